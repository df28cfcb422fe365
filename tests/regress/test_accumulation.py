# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation ends at step() or zero_grad(), never at a count."""

from __future__ import annotations

import helpers
import pytest
import torch


def accumulate(
    recorder: helpers.Recorder, num_backwards: tuple[int, ...], max_norm: float | None = None
) -> None:
    """A global step for each entry, with that many backward passes."""
    model = helpers.Stack(4)
    optimizer = helpers.adamw(model)
    for step, num in enumerate(num_backwards):
        for micro_batch in range(num):
            loss = model(torch.randn(4, 32)).pow(2).mean() / num
            loss.backward()
            recorder.step(f"step {step}.{micro_batch}", loss, model)
            norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            recorder.note(f"step {step}.{micro_batch} norm", norm)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm
            recorder.step(f"step {step} clipped to {max_norm} from", norm, model)
        optimizer.step()
        recorder.note(f"step {step}", optimizer)
        optimizer.zero_grad()
    recorder.note("end", model)


def test_four_backwards_then_clipping_then_a_step():
    helpers.twin(lambda recorder: accumulate(recorder, (4,), max_norm=1e-3))


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_every_micro_batch_adds_on_the_first_step_and_later_ones(max_norm):
    helpers.twin(lambda recorder: accumulate(recorder, (4, 4, 4), max_norm))


def test_the_number_of_backwards_varies_from_step_to_step():
    helpers.twin(lambda recorder: accumulate(recorder, (1, 3, 2)))


def test_accumulation_across_zero_grad_that_keeps_the_buffers():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.sgd(model)
        for step in range(3):
            for micro_batch in range(2):
                model(torch.randn(4, 32)).pow(2).mean().backward()
                recorder.note(f"step {step}.{micro_batch}", model)
            if step == 1:
                optimizer.zero_grad()  # what was accumulated is given up without a step
                continue
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            recorder.note(f"step {step} zeroed", model)
        recorder.note("end", model)

    helpers.twin(loop)
