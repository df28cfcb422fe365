# SPDX-License-Identifier: Apache-2.0
"""What tests of clipping share: optimizers, budgets, and a loop that clips between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers
import torch
from torch import nn
from torch.optim import Optimizer

NORM = 1e-3  # below the norms of these models, so that clipping changes every gradient
WIDTH = 32

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": helpers.sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}

ADAM_BYTES = 4 * 4 * 4 * (WIDTH * WIDTH + WIDTH)  # parameters, gradients and moments of a Stack
BUDGETS = {percent: ADAM_BYTES * percent // 100 for percent in (100, 50, 25)}

STRESS = ("evict,poison,delay",)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clip(model: nn.Module, max_norm: float = NORM, **arguments: Any) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, **arguments)


def backward(model: nn.Module, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    loss = model(torch.randn(4, WIDTH, dtype=dtype)).pow(2).mean()
    (loss * factor).backward()


def train_clipped(
    recorder: helpers.Recorder,
    between: Callable[[nn.Module], Any],
    make: Make = helpers.adamw,
    *,
    num_steps: int = 4,
    dtype: torch.dtype = torch.float32,
    factor_of: Callable[[int], float] = lambda step: 1.0,
    spread: bool = True,
) -> None:
    """Trains; after each backward everything leaves memory and ``between`` is called.

    Args:
        recorder: Gets what ``between`` returns, versions of the gradients, and the end.
        between: Called with the model between ``backward()`` and ``step()``.
        make: Makes the optimizer.
        num_steps: Steps to take: the first one teaches the engine that norms are wanted.
        dtype: Of the model.
        factor_of: By step, what the loss is multiplied by.
        spread: Whether everything leaves memory before and after ``between``.
    """
    model = helpers.Stack(width=WIDTH).to(dtype)
    optimizer = make(model.parameters())
    for step in range(num_steps):
        backward(model, factor_of(step), dtype)
        if spread:
            helpers.evict_everything()
        recorder.note(f"{step} between", between(model))
        recorder.note(f"{step} versions", [g._version for g in gradients_of(model)])
        if spread:
            helpers.evict_everything()
        optimizer.step()
        optimizer.zero_grad()
    recorder.note("end", [model, optimizer])
