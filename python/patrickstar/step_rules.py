# SPDX-License-Identifier: Apache-2.0
"""StepRules: which calls of ``step()`` step, and what is done to the gradients before.

Note [Idle steps]: A call that must not step still runs the optimizer's code, on a stub without
parameters, so a closure runs and its value is returned. To the loop it is as if it had not been
called: hooks on the optimizer do not run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import LBFGS, Optimizer

from patrickstar.accumulation import Accumulation
from patrickstar.errors import Unsupported
from patrickstar.loss_scale import LossScale
from patrickstar.step_stub import Group, stub_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Hooks = dict[int, Any]


class Outcome(enum.Enum):
    """What a call of ``step()`` did."""

    TAKEN = enum.auto()
    ACCUMULATED = enum.auto()  # nothing: it is one of the first k-1
    SKIPPED = enum.auto()  # nothing: gradients overflowed


class StepRules:
    """Decides over each call of an optimizer's ``step()``.

    Args:
        accumulation: None when every call steps.
        clipping: The norm to clip gradients to before a step; None for no clipping.
        loss_scale: None when there is none.
    """

    def __init__(
        self,
        accumulation: Accumulation | None,
        clipping: float | None,
        loss_scale: LossScale | None,
    ) -> None:
        self._accumulation = accumulation
        self._clipping = clipping
        self._loss_scale = loss_scale
        self._idle: WeakKeyDictionary[Optimizer, _IdleStep] = WeakKeyDictionary()

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Outcome, Arguments]:
        """What the call that begins will do, and the arguments it must run with.

        Raises:
            Unsupported: An optimizer that evaluates its closure many times a step.
            Error: Gradients never stop to overflow.
        """
        self._refuse_many_evaluations(optimizer)
        left = self._idle.pop(optimizer, None)
        if left is not None:  # it was interrupted
            left.end()
        if self._accumulation is not None and not self._accumulation.is_last(optimizer):
            return self._make_idle(optimizer, Outcome.ACCUMULATED, args, kwargs)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._loss_scale is not None:
            args, kwargs = _with_closure(args, kwargs, _evaluated)
        if self._clipping is not None:
            args, kwargs = self._clip(parameters, args, kwargs)
        if self._loss_scale is not None and not self._loss_scale.take_step(parameters):
            return self._make_idle(optimizer, Outcome.SKIPPED, args, kwargs)
        return Outcome.TAKEN, (args, kwargs)

    def after_step(self, optimizer: Optimizer) -> Outcome:
        """What the call that ends has done."""
        if self._accumulation is not None:
            self._accumulation.count(optimizer)
        idle = self._idle.pop(optimizer, None)
        if idle is None:
            return Outcome.TAKEN
        idle.end()
        return idle.outcome

    def _refuse_many_evaluations(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, LBFGS):
            return
        for setting, does in (
            (self._accumulation, "gradient_accumulation_steps"),
            (self._loss_scale, 'mixed_precision="fp16"'),
        ):
            if setting is not None:
                raise Unsupported(
                    f"cannot step {type(optimizer).__name__} with {does}: it calls its closure "
                    "many times a step; leave the setting out and do the same inside the closure"
                )

    def _make_idle(
        self,
        optimizer: Optimizer,
        outcome: Outcome,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Outcome, Arguments]:
        idle = self._idle[optimizer] = _IdleStep(optimizer, outcome)
        stub = stub_of(optimizer, lambda: _without_parameters(optimizer))
        args, kwargs = _with_closure(args, kwargs, idle.ending_on_error)
        return outcome, ((stub, *args[1:]), kwargs)

    def _clip(
        self, parameters: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Now, or after each evaluation of a closure, which makes the gradients."""
        assert self._clipping is not None
        max_norm = self._clipping

        def clipping(closure: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                loss = closure()
                torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                return loss

            return call

        if _closure_of(args, kwargs) is not None and self._loss_scale is None:
            return _with_closure(args, kwargs, clipping)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return args, kwargs


class _IdleStep:
    """A call that does nothing, with the hooks that must not run in it."""

    def __init__(self, optimizer: Optimizer, outcome: Outcome) -> None:
        self.outcome = outcome
        self._hooks: list[tuple[_Hooks, _Hooks]] = []
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            self._hooks.append((hooks, dict(hooks)))
            hooks.clear()

    def end(self) -> None:
        """Gives the optimizer its hooks back, before those that came meanwhile."""
        for hooks, hidden in self._hooks:
            added = dict(hooks)
            hooks.clear()
            hooks.update({**hidden, **added})
        self._hooks.clear()

    def ending_on_error(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            try:
                return closure()
            except BaseException:
                self.end()
                raise

        return call


def _without_parameters(optimizer: Optimizer) -> list[Group]:
    return [{**group, "params": []} for group in optimizer.param_groups]


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _with_closure(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> Arguments:
    """The arguments with a changed closure, where there is one."""
    closure = _closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    if len(args) > 1:
        return (args[0], change(closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": change(closure)}


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Calls the closure now, since its gradients decide whether there is a step."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss
