# SPDX-License-Identifier: Apache-2.0
"""Stepping in ranges needs temporaries of a range, where a loop over tensors needs whole ones."""

from __future__ import annotations

import helpers
import pytest
import step_runs
import torch
from patrickstar import ranged_step
from torch.profiler import ProfilerActivity, profile

NUM_ELEMENTS = 1 << 23
PARAMETER_BYTES = 4 * NUM_ELEMENTS
# Of one range.
MOST_BYTES = 4 * ranged_step.RANGE_ELEMENTS


def largest_allocation(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the largest tensor that ``step()`` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        optimizer.step()
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    return max(sizes)


def prepare(optimizer: type[torch.optim.Optimizer], form: str) -> torch.optim.Optimizer:
    """With its state made, in the step before."""
    p = torch.nn.Parameter(torch.ones(NUM_ELEMENTS))
    p.grad = torch.ones(NUM_ELEMENTS)
    options = step_runs.options_of(optimizer, list(step_runs.OPTIONS[optimizer])[-1], form)
    made = optimizer([p], **options)
    made.step()
    return made


@pytest.mark.parametrize("form", ["loop", "foreach"])
@pytest.mark.parametrize("optimizer", [*step_runs.OPTIONS])
def test_no_temporary_is_as_large_as_the_parameter(optimizer, form):
    with helpers.managed("512MiB", chunk_size="1MiB"):
        assert largest_allocation(prepare(optimizer, form)) <= MOST_BYTES


def test_the_loop_of_torch_has_large_ones():
    """What the other test would see if nothing were cut."""
    assert largest_allocation(prepare(torch.optim.AdamW, "loop")) >= PARAMETER_BYTES
