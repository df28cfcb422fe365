# SPDX-License-Identifier: Apache-2.0
"""OptimizerHooks: what happens around any optimizer's ``step()``.

Every optimizer runs its own code. Around it, its parameters are adopted if no module showed them
to us, its state is moved into chunks, and the return of ``step()`` is the step boundary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from patrickstar import _C

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from patrickstar.adoption import Adopter


class OptimizerHooks:
    """Brackets the steps of every optimizer.

    Args:
        adopter: Adopts parameters that belong to no module.
        on_boundary: Called after each step.
    """

    def __init__(self, adopter: Adopter, on_boundary: Callable[[], None]) -> None:
        self._adopter = adopter
        self._on_boundary = on_boundary
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._adopter.adopt_tensors(parameters)
        _adopt_state(optimizer)
        _C.begin_native_step(sys._getframe(1))  # of the wrapper that torch puts around step()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        _C.end_native_step()
        _adopt_state(optimizer)
        self._on_boundary()


def _adopt_state(optimizer: Optimizer) -> None:
    """Moves state that is as large as its parameter into the parameter's chunk group."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
            continue
        values: dict[str, Any] = state
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                _C.adopt_state(parameter, value)
