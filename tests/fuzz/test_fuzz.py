# SPDX-License-Identifier: Apache-2.0
"""Random training programs give the bits of plain PyTorch.

A seed that fails prints its plan and the command that runs it alone.
"""

from __future__ import annotations

import execute
import program
import pytest

NUM_SEEDS = 200
NUM_SAMPLED = 20


def seeds() -> list[object]:
    sampled = list(range(NUM_SAMPLED))
    rest = [pytest.param(seed, marks=pytest.mark.full) for seed in range(NUM_SAMPLED, NUM_SEEDS)]
    return [*sampled, *rest]


@pytest.mark.parametrize("seed", seeds())
def test_ten_steps_of_a_random_program(seed):
    plan = program.draw(seed)
    print(f"{plan}\nrun it alone: python tests/fuzz/execute.py {seed}")
    execute.check(plan)


def test_a_plan_follows_from_its_seed():
    assert program.draw(7) == program.draw(7)
    assert program.draw(7) != program.draw(8)


def test_every_choice_is_met_by_some_seed():
    plans = [program.draw(seed) for seed in range(NUM_SEEDS)]
    blocks = [block for plan in plans for block in plan.blocks]
    events = {event for plan in plans for step in plan.steps for event in step.events}
    assert events == set(program.EVENTS)
    assert {block.kind for block in blocks} == set(program.KINDS)
    assert {name for plan in plans for name in plan.optimizers} == set(program.OPTIMIZERS)
    assert {block.recompute for block in blocks} == {"", "reentrant", "non-reentrant"}
    assert {block.dtype for block in blocks} >= {"float32", "bfloat16", "float64", "float16"}
    assert any(block.same_as is not None for block in blocks)
    assert any(block.tied_to is not None for block in blocks)
    assert any(block.is_frozen for block in blocks)
    assert {plan.scheduler for plan in plans} == {"", *program.SCHEDULERS}
    assert {plan.setting for plan in plans} == {"auto", "native"}
    assert {plan.num_groups for plan in plans} == {1, 2}
    assert any(plan.precision for plan in plans)
    assert any(plan.clipping for plan in plans)
