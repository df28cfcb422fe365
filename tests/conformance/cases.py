# SPDX-License-Identifier: Apache-2.0
"""Cases: everything of PyTorch's test data, by name, and what of it is known to be open."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import modules
import ops
import optimizer_samples as optimizers
import pytest
import skip_policy
from runs import Judged, Run, Verdict, judge

OPEN_FILE = Path(__file__).parent / "open.txt"
ACCEPTED = (Verdict.SAME, Verdict.PLAIN_RAISES, Verdict.PLAIN_UNSTABLE)
_MOST_RUNS_IN_SAMPLE = 40


@dataclass(frozen=True)
class Case:
    """One operation, module or optimizer in one configuration.

    Attributes:
        suite: The list it is from.
        title: Its name there.
        kind: The dtype, and what else is chosen.
        runs: Makes its runs.
    """

    suite: str
    title: str
    kind: str
    runs: Callable[[], list[Run]]

    @property
    def name(self) -> str:
        return f"{self.suite}/{self.title}/{self.kind}"

    def judge(self, *, is_whole: bool = True) -> list[Judged]:
        """Judges every run, or an even choice of at most a few of them."""
        runs = self.runs()
        return judge(runs if is_whole else runs[:: -(-len(runs) // _MOST_RUNS_IN_SAMPLE) or 1])


def op_cases() -> list[Case]:
    return [
        Case("op_db", ops.title(op), _name_of(dtype), partial(ops.runs_of, op, dtype))
        for dtype in ops.DTYPES
        for op in ops.ops_with(dtype)
    ]


def module_cases() -> list[Case]:
    return [
        Case(
            "module_db",
            modules.title(module),
            f"{_name_of(dtype)}, {mode}",
            partial(modules.runs_of, module, dtype, mode),
        )
        for dtype in modules.DTYPES
        for mode in modules.MODES
        for module in modules.modules()
    ]


def optimizer_cases() -> list[Case]:
    return [
        Case("optim_db", optimizers.title(one), "float32", partial(optimizers.runs_of, one))
        for one in optimizers.optimizers()
    ]


def sampled(cases: Sequence[Case], one_in: int) -> list[object]:
    """Test parameters: all cases, with those outside the sample marked ``full``."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=() if zlib.crc32(case.name.encode()) % one_in == 0 else pytest.mark.full,
        )
        for case in cases
    ]


def unexplained(case: Case, judged: Sequence[Judged]) -> list[str]:
    """The failures that open.txt does not list, each with what was got and expected."""
    failures = {
        f"{name_of_failure(case, one)}": one.detail for one in judged if one.verdict not in ACCEPTED
    }
    names = skip_policy.unlisted(failures, skip_policy.read_allowed(OPEN_FILE))
    return [f"{name}: {failures[name]}" for name in names]


def name_of_failure(case: Case, judged: Judged) -> str:
    """As open.txt has it."""
    return f"{case.name}: {judged.variant}: {judged.verdict.value}"


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
