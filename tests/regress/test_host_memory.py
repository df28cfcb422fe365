# SPDX-License-Identifier: Apache-2.0
"""Slow moves, odd mixes of sizes, budgets nearly full, peaks that come late."""

from __future__ import annotations

import re

import helpers
import patrickstar
import pytest
import torch
from patrickstar import config, session
from torch import nn


def test_two_hundred_steps_with_delays_between_the_ends_of_every_move():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(200):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.note(f"step {step} loss", loss)
            # Whoever reads first after a step sees the new value: a forward, or the user.
            recorder.note(f"step {step} read", model.layers[step % 4].weight)
            optimizer.zero_grad()
        recorder.step("end", None, model, optimizer)

    expected = helpers.plain(loop)
    with helpers.managed("48KiB", stress="delay"):
        got = helpers.plain(loop)
        assert patrickstar.stats().num_evictions > 200
    helpers.assert_same(got.records, expected.records, "with delays")


SIZES = (1, 3, 700, 1024, 1500, 4096, 9000, 20000)


def mixed_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) for size in SIZES * 3]


def test_a_budget_that_is_nearly_full_without_a_disk():
    """Many sizes of chunk, all of them in memory, come and go in every order."""
    wanted = mixed_tensors()
    with helpers.managed(disk_space=0):
        tensors = [tensor.clone() for tensor in wanted]
        patrickstar.manage(tensors)
        managed_bytes = patrickstar.stats().managed_bytes
        del tensors
    budget = managed_bytes * 100 // 95
    with helpers.managed(budget, disk_space=0):
        tensors = [tensor.clone() for tensor in wanted]
        patrickstar.manage(tensors)
        order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(4)).tolist()
        for index in order * 4:
            tensors[index].add_(1)
            wanted[index].add_(1)
            if index % 4 == 0:  # its room is wanted back
                tensors[index] = tensors[index].clone()
                patrickstar.manage(tensors[index])
        for tensor, expected in zip(tensors, wanted, strict=True):
            assert torch.equal(tensor, expected)
        stats = patrickstar.stats()
        assert stats.host_resident_bytes > 0.9 * budget
        with pytest.raises(patrickstar.OutOfMemory) as caught:
            patrickstar.manage(torch.zeros(budget // 4))
        words = str(caught.value)
        assert re.search(r"KiB budget", words), words
        assert "raise host_memory to at least" in words
        assert "disk_space" in words or "spill_dir" in words
        for tensor, expected in zip(tensors, wanted, strict=True):
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("stress", ["", "delay", "evict,poison,delay"])
def test_ten_layers_through_the_smallest_budget(stress):
    """More moves wanted at once than there is room for: they wait, nothing fails."""

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.zero_grad()

    expected = helpers.plain(loop)
    with helpers.managed(2 * 4096, stress=stress):
        got = helpers.plain(loop)
        assert patrickstar.stats().host_peak_bytes <= 2 * 4096
    helpers.assert_same(got.records, expected.records, stress)


def test_a_peak_that_comes_at_step_five():
    """A longer batch, and a part whose optimizer state is made only then."""

    def loop(recorder: helpers.Recorder) -> None:
        model = nn.ModuleDict({"small": helpers.Stack(3), "large": helpers.Stack(4, 64)})
        optimizer = helpers.adamw(model)
        for step in range(8):
            x = torch.randn(4 if step < 4 else 64, 32)
            hidden = model["small"](x)
            if step >= 4:
                hidden = model["large"](torch.cat([hidden, hidden], 1))
            loss = hidden.pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop, tight="80KiB")


@pytest.mark.parametrize("left_bytes", [96 << 10, 0])
def test_memory_that_somebody_else_takes_at_step_five(monkeypatch, left_bytes):
    """A budget that is measured follows what is free, but never below what one op needs."""
    free = [0]

    def loop(recorder: helpers.Recorder) -> None:
        free[0] = 256 << 10
        model = helpers.Stack(8)
        optimizer = helpers.adamw(model)
        for step in range(40):
            if step == 4:
                free[0] = left_bytes
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.note(f"step {step}", loss)
            optimizer.zero_grad()
        recorder.step("end", None, model, optimizer)

    def available_memory() -> int:
        return max(free[0] - patrickstar._C.stats()["mapped_bytes"], 0)

    expected = helpers.plain(loop)
    monkeypatch.setattr(session, "available_memory", available_memory)
    monkeypatch.setattr(session, "peak_resident_set_bytes", lambda: 0)
    monkeypatch.setattr(config, "available_memory", lambda: 512 << 10)
    with helpers.managed(None):
        got = helpers.plain(loop)
        stats = patrickstar.stats()
        assert 0 < stats.host_budget_bytes < 128 << 10
        assert stats.num_evictions > 0
        free[0] = 512 << 10  # it is given back
        got_again = helpers.plain(loop)
    helpers.assert_same(got.records, expected.records, f"{left_bytes} bytes were left")
    helpers.assert_same(got_again.records, expected.records, "again")
