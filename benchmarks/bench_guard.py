# SPDX-License-Identifier: Apache-2.0
"""What the guard adds to an op: ops on one-element managed tensors, less the same on plain ones.

Prints min, median and max over alternating rounds, in microseconds per op (per tensor for lists),
and whether the median of the difference is within the limit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import patrickstar
import torch
from rich.console import Console
from rich.table import Table

LIMIT_US = 0.3
_ROUNDS = 151  # short ones: the speed of a shared machine changes within seconds
_CALLS = 2_000
_LIST_LENGTH = 100

Op = Callable[[], object]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        patrickstar.init(host_memory="64MiB", spill_dir=folder, chunk_size="1MiB")
        plain, managed = make_tensors(), make_tensors()
        patrickstar.manage([*managed[0], *managed[1]])
        table = Table(title="guard, us per op (min / median / max)")
        for column in ("op", "plain", "managed", "difference", "limit"):
            table.add_column(column, justify="right")
        with torch.no_grad():
            for (name, op, count), (_, managed_op, _) in zip(
                make_ops(*plain), make_ops(*managed), strict=True
            ):
                add_row(table, name, op, managed_op, count)
        Console(width=120).print(table)
        patrickstar.shutdown()
    print(f"torch {torch.__version__}; python benchmarks/bench_guard.py")


def make_tensors() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.ones(1) for _ in range(_LIST_LENGTH)], [torch.ones(1, 1) for _ in range(3)]


def make_ops(
    vectors: list[torch.Tensor], matrices: list[torch.Tensor]
) -> list[tuple[str, Op, int]]:
    """(name, op, ops or list elements that one call counts for)."""
    return [
        ("add", lambda: torch.add(vectors[0], vectors[1]), 1),
        ("view", lambda: vectors[0].view(1), 1),
        ("addmm", lambda: torch.addmm(*matrices), 1),
        ("cat of 4", lambda: torch.cat(vectors[:4]), 1),
        ("_foreach_add_ of 100", lambda: torch._foreach_add_(vectors, 1.0), _LIST_LENGTH),
    ]


def add_row(table: Table, name: str, plain: Op, managed: Op, count: int) -> None:
    calls = _CALLS // count
    time_calls(plain, calls), time_calls(managed, calls)  # warm-up
    rounds = [(time_calls(plain, calls), time_calls(managed, calls)) for _ in range(_ROUNDS)]
    per_op = [(p / count, m / count, (m - p) / count) for p, m in rounds]
    columns = [summary([r[index] for r in per_op]) for index in range(3)]
    median = statistics.median(r[2] for r in per_op)
    verdict = "within" if median <= LIMIT_US else "above"
    table.add_row(name, *columns, f"{verdict} {LIMIT_US}")


def time_calls(op: Op, calls: int) -> float:
    """Microseconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        op()
    return (time.perf_counter() - start) / calls * 1e6


def summary(values: list[float]) -> str:
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"


if __name__ == "__main__":
    main()
