# SPDX-License-Identifier: Apache-2.0
"""A step that fails in the middle leaves no lease and no memory behind, and training may go on."""

from __future__ import annotations

from unittest import mock

import helpers
import patrickstar
import pytest
import torch
from step_runs import give_gradients, parameter
from torch.optim import SGD, Adam
from torch.optim import adam as adam_module

NUM_ELEMENTS = 2_000_003  # 8 MB
WINDOWED = "16MiB"  # of 32 MB that a step needs
# With room for what a step needs, and with so little that it goes through windows.
budgets = pytest.mark.parametrize("budget", ["64MiB", WINDOWED])
CUT = adam_module._single_tensor_adam


def adam_of(p):
    patrickstar.manage(p)
    optimizer = Adam([p], lr=0.1)
    for _ in range(2):
        give_gradients(p)
        optimizer.step()
    return optimizer


@budgets
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_training_goes_on_after_an_error(budget, error):
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(len(args[0]))
        if len(calls) == 1:
            raise error("stop")
        return CUT(*args, **kwargs)

    with helpers.managed(budget):
        p = parameter(NUM_ELEMENTS)
        optimizer = adam_of(p)
        before = p.detach().clone()
        give_gradients(p)
        with (
            mock.patch.object(adam_module, "_single_tensor_adam", interrupted),
            pytest.raises(error),
        ):
            optimizer.step()
        assert patrickstar.stats().num_leases == 0
        assert helpers.same(p, before)
        optimizer.step()
        assert optimizer.state[p]["step"] == 3
        assert not helpers.same(p, before)
        helpers.evict_everything()
        assert torch.isfinite(p).all()


def test_an_interrupt_in_the_middle_of_a_stream_changes_nothing():
    """Through windows, a step is done or not begun."""
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(len(args[0]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return CUT(*args, **kwargs)

    with helpers.managed(WINDOWED):
        p = parameter(NUM_ELEMENTS)
        optimizer = adam_of(p)
        give_gradients(p)
        parts = [p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]
        before = [part.detach().clone() for part in parts]
        with (
            mock.patch.object(adam_module, "_single_tensor_adam", interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            optimizer.step()
        assert len(calls) > 1, "the step did not go through windows"
        assert all(map(helpers.same, parts, before))
        assert optimizer.state[p]["step"] == 2


@budgets
def test_what_a_failed_step_saw_cannot_be_read_later(budget):
    """Its traceback keeps tensors over memory that is given to others since."""
    kept = []

    def failing(params, grads, *args, **kwargs):
        kept.extend([*params, *grads])
        raise ValueError("stop")

    with helpers.managed(budget):
        p = parameter(NUM_ELEMENTS)
        optimizer = adam_of(p)
        p.pow(2).sum().backward()
        with (
            mock.patch.object(adam_module, "_single_tensor_adam", failing),
            pytest.raises(ValueError),
        ):
            optimizer.step()
        helpers.evict_everything()
        assert len(kept) > 2
        with pytest.raises(RuntimeError, match="read the parameter, its gradient or its state"):
            kept[0].sum()


def test_a_second_init_and_plain_steps_after_shutdown():
    p = parameter(5000)
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    for budget in ("1MiB", "64KiB"):
        with helpers.managed(budget):
            give_gradients(p)
            optimizer.step()
            assert patrickstar.is_managed(p)
    before = p.detach().clone()
    optimizer.step()
    assert not patrickstar.is_managed(p)
    assert not helpers.same(p, before)
