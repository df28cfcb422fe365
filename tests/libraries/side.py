# SPDX-License-Identifier: Apache-2.0
"""One side of the twins of a library: runs each of its programs from a seed, writes what they note.

python tests/libraries/side.py trainer_programs folder              # plain
python tests/libraries/side.py trainer_programs folder --managed    # with one added line
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from notes import Notes


def run(name: str, program: Any, folder: Path) -> dict[str, Any]:
    """Runs a program in a folder of its own; what it noted, or how it failed."""
    notes = Notes()
    torch.manual_seed(1234)
    scratch = folder / name
    scratch.mkdir()
    try:
        program(notes, scratch)
    except Exception as error:
        answer = {"error": traceback.format_exc()}
        traceback.clear_frames(error.__traceback__)  # else they keep the model alive
        return answer
    return {"texts": notes.texts, "model_data_bytes": notes.model_data_bytes}


def run_managed(name: str, program: Any, budget: str, folder: Path) -> dict[str, Any]:
    """The same with the one added line."""
    import patrickstar

    patrickstar.init(host_memory=budget, chunk_size="16KiB", spill_dir=folder)
    answer = run(name, program, folder)
    answer["stats"] = dataclasses.asdict(patrickstar.stats())
    gc.collect()
    patrickstar.shutdown()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", help="the module of the programs")
    parser.add_argument("folder", type=Path, help="gets a JSON file and what the programs save")
    parser.add_argument("--managed", action="store_true", help="with patrickstar")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = {}
    for name, (program, budget) in importlib.import_module(options.programs).PROGRAMS.items():
        if options.managed:
            answers[name] = run_managed(name, program, budget, options.folder)
        else:
            answers[name] = run(name, program, options.folder)
    (options.folder / "answers.json").write_text(json.dumps(answers))
    assert options.managed == ("patrickstar" in sys.modules)


if __name__ == "__main__":
    main()
