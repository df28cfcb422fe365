# SPDX-License-Identifier: Apache-2.0
"""Every module of PyTorch's ``module_db`` trains and evaluates with the plain bytes."""

from __future__ import annotations

import cases
import pytest


@pytest.mark.parametrize("case", cases.sampled(cases.module_cases(), one_in=6))
def test_module_has_the_plain_bytes(case: cases.Case, request: pytest.FixtureRequest) -> None:
    is_whole = request.config.getoption("--all")
    judged = case.judge(is_whole=is_whole)
    assert judged
    assert not cases.unexplained(case, judged)
