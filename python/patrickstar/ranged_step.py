# SPDX-License-Identifier: Apache-2.0
"""RangedStep: torch's own optimizer code over one chunk group after the other, in ranges.

An element-wise optimizer may be cut without changing a bit. Its loop over a whole tensor reads and
writes memory once for every operation; over a range that stays in cache it does so once for all of
them, and its temporaries are as small as the range.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from patrickstar import _C
from patrickstar.step_stub import Group

_logger = logging.getLogger("patrickstar")

# Exact types: a subclass may do anything.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SGD)

# Elements of a range: with gradient, state and temporaries it stays in a core's own cache, and
# torch's fixed cost of an operation is small against its work.
RANGE_ELEMENTS = 1 << 17

State = dict[str, Any]


def can_step_in_ranges(optimizer: Optimizer) -> bool:
    """Whether it is one whose code may be cut in ranges."""
    return type(optimizer) in _ELEMENTWISE


def step_in_ranges(optimizer: Optimizer) -> Iterator[Group]:
    """Updates what can be updated in ranges; gives what is left for the optimizer's own loop."""
    for group in optimizer.param_groups:
        if _is_native(group):
            _tell_once(type(optimizer))
            yield group
            continue
        _make_state(optimizer, group)
        left: list[Tensor] = []
        for _, members in itertools.groupby(group["params"], key=_C.group_of):
            left += _step_members(optimizer, group, list(members))
        if left:
            yield {**group, "params": left}


def _is_native(group: Group) -> bool:
    return any(group.get(flag) for flag in ("fused", "differentiable", "capturable"))


_told: set[type] = set()


def _tell_once(optimizer_type: type) -> None:
    if optimizer_type not in _told:
        _told.add(optimizer_type)
        _logger.info(
            "%s with fused, differentiable or capturable runs its own code on whole tensors",
            optimizer_type.__name__,
        )


def _step_members(optimizer: Optimizer, group: Group, members: list[Tensor]) -> list[Tensor]:
    """Steps parameters of one chunk group; returns those that it could not."""
    with_gradient = [p for p in members if p.grad is not None]
    able = [p for p in with_gradient if _is_able(p)]
    left = [p for p in with_gradient if not _is_able(p)]
    able, without_state = _split_by_state(optimizer, group, able)
    return left + without_state + _step_what_fits(optimizer, group, able)


def _is_able(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return (
        _C.group_of(parameter) is not None
        and gradient is not None
        and gradient.layout == torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
        and not parameter.is_complex()
        and not gradient.requires_grad
    )


def _make_state(optimizer: Optimizer, group: Group) -> None:
    """Has the optimizer check a group and make its state, in order, as its ``step()`` would."""
    init_group: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    num_lists = len(inspect.signature(init_group).parameters) - 1
    init_group(group, *([] for _ in range(num_lists)))


def _split_by_state(
    optimizer: Optimizer, group: Group, parameters: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """SGD makes its momentum out of the first gradients, whole: those steps are its own."""
    if type(optimizer) is not SGD or not group["momentum"]:
        return parameters, []
    has_state = [optimizer.state[p].get("momentum_buffer") is not None for p in parameters]
    return (
        list(itertools.compress(parameters, has_state)),
        [p for p, has in zip(parameters, has_state, strict=True) if not has],
    )


def _step_what_fits(optimizer: Optimizer, group: Group, parameters: list[Tensor]) -> list[Tensor]:
    """Steps all at once if the budget holds them, else half by half; returns what never fits."""
    if not parameters:
        return []
    if _LeasedStep(optimizer, group, parameters).run():
        return []
    if len(parameters) == 1:
        return parameters
    middle = len(parameters) // 2
    return _step_what_fits(optimizer, group, parameters[:middle]) + _step_what_fits(
        optimizer, group, parameters[middle:]
    )


class _LeasedStep:
    """One step of some parameters under one lease of all that they need."""

    def __init__(self, optimizer: Optimizer, group: Group, parameters: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._parameters = parameters
        self._state_keys = [
            [key for key, value in self._state_of(p).items() if isinstance(value, Tensor)]
            for p in parameters
        ]

    def _state_of(self, parameter: Tensor) -> State:
        """Makes no entry where there is none."""
        return self._optimizer.state.get(parameter, {})

    def run(self) -> bool:
        tensors: list[Tensor] = []
        is_written: list[bool] = []
        # With nesterov, torch's foreach form adds to the gradients themselves.
        is_gradient_written = bool(self._group.get("nesterov") and self._group["foreach"])
        for parameter, keys in zip(self._parameters, self._state_keys, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            state = self._state_of(parameter)
            tensors += [parameter, gradient, *(state[key] for key in keys)]
            is_written += [True, is_gradient_written, *(True for _ in keys)]
        name = f"the step of {type(self._optimizer).__name__}"
        if not _C.run_on_raw_memory(tensors, is_written, name, self._step_on_memory):
            return False
        torch.autograd.graph.increment_version(
            [p for p in self._parameters if not p.is_inference()]
        )
        return True

    def _step_on_memory(self, memory: list[Tensor]) -> None:
        """Runs the optimizer's code on ranges of ``memory``, which is in the order of ``run``."""
        pieces: list[Tensor] = []
        states: defaultdict[Tensor, State] = defaultdict(dict)
        rest = iter(memory)
        for parameter, keys in zip(self._parameters, self._state_keys, strict=True):
            raw, gradient = next(rest), next(rest)
            state = {**self._state_of(parameter), **{key: next(rest) for key in keys}}
            for piece, piece_state in _cut(raw, gradient, state):
                pieces.append(piece)
                states[piece] = piece_state
        # In a loop over tensors the ranges come one after the other; a foreach operation would
        # take them all before the next one does.
        at_once = 1 if self._group["foreach"] else len(pieces)
        stub: Any = type(self._optimizer).__new__(type(self._optimizer))
        stub.__dict__.update(self._optimizer.__dict__, state=states)
        step = _code_of_step(type(self._optimizer))
        for first in range(0, len(pieces), at_once):
            stub.param_groups = [{**self._group, "params": pieces[first : first + at_once]}]
            step(stub)


def _cut(parameter: Tensor, gradient: Tensor, state: State) -> Iterator[tuple[Tensor, State]]:
    """Ranges of a parameter, each with its gradient attached, and the state of each.

    The first range has the parameter's own step count; the others have copies, so that it is
    counted once.
    """
    ranged = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
    has_one_layout = all(value.stride() == parameter.stride() for value in ranged.values())
    if parameter.numel() <= RANGE_ELEMENTS or not has_one_layout:
        parameter.grad = gradient
        yield parameter, state
        return
    others = {key: value for key, value in state.items() if key not in ranged}
    rows = zip(
        _ranges_of(parameter),
        _ranges_of(gradient),
        *(_ranges_of(value) for value in ranged.values()),
        strict=True,
    )
    copies = [others] + [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in others.items()
        }
        for _ in range(RANGE_ELEMENTS, parameter.numel(), RANGE_ELEMENTS)
    ]
    for (piece, piece_gradient, *values), rest in zip(rows, copies, strict=True):
        piece.grad = piece_gradient
        yield piece, {**dict(zip(ranged, values, strict=True)), **rest}


def _ranges_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """In the order of memory."""
    return torch.split(tensor.as_strided((tensor.numel(),), (1,)), RANGE_ELEMENTS)


def _code_of_step(optimizer_type: type) -> Callable[[Any], Any]:
    """The class's ``step`` without what torch wraps around it: hooks and gradient mode."""
    return inspect.unwrap(optimizer_type.step)  # type: ignore[attr-defined, no-any-return]
