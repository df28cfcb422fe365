# SPDX-License-Identifier: Apache-2.0
"""Trainer of transformers trains, evaluates, saves and resumes with the bits of plain PyTorch."""

from __future__ import annotations

import pytest
import two_sides
from trainer_programs import PROGRAMS


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    return two_sides.run_both("trainer_programs", tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_numbers_in_a_quarter_of_the_memory(sides, program):
    sides.check(program, PROGRAMS[program][1])


def test_resuming_is_not_having_stopped(sides):
    whole = sides.managed["gpt2_saves"]["texts"]
    resumed = sides.managed["gpt2_resumes"]["texts"]
    at_the_end = [name for name in resumed if name.startswith(("train weight ", "train state "))]
    assert len(at_the_end) > 100
    for name in at_the_end:
        assert resumed[name] == whole[name], name
    losses = [whole[f"train loss {step}"] for step in range(1, 7)]
    assert len(set(losses)) == 6
    assert losses[4:] == [resumed[f"train loss {step}"] for step in (1, 2)]


@pytest.mark.parametrize(
    "path", ["gpt2_saves/checkpoint-4", "gpt2_resumes/checkpoint-6", "gpt2_resumes/final"]
)
def test_model_files_are_those_of_plain_pytorch(sides, path):
    for name in ("model.safetensors", "config.json"):
        plain, managed = sides.saved(f"{path}/{name}")
        assert managed.read_bytes() == plain.read_bytes(), name


@pytest.mark.parametrize("path", ["gpt2_saves/checkpoint-4", "gpt2_resumes/checkpoint-6"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_state_files_load_as_those_of_plain_pytorch(sides, path, name):
    two_sides.assert_same_files(*sides.saved(f"{path}/{name}"))
