# SPDX-License-Identifier: Apache-2.0
"""The optimizer object stays the user's own: schedulers, groups, saving, copies, averages."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path

import helpers
import pytest
import step_runs
import torch
from step_runs import give_gradients, parameter
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn


def train_step(model: nn.Module, optimizer: Optimizer) -> torch.Tensor:
    loss = model(torch.randn(4, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_type_and_defaults():
    model = helpers.Stack()
    optimizer = AdamW(model.parameters(), lr=0.1)
    defaults, groups = dict(optimizer.defaults), optimizer.param_groups
    with helpers.managed():
        train_step(model, optimizer)
        assert type(optimizer) is AdamW
        assert optimizer.defaults == defaults
        assert optimizer.param_groups is groups
        assert type(groups) is list
    assert not optimizer._optimizer_step_pre_hooks, "shutdown() left a hook"


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=2),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_sets_what_is_used(scheduler):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack()
        optimizer = Adam(model.parameters(), lr=0.1)
        schedule = SCHEDULERS[scheduler](optimizer)
        for step in range(6):
            loss = train_step(model, optimizer)
            given = [loss.detach()] if scheduler == "ReduceLROnPlateau" else []
            schedule.step(*given)
            step_runs.note_all(recorder, f"step {step}", model, optimizer)
        recorder.note("schedule", str(schedule.state_dict()))

    step_runs.check(loop, tight="48KiB")


def test_groups_come_and_are_empty():
    def loop(recorder: helpers.Recorder) -> None:
        p, q, late = parameter(), parameter(700), parameter(501)
        optimizer = Adam([{"params": [p], "lr": 0}, {"params": []}, {"params": [q], "lr": 0.1}])
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [late], "weight_decay": 0.1})
            give_gradients(p, q, late)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p, q, late], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("is_counted_alone", [True, False])
def test_a_parameter_with_few_gradients_counts_its_own_steps(is_counted_alone):
    def loop(recorder: helpers.Recorder) -> None:
        p, rare = parameter(), parameter(700)
        groups = [[p], [rare]] if is_counted_alone else [[p, rare]]
        optimizer = AdamW([{"params": group} for group in groups], lr=0.1)
        for step in range(12):
            give_gradients(p)
            if step % 3 == 2:
                give_gradients(rare)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if not step % 2:
                rare.grad = None
        step_runs.note(recorder, "end", [p, rare], optimizer)

    step_runs.check(loop)


@pytest.mark.parametrize("way", ["dict", "copy", "file", "mapped", "numbers"])
@pytest.mark.parametrize("optimizer_type", [AdamW, pytest.param(SGD, marks=pytest.mark.full)])
def test_saved_state_goes_on(way, optimizer_type, tmp_path):
    def loop(recorder: helpers.Recorder) -> None:
        options = {"momentum": 0.9} if optimizer_type is SGD else {}
        model = helpers.Stack()
        optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
        for step in range(6):
            train_step(model, optimizer)
            step_runs.note_all(recorder, f"step {step}", model, optimizer)
            if step in (1, 3):
                state = through(way, optimizer.state_dict(), tmp_path)
                if step == 1:
                    optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
                optimizer.load_state_dict(state)

    step_runs.check(loop, tight="48KiB")


def through(way: str, state: dict, folder: Path) -> dict:
    """A state dict after it was saved in some way."""
    if way == "dict":
        return state
    if way == "copy":
        return copy.deepcopy(state)
    if way == "numbers":  # as old files have step counts
        state = copy.deepcopy(state)
        for part in state["state"].values():
            if "step" in part:
                part["step"] = int(part["step"])
        return state
    if way == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file)
    path = folder / f"{len(list(folder.iterdir()))}.pt"  # never one that is mapped already
    torch.save(state, path)
    return torch.load(path, mmap=True)


@pytest.mark.parametrize("stress", ["", "evict,poison"])
def test_management_comes_and_goes_between_steps(stress):
    """Made in plain PyTorch, stepped under two managements, then plain again."""

    def run(recorder: helpers.Recorder, *, is_managed: bool) -> None:
        torch.manual_seed(helpers.SEED)
        model = helpers.Stack()
        optimizer = NAdam(model.parameters(), lr=0.1)
        for part in range(4):
            if is_managed and part in (1, 2):
                with helpers.managed("48KiB", stress=stress):
                    two_steps(recorder, f"part {part}", model, optimizer)
            else:
                two_steps(recorder, f"part {part}", model, optimizer)

    def two_steps(recorder, name, model, optimizer):
        for step in range(2):
            train_step(model, optimizer)
            step_runs.note_all(recorder, f"{name} {step}", model, optimizer)

    expected, got = helpers.Recorder(), helpers.Recorder()
    with step_runs.small_ranges():
        run(expected, is_managed=False)
        run(got, is_managed=True)
    helpers.assert_same(got.records, expected.records, stress)


def test_copies_step_for_themselves():
    def loop(recorder: helpers.Recorder) -> None:
        p = parameter()
        optimizer = Adam([p], lr=0.1)
        give_gradients(p)
        optimizer.step()
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        for index, made in enumerate(copies):
            (theirs,) = made.param_groups[0]["params"]
            give_gradients(theirs)
            made.step()
            step_runs.note(recorder, f"copy {index}", [theirs], made)
        step_runs.note(recorder, "original", [p], optimizer)

    step_runs.check(loop)


def test_averages_of_weights():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        averages = [
            AveragedModel(model),
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        ]
        for step in range(4):
            train_step(model, optimizer)
            for average in averages:
                average.update_parameters(model)
            recorder.note(f"step {step}", [model, *averages])

    step_runs.check(loop, tight="48KiB")


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler(fused):
    """One that skips a step; a fused optimizer unscales by itself."""

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack()
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(6):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                recorder.note(f"step {step} norm", norm)
            scaler.step(optimizer)
            scaler.update()
            recorder.note(f"step {step} scale", scaler.get_scale())
            step_runs.note_all(recorder, f"step {step}", model, optimizer)
            optimizer.zero_grad()

    step_runs.check(loop, tight="48KiB")


def test_threads_step_models_of_their_own():
    """Each thread's numbers are those that it has alone."""

    def loop(recorder: helpers.Recorder) -> None:
        models = [helpers.Stack() for _ in range(3)]
        batches = torch.randn(3, 5, 4, 32)
        recorder.note("before", [model(batches[0, 0]) for model in models])  # adopts them
        failures: list[BaseException] = []

        def train(model: nn.Module, inputs: torch.Tensor) -> None:
            try:
                optimizer = Adam(model.parameters(), lr=0.01)
                for batch in inputs:
                    model(batch).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except BaseException as error:
                failures.append(error)
                raise

        threads = [
            threading.Thread(target=train, args=pair) for pair in zip(models, batches, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        recorder.note("end", models)

    step_runs.check(loop, tight="160KiB")
