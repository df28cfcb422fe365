# SPDX-License-Identifier: Apache-2.0
"""Each element-wise optimizer with each of its flags gives the bytes of plain PyTorch.

The sample has every set of options in one form and every form of every optimizer; the product with
budgets is marked ``full``.
"""

from __future__ import annotations

import itertools
from functools import partial

import helpers
import pytest
import step_runs
import torch
from torch.optim import Optimizer

BUDGETS = (100, 50, 25)  # percent of the model data


def cases() -> list[tuple[type[Optimizer], str, str]]:
    return [
        (optimizer, options, form)
        for optimizer, sets in step_runs.OPTIONS.items()
        for options, form in itertools.product(sets, step_runs.forms_of(optimizer))
    ]


def sampled() -> set[tuple[type[Optimizer], str, str]]:
    """Each set of options once and each form once."""
    chosen = set()
    for optimizer, sets in step_runs.OPTIONS.items():
        forms = step_runs.forms_of(optimizer)
        for index in range(max(len(sets), len(forms))):
            chosen.add((optimizer, list(sets)[index % len(sets)], forms[index % len(forms)]))
    return chosen


def parameters() -> list[object]:
    sample, cycle = sampled(), itertools.cycle(BUDGETS)
    made: list[object] = []
    for case in cases():
        optimizer, options, form = case
        in_sample = next(cycle) if case in sample else None
        for budget in BUDGETS:
            marks = () if budget == in_sample else pytest.mark.full
            title = f"{optimizer.__name__}-{options}-{form}-{budget}"
            made.append(pytest.param(*case, budget, id=title, marks=marks))
    return made


@pytest.mark.parametrize(("optimizer", "options", "form", "budget"), parameters())
def test_steps_have_the_plain_bytes(optimizer, options, form, budget):
    given = step_runs.options_of(optimizer, options, form)
    build = partial(step_runs.Parts, optimizer)
    model_data = step_runs.model_data_bytes(optimizer, given, build())
    with step_runs.small_ranges():
        helpers.twin(
            step_runs.loop_of(optimizer, given, build),
            tight=model_data * budget // 100,
            must_evict=budget < 50,
            stress=() if budget == 100 else ("evict,poison",),
        )


def large_cases() -> list[object]:
    """Each optimizer; in the sample, in one of its forms with one thread."""
    forms = ("loop", "foreach")
    return [
        pytest.param(
            optimizer,
            form,
            num_threads,
            marks=() if num_threads == 1 and form == forms[index % 2] else pytest.mark.full,
        )
        for index, optimizer in enumerate(step_runs.OPTIONS)
        for form in forms
        for num_threads in (1, 2)
    ]


@pytest.mark.parametrize(("optimizer", "form", "num_threads"), large_cases())
def test_tensors_of_many_whole_ranges(optimizer, form, num_threads):
    """At the size of range that the engine uses, with torch's threads."""
    given = step_runs.options_of(optimizer, next(iter(step_runs.OPTIONS[optimizer])), form)
    build = partial(step_runs.Parts, optimizer, scale=140 if num_threads == 1 else 300)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        helpers.twin(
            step_runs.loop_of(optimizer, given, build),
            tight="8MiB",
            chunk_size="1MiB",
            must_evict=False,
        )
    finally:
        torch.set_num_threads(before)
