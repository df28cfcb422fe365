# SPDX-License-Identifier: Apache-2.0
"""What torch's fused forms refuse: refused where the user asked for one, else stepped as usual."""

from __future__ import annotations

from functools import partial

import helpers
import pytest
import step_runs
from torch.optim import SGD, Adagrad


@pytest.mark.parametrize("optimizer", [SGD, Adagrad])
def test_the_setting_leaves_sparse_and_complex_gradients_to_the_usual_form(optimizer):
    """Both are in the group."""
    options = step_runs.options_of(optimizer, "plain", "default")
    build = partial(step_runs.Parts, optimizer)

    def loop(recorder: helpers.Recorder) -> None:
        step_runs.loop_of(optimizer, options, build)(recorder)
        assert not any("raised" in name for name in recorder.records)

    step_runs.check(loop, tight="400KiB", optimizer="fused")
