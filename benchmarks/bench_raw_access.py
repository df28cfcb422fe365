# SPDX-License-Identifier: Apache-2.0
"""What the patches of raw readers cost calls on tensors that are not managed.

Prints min, median and max over alternating rounds, in microseconds per call, patched and in plain
PyTorch, and whether the median of the difference is within the limit.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable

import patrickstar
import torch
from bench_guard import summary, time_calls
from rich.console import Console
from rich.table import Table

C_LIMIT_US = 0.1  # the patch is a method in C
PYTHON_LIMIT_US = 0.35
_ROUNDS = 15
_CALLS = 20_000

Call = Callable[[], object]


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title="raw readers of ordinary tensors, us per call (min / median / max)")
    for column in ("reader", "plain", "patched", "difference", "limit"):
        table.add_column(column, justify="right")
    plain = {name: [] for name in make_calls()}
    patched = {name: [] for name in make_calls()}
    for _ in range(_ROUNDS):
        measure(plain)
        with tempfile.TemporaryDirectory() as folder:
            patrickstar.init(host_memory="64MiB", spill_dir=folder)
            measure(patched)
            patrickstar.shutdown()
    for name, (_, limit) in make_calls().items():
        differences = [b - a for a, b in zip(plain[name], patched[name], strict=True)]
        verdict = "within" if statistics.median(differences) <= limit else "above"
        columns = [summary(values) for values in (plain[name], patched[name], differences)]
        table.add_row(name, *columns, f"{verdict} {limit}")
    Console(width=120).print(table)
    print(f"torch {torch.__version__}; python benchmarks/bench_raw_access.py")


def make_calls() -> dict[str, tuple[Call, float]]:
    """Calls by name, each with its limit."""
    tensor = torch.ones(4)
    other = torch.ones(4)
    storage = tensor.untyped_storage()
    return {
        "numpy": (lambda: tensor.numpy(), C_LIMIT_US),
        "data_ptr": (lambda: tensor.data_ptr(), C_LIMIT_US),
        "storage data_ptr": (lambda: storage.data_ptr(), C_LIMIT_US),
        "storage element": (lambda: storage[0], PYTHON_LIMIT_US),
        "tolist": (lambda: tensor.tolist(), C_LIMIT_US),
        "is_shared": (lambda: tensor.is_shared(), C_LIMIT_US),
        "new_tensor": (lambda: tensor.new_tensor(1.0), C_LIMIT_US),
        "set_": (lambda: tensor.set_(other), PYTHON_LIMIT_US),
    }


def measure(values: dict[str, list[float]]) -> None:
    for name, (call, _) in make_calls().items():
        time_calls(call, _CALLS // 20)  # warm-up
        values[name].append(time_calls(call, _CALLS))


if __name__ == "__main__":
    main()
