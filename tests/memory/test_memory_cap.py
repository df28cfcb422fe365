# SPDX-License-Identifier: Apache-2.0
"""Training and building models larger than the memory that the kernel allows the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from memory_cap import MemoryCap, can_cap

_SCRIPT = Path(__file__).with_name("capped_training.py")
_MIB = 1 << 20
_SLACK_BYTES = 128 * _MIB

needs_cap = pytest.mark.skipif(not can_cap(), reason="memory control groups need root")

# One size for every run of the tests, and the real one.
_SIZES = [
    pytest.param({"layers": 6, "width": 512, "vocabulary": 16000}, id="28M"),
    pytest.param(
        {"layers": 24, "width": 1024, "vocabulary": 50257}, id="355M", marks=pytest.mark.full
    ),
]


def _command(size: dict[str, int], **options: object) -> list[str]:
    flags = {**size, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [
        sys.executable,
        str(_SCRIPT),
        *(text for name, value in flags.items() for text in (f"--{name}", str(value))),
    ]


def _run_plain(size: dict[str, int], **options: object) -> dict[str, Any]:
    done = subprocess.run(
        _command(size, **options), capture_output=True, text=True, timeout=600, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _run_capped(cap_bytes: int, command: list[str], *, timeout_s: float) -> dict[str, Any]:
    with MemoryCap(cap_bytes) as cap:
        done = cap.run(command, timeout_s=timeout_s)
    killed = done.returncode == -signal.SIGKILL
    assert not killed, f"passed the cap of {cap_bytes / _MIB:.0f} MiB\n{done.stderr[-2000:]}"
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@needs_cap
@pytest.mark.parametrize("size", _SIZES)
def test_trains_in_a_quarter_of_its_model_data(size: dict[str, int], tmp_path: Path) -> None:
    # Parameters, gradients and two moments, each as large as the parameters.
    one_layer = _run_plain({**size, "layers": 1}, steps=2)
    other_bytes = one_layer["peak_bytes"] - 4 * one_layer["parameter_bytes"]
    one_block = 12 * size["width"] ** 2 * 4
    parameter_bytes = one_layer["parameter_bytes"] + (size["layers"] - 1) * one_block
    budget = 4 * parameter_bytes // 4
    report = _run_capped(
        budget + other_bytes + _SLACK_BYTES,
        _command(size, steps=5, host_memory=budget, spill_dir=tmp_path / "spill"),
        timeout_s=1500,
    )
    losses = report["losses"]
    assert losses[-1] < losses[0]
    assert report["host_peak_bytes"] <= budget
    assert report["num_evictions"] > 0


@needs_cap
def test_builds_a_model_larger_than_memory(tmp_path: Path) -> None:
    size = {"layers": 12, "width": 1024, "vocabulary": 8000}
    tiny = _run_plain({**size, "layers": 1, "width": 64})
    budget = 128 * _MIB
    cap_bytes = tiny["peak_bytes"] + budget + _SLACK_BYTES // 2
    command = _command(size, host_memory=budget, spill_dir=tmp_path / "spill")
    built = _run_capped(cap_bytes, command, timeout_s=600)
    assert built["parameter_bytes"] > cap_bytes

    _run_plain(size, save_to=tmp_path / "model")
    loaded = _run_capped(
        cap_bytes, [*command, "--load-from", str(tmp_path / "model")], timeout_s=600
    )
    assert loaded["parameter_bytes"] == built["parameter_bytes"]


@needs_cap
def test_the_same_model_in_plain_pytorch_passes_the_cap() -> None:
    size = {"layers": 12, "width": 1024, "vocabulary": 8000}
    tiny = _run_plain({**size, "layers": 1, "width": 64})
    with MemoryCap(tiny["peak_bytes"] + 128 * _MIB + _SLACK_BYTES // 2) as cap:
        done = cap.run(_command(size), timeout_s=600)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]  # so the tests above can fail


def test_a_killed_run_leaves_nothing_in_the_spill_folder(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    command = _command(
        {"layers": 2, "width": 256, "vocabulary": 2000},
        steps=10_000,
        host_memory=8 * _MIB,
        spill_dir=folder,
    )
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("loss"):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(folder.iterdir()) == []
