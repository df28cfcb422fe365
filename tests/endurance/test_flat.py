# SPDX-License-Identifier: Apache-2.0
"""Long runs: memory, threads, open files and the engine's own tables stay level."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import helpers
import patrickstar
import pytest
import torch
from patrickstar import adoption
from torch import nn


class Reader(nn.Module):
    """An embedding and layers over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.stack = helpers.Stack(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stack(self.embedding(tokens))


def live_and_die(generator: torch.Generator) -> None:
    """A second model that trains once; one of its parameters cannot be managed."""
    other = helpers.Stack(2)
    other.shared = nn.Parameter(torch.zeros(1, 4).expand(3, 4))
    optimizer = helpers.sgd(other)
    other(torch.randn(2, 32, generator=generator)).pow(2).mean().backward()
    optimizer.step()


def level(session: patrickstar.Session) -> dict[str, int]:
    """Everything that must not grow, after the garbage is collected."""
    gc.collect()
    stats = session.stats()
    adopter = session._adopter
    assert isinstance(adopter, adoption.Adopter)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "open files": len(os.listdir("/proc/self/fd")),
        "chunks": stats.num_chunks,
        "leases": stats.num_leases,
        "managed bytes": stats.managed_bytes,
        "bytes on disk": stats.disk_used_bytes,
        "tracked": len(adopter._tracked),
        "pending": len(adopter._pending),
        "left out": len(adopter._left_out),
        "seen modules": len(adopter._seen_modules),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.filterwarnings("ignore:.*left out of management")
@pytest.mark.parametrize("num_steps", [200, pytest.param(500, marks=pytest.mark.full)])
def test_steps_of_every_length_beside_a_model_that_dies_and_is_reborn(num_steps):
    levels, memory = [], []
    with helpers.managed("64KiB", stress="poison") as session:
        torch.manual_seed(helpers.SEED)
        generator = torch.Generator().manual_seed(1)
        model = Reader()
        optimizer = helpers.adamw(model)
        for step in range(num_steps):
            length = int(torch.randint(1, 40, (), generator=generator))
            tokens = torch.randint(64, (2, length), generator=generator)
            model(tokens).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                live_and_die(generator)
            if step % 20 == 19:
                levels.append(level(session))
                memory.append(resident_bytes())
        del model, optimizer
        helpers.assert_nothing_left()
    assert levels[1:] == levels[:1] * (len(levels) - 1)
    # The heap settles in the first third; a leak of one page a step would show.
    assert max(memory[len(memory) // 3 :]) - memory[len(memory) // 3] < num_steps * 4096


def test_chunks_of_dead_models_leave_nothing_to_look_through():
    """Deep copies for evaluation, one a step: each is a model that is born and dies."""
    with helpers.managed("64KiB"):
        kept = torch.ones(32, 32)
        patrickstar.manage(kept)
        for _ in range(300):
            patrickstar.manage([torch.ones(32, 32) for _ in range(8)])
        assert torch.equal(kept, torch.ones(32, 32))
        assert patrickstar.stats().num_chunks <= 2


@pytest.mark.parametrize("jump_s", [-1e9, 1e9], ids=["back", "forth"])
def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch, tmp_path, jump_s):
    """Durations are measured with a clock that only goes on."""
    import json

    expected = helpers.plain(helpers.train_stack)
    real = time.time
    jumps = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: real() + jump_s * next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    log = tmp_path / "run.jsonl"
    with helpers.managed("48KiB", stress="evict,poison,delay", log=log):
        got = helpers.plain(helpers.train_stack)
        assert 0 <= patrickstar.stats().stall_seconds < 1e6
    helpers.assert_same(got.records, expected.records, f"{jump_s} s")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    times = [record["time_s"] for record in records]
    assert times == sorted(times)
    assert all(0 <= seconds < 1e6 for seconds in times)
    assert all(0 <= record["stall_s"] < 1e6 for record in records)
