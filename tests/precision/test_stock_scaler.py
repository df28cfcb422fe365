# SPDX-License-Identifier: Apache-2.0
"""Autocast and GradScaler of the user's own, without any setting: the bits of plain PyTorch."""

from __future__ import annotations

import helpers
import pytest
import torch
from precisions import DTYPES, ByHand, batches, train_step

FORMS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("precision", list(DTYPES))
def test_a_loop_by_hand(precision, kind, form):
    def loop(recorder: helpers.Recorder) -> None:
        by = ByHand(precision)
        model = helpers.Stack()
        optimizer = kind(model.parameters(), lr=0.01, **FORMS[form])
        for step, batch in enumerate(batches(4)):
            loss = by.call(model, batch).float().pow(2).mean()
            if step == 2 and precision == "fp16":
                loss = loss * float("inf")
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    helpers.twin(loop)


@pytest.mark.parametrize("form", list(FORMS))
def test_unscaling_left_to_the_step(form):
    def loop(recorder: helpers.Recorder) -> None:
        by = ByHand("fp16")
        model = helpers.Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **FORMS[form])
        for step, batch in enumerate(batches(4)):
            loss = by.call(model, batch).float().pow(2).mean()
            by.backward(loss * float("inf") if step == 1 else loss)
            by.step(optimizer)
            optimizer.zero_grad()
            recorder.note(f"{step} scale", by.update())
            recorder.note(f"{step}", [model, optimizer])

    helpers.twin(loop)
