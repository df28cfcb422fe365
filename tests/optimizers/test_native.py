# SPDX-License-Identifier: Apache-2.0
"""Which steps run in ranges, and which run the optimizer's own code on whole tensors."""

from __future__ import annotations

from functools import partial
from unittest import mock

import helpers
import pytest
import step_runs
from patrickstar import ranged_step
from torch.optim import SGD, Adagrad, Adam, Optimizer


def count_ranged(loop: step_runs.Loop, **settings: str) -> int:
    """How many ranges a loop stepped under management."""
    with (
        step_runs.small_ranges(),
        helpers.managed(**settings),
        mock.patch.object(ranged_step, "_cut", wraps=ranged_step._cut) as cut,
    ):
        helpers.plain(loop)
    return int(cut.call_count)


def loop_of(optimizer: type[Optimizer], form: str = "default") -> step_runs.Loop:
    options = step_runs.options_of(optimizer, next(iter(step_runs.OPTIONS[optimizer])), form)
    return step_runs.loop_of(optimizer, options, partial(step_runs.Parts, optimizer))


SAMPLED = (Adam, SGD, Adagrad)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optimizer, marks=() if optimizer in SAMPLED else pytest.mark.full)
        for optimizer in step_runs.OPTIONS
    ],
)
def test_native_has_the_plain_bytes_without_ranges(optimizer):
    loop = loop_of(optimizer)
    step_runs.check(loop, tight="200KiB", optimizer="native")
    assert count_ranged(loop, optimizer="native") == 0


@pytest.mark.parametrize("optimizer", [*step_runs.OPTIONS])
@pytest.mark.parametrize("form", ["default", "foreach"])
def test_each_elementwise_optimizer_is_cut(optimizer, form):
    assert count_ranged(loop_of(optimizer, form)) > 0


def test_a_differentiable_step_is_not_cut():
    def loop(recorder: helpers.Recorder) -> None:
        p = step_runs.parameter().requires_grad_(False)
        optimizer = Adam([p], lr=0.1, differentiable=True)
        for step in range(3):
            step_runs.give_gradients(p)
            optimizer.step()
            step_runs.note(recorder, f"step {step}", [p], optimizer)

    step_runs.check(loop)
    assert count_ranged(loop) == 0
