# SPDX-License-Identifier: Apache-2.0
"""Writes docs/conformance.md: PyTorch's own test data under management and in plain PyTorch.

Runs everything that tests/conformance tests, in processes of its own, which takes the better part
of an hour. Fails on what tests/conformance/open.txt does not list, on a line there that nothing
needs, and when a case ends its process. From the root: python scripts/conformance_table.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "conformance")]

import cases  # noqa: E402
import skip_policy  # noqa: E402
import torch  # noqa: E402
from runs import Judged, Verdict  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
_INTRODUCTION = """\
# Conformance

PyTorch comes with test data for its own operations, modules and optimizers (`op_db`, `module_db`
and `optim_db` of `torch.testing._internal`). Here every sample of it runs twice: in plain PyTorch,
and under management with `PATRICKSTAR_STRESS=evict,poison`, where every tensor of the sample is
managed, is on disk when the call begins, and leaves memory again after every operation that the
call is made of, its old place filled with garbage.

A run passes when every result, every input after the call and every gradient has the same type,
shape, strides, flags and bytes as in plain PyTorch, and when the call has taken a lease, or is
listed below as one that needs none. A run that raises in plain PyTorch has to raise the same error;
such runs are not counted below, nor are those in which plain PyTorch differs from itself.

Each entry is *runs that pass under management / runs that pass in plain PyTorch*.
"""
_OP_NOTE = """\
Variants: *forward*; *views*, where each argument is every second element of a larger managed
tensor; *backward*; *in-place*, also on views; *out=* into a managed tensor of the right shape, and
*out=, resized* into one of another shape, which torch resizes.
"""


def judge(index: int) -> list[Judged]:
    """Judges a case in a worker."""
    return _all_cases()[index].judge()


@functools.cache
def _all_cases() -> list[cases.Case]:
    return [*cases.op_cases(), *cases.module_cases(), *cases.optimizer_cases()]


def judge_all(todo: Sequence[cases.Case], num_jobs: int) -> Iterator[tuple[cases.Case, Judged]]:
    """Judges every case, in processes of their own.

    Raises:
        SystemExit: A case ended its process.
    """
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(judge, index) for index in range(len(todo))]
        for number, (case, future) in enumerate(zip(todo, futures, strict=True), start=1):
            print(f"\r{number}/{len(todo)} {case.name:70}", end="", file=sys.stderr, flush=True)
            try:
                yield from ((case, judged) for judged in future.result())
            except BrokenProcessPool:
                raise SystemExit(f"\n{case.name}, or one after it, ended its process") from None
    print(file=sys.stderr)


class Table:
    """Counts of verdicts, printed as lines of a page."""

    def __init__(self, results: Iterable[tuple[cases.Case, Judged]]) -> None:
        self.passing: Counter[tuple[str, str, str]] = Counter()
        self.plain: Counter[tuple[str, str, str]] = Counter()
        self.titles: dict[tuple[str, str], dict[str, bool]] = {}
        self.failures: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.unstable: set[str] = set()
        self.raising: set[str] = set()
        self.running: set[str] = set()
        for case, judged in results:
            self._count(case, judged)

    def _count(self, case: cases.Case, judged: Judged) -> None:
        key = (case.suite, case.kind, judged.variant)
        titles = self.titles.setdefault(key[:2], {})
        is_accepted = judged.verdict in cases.ACCEPTED or judged.verdict is Verdict.NO_LEASE
        titles[case.title] = titles.get(case.title, True) and is_accepted
        if judged.verdict is Verdict.PLAIN_UNSTABLE:
            self.unstable.add(case.title)
        is_raising = judged.verdict is Verdict.PLAIN_RAISES
        (self.raising if is_raising else self.running).add(case.title)
        if judged.verdict in (Verdict.PLAIN_RAISES, Verdict.PLAIN_UNSTABLE):
            return
        self.plain[key] += 1
        self.passing[key] += is_accepted
        if judged.verdict not in cases.ACCEPTED:
            name = cases.name_of_failure(case, judged)
            self.failures[name] += 1
            self.details[name] = judged.detail

    def lines(self, suite: str, heading: str) -> Iterator[str]:
        """The table of a suite: a row for each kind, a column for each variant."""
        variants = list(dict.fromkeys(key[2] for key in self.plain if key[0] == suite))
        yield f"| {heading} | names | {' | '.join(variants)} |"
        yield "|---|" + "---|" * (len(variants) + 1)
        for suite_of_row, kind in self.titles:
            if suite_of_row != suite:
                continue
            titles = self.titles[suite, kind]
            keys = [(suite, kind, variant) for variant in variants]
            counts = [self._count_of(key) for key in keys]
            yield f"| {kind} | {sum(titles.values())} / {len(titles)} | {' | '.join(counts)} |"

    def _count_of(self, key: tuple[str, str, str]) -> str:
        return f"{self.passing[key]} / {self.plain[key]}" if self.plain[key] else ""

    @property
    def num_refused(self) -> int:
        """Runs that raise an error of ours."""
        refused = (name.endswith(Verdict.REFUSED.value) for name in self.failures.elements())
        return sum(refused)


def page(table: Table) -> str:
    """The whole page."""
    allowed = skip_policy.read_allowed(cases.OPEN_FILE)
    parts: list[Iterable[str]] = [
        [_INTRODUCTION, "## Operations\n", _OP_NOTE],
        table.lines("op_db", "dtype"),
        ["\n## Modules\n\nForward and backward, with the parameters managed too.\n"],
        table.lines("module_db", "dtype and mode"),
        ["\n## Optimizers\n\nThree steps with every set of options, a flag at a time.\n"],
        table.lines("optim_db", "dtype"),
        [f"\n## Exceptions\n\nRuns that raise an error of ours: {table.num_refused}.\n"],
        *_open_lines(table, allowed),
        [
            "\nPlain PyTorch differs from itself, from call to call, in: "
            f"{_listed(table.unstable)}.\n",
            "Nothing but errors, the same in plain PyTorch and under management, come of: "
            f"{_listed(table.raising - table.running)}.\n",
            f"Made with torch {torch.__version__.partition('+')[0]} on the CPU, one thread, by "
            "`python scripts/conformance_table.py`.",
        ],
    ]
    return "\n".join(itertools.chain.from_iterable(parts)) + "\n"


def _listed(titles: Iterable[str]) -> str:
    return ", ".join(f"`{title}`" for title in sorted(titles)) or "nothing"


def _open_lines(table: Table, allowed: dict[str, str]) -> Iterator[list[str]]:
    yield ["Listed in `tests/conformance/open.txt`:\n"]
    yield ["| runs | what | why |", "|---|---|---|"]
    for pattern, reason in allowed.items():
        count = sum(n for name, n in table.failures.items() if not _is_unlisted(name, pattern))
        yield [f"| {count} | `{pattern}` | {reason} |"]


def _is_unlisted(name: str, pattern: str) -> bool:
    return bool(skip_policy.unlisted([name], [pattern]))


def _complaints(table: Table) -> list[str]:
    allowed = skip_policy.read_allowed(cases.OPEN_FILE)
    unlisted = skip_policy.unlisted(table.failures, allowed)
    needless = [
        pattern
        for pattern in allowed
        if all(_is_unlisted(name, pattern) for name in table.failures)
    ]
    return [f"not in open.txt: {name}: {table.details[name]}" for name in unlisted] + [
        f"open.txt: nothing needs the line {pattern!r}" for pattern in needless
    ]


def main() -> int:
    """Judges everything and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    table = Table(judge_all(_all_cases(), parser.parse_args().jobs))
    PAGE.write_text(page(table), encoding="utf-8")
    complaints = _complaints(table)
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
