# SPDX-License-Identifier: Apache-2.0
"""Whoever brings code of their own for ``step()`` gets it run, whole: only torch's is cut."""

from __future__ import annotations

import functools
import types

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch.optim import SGD, Adam


def by_norm(self, closure=None):
    """A step that ranges of a tensor cannot take: it needs the norm of all."""
    for group in self.param_groups:
        norm = sum(p.grad.pow(2).sum() for p in group["params"])
        with torch.no_grad():
            for p in group["params"]:
                p.sub_(p.grad / norm)


def steps_of(recorder, optimizer, parameters):
    for step in range(3):
        give_gradients(*parameters)
        optimizer.step()
        step_runs.note(recorder, f"step {step}", parameters, optimizer)


def test_another_step_in_the_class(monkeypatch):
    monkeypatch.setattr(SGD, "step", by_norm)

    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        steps_of(recorder, SGD([p, q], lr=0.1), [p, q])

    step_runs.check(loop)


def test_another_step_on_the_object():
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = SGD([p, q], lr=0.1)
        optimizer.step = types.MethodType(by_norm, optimizer)
        steps_of(recorder, optimizer, [p, q])

    step_runs.check(loop)


@pytest.mark.parametrize("where", ["class", "object"])
def test_a_wrapper_runs_once_a_step(monkeypatch, where):
    calls = []

    def wrapped(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append(len(args))
            return function(*args, **kwargs)

        return wrapper

    if where == "class":
        monkeypatch.setattr(Adam, "step", wrapped(Adam.step))

    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = Adam([p, q], lr=0.1)
        if where == "object":
            optimizer.step = wrapped(optimizer.step)
        calls.clear()
        steps_of(recorder, optimizer, [p, q])
        recorder.note("calls", list(calls))

    step_runs.check(loop)


def test_a_subclass_sees_itself_and_whole_gradients():
    def loop(recorder: helpers.Recorder) -> None:
        seen = []

        class Mine(Adam):
            def step(self, closure=None):
                norms = [p.grad.norm().item() for g in self.param_groups for p in g["params"]]
                seen.append((type(self).__name__, self is optimizer, norms))
                return super().step(closure)

        p = parameter()
        optimizer = Mine([p], lr=0.1)
        steps_of(recorder, optimizer, [p])
        recorder.note("seen", str(seen))

    step_runs.check(loop)


def test_a_hook_that_has_another_optimizer_step():
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer, other = SGD([p], lr=0.1), SGD([q], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: ((other,), {}))
        steps_of(recorder, optimizer, [p, q])

    step_runs.check(loop)
