# SPDX-License-Identifier: Apache-2.0
"""The suite goes red when the guard forgets its leases, and when management is not there."""

from __future__ import annotations

from collections.abc import Iterator

import ops
import pytest
import torch
from copies import Copier
from patrickstar import _C
from runs import Run, Verdict, judge


@pytest.fixture
def no_read_leases() -> Iterator[None]:
    _C.skip_read_leases(True)
    yield
    _C.skip_read_leases(False)


def _runs(name: str) -> list[Run]:
    [op] = [op for op in ops.ops_with(torch.float32) if ops.title(op) == name]
    return ops.runs_of(op, torch.float32)[:2]


def test_a_read_without_a_lease_is_different(no_read_leases: None) -> None:
    assert {judged.verdict for judged in judge(_runs("exp"))} == {Verdict.DIFFERENT}


def test_a_call_that_meets_nothing_managed_takes_no_lease() -> None:
    def prepare(copier: Copier) -> torch.Tensor:
        return copier.copy(torch.ones(3))

    run = Run("forward", prepare, lambda tensor: tensor.shape)
    assert [judged.verdict for judged in judge([run])] == [Verdict.NO_LEASE]


def test_a_write_that_is_lost_is_different() -> None:
    def prepare(copier: Copier) -> tuple[torch.Tensor, bool]:
        copy = copier.copy(torch.ones(3))
        return copy, _C.is_running()

    def call(prepared: tuple[torch.Tensor, bool]) -> None:
        tensor, is_managed = prepared
        tensor.add_(0 if is_managed else 1)

    run = Run("in-place", prepare, call, is_writing=True)
    assert [judged.verdict for judged in judge([run])] == [Verdict.DIFFERENT]
