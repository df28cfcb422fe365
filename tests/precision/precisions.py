# SPDX-License-Identifier: Apache-2.0
"""One loop, twice: mixed precision written by hand, and left to the setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import helpers
import torch
from patrickstar.session import current

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 65536.0


class ByHand:
    """What a user of plain PyTorch writes."""

    def __init__(self, precision: str) -> None:
        self.dtype = DTYPES[precision]
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", self.dtype):
            return function(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.scaler.scale(loss).backward(**kwargs)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)

    def update(self) -> float:
        """Ends an iteration; returns the scale."""
        self.scaler.update()
        return self.scaler.get_scale()


class BySetting:
    """The plain loop."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> float:
        session = current()
        assert session is not None
        return 1.0 if session.loss_scale is None else session.loss_scale.scale


Precision = ByHand | BySetting
Loop = Callable[[helpers.Recorder, Precision], None]


def twin(loop: Loop, precision: str, **options: Any) -> None:
    """Compares the loop under the setting with the one written by hand."""
    helpers.twin(
        lambda recorder: loop(recorder, BySetting()),
        by_hand=lambda recorder: loop(recorder, ByHand(precision)),
        mixed_precision=precision,
        **options,
    )


def train_step(
    recorder: helpers.Recorder,
    name: str,
    loss: torch.Tensor,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
) -> None:
    """The usual step: backward, unscale, note, step, update, zero."""
    precision.backward(loss)
    precision.unscale(optimizer)
    recorder.step(name, loss, model, optimizer)
    precision.step(optimizer)
    optimizer.zero_grad()
    recorder.note(f"{name} scale", precision.update())


def batches(num: int, width: int = 32) -> Iterable[torch.Tensor]:
    return (torch.randn(4, width) for _ in range(num))
