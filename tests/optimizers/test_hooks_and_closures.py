# SPDX-License-Identifier: Apache-2.0
"""Hooks around ``step()`` and closures in it see and change what they would in plain PyTorch."""

from __future__ import annotations

import contextlib

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch.optim import SGD, Adam, Adamax
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def closure_of(optimizer, parameters):
    def closure():
        optimizer.zero_grad()
        loss = sum(p.pow(2).sum() for p in parameters)
        loss.backward()
        return loss

    return closure


def test_order_and_what_each_hook_sees():
    def loop(recorder: helpers.Recorder) -> None:
        seen = []
        p = parameter()
        optimizer = Adam([p], lr=0.1)

        def watch(name, is_before):
            def hook(given, args, kwargs):
                value = p.grad.sum().item() if is_before else p.sum().item()
                seen.append((name, given is optimizer, len(args), kwargs, value))
                if is_before:
                    seen.append(args[0] is optimizer)

            return hook

        with contextlib.ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(watch("any before", True)),
                register_optimizer_step_post_hook(watch("any after", False)),
            ):
                stack.callback(handle.remove)
            optimizer.register_step_pre_hook(watch("before", True))
            optimizer.register_step_post_hook(watch("after", False))
            for step in range(2):
                give_gradients(p)
                optimizer.step()
                step_runs.note(recorder, f"step {step}", [p], optimizer)
            optimizer.register_step_pre_hook(watch("late", True))
            give_gradients(p)
            optimizer.step(None)
        recorder.note("seen", str(seen))

    step_runs.check(loop)


def test_hooks_change_gradients_and_settings():
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = Adam([p], lr=0.1)

        def before(given, args, kwargs):
            p.grad.mul_(0.5)
            given.param_groups[0]["lr"] *= 0.9
            if len(given.param_groups) == 1:
                given.add_param_group({"params": [q], "lr": 0.3})

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: p.data.clamp_(-1, 1))
        for step in range(3):
            give_gradients(p, q)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("by", ["position", "keyword", "hook"])
def test_a_closure(by):
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(700)
        optimizer = Adamax([p, q], lr=0.1)
        closure = closure_of(optimizer, [p, q])
        if by == "hook":
            optimizer.register_step_pre_hook(lambda given, args, kwargs: ((given, closure), {}))
        for step in range(3):
            given = {"closure": closure} if by == "keyword" else {}
            loss = optimizer.step(*([closure] if by == "position" else []), **given)
            recorder.note(f"step {step} loss", loss)
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


def test_a_closure_that_returns_nothing():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        recorder.note("returned", optimizer.step(lambda: give_gradients(p)))
        step_runs.note(recorder, "after", [p], optimizer)

    step_runs.check(loop)


def test_a_closure_changes_the_groups():
    def loop(recorder: helpers.Recorder) -> None:
        p, q = parameter(), parameter(600)
        optimizer = Adam([p], lr=0.1)

        def closure():
            optimizer.param_groups[0]["lr"] *= 0.5
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [q], "lr": 0.3})
            return closure_of(optimizer, [p, q])()

        for step in range(3):
            recorder.note(f"step {step} loss", optimizer.step(closure))
            step_runs.note(recorder, f"step {step}", [p, q], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("where", ["before", "closure", "after"])
def test_an_exception_around_the_update(where):
    """The update happened or not as in PyTorch, and later steps do."""

    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = SGD([p], lr=0.1, momentum=0.9)
        is_raising = False

        def hook(*_):
            if is_raising:
                raise InterruptedError("stop")

        if where != "closure":
            register = {
                "before": optimizer.register_step_pre_hook,
                "after": optimizer.register_step_post_hook,
            }
            register[where](hook)
        for step in range(4):
            is_raising = step in (0, 2)
            give_gradients(p)
            with contextlib.suppress(InterruptedError):
                optimizer.step(hook if where == "closure" else None)
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)


def test_what_torch_refuses_is_refused_before_anything_changes():
    def loop(recorder: helpers.Recorder) -> None:
        p, q, table = parameter(), parameter(500), parameter(20, 32)
        optimizer = Adam([p, table, q], lr=0.1)
        for step in range(4):
            give_gradients(p, q)
            rows = torch.nn.functional.embedding(torch.tensor([1, 2]), table, sparse=step < 3)
            rows.sum().backward()
            step_runs.try_step(recorder, f"step {step}", optimizer)
            step_runs.note(recorder, f"step {step}", [p, q, table], optimizer)
            optimizer.zero_grad()

    step_runs.check(loop)
