# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of a library in plain PyTorch and under management, and compares their notes.

The two sides are processes of their own, at the same time; the plain one never imports us.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from notes import Notes
from patrickstar.report.units import parse_size

SIDE = Path(__file__).with_name("side.py")
TIMEOUT_S = 240  # a hang; usually they take 10 seconds


@dataclasses.dataclass(frozen=True)
class Sides:
    """What the programs of one library answered on both sides.

    Attributes:
        folder: Where the sides saved their files, in ``plain`` and ``managed``.
        plain: Answers by program.
        managed: The same.
    """

    folder: Path
    plain: dict[str, Any]
    managed: dict[str, Any]

    def saved(self, path: str) -> tuple[Path, Path]:
        """A file that a program, its first part, saved on both sides."""
        return self.folder / "plain" / path, self.folder / "managed" / path

    def check(self, program: str, budget: str) -> None:
        """The same notes, under a budget that holds at most a quarter of the model data."""
        plain, managed = self.plain[program], self.managed[program]
        assert "error" not in plain, plain["error"]
        assert "error" not in managed, managed["error"]
        assert plain["texts"], "the program noted nothing, so there is nothing to compare"
        for name, text in plain["texts"].items():
            assert managed["texts"].get(name) == text, name
        assert managed["texts"].keys() == plain["texts"].keys()
        stats = managed["stats"]
        allowed = parse_size(budget, "budget", lambda: 0)
        assert allowed * 4 <= plain["model_data_bytes"]
        assert 0 < stats["host_peak_bytes"] <= stats["host_budget_bytes"] == allowed
        assert stats["num_evictions"] > 0
        assert stats["read_bytes"] > 0


def run_both(programs: str, folder: Path) -> Sides:
    """Runs both sides of a module of programs."""
    processes = {}
    for side, options in (("plain", []), ("managed", ["--managed"])):
        scratch = folder / side
        scratch.mkdir()
        with (folder / f"{side}.txt").open("wb") as output:
            processes[side] = subprocess.Popen(
                [sys.executable, str(SIDE), programs, str(scratch), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
    answers = {}
    try:
        for side, process in processes.items():
            status = process.wait(TIMEOUT_S)
            output = (folder / f"{side}.txt").read_text(errors="replace")
            assert status == 0, f"the {side} side ended with status {status}\n{output[-8000:]}"
            answers[side] = json.loads((folder / side / "answers.json").read_text())
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return Sides(folder, answers["plain"], answers["managed"])


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PATRICKSTAR_")}
    kept.update(PYTHONFAULTHANDLER="1", OMP_WAIT_POLICY="passive")
    # Look-ups at the hub and progress bars have no place in a test.
    kept.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    return kept


def assert_same_files(plain: Path, managed: Path) -> None:
    """Files of ``torch.save`` with the same contents and sizes, which plain PyTorch loads."""
    sizes = [path.stat().st_size for path in (plain, managed)]
    assert sizes[0] == sizes[1], f"{plain.name}: {sizes}"
    contents = [torch.load(path, weights_only=False) for path in (plain, managed)]
    noted = []
    for part in contents:
        notes = Notes()
        notes.note(plain.name, part)
        noted.append(notes.texts)
    assert noted[0] == noted[1]
