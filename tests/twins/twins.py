# SPDX-License-Identifier: Apache-2.0
"""Runs both sides of many twins, in processes of their own, and compares what they answer."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matrix

NUM_PROCESSES = 2
RUN = Path(__file__).with_name("run.py")
COMPARED = ("losses", "norms", "gradients", "weights", "state", "model_data_bytes")
SMALLEST_FIRST_TRY = 64 << 10  # the first budget of a search for the smallest

Answers = dict[str, dict[str, Any]]


def run_plain(cases: Sequence[matrix.Case], folder: Path, threads: int = 2) -> Answers:
    """Answers of plain PyTorch, by the id of the plain axes."""
    plain = {}
    for case in cases:
        name = matrix.case_id(case, matrix.PLAIN_AXES)
        plain[name] = {"id": name, **{axis: case[axis] for axis in matrix.PLAIN_AXES}}
    return _run(list(plain.values()), folder / "plain", [f"--threads={threads}"])


def run_managed(
    cases: Sequence[matrix.Case],
    plain: Answers,
    folder: Path,
    threads: int = 2,
    *,
    skip_leases: bool = False,
) -> Answers:
    """Answers of the managed side, by the id of all axes.

    Args:
        skip_leases: Break the engine on purpose: ops read without leases.
    """
    options = ["--managed", f"--threads={threads}", *(["--skip-leases"] if skip_leases else [])]
    managed = []
    for case in cases:
        twin = plain[matrix.case_id(case, matrix.PLAIN_AXES)]
        spill_dir = str(folder / "spill")
        if "model_data_bytes" in twin:
            budget = budget_bytes(case, twin)
            name = matrix.case_id(case)
            managed.append({"id": name, **case, "budget_bytes": budget, "spill_dir": spill_dir})
    return _run(managed, folder / "managed", options)


def budget_bytes(case: matrix.Case, plain: Mapping[str, Any]) -> int:
    """The first budget that the managed side of a case tries."""
    if case["budget"] == "smallest":
        return SMALLEST_FIRST_TRY
    return int(plain["model_data_bytes"]) * int(case["budget"]) // 100


def first_difference(plain: Mapping[str, Any], managed: Mapping[str, Any]) -> str | None:
    """Names the first number in which two answers differ, in the order of training."""
    for part in COMPARED:
        ours, theirs = managed[part], plain[part]
        if ours == theirs:
            continue
        if not isinstance(theirs, (dict, list)):
            return f"{part}: plain {theirs}, managed {ours}"
        if isinstance(theirs, list):
            theirs, ours = dict(enumerate(theirs)), dict(enumerate(ours))
        missing = object()
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            a, b = theirs.get(key, missing), ours.get(key, missing)
            if a is missing or b is missing or a != b:
                return f"{part} {key}: plain {_show(a)}, managed {_show(b)}"
    return None


def _show(digest: object) -> str:
    return digest if isinstance(digest, str) else "nothing"


def _run(cases: list[dict[str, Any]], folder: Path, options: list[str]) -> Answers:
    """Runs cases in a few processes at once; one that dies is started again after its last case."""
    folder.mkdir(parents=True)
    answers: Answers = {}
    shares = [cases[first::NUM_PROCESSES] for first in range(NUM_PROCESSES)]
    for attempt in itertools.count():
        running = []
        for index, share in enumerate(shares):
            if share:
                process = _start(share, folder / f"{attempt}-{index}", options)
                running.append((index, process, folder / f"{attempt}-{index}"))
        if not running:
            return answers
        for index, process, path in running:
            status = process.wait()
            lines = path.with_suffix(".jsonl").read_text().splitlines()
            for answer in map(json.loads, lines):
                answers[answer["id"]] = answer
            rest = shares[index][len(lines) :]
            if rest or status != 0:
                # Past the last case, what died is the end of the process: that case answers for it.
                died = rest[0] if rest else shares[index][-1]
                errors = path.with_suffix(".err").read_text()[-4000:]
                answers[died["id"]] = {
                    "id": died["id"],
                    "error": f"the process ended with status {status}\n{errors}",
                }
            shares[index] = rest[1:]
    raise AssertionError("unreachable")


def _start(cases: list[dict[str, Any]], path: Path, options: list[str]) -> subprocess.Popen[bytes]:
    path.with_suffix(".json").write_text(json.dumps(cases))
    path.with_suffix(".jsonl").touch()
    command = [sys.executable, str(RUN), f"--cases={path}.json", f"--out={path}.jsonl", *options]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PATRICKSTAR_")
    }
    # Hub look-ups of transformers have no place in a test.
    environment.update(HF_HUB_OFFLINE="1", PYTHONFAULTHANDLER="1")
    # Threads that spin while they wait take the cores from the other process.
    environment.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    with path.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, stdout=errors, stderr=subprocess.STDOUT, env=environment)
