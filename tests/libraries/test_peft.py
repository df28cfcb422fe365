# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of peft train, save, load and merge with the bits of plain PyTorch."""

from __future__ import annotations

import pytest
import two_sides
from peft_programs import PROGRAMS


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    return two_sides.run_both("peft_programs", tmp_path_factory.mktemp("peft"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_numbers_in_a_quarter_of_the_memory(sides, program):
    sides.check(program, PROGRAMS[program][1])


def test_the_loaded_adapter_is_the_one_that_was_trained(sides):
    texts = sides.managed["gpt2_saves_loads_and_merges"]["texts"]
    adapter = [name for name in texts if name.startswith("loaded weight ") and "lora_" in name]
    assert len(adapter) == 24
    for name in adapter:
        assert texts[name] == texts[name.replace("loaded", "train")], name


@pytest.mark.parametrize("path", ["adapter/adapter_model.safetensors", "merged/model.safetensors"])
def test_files_are_those_of_plain_pytorch(sides, path):
    plain, managed = sides.saved(f"gpt2_saves_loads_and_merges/{path}")
    assert managed.read_bytes() == plain.read_bytes()
