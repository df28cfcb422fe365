# SPDX-License-Identifier: Apache-2.0
"""What one training step moves, in bytes for each fp32 parameter, when next to nothing stays.

docs/memory-and-traffic.md has the same numbers with the reason for each term.
"""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import nn

MIB = 1 << 20
NUM_LAYERS = 24
NUM_PARAMETERS = NUM_LAYERS * MIB // 4  # each layer is one chunk of 1 MiB
BUDGET = 5 * MIB  # a step leases at most four chunks at once

# The forward reads each parameter, the backward reads it again and writes its gradient.
PASSES_READ, PASSES_WRITTEN = 4 + 4, 4

STEPS = {
    # The step reads parameter, gradient and state, and writes parameter and state.
    "adamw": (lambda p: torch.optim.AdamW(p), 4 + 4 + 8, 4 + 8),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 + 4 + 4, 4 + 4),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 4 + 4, 4),
}

# What may be in memory already, or stay there: the budget, and what is written back ahead of need.
SLACK = 2 * BUDGET / NUM_PARAMETERS


def traffic_of_a_step(make_optimizer, num_passes, **settings):
    """Bytes read from and written to disk in one step, for each parameter."""
    with helpers.managed(BUDGET, chunk_size=MIB, **settings):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(NUM_LAYERS)])
        optimizer = make_optimizer(model.parameters())
        before = after = patrickstar.stats()
        for _ in range(3):  # the first two make state and habits
            before = patrickstar.stats()
            for _ in range(num_passes):
                model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = patrickstar.stats()
    return (
        (after.read_bytes - before.read_bytes) / NUM_PARAMETERS,
        (after.spilled_bytes - before.spilled_bytes) / NUM_PARAMETERS,
    )


def expect(found, read, written, num_passes=1):
    slack = num_passes * SLACK
    assert read - slack <= found[0] <= read + slack, (found, read)
    assert written - slack <= found[1] <= written + slack, (found, written)


@pytest.mark.parametrize("form", ["auto", "fused", "native"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_moves_each_byte_once(name, form):
    make_optimizer, read, written = STEPS[name]
    found = traffic_of_a_step(make_optimizer, 1, optimizer=form)
    expect(found, PASSES_READ + read, PASSES_WRITTEN + written)


def test_accumulation_moves_the_gradient_once_more_each_pass():
    make_optimizer, read, written = STEPS["adamw"]
    found = traffic_of_a_step(make_optimizer, 3)
    # The later passes add to what is there: each reads the gradient and writes it.
    expect(found, 3 * PASSES_READ + 2 * 4 + read, 3 * PASSES_WRITTEN + written, 3)
