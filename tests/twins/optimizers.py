# SPDX-License-Identifier: Apache-2.0
"""The optimizers of the twin runs: torch's in their forms, and one written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch


class HandWritten:
    """Momentum over ``p.data``, as scripts older than ``torch.optim`` conventions write it.

    No subclass of torch's Optimizer: nothing announces its ``step``.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float = 0.3) -> None:
        self.parameters = parameters
        self.lr = lr
        self.state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is None:
                continue
            momentum = self.state.setdefault(p, {}).setdefault("momentum", torch.zeros_like(p.data))
            momentum.mul_(0.9).add_(p.grad.data)
            p.data.add_(momentum, alpha=-self.lr)

    def zero_grad(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.grad.data.zero_()


OPTIMIZERS: Mapping[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw-loop": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "hand-written": HandWritten,
}
