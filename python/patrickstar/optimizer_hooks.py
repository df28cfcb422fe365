# SPDX-License-Identifier: Apache-2.0
"""OptimizerHooks: what happens around any optimizer's ``step()``.

Around it, an optimizer's parameters are adopted if no module showed them to us, its state is moved
into chunks, and the return of ``step()`` is the step boundary. Inside, torch's element-wise
optimizers step in ranges; every other one runs its own code as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from patrickstar import _C
from patrickstar.ranged_step import can_step_in_ranges, step_in_ranges
from patrickstar.step_rules import Arguments, Outcome, StepRules
from patrickstar.step_stub import stub_of

if TYPE_CHECKING:
    from collections import OrderedDict

    from torch.utils.hooks import RemovableHandle

    from patrickstar.adoption import Adopter


class OptimizerHooks:
    """Brackets the steps of every optimizer.

    Args:
        adopter: Adopts parameters that belong to no module.
        on_boundary: Called after each step, with whether it was skipped.
        rules: Decide whether a call of ``step()`` steps; None when every call does.
        form: "auto", "native" or "fused", see the setting ``optimizer``.
    """

    def __init__(
        self,
        adopter: Adopter,
        on_boundary: Callable[[bool], None],
        rules: StepRules | None,
        *,
        form: str,
    ) -> None:
        self._adopter = adopter
        self._on_boundary = on_boundary
        self._rules = rules
        self._form = form
        self._handles: list[RemovableHandle] = []
        self._replacing: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def open(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        for handle in [*self._handles, *self._replacing.values()]:
            handle.remove()
        self._handles = []
        self._replacing.clear()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if torch.compiler.is_compiling():
            return None
        arguments = None
        if self._rules is not None:
            outcome, arguments = self._rules.before_step(optimizer, args, kwargs)
            if outcome is not Outcome.TAKEN:
                return arguments
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._adopter.adopt_tensors(parameters)
        self._adopter.end_building()
        _adopt_state(optimizer)
        _C.begin_native_step(sys._getframe(1))  # of the wrapper that torch puts around step()
        if self._form != "native" and can_step_in_ranges(optimizer):
            self._replace_step(optimizer)
        return arguments

    def _replace_step(self, optimizer: Optimizer) -> None:
        """Has ``step()`` called on a stub, by a hook that comes after the user's own."""
        handle = self._replacing.get(optimizer)
        if handle is None:
            handle = optimizer.register_step_pre_hook(self._step_on_a_stub)
            self._replacing[optimizer] = handle
        hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(handle.id)

    def _step_on_a_stub(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        is_another_called = not args or args[0] is not optimizer  # an earlier hook's wish
        if torch.compiler.is_compiling() or is_another_called:
            return None
        is_fused = self._form == "fused"
        stub = stub_of(optimizer, lambda: step_in_ranges(optimizer, is_fused=is_fused))
        return (stub, *args[1:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        outcome = Outcome.TAKEN if self._rules is None else self._rules.after_step(optimizer)
        if outcome is Outcome.TAKEN:
            _C.end_native_step()
            _adopt_state(optimizer)
        if outcome is not Outcome.ACCUMULATED:
            self._on_boundary(outcome is Outcome.SKIPPED)


def _adopt_state(optimizer: Optimizer) -> None:
    """Moves state that is as large as its parameter into the parameter's chunk group."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
            continue
        values: dict[str, Any] = state
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                _C.adopt_state(parameter, value)
