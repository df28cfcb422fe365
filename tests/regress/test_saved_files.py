# SPDX-License-Identifier: Apache-2.0
"""Saving at every moment, loading in every direction, in files that plain PyTorch knows."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import helpers
import patrickstar
import pytest
import torch
from torch import nn


class Odd(nn.Module):
    """A stack with a tied head, parameters of no dimension and no element, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.stack = helpers.Stack(3)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.codes = nn.Parameter(torch.arange(48).to(torch.uint8), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = self.stack(self.embedding(tokens)) / self.temperature + self.empty.sum()
        return self.head(x) + self.codes.float() * 0.01


def optimizer_of(model: Odd) -> torch.optim.AdamW:
    """Three groups, each with settings of its own."""
    groups = [
        {"params": [model.embedding.weight], "lr": 0.1, "betas": (0.8, 0.9)},
        {"params": list(model.stack.parameters()), "weight_decay": 0.2},
        {"params": [model.temperature, model.empty], "lr": 0.01, "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    tokens = torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach().clone()


def saved(obj: Any) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def loaded(content: bytes) -> Any:
    """As people load files that they do not trust."""
    return torch.load(io.BytesIO(content), weights_only=True)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping from a path to a value."""
    if isinstance(state, dict):
        parts = state.items()
    elif isinstance(state, (list, tuple)):
        parts = enumerate(state)
    else:
        return {prefix: state}
    return {
        path: value for key, part in parts for path, value in flat(part, f"{prefix}/{key}").items()
    }


def save_at_five_moments() -> list[bytes]:
    """Model and optimizer before the first step, after each half of one, and after evaluation."""
    torch.manual_seed(helpers.SEED)
    model = Odd()
    optimizer = optimizer_of(model)
    files = []

    def save() -> None:
        helpers.evict_everything()
        files.extend([saved(model.state_dict()), saved(optimizer.state_dict())])

    save()
    step(model, optimizer, 1)
    tokens = torch.arange(12).reshape(2, 6)
    loss = model(tokens).pow(2).mean()
    save()
    loss.backward()
    save()
    optimizer.step()
    save()
    model.eval()
    with torch.no_grad():
        model(tokens)
    save()
    return files


def test_files_saved_at_every_moment_are_those_of_plain_pytorch():
    expected = save_at_five_moments()
    for stress in ("", "evict,poison"):
        with helpers.managed("48KiB", stress=stress):
            got = save_at_five_moments()
        for index, (file, plain_file) in enumerate(zip(got, expected, strict=True)):
            helpers.assert_same(
                flat(loaded(file)), flat(loaded(plain_file)), f"file {index}, stress={stress!r}"
            )
            assert len(file) == len(plain_file)


def trained(num_steps: int) -> tuple[Odd, torch.optim.AdamW, list[torch.Tensor]]:
    torch.manual_seed(helpers.SEED)
    model = Odd()
    optimizer = optimizer_of(model)
    return model, optimizer, [step(model, optimizer, seed) for seed in range(num_steps)]


def resumed(content: tuple[bytes, bytes], is_assigned: bool) -> list[torch.Tensor]:
    """Five further losses of fresh objects that took the state from files."""
    torch.manual_seed(99)
    model = Odd()
    if is_assigned:
        model.load_state_dict(loaded(content[0]), assign=True, strict=True)
        model.head.weight = model.embedding.weight  # assigning drops ties, as in torch
        optimizer = optimizer_of(model)
    else:
        optimizer = optimizer_of(model)
        model.load_state_dict(loaded(content[0]), strict=True)
    optimizer.load_state_dict(loaded(content[1]))
    return [step(model, optimizer, seed) for seed in range(3, 8)]


@pytest.mark.parametrize("is_assigned", [False, True], ids=["copied", "assigned"])
def test_plain_and_managed_load_each_others_files_and_go_on(is_assigned):
    model, optimizer, _ = trained(3)
    plain_files = saved(model.state_dict()), saved(optimizer.state_dict())
    expected = trained(8)[2][3:]
    with helpers.managed("48KiB", stress="evict,poison"):
        model, optimizer, _ = trained(3)
        managed_files = saved(model.state_dict()), saved(optimizer.state_dict())
        del model, optimizer
        for name, files in (("plain", plain_files), ("managed", managed_files)):
            got = resumed(files, is_assigned)
            assert all(map(helpers.same, got, expected)), f"{name} to managed"
    assert all(map(helpers.same, resumed(managed_files, is_assigned), expected))


def test_a_file_loaded_before_init_or_in_the_middle():
    model, optimizer, _ = trained(3)
    files = saved(model.state_dict()), saved(optimizer.state_dict())
    expected = trained(8)[2][3:]
    torch.manual_seed(99)
    model = Odd()
    optimizer = optimizer_of(model)
    model.load_state_dict(loaded(files[0]))
    optimizer.load_state_dict(loaded(files[1]))
    with helpers.managed("48KiB", stress="evict,poison"):
        got = [step(model, optimizer, seed) for seed in range(3, 5)]
        model.load_state_dict(loaded(files[0]))  # back again, into an engine that went on
        optimizer.load_state_dict(loaded(files[1]))
        assert torch.equal(model.temperature.detach(), loaded(files[0])["temperature"])
        again = [step(model, optimizer, seed) for seed in range(3, 8)]
    assert all(map(helpers.same, got, expected))
    assert all(map(helpers.same, again, expected))


def test_an_optimizers_state_has_torchs_layout_and_types():
    expected = trained(2)[1].state_dict()
    with helpers.managed("48KiB"):
        state = trained(2)[1].state_dict()
        helpers.evict_everything()
        helpers.assert_same(flat(state), flat(expected), "the state")
        for value in flat(loaded(saved(state))).values():
            assert type(value) in (torch.Tensor, int, float, bool, type(None))
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes
        del state


SAVERS: dict[str, Callable[[nn.Module], Any]] = {
    "whole module": lambda model: model,
    "list of parameters": lambda model: list(model.parameters()),
    "one weight": lambda model: model.stack.layers[0].weight,
    "a slice of one": lambda model: model.stack.layers[0].weight.detach()[2:4],
}


@pytest.mark.parametrize("name", SAVERS)
def test_other_things_that_people_save(name):
    torch.manual_seed(helpers.SEED)
    model = Odd()
    expected = torch.load(io.BytesIO(saved(SAVERS[name](model))), weights_only=False)
    plain_size = len(saved(SAVERS[name](model)))
    with helpers.managed("48KiB", stress="evict,poison"):
        torch.manual_seed(helpers.SEED)
        model = Odd()
        patrickstar.manage(model)
        content = saved(SAVERS[name](model))
        del model
    assert abs(len(content) - plain_size) <= 0.05 * plain_size
    got = torch.load(io.BytesIO(content), weights_only=False)
    if isinstance(got, nn.Module):
        got, expected = got.state_dict(), expected.state_dict()
    helpers.assert_same(flat(got), flat(expected), name)


@pytest.mark.parametrize("budget", ["48KiB", "1MiB"])
def test_a_checkpoint_resumes_to_the_bit_under_another_budget(budget, tmp_path):
    expected = trained(8)[2][3:]
    with helpers.managed("64KiB", stress="evict"):
        model, optimizer, _ = trained(3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        patrickstar.save_checkpoint(tmp_path / "saved", model, optimizer, scheduler=scheduler)
        del model, optimizer, scheduler
    with helpers.managed(budget, stress="evict,poison"):
        torch.manual_seed(99)
        model = Odd()
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        patrickstar.load_checkpoint(tmp_path / "saved", model, optimizer, scheduler=scheduler)
        assert model.temperature.shape == ()
        assert model.empty.shape == (0, 5)
        assert model.head.weight is model.embedding.weight
        got = [step(model, optimizer, seed) for seed in range(3, 8)]
    assert all(map(helpers.same, got, expected))
