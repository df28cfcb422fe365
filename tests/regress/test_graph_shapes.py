# SPDX-License-Identifier: Apache-2.0
"""Branches, unused parts, several forwards and backwards: nothing learnt may be relied on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn import functional


class Branches(nn.Module):
    """A trunk and named branches of which a forward takes some."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(32, 32)
        self.branches = nn.ModuleDict({name: helpers.Stack(2) for name in names})

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for name in names:
            x = self.branches[name](x)
        return x


def train_branches(
    recorder: helpers.Recorder,
    taken: Callable[[int], list[str]],
    num_steps: int,
    names: str = "abc",
    max_norm: float | None = None,
) -> None:
    model = Branches(*names)
    optimizer = helpers.adamw(model)
    for step in range(num_steps):
        loss = model(torch.randn(4, 32), *taken(step)).pow(2).mean()
        loss.backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm  # or clipping would change nothing
            recorder.note(f"step {step} norm", norm)
        recorder.step(f"step {step}", loss, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    recorder.note("end", model)


def test_branches_that_alternate_and_one_first_seen_at_step_ten():
    def loop(recorder: helpers.Recorder) -> None:
        train_branches(recorder, lambda step: ["c" if step == 10 else "ab"[step % 2]], 20)

    helpers.twin(loop)


def test_layers_dropped_at_random():
    def loop(recorder: helpers.Recorder) -> None:
        kept = torch.rand(20, 3, generator=torch.Generator().manual_seed(5)) < 0.5
        train_branches(
            recorder, lambda step: [n for n, k in zip("abc", kept[step], strict=True) if k], 20
        )

    helpers.twin(loop)


def test_experts_that_get_no_token():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(32, 4)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).softmax(-1).max(-1)
            answer = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().flatten()
                if len(rows):
                    routed = weights[rows, None] * expert(x[rows])
                    answer = answer.index_add(0, rows, routed)
            return answer

    def loop(recorder: helpers.Recorder) -> None:
        model = Mixture()
        optimizer = helpers.adamw(model)
        num_unused = 0
        for step in range(6):
            loss = (model(torch.randn(3, 32)) - 1).pow(2).mean()
            loss.backward()
            num_unused += sum(expert.weight.grad is None for expert in model.experts)
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert num_unused > 0
        recorder.note("end", model)

    helpers.twin(loop)


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_a_head_that_only_some_steps_use(max_norm):
    uses_head = (False, True, True, False, False, True)

    def loop(recorder: helpers.Recorder) -> None:
        train_branches(
            recorder,
            lambda step: ["a", "b"] if uses_head[step] else ["a"],
            len(uses_head),
            "ab",
            max_norm,
        )

    helpers.twin(loop)


@pytest.mark.parametrize("used_in", [1, 3])
def test_a_branch_that_one_micro_batch_of_four_uses(used_in):
    def loop(recorder: helpers.Recorder) -> None:
        model = Branches("a", "b")
        optimizer = helpers.adamw(model)
        for step in range(3):
            for micro_batch in range(4):
                names = ["a", "b"] if micro_batch == used_in else ["a"]
                loss = model(torch.randn(4, 32), *names).pow(2).mean() / 4
                loss.backward()
                recorder.step(f"step {step}.{micro_batch}", loss, model)
            optimizer.step()
            recorder.note(f"step {step}", optimizer)
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop)


@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_second_backward_through_a_kept_graph(is_cleared):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(3):
            hidden = model(torch.randn(4, 32))
            first, second = hidden.pow(2).mean(), hidden.abs().mean()
            first.backward(retain_graph=True)
            recorder.step(f"step {step} first", first, model)
            if is_cleared:
                optimizer.zero_grad()
            helpers.evict_everything()
            second.backward()
            recorder.step(f"step {step} second", second, model)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop)


def test_modules_that_pass_objects_of_unknown_types():
    class Opaque:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    @dataclass
    class Cache:
        hidden: torch.Tensor
        nested: dict[str, Any]
        pair: tuple[torch.Tensor, None]
        opaque: Opaque
        device: torch.device

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = helpers.Stack(3)

        def forward(self, x: torch.Tensor) -> Cache:
            x = self.stack(x)
            return Cache(x, {"inner": [x * 2]}, (x + 1, None), Opaque(x - 1), x.device)

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = helpers.Stack(3)

        def forward(self, *, cache: Cache) -> torch.Tensor:
            (inner,) = cache.nested["inner"]
            x = cache.hidden + inner + cache.pair[0] + cache.opaque.tensor
            return self.stack(x.to(cache.device))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = First(), Second()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(cache=self.first(x))

    helpers.twin(lambda recorder: helpers.train(recorder, Model()))


class FrozenEncoder(nn.Module):
    """Inputs that need no gradient: a frozen encoder, an embedding, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = helpers.Stack(2).requires_grad_(False)
        self.embedding = nn.Embedding(64, 32)
        self.stack = helpers.Stack(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            bias = self.encoder(torch.ones(1, 32))
        return self.stack(self.embedding(tokens) + bias)


def train_frozen_encoder(
    recorder: helpers.Recorder, after_step: Callable[[int], None] = lambda step: None
) -> None:
    model = FrozenEncoder()
    optimizer = helpers.adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(10):
        loss = model(torch.randint(64, (4, 6))).pow(2).mean()
        loss.backward()
        recorder.step(f"step {step}", loss, model)
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
    recorder.note("end", model)


def test_resident_bytes_stay_level_when_inputs_need_no_gradient():
    helpers.twin(train_frozen_encoder)

    levels = []
    with helpers.managed():

        def measure(step: int) -> None:
            gc.collect()
            patrickstar._C.free_dead_slots()
            levels.append(patrickstar.stats().host_resident_bytes)

        train_frozen_encoder(helpers.Recorder(), measure)
    # From the first step on: parameters, and moments of those that train; no gradient.
    assert len(set(levels)) == 1, levels


def test_gradients_made_by_autograd_grad_and_assigned():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(6):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            if step % 2:
                loss.backward()
            else:
                parameters = list(model.parameters())
                gradients = torch.autograd.grad(loss, parameters)
                recorder.note(f"step {step} gradients", gradients)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop)


def test_a_gradient_penalty_through_create_graph():
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.Sequential(nn.Linear(32, 48), nn.Softplus(), nn.Linear(48, 32))
        optimizer = helpers.adamw(model)
        for step in range(3):
            x = torch.randn(4, 32)
            loss = functional.mse_loss(model(x), x)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            whole = loss + 0.1 * sum(g.pow(2).sum() for g in gradients)
            whole.backward()
            recorder.step(f"step {step}", whole, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop)
