# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients that share memory, within a group and between optimizers."""

from __future__ import annotations

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch import nn
from torch.optim import SGD, Adam, AdamW

both_forms = pytest.mark.parametrize("foreach", [False, True])


@both_forms
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group(foreach):
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p, p], lr=0.1, foreach=foreach)
        for step in range(3):
            give_gradients(p)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)


@both_forms
def test_two_parameters_over_one_memory(foreach):
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        q = nn.Parameter(p.data)
        optimizer = AdamW([p, q], lr=0.1, foreach=foreach)
        for step in range(3):
            give_gradients(p, q)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@both_forms
def test_one_gradient_of_two_parameters_that_the_step_writes(foreach):
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter()
        optimizer = SGD([p, q], lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
        for step in range(3):
            give_gradients(p)
            q.grad = p.grad
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@both_forms
def test_a_gradient_that_is_another_parameter(foreach):
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter()
        optimizer = AdamW([p, q], lr=0.1, foreach=foreach)
        for step in range(4):
            give_gradients(p, q)
            if step:  # the first one has them adopted
                q.grad = p.detach()
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [q, p], optimizer)
            q.grad = None

    step_runs.check(loop)


@both_forms
def test_gradients_in_one_flat_buffer(foreach):
    def loop(recorder: helpers.Recorder) -> None:
        flat = torch.zeros(2006)
        p, q = parameter(), parameter()
        optimizer = AdamW([p, q], lr=0.1, foreach=foreach)
        for step in range(3):
            flat.copy_(torch.randn(2006))
            p.grad, q.grad = flat[:1003], flat[1003:]
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)
            recorder.note(f"step {step} buffer", flat)

    step_runs.check(loop)


def test_several_optimizers_of_one_parameter():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizers = (Adam([p], 0.1), SGD([p], 0.1, momentum=0.9), Adam([p], 0.01))
        for step in range(4):
            give_gradients(p)
            for optimizer in optimizers:
                optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], *optimizers)

    step_runs.check(loop)


def test_optimizers_over_parts_of_one_model():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        first = Adam(model.layers[:2].parameters(), 0.01)
        second = SGD(model.layers[2:].parameters(), 0.1, momentum=0.9)
        for step in range(4):
            model(torch.randn(4, 32)).pow(2).mean().backward()
            for optimizer in (first, second) if step % 2 else (first,):
                optimizer.step()
                optimizer.zero_grad()
            recorder.note(f"step {step}", model)
            recorder.note(f"step {step}", [first, second])

    step_runs.check(loop, tight="48KiB")
