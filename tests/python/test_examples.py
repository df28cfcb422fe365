# SPDX-License-Identifier: Apache-2.0
"""The example scripts give the same bits with PatrickStar in little memory and in plain PyTorch."""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo  # noqa: E402
from training_report import hash_tensor  # noqa: E402

# Two layers with 2.1 MiB of model data, of which about a third may be in memory.
SIZES = ["--layers", "2", "--width", "64", "--heads", "2", "--positions", "32", "--vocab", "512"]
BUDGET_BYTES = 704 << 10
TRAINING = ["--steps", "2", "--batch-size", "2"]
TEXT = str(argparse.__file__)
TIMEOUT_S = 240

Record = dict[str, Any]


def run_example(script: str, *options: str | Path, record: Path) -> Record:
    """Runs an example in a process of its own and returns its record."""
    command = [sys.executable, EXAMPLES / script, TEXT, *TRAINING, *options, "--record", record]
    done = subprocess.run(
        [str(word) for word in command], timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded: Record = json.loads(record.read_text())
    return loaded


def run_twins(script: str, *options: str | Path, folder: Path) -> tuple[Record, Record]:
    """Runs an example in plain PyTorch and with PatrickStar; returns the records, ours first."""
    memory = ("--host-memory", str(BUDGET_BYTES), "--spill-dir", folder / "spill")
    plain = run_example(script, *options, "--plain", record=folder / "plain.json")
    managed = run_example(script, *options, *memory, record=folder / "managed.json")
    return managed, plain


def check_twins(managed: Record, plain: Record) -> None:
    assert managed["imported_patrickstar"]
    assert not plain["imported_patrickstar"]
    assert managed["stats"]["host_budget_bytes"] == BUDGET_BYTES
    assert managed["stats"]["host_peak_bytes"] <= BUDGET_BYTES
    assert managed["stats"]["num_evictions"] > 0
    assert managed["stats"]["spilled_bytes"] > 0
    assert len(plain["losses"]) == 2
    assert len(plain["optimizer_state"]) > len(plain["weights"])
    assert demo.first_difference(managed, plain) is None
    assert managed["sample"] == plain["sample"]


@pytest.fixture(scope="module", params=["train_gpt2.py", "train_bert.py"])
def config_twins(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Record, Record]:
    """Returns script, folder with the model that the managed run saved, and both records."""
    script: str = request.param
    folder = tmp_path_factory.mktemp("config")
    managed, plain = run_twins(script, *SIZES, "--save", folder / "model", folder=folder)
    return script, folder / "model", managed, plain


def test_from_a_config(config_twins: tuple[str, Path, Record, Record]) -> None:
    check_twins(*config_twins[2:])


def test_saved_weights_are_the_final_ones(
    config_twins: tuple[str, Path, Record, Record],
) -> None:
    _, model, managed, _ = config_twins
    saved = load_file(model / "model.safetensors")
    assert len(saved) > 20
    for name, tensor in saved.items():
        assert hash_tensor(tensor) == managed["weights"][name], name


def test_from_a_local_folder_in_bf16(
    config_twins: tuple[str, Path, Record, Record], tmp_path: Path
) -> None:
    script, model, from_config, _ = config_twins
    managed, plain = run_twins(script, "--model", model, "--bf16", folder=tmp_path)
    check_twins(managed, plain)
    assert plain["losses"] != from_config["losses"]


def test_demo_ends_with_identical() -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "2"]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nidentical: 2 losses and " in done.stdout


def test_demo_names_the_first_difference() -> None:
    record = {
        "losses": [(2.0).hex(), (1.5).hex()],
        "weights": {"a.weight": "00", "b.weight": "11"},
        "optimizer_state": {"a.weight/exp_avg": "22"},
    }
    assert demo.first_difference(record, record) is None
    for part, key, shown in [
        ("losses", 1, "loss of step 2: 1.25 and 1.5"),
        ("weights", "b.weight", "final weight b.weight"),
        ("optimizer_state", "a.weight/exp_avg", "final optimizer state a.weight/exp_avg"),
    ]:
        other = copy.deepcopy(record)
        other[part][key] = (1.25).hex()
        assert demo.first_difference(other, record) == shown


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    command = [sys.executable, str(EXAMPLES / "train_gpt2.py"), str(text), "--plain", *SIZES]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert done.returncode == 1
    assert "text too short" in done.stderr
