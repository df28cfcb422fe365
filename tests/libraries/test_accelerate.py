# SPDX-License-Identifier: Apache-2.0
"""A loop of accelerate trains, saves and loads its state with the bits of plain PyTorch."""

from __future__ import annotations

import pytest
import two_sides
from accelerate_programs import PROGRAMS


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    return two_sides.run_both("accelerate_programs", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_numbers_in_a_quarter_of_the_memory(sides, program):
    sides.check(program, PROGRAMS[program][1])


def test_loading_goes_back_to_what_was_saved(sides):
    texts = sides.managed["gpt2_saves_and_loads_its_state"]["texts"]
    first, again = (
        {k.removeprefix(title): v for k, v in texts.items() if k.startswith(title)}
        for title in ("second epoch ", "second epoch again ")
    )
    assert len(again) > 100
    for name, text in again.items():
        assert first[name] == text, name
    loaded = {k: v for k, v in texts.items() if k.startswith("loaded weight ")}
    assert any(texts[k.replace("loaded", "second epoch")] != v for k, v in loaded.items())


@pytest.mark.parametrize("path", ["state/model.safetensors", "model/model.safetensors"])
def test_model_files_are_those_of_plain_pytorch(sides, path):
    plain, managed = sides.saved(f"gpt2_saves_and_loads_its_state/{path}")
    assert managed.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("path", ["state/optimizer.bin", "state/scheduler.bin"])
def test_state_files_load_as_those_of_plain_pytorch(sides, path):
    two_sides.assert_same_files(*sides.saved(f"gpt2_saves_and_loads_its_state/{path}"))
