# SPDX-License-Identifier: Apache-2.0
"""Every operation of PyTorch's ``op_db`` has the plain bytes, evicted after every op."""

from __future__ import annotations

import cases
import pytest


@pytest.mark.parametrize("case", cases.sampled(cases.op_cases(), one_in=12))
def test_operation_has_the_plain_bytes(case: cases.Case, request: pytest.FixtureRequest) -> None:
    is_whole = request.config.getoption("--all")
    judged = case.judge(is_whole=is_whole)
    assert judged
    assert not cases.unexplained(case, judged)
