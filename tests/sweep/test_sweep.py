# SPDX-License-Identifier: Apache-2.0
"""Every method and property of evicted managed tensors and storages: right, or our error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

SWEEP = Path(__file__).with_name("sweep.py")
KINDS = (
    "parameter",
    "detached",
    "data",
    "slice",
    "gradient",
    "state",
    "untyped storage",
    "typed storage",
)
SAMPLE = 60  # one name in so many, another one for each kind

# Those that were wrong once, for every kind that has them.
ALWAYS = {"_lazy_clone", "filename", "is_shared", "new", "numpy", "resize_as", "share_memory_"}


def _lines(*arguments: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SWEEP), *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def _sweep(kind: str, names: list[str]) -> None:
    outcomes = dict(json.loads(line) for line in _lines(kind, *names))
    assert set(outcomes) == set(names)
    wrong = {name: text for name, text in outcomes.items() if text not in ("right", "our error")}
    assert not wrong
    refused = [name for name, text in outcomes.items() if text == "our error"]
    assert len(refused) <= len(names) // 20, refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_right_or_gets_our_error(kind: str) -> None:
    [names] = map(json.loads, _lines(kind, "--list"))
    chosen = [n for n in names if zlib.crc32(f"{kind} {n}".encode()) % SAMPLE == 0 or n in ALWAYS]
    _sweep(kind, chosen)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_right_or_gets_our_error(kind: str) -> None:
    [names] = map(json.loads, _lines(kind, "--list"))
    _sweep(kind, names)
