#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train GPT-2 in a quarter of the memory it needs, and get the same numbers.

The same script, `train_gpt2.py`, runs twice with the same seed: first with PatrickStar and a memory
budget of a quarter of the model data, then in plain PyTorch, in a process that never imports
PatrickStar. Then losses, final weights and optimizer state of the two are compared bit by bit.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN_SCRIPT = Path(__file__).resolve().with_name("train_gpt2.py")

# Small enough for a minute of training on two cores, large enough for the budget to matter.
LAYERS = 6
WIDTH = 384
VOCAB = 4096
POSITIONS = 64
MODEL_OPTIONS = (
    f"--layers {LAYERS} --width {WIDTH} --heads 6 --vocab {VOCAB} --positions {POSITIONS}".split()
)

# Parameter, gradient and the two moments of Adam, four bytes each.
MODEL_DATA_BYTES_PER_PARAMETER = 16
BUDGET_SHARE = 0.25

NUM_LOSSES_SHOWN = 8
SAMPLE_LINES_SHOWN = 8
BAR_WIDTH = 24
MIB = 1 << 20
SECONDS_TO_STOP = 10


def count_parameters() -> int:
    """Returns the number of parameters of the demo's GPT-2: embeddings, layers, final norm."""
    layer = 12 * WIDTH * WIDTH + 13 * WIDTH
    return (VOCAB + POSITIONS) * WIDTH + LAYERS * layer + 2 * WIDTH


