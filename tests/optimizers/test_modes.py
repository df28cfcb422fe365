# SPDX-License-Identifier: Apache-2.0
"""Steps under gradient modes, version counters, the profiler and the compiler, as in PyTorch."""

from __future__ import annotations

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch.optim import SGD, Adam, AdamW, NAdam


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_later_steps_in_a_gradient_mode(mode):
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        for step in range(4):
            give_gradients(p)
            if step % 2:
                with mode():
                    optimizer.step()
            else:
                optimizer.step()
            facts = p.requires_grad, p.is_leaf, p.grad.requires_grad, torch.is_grad_enabled()
            recorder.note(f"step {step} facts", facts)
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("optimizer_type", [Adam, AdamW, SGD])
def test_an_old_graph_notices_the_step(optimizer_type):
    def loop(recorder: helpers.Recorder) -> None:
        p, untouched = parameter(), parameter(3)
        optimizer = optimizer_type([p, untouched], lr=0.1)
        loss = p.pow(2).sum()
        rest = untouched.pow(2).sum()
        give_gradients(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        rest.backward()
        recorder.note("gradient", untouched.grad)

    step_runs.check(loop)


def test_a_graph_over_state_notices_the_step():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        give_gradients(p)
        optimizer.step()
        factor = torch.ones(1003, requires_grad=True)
        loss = (factor * optimizer.state[p]["exp_avg"]).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        recorder.note("end", p)

    step_runs.check(loop)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_graph_over_a_gradient_notices_what_the_step_writes(is_written):
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = SGD([p], lr=0.1, momentum=0.9, nesterov=True, foreach=is_written)
        for step in range(3):
            give_gradients(p)
            factor = torch.ones(1003, requires_grad=True)
            loss = (factor * p.grad).sum()
            optimizer.step()
            if is_written:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
            recorder.note(f"step {step} factor", factor.grad)
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)


def test_the_profiler_sees_one_step():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        give_gradients(p)
        with torch.profiler.profile() as profile:
            optimizer.step()
        marks = [e for e in profile.key_averages() if e.key.startswith("Optimizer.step")]
        recorder.note("marks", [(mark.key, mark.count) for mark in marks])
        recorder.note("end", p)

    step_runs.check(loop)


def test_two_steps_of_one_backward():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = NAdam([p], lr=0.1)
        p.pow(3).sum().backward()
        for step in range(3):
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)


def test_a_compiled_step():
    def loop(recorder: helpers.Recorder) -> None:
        torch.compiler.reset()
        p, q = parameter(), parameter(40)
        optimizer = AdamW([p, q], lr=0.1, foreach=True)
        compiled = torch.compile(optimizer.step, backend="eager")
        for step in range(3):
            p.pow(2).sum().backward()
            q.pow(2).sum().backward()
            compiled()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)
            optimizer.zero_grad()

    step_runs.check(loop)


def test_gradients_that_are_part_of_a_graph():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        for step in range(3):
            p.pow(3).sum().backward(create_graph=True)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], optimizer)
            p.grad = None  # torch's own cycle: a graph that its gradient keeps alive

    step_runs.check(loop)
