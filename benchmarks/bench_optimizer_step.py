# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step with everything resident, against the same step in plain PyTorch.

For each row two processes, one of which never imports patrickstar, take turns. The parameters are
one tensor, or a list of the shapes that a GPT has. Prints min, median and max of each in
milliseconds, and the ratio of the medians beside its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_NUM_PARAMETERS = 64 << 20
_NUM_PARAMETERS_QUICK = 4 << 20
_BYTES_PER_PARAMETER = 16  # with gradient and two moments in fp32
_THREADS = (1, 2)
_WARM_UP = 2
_LAYOUTS = ("one tensor", "gpt")

OPTIMIZERS: Mapping[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3}),
    "SGD momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}


@dataclass(frozen=True)
class Row:
    """What is compared.

    Attributes:
        setting: The ``optimizer`` setting of ``patrickstar.init``.
        optimizer: Of ``OPTIMIZERS``.
        is_fused: Whether plain PyTorch runs its fused form, not its default one.
        goal: How many times as fast as plain PyTorch it shall be; None where nothing is set.
    """

    setting: str
    optimizer: str
    is_fused: bool
    goal: float | None


ROWS = (
    Row("auto", "AdamW", is_fused=False, goal=2.5),
    Row("auto", "Adam", is_fused=False, goal=2.5),
    Row("auto", "SGD momentum", is_fused=False, goal=None),
    Row("fused", "AdamW", is_fused=True, goal=None),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="4 Mi parameters, not 64 Mi")
    parser.add_argument("--setting", help="only rows of this one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    num_parameters = _NUM_PARAMETERS_QUICK if options.quick else _NUM_PARAMETERS
    table = Table(title=f"step of {num_parameters >> 20} Mi parameters, ms (min / median / max)")
    for column in ("optimizer", "setting", "layout", "threads", "plain", "managed", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("goal", justify="right")
    for row in ROWS:
        if options.setting not in (None, row.setting):
            continue
        for layout in _LAYOUTS:
            add_lines(table, row, layout, num_parameters, options.rounds)
    Console(width=120).print(table)
    print(f"{processor()}; torch {torch.__version__}, Python {platform.python_version()}")
    print(f"python {' '.join(sys.argv)}")


def add_lines(table: Table, row: Row, layout: str, num_parameters: int, rounds: int) -> None:
    """A line for each number of threads; both processes live as long as the row."""
    workers = [
        start_worker(row, layout, num_parameters, is_managed=is_managed)
        for is_managed in (False, True)
    ]
    for threads in _THREADS:
        times: list[list[float]] = [[], []]
        for index in range(rounds + _WARM_UP):
            for side, worker in zip(times, workers, strict=True):
                milliseconds = ask_step(worker, threads)
                if index >= _WARM_UP:
                    side.append(milliseconds)
        ratio = statistics.median(times[0]) / statistics.median(times[1])
        goal = f"{row.goal:.1f}" if row.goal else "-"
        name = f"{row.optimizer}{' fused' if row.is_fused else ''}"
        cells = (name, row.setting, layout, str(threads), *map(summary, times))
        table.add_row(*cells, f"{ratio:.2f}", goal)
    for worker in workers:
        worker.communicate()


def start_worker(
    row: Row, layout: str, num_parameters: int, *, is_managed: bool
) -> subprocess.Popen[str]:
    job = {
        "setting": row.setting if is_managed else None,
        "optimizer": row.optimizer,
        "is_fused": row.is_fused and not is_managed,
        "layout": layout,
        "num_parameters": num_parameters,
    }
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask_step(worker: subprocess.Popen[str], threads: int) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{threads}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def work(
    *, setting: str | None, optimizer: str, is_fused: bool, layout: str, num_parameters: int
) -> None:
    """Steps once, with so many threads, for each line of standard input."""
    shapes = gpt_shapes(num_parameters) if layout == "gpt" else [(num_parameters,)]
    make, given = OPTIMIZERS[optimizer]
    with tempfile.TemporaryDirectory() as folder:
        if setting is not None:
            import patrickstar

            # Whole chunks, of which the last of each kind is not full.
            budget = _BYTES_PER_PARAMETER * num_parameters + (512 << 20)
            patrickstar.init(host_memory=budget, spill_dir=folder, optimizer=setting)
        model = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)
        if setting is not None:
            patrickstar.manage(model)
        made = make(model.parameters(), **{**given, "fused": is_fused or None})
        for parameter in model:
            torch.autograd.backward((parameter * 0.01).sum())
        for line in sys.stdin:
            torch.set_num_threads(int(line))
            start = time.perf_counter()
            made.step()
            print((time.perf_counter() - start) * 1e3, flush=True)
        if setting is not None:
            assert patrickstar.stats().num_evictions == 0, "not everything was resident"


def gpt_shapes(num_parameters: int) -> list[tuple[int, ...]]:
    """Shapes of a GPT: more than half of it an embedding, the rest layers."""
    width = 768 if num_parameters >= _NUM_PARAMETERS else 128
    rows = num_parameters * 4 // 7 // width
    layer: list[tuple[int, ...]] = [
        *[(width,)] * 4,
        *[(3 * width, width), (3 * width,), (width, width), (width,)],
        *[(4 * width, width), (4 * width,), (width, 4 * width), (width,)],
    ]
    num_in_layer = sum(torch.Size(shape).numel() for shape in layer)
    num_layers = (num_parameters - rows * width) // num_in_layer
    return [(rows, width), *layer * num_layers]


def summary(values: list[float]) -> str:
    return f"{min(values):.1f} / {statistics.median(values):.1f} / {max(values):.1f}"


def processor() -> str:
    """The name of the processor and the number of cores."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(': ')[2]}, {len(os.sched_getaffinity(0))} cores"
    return platform.machine()


if __name__ == "__main__":
    main()