def run_training(options: list[str], record_path: Path) -> dict[str, Any]:
    """Runs `train_gpt2.py` to its end and returns its record; exits if it fails."""
    command = [sys.executable, str(TRAIN_SCRIPT), *MODEL_OPTIONS, *options]
    command += ["--record", str(record_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate()
    finally:
        stop(process)
    if process.returncode != 0:
        print(output)
        raise SystemExit(f"training failed with exit code {process.returncode}, see above")
    record: dict[str, Any] = json.loads(record_path.read_text())
    return record


def stop(process: subprocess.Popen[str]) -> None:
    """Waits for a process that may have seen Ctrl-C too, and ends it if it goes on."""
    try:
        process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def first_difference(managed: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """Returns the first difference of two records in words, or None if all bits are the same."""
    for step, (ours, theirs) in enumerate(
        zip(managed["losses"], plain["losses"], strict=True), start=1
    ):
        if ours != theirs:
            return f"loss of step {step}: {float.fromhex(ours)!r} and {float.fromhex(theirs)!r}"
    for what, title in (("weights", "final weight"), ("optimizer_state", "final optimizer state")):
        if managed[what].keys() != plain[what].keys():
            return f"names of {what}: {sorted(managed[what].keys() ^ plain[what].keys())}"
        for name, digest in managed[what].items():
            if digest != plain[what][name]:
                return f"{title} {name}"
    return None


def print_losses(managed: dict[str, Any], plain: dict[str, Any]) -> None:
    """Prints a few steps of both loss curves side by side; the bars start below the lowest."""
    curves = [[float.fromhex(loss) for loss in record["losses"]] for record in (managed, plain)]
    finite = [loss for curve in curves for loss in curve if math.isfinite(loss)]
    floor = math.floor(min(finite, default=0.0))
    highest = max([*finite, floor + 1.0])
    last = len(curves[0]) - 1
    steps = sorted(
        {round(last * part / (NUM_LOSSES_SHOWN - 1)) for part in range(NUM_LOSSES_SHOWN)}
    )
    print(f"{'step':>5}  {'loss, PatrickStar':<{BAR_WIDTH + 10}}  loss, plain PyTorch")
    for step in steps:
        cells = []
        for curve in curves:
            share = (curve[step] - floor) / (highest - floor) if math.isfinite(curve[step]) else 0
            cells.append(f"{curve[step]:8.5f}  {'#' * round(BAR_WIDTH * share):<{BAR_WIDTH}}")
        print(f"{step + 1:>5}  {'  '.join(cells)}".rstrip())


def print_memory(managed: dict[str, Any], plain: dict[str, Any]) -> None:
    """Prints memory, disk traffic and speed of both runs."""
    stats = managed["stats"]
    model_data_bytes = managed["num_parameters"] * MODEL_DATA_BYTES_PER_PARAMETER
    rows = [
        ("model data in memory, at most", stats["host_peak_bytes"], model_data_bytes),
        ("process memory, at most", managed["peak_memory_bytes"], plain["peak_memory_bytes"]),
        ("  of it before the model", managed["memory_before_bytes"], plain["memory_before_bytes"]),
        ("spilled to disk", stats["spilled_bytes"], 0),
        ("read from disk", stats["read_bytes"], 0),
    ]
    print(f"{'':<32}{'PatrickStar':>14}{'plain PyTorch':>16}")
    for title, ours, theirs in rows:
        print(f"{title:<32}{ours / MIB:>10.0f} MiB{theirs / MIB:>12.0f} MiB")
    speeds = [f"{record['tokens_per_second']:.0f} tokens/s" for record in (managed, plain)]
    print(f"{'speed':<32}{speeds[0]:>14}{speeds[1]:>16}")


def print_next() -> None:
    """Prints what a newcomer can do after this."""
    python, gpt2, bert = (
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        for path in (Path(sys.executable), TRAIN_SCRIPT, TRAIN_SCRIPT.with_name("train_bert.py"))
    )
    larger = "--layers 24 --width 1024 --heads 16 --batch-size 2 --checkpointing --steps 5"
    print(f"""What to try next
  your own text    {python} {gpt2} --host-memory 64MiB your-text.txt
  BERT             {python} {bert} --host-memory 64MiB
  a larger model   {python} {gpt2} --host-memory 1.2GiB \\
                     {larger}
  your own script  docs/port-your-script.md""")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (%(default)s)")
    parser.add_argument("--spill-dir", help="folder for what does not fit (a cache folder)")
    args = parser.parse_args()

    parameters = count_parameters()
    model_data_bytes = parameters * MODEL_DATA_BYTES_PER_PARAMETER
    budget_bytes = int(model_data_bytes * BUDGET_SHARE)
    print(
        f"GPT-2 with {parameters / 1e6:.1f} million parameters:"
        f" {model_data_bytes / MIB:.0f} MiB of parameters, gradients and Adam state.\n"
        f"1. With PatrickStar, {budget_bytes / MIB:.0f} MiB of that in memory, the rest on disk:",
        flush=True,
    )
    steps = ["--steps", str(args.steps)]
    memory = ["--host-memory", str(budget_bytes)]
    if args.spill_dir:
        memory += ["--spill-dir", args.spill_dir]
    with tempfile.TemporaryDirectory(prefix="patrickstar-demo-") as folder:
        managed = run_training([*steps, *memory], Path(folder, "managed.json"))
        print("2. In plain PyTorch, in a process that never imports PatrickStar:", flush=True)
        plain = run_training([*steps, "--plain"], Path(folder, "plain.json"))
    if plain["imported_patrickstar"] or not managed["imported_patrickstar"]:
        raise SystemExit("expected only the first run to import patrickstar; cannot compare")

    print("\nWhat the model writes by now:\n")
    lines = [line for line in managed["sample"].splitlines() if line.strip()]
    print("\n".join(f"  | {line}" for line in lines[:SAMPLE_LINES_SHOWN]) + "\n")
    print_losses(managed, plain)
    print()
    print_memory(managed, plain)
    print()
    difference = first_difference(managed, plain)
    if difference:
        print(f"DIFFERENT: {difference}")
        return 1
    num_tensors = len(plain["weights"]) + len(plain["optimizer_state"])
    print(
        f"identical: {len(plain['losses'])} losses and {num_tensors} final tensors"
        " (weights and optimizer state), every bit\n"
    )
    print_next()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("\ninterrupted: training was stopped and its files are removed", flush=True)
        raise SystemExit(130) from None
