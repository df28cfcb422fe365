# SPDX-License-Identifier: Apache-2.0
"""Every optimizer of PyTorch's ``optim_db``, with every flag, gives the plain bytes."""

from __future__ import annotations

import cases
import pytest


@pytest.mark.parametrize("case", cases.sampled(cases.optimizer_cases(), one_in=1))
def test_optimizer_has_the_plain_bytes(case: cases.Case, request: pytest.FixtureRequest) -> None:
    is_whole = request.config.getoption("--all")
    judged = case.judge(is_whole=is_whole)
    assert judged
    assert not cases.unexplained(case, judged)
