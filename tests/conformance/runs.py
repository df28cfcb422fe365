# SPDX-License-Identifier: Apache-2.0
"""Runs: one call of PyTorch's test data in plain PyTorch and once more under management."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import patrickstar
import torch
from copies import Copier
from facts import facts_of
from helpers import managed
from patrickstar import _C
from torch.utils._pytree import tree_leaves

SEED = 20
BUDGET = "256MiB"
_NUM_REPEATS = 100  # of a plain run that differs from ours

# common_utils, which all of torch's test data needs, forbids setting backend flags; others here do.
torch.backends.__allow_nonbracketed_mutation_flag = True


@dataclass(frozen=True)
class Run:
    """One call.

    Attributes:
        variant: The kind of call, a column of the table.
        prepare: Copies the inputs; its result is passed to `call`.
        call: What must take leases; its result is compared, and so is every input after it.
        are_bytes_defined: False where the result is memory that nobody has written.
        is_writing: Whether an input is written; else a result of views needs no lease.
    """

    variant: str
    prepare: Callable[[Copier], Any]
    call: Callable[[Any], Any]
    are_bytes_defined: bool = True
    is_writing: bool = False


class Verdict(enum.Enum):
    SAME = "same"
    PLAIN_RAISES = "plain PyTorch raises"  # and so do we, the same error
    PLAIN_UNSTABLE = "plain PyTorch differs from itself"  # so there are no bits to have
    REFUSED = "refused"  # by an error of ours
    DIFFERENT = "different"
    NO_LEASE = "no lease"  # same, but nothing shows that management was there


@dataclass(frozen=True)
class Judged:
    """What became of a run; `detail` says what was got and what was expected."""

    variant: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class _Attempt:
    facts: list[Any]
    error: Exception | None
    is_lease_missing: bool


def judge(runs: Sequence[Run]) -> list[Judged]:
    """Makes all runs in plain PyTorch, then under management, evicting after every operation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of deprecated use
        expected = [_attempt(run, Copier(is_managed=False)) for run in runs]
        with managed(BUDGET, stress="evict,poison"):
            got = [_attempt(run, Copier(is_managed=True)) for run in runs]
        return [_judge_one(*one) for one in zip(runs, expected, got, strict=True)]


def _judge_one(run: Run, expected: _Attempt, got: _Attempt) -> Judged:
    verdict, detail = _compare(expected, got)
    if verdict is Verdict.DIFFERENT and _is_unstable(run, expected):
        verdict, detail = Verdict.PLAIN_UNSTABLE, ""
    return Judged(run.variant, verdict, detail)


def _is_unstable(run: Run, expected: _Attempt) -> bool:
    """Whether plain PyTorch, asked more times while memory fills, gives something else."""
    ballast = []
    for size in range(_NUM_REPEATS):
        again = _attempt(run, Copier(is_managed=False))
        if _compare(expected, again)[0] is Verdict.DIFFERENT:
            return True
        ballast.append(torch.empty(7 * size + 1))
    return False


def backward(result: Any) -> None:
    """Runs backward from every differentiable tensor of a result, with gradients that differ."""
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [_gradient_for(output.detach()) for output in outputs])


def _gradient_for(output: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(output) if output.layout is torch.strided else output


def _attempt(run: Run, copier: Copier) -> _Attempt:
    torch.manual_seed(SEED)
    try:
        prepared = run.prepare(copier)
        copier.evict()
        before = copier.num_leases()
        result = run.call(prepared)
        num_leases = copier.num_leases() - before
        is_lease_needed = copier.num_adopted > 0 and (run.is_writing or not _are_views(result))
        copier.evict()
        facts = facts_of(result, are_bytes_defined=run.are_bytes_defined)
        facts += facts_of([(t, t.grad if t.is_leaf else None) for t in copier.tensors])
    except Exception as error:
        return _Attempt([], error, False)
    return _Attempt(facts, None, is_lease_needed and num_leases == 0)


def _are_views(result: Any) -> bool:
    """Whether a result is views of managed tensors alone, which are made without their bytes."""
    leaves = tree_leaves(result)
    return all(isinstance(leaf, torch.Tensor) and _C.is_managed(leaf) for leaf in leaves)


def _compare(expected: _Attempt, got: _Attempt) -> tuple[Verdict, str]:
    if isinstance(got.error, patrickstar.Error):
        return Verdict.REFUSED, f"{type(got.error).__name__}: {got.error}"
    if _summary(got.error) != _summary(expected.error):
        return Verdict.DIFFERENT, f"got {_summary(got.error)}, expected {_summary(expected.error)}"
    if expected.error is not None:
        return Verdict.PLAIN_RAISES, _summary(expected.error)
    if len(got.facts) != len(expected.facts):
        return Verdict.DIFFERENT, f"got {len(got.facts)} values, expected {len(expected.facts)}"
    for index, (a, b) in enumerate(zip(got.facts, expected.facts, strict=True)):
        if a != b:
            return Verdict.DIFFERENT, f"value {index}: got {a}, expected {b}"
    return (Verdict.NO_LEASE, "") if got.is_lease_missing else (Verdict.SAME, "")


def _summary(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
