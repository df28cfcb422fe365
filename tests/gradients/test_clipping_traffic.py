# SPDX-License-Identifier: Apache-2.0
"""What clipping by norm reads: no gradient, once the engine knows that norms are wanted."""

from __future__ import annotations

import clipped_loops as loops
import helpers
import patrickstar
import pytest
import torch
from patrickstar import _C


def traffic():
    stats = patrickstar.stats()
    return stats.read_bytes, stats.num_fetches, stats.spilled_bytes


def prepare(model, num_micro_batches=1):
    for _ in range(num_micro_batches):
        loops.backward(model)
    helpers.evict_everything()
    assert all(_C.is_managed(gradient) for gradient in loops.gradients_of(model))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_reads_no_gradient(foreach, num_micro_batches):
    with helpers.managed("64KiB"):
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step in range(4):
            prepare(model, num_micro_batches)
            before = traffic()
            norm = loops.clip(model, foreach=foreach)
            assert float(norm) > loops.NORM
            moved = [now - then for now, then in zip(traffic(), before, strict=True)]
            # The first norm is asked for after the gradients were made: it reads them.
            assert (moved == [0, 0, 0]) == (step > 0), (step, moved)
            optimizer.step()
            optimizer.zero_grad()


def test_norm_and_clipping_apart_read_no_gradient():
    with helpers.managed("64KiB"):
        model = helpers.Stack()
        prepare(model)
        torch.nn.utils.get_total_norm(loops.gradients_of(model))
        model.zero_grad()
        prepare(model)
        before = traffic()
        norm = torch.nn.utils.get_total_norm(loops.gradients_of(model))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), loops.NORM, norm)
        assert traffic() == before


def test_a_norm_below_the_limit_reads_nothing_twice():
    with helpers.managed("64KiB"):
        model = helpers.Stack()
        prepare(model)
        loops.clip(model, 1e6)
        model.zero_grad()
        prepare(model)
        before = traffic()
        for _ in range(3):  # multiplied by 1 the gradients keep their norms
            loops.clip(model, 1e6)
        assert traffic() == before


def test_clipped_gradients_that_nobody_reads_cost_nothing():
    with helpers.managed("64KiB"):
        model = helpers.Stack()
        prepare(model)
        loops.clip(model)
        model.zero_grad()
        prepare(model)
        before = traffic()
        loops.clip(model)
        model.zero_grad()
        _C.free_dead_slots()
        assert traffic() == before


def test_a_write_makes_the_norm_unknown():
    with helpers.managed("64KiB"):
        model = helpers.Stack()
        prepare(model)
        loops.clip(model)
        model.zero_grad()
        prepare(model)
        model.layers[0].weight.grad.add_(1.0)
        helpers.evict_everything()
        before = patrickstar.stats().num_fetches
        torch.nn.utils.get_total_norm(loops.gradients_of(model))
        assert patrickstar.stats().num_fetches - before == 1


def test_the_setting_reads_no_gradient_but_for_the_step():
    fetches = {}
    for clipping in (None, loops.NORM):
        with helpers.managed("64KiB", gradient_clipping=clipping):
            torch.manual_seed(0)
            model = helpers.Stack()
            optimizer = helpers.adamw(model)
            for _ in range(3):
                prepare(model)
                before = patrickstar.stats().num_fetches
                optimizer.step()
                fetches[clipping] = patrickstar.stats().num_fetches - before
                optimizer.zero_grad()
    assert fetches[loops.NORM] == fetches[None]
