# SPDX-License-Identifier: Apache-2.0
"""Gradients and state that somebody made by hand, in forms that no backward makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

GRADIENTS: Mapping[str, Callable[[], torch.Tensor]] = {
    "negative view": lambda: torch._neg_view(torch.randn(30, 40)),
    "expanded": lambda: torch.randn(1).expand(30, 40),
    "transposed": lambda: torch.randn(40, 30).t(),
    "part of a larger one": lambda: torch.randn(30, 80)[:, ::2],
    "offset": lambda: torch.randn(1203)[3:].view(30, 40),
    "not finite": lambda: torch.randn(30, 40).div(0),
    "denormal": lambda: torch.randn(30, 40) * 1e-42,
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_gradient_of_another_form(gradient, foreach):
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(30, 40), parameter()
        optimizer = AdamW([p, q], lr=0.1, foreach=foreach)
        for step in range(3):
            give_gradients(q)
            p.grad = GRADIENTS[gradient]()
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("optimizer", [Adam, partial(SGD, momentum=0.9)])
@pytest.mark.parametrize("setting", ["auto", "native"])
def test_views_of_managed_gradients(optimizer, setting):
    """A negative one, and a conjugate one: their bytes are not their values."""

    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(300, dtype=torch.complex64)
        made = optimizer([p, q], lr=0.1)
        for step in range(3):
            (p.pow(2).sum() + q.abs().pow(2).sum()).backward()
            if step != 1:
                p.grad = torch._neg_view(p.grad)
                if type(made) is SGD:  # Adam takes no conjugate ones
                    q.grad = q.grad.conj()
            made.step()
            values = [value for state in made.state.values() for value in state.values()]
            recorder.note(f"step {step}", [each.resolve_conj() for each in (p, q, *values)])
            made.zero_grad()
            if step == 0:
                made.state.clear()

    step_runs.check(loop, optimizer=setting)


def replaced(state: torch.Tensor) -> torch.Tensor:
    return torch.cat([state, torch.zeros(5)])[: len(state)]


STATES: Mapping[str, Callable[[Optimizer, nn.Parameter], None]] = {
    "a part of another tensor": lambda o, p: o.state[p].update(
        exp_avg=replaced(o.state[p]["exp_avg"])
    ),
    "in double": lambda o, p: o.state[p].update(exp_avg_sq=o.state[p]["exp_avg_sq"].double()),
    "more of it": lambda o, p: o.state[p].update(mine=torch.ones(1003), own=torch.ones(3)),
    "none": lambda o, p: o.state[p].clear(),
    "nothing at all": lambda o, p: o.state.clear(),
}


@pytest.mark.parametrize("state", STATES)
def test_state_changed_by_hand(state):
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        for step in range(4):
            give_gradients(p)
            step_runs.try_step(recorder, f"step {step}", optimizer)
            step_runs.note(recorder, f"step {step}", [p], optimizer)
            if step == 1:
                STATES[state](optimizer, p)

    step_runs.check(loop)


def test_state_of_another_layout():
    def loop(recorder: helpers.Recorder) -> None:
        p = nn.Parameter(torch.randn(40, 30).t())
        optimizer = Adam([p], lr=0.1)
        for step in range(3):
            p.grad = torch.randn(40, 30).t()
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], optimizer)
            if step == 0:
                optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].contiguous()

    step_runs.check(loop)


@pytest.mark.parametrize("momenta", [(0, 0.9, 0.9, 0, 0.5), (0.9, 0, 0.9, 0.1, 0)])
def test_momentum_that_comes_and_goes(momenta):
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = SGD([p, q], lr=0.1)
        for step, momentum in enumerate(momenta):
            give_gradients(p, q)
            if step in (1, 2):
                q.grad = None
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [False, True])
def test_momentum_that_begins_at_different_steps(dtype, foreach):
    """In bfloat16, foreach operations with a number have other bits than one by one."""

    def loop(recorder: helpers.Recorder) -> None:
        p, late = parameter(dtype=dtype), parameter(700, dtype=dtype)
        optimizer = SGD([p, late], 0.1, momentum=0.9497, nesterov=True, foreach=foreach)
        for step in range(5):
            give_gradients(*([p] if step < 3 else [p, late]))
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, late], optimizer)

    step_runs.check(loop)


def test_amsgrad_that_comes_late():
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = Adam([p, q], lr=0.1)
        for step in range(4):
            give_gradients(p, q)
            optimizer.param_groups[0]["amsgrad"] = step == 2
            step_runs.try_step(recorder, f"step {step}", optimizer)
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)
