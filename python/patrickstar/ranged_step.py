# SPDX-License-Identifier: Apache-2.0
"""RangedStep: torch's own optimizer code over one chunk group after the other, in ranges.

An element-wise optimizer may be cut without changing a bit. Its loop over a whole tensor reads and
writes memory once for every operation; over a range that stays in cache it does so once for all of
them, and its temporaries are as small as the range.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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
from patrickstar.fused_step import has_kernel, step_with_kernel
from patrickstar.step_stub import Group, State, copy_of

# Identity of a storage without access to its bytes.
_storage_of: Callable[[Tensor], int] = getattr(torch._C, "_storage_address")  # noqa: B009 - no stub

_logger = logging.getLogger("patrickstar")

# Exact types: a subclass may do anything.
_ELEMENTWISE = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SGD)

_FUSABLE = (Adagrad, Adam, AdamW, SGD)

# Elements of a range: with gradient, state and temporaries it stays in a core's own cache, and
# torch's fixed cost of an operation is small against its work.
RANGE_ELEMENTS = 1 << 17


def can_step_in_ranges(optimizer: Optimizer) -> bool:
    """Whether it is one whose code may be cut in ranges: torch's own, not what replaced it."""
    kind = type(optimizer)
    return kind in _ELEMENTWISE and _code_of_step(kind).__module__.startswith("torch.optim.")


def step_in_ranges(optimizer: Optimizer, *, is_fused: bool = False) -> Iterator[Group]:
    """Updates what can be updated in ranges; gives what is left for the optimizer's own loop.

    Args:
        optimizer: One that ``can_step_in_ranges``.
        is_fused: Run those that torch has a fused form of in that form, whatever they ask for.
    """
    is_fused = is_fused and type(optimizer) in _FUSABLE
    for own_group in optimizer.param_groups:
        is_fusable = not any(map(_is_never_fused, own_group["params"]))
        group = own_group
        if is_fused and is_fusable:
            group = {**own_group, "fused": True, "foreach": False}
        if _is_native(own_group):
            _tell_once(type(optimizer).__name__)
            yield own_group
            continue
        _make_state(optimizer, group)
        is_refused = group.get("fused") and not is_fusable
        if (
            is_refused
            or _is_decay_refused(group)
            or _is_entangled(group)
            or _is_partly_begun(optimizer, group)
        ):
            yield group
            continue
        left: list[Tensor] = []
        for _, members in itertools.groupby(group["params"], key=_C.group_of):
            left += _step_members(optimizer, group, list(members))
        if left:
            yield {**group, "params": left}


def _is_native(group: Group) -> bool:
    return any(group.get(flag) for flag in ("differentiable", "capturable"))


def _is_never_fused(parameter: Tensor) -> bool:
    """Whether torch's fused forms refuse it, with all of its group and before any update."""
    gradient = parameter.grad
    return gradient is not None and (gradient.layout != torch.strided or parameter.is_complex())


def _is_decay_refused(group: Group) -> bool:
    """Whether a foreach form is to decay sparse gradients: it raises, with nothing changed yet."""
    return bool(group["foreach"] and group["weight_decay"]) and any(
        p.grad is not None and p.grad.layout != torch.strided for p in group["params"]
    )


def _is_entangled(group: Group) -> bool:
    """Whether tensors of a group share memory in a way that shows who was stepped first."""
    parameters = [p for p in group["params"] if p.grad is not None]
    if len({id(p) for p in parameters}) < len(parameters):
        return True
    if not group["foreach"]:
        return False
    # An operation of a foreach form is over for all before the next one begins for any.
    storages = [_storage_of(p) for p in parameters]
    gradients = {_storage_of(p.grad) for p in parameters if p.grad.layout == torch.strided}
    num_gradients = len(parameters) if group.get("nesterov") else len(gradients)
    return len({*storages, *gradients}) < len(storages) + num_gradients


def _is_partly_begun(optimizer: Optimizer, group: Group) -> bool:
    """Whether SGD's foreach form takes the parameters one by one, whose bits differ in bfloat16.

    It does where some have momentum and some are about to get it.
    """
    if type(optimizer) is not SGD or not group["momentum"] or not group["foreach"]:
        return False
    parameters = [p for p in group["params"] if p.grad is not None]
    begun = {optimizer.state[p].get("momentum_buffer") is not None for p in parameters}
    return len(begun) > 1


@functools.cache
def _tell_once(name: str) -> None:
    _logger.info("%s with differentiable or capturable runs its own code on whole tensors", name)


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
        and not gradient.is_neg()
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
    """Steps all at once if the budget holds them, else as a stream; returns what could not be."""
    for kind_of_step in (_LeasedStep, _StreamedStep):
        step = kind_of_step(optimizer, group, parameters)
        if parameters and step.run():
            torch.autograd.graph.increment_version(step.written())
            return []
    return parameters


class _Step:
    """One step of parameters of one chunk group."""

    def __init__(self, optimizer: Optimizer, group: Group, parameters: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._parameters = parameters
        # With nesterov, torch's foreach form adds to the gradients themselves; a fused one unscales
        # them.
        is_foreach_nesterov = group["foreach"] and group.get("nesterov")
        is_unscaling = group.get("fused") and getattr(optimizer, "grad_scale", None) is not None
        self._is_gradient_written = bool(is_foreach_nesterov or is_unscaling)
        # A fused form makes one pass over memory as it is.
        self._range_elements = sys.maxsize if group.get("fused") else RANGE_ELEMENTS

    def written(self) -> list[Tensor]:
        """What the step writes, less inference tensors, which have no version."""
        tensors: list[Tensor] = []
        for parameter in self._parameters:
            tensors += [parameter, *self._state_of(parameter).values()]
            if self._is_gradient_written and parameter.grad is not None:
                tensors.append(parameter.grad)
        return [t for t in tensors if isinstance(t, Tensor) and not t.is_inference()]

    def _state_of(self, parameter: Tensor) -> State:
        """Makes no entry where there is none."""
        state: State = self._optimizer.state.get(parameter, {})
        return state

    def _run_code(self, pieces: Iterable[tuple[Tensor, State]]) -> None:
        """Runs the optimizer's code on parameters, or ranges of them, with gradients attached."""
        states: defaultdict[Tensor, State] = defaultdict(dict, pieces)
        if self._group.get("fused") and all(
            has_kernel(self._optimizer, piece, state) for piece, state in states.items()
        ):
            for piece, state in states.items():
                step_with_kernel(self._optimizer, self._group, piece, state)
            return
        tensors = list(states)
        # In a loop over tensors the ranges come one after the other; a foreach operation would
        # take them all before the next one does.
        at_once = 1 if self._group["foreach"] else len(tensors)
        stub = copy_of(self._optimizer, state=states)
        step = _code_of_step(type(self._optimizer))
        for first in range(0, len(tensors), at_once):
            stub.param_groups = [{**self._group, "params": tensors[first : first + at_once]}]
            step(stub)


class _LeasedStep(_Step):
    """Under one lease of all that the parameters need."""

    def __init__(self, optimizer: Optimizer, group: Group, parameters: list[Tensor]) -> None:
        super().__init__(optimizer, group, parameters)
        self._state_keys = [
            [key for key, value in self._state_of(p).items() if isinstance(value, Tensor)]
            for p in parameters
        ]

    def run(self) -> bool:
        """False, and nothing has happened, when the budget cannot hold it."""
        tensors: list[Tensor] = []
        is_written: list[bool] = []
        for parameter, keys in zip(self._parameters, self._state_keys, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            state = self._state_of(parameter)
            tensors += [parameter, gradient, *(state[key] for key in keys)]
            is_written += [True, self._is_gradient_written, *(True for _ in keys)]
        name = f"the step of {type(self._optimizer).__name__}"
        return _C.run_on_raw_memory(tensors, is_written, name, self._step_on_memory)

    def _step_on_memory(self, memory: list[Tensor]) -> None:
        """``memory`` is in the order of ``run``."""
        pieces: list[tuple[Tensor, State]] = []
        rest = iter(memory)
        for parameter, keys in zip(self._parameters, self._state_keys, strict=True):
            raw, gradient = next(rest), next(rest)
            state = {**self._state_of(parameter), **{key: next(rest) for key in keys}}
            pieces += _cut(raw, gradient, state, self._range_elements)
        self._run_code(pieces)


class _StreamedStep(_Step):
    """Through windows, when memory cannot hold it: all parameters are updated, or none."""

    def __init__(self, optimizer: Optimizer, group: Group, parameters: list[Tensor]) -> None:
        super().__init__(optimizer, group, parameters)
        split = [_split_state(p, self._state_of(p)) for p in parameters]
        self._ranged = [ranged for ranged, _ in split]
        self._others = [others for _, others in split]
        self._counted: dict[int, State] = {}  # the other state after the step, by parameter

    def run(self) -> bool:
        """False, and nothing has happened, when that cannot be done either."""
        if not all(map(_has_one_layout, self._parameters, self._ranged)):
            return False
        if len({tuple(ranged) for ranged in self._ranged}) != 1:
            return False
        rows: list[list[Tensor]] = []
        for parameter, ranged in zip(self._parameters, self._ranged, strict=True):
            assert parameter.grad is not None
            rows.append([parameter, parameter.grad, *ranged.values()])
        is_written = [True, self._is_gradient_written, *(True for _ in self._ranged[0])]
        if not _C.stream_raw_memory(rows, is_written, self._step_on_window):
            return False
        for others, counted in ((self._others[row], new) for row, new in self._counted.items()):
            for key, value in others.items():
                if isinstance(value, Tensor):
                    value.copy_(counted[key])
        return True

    def _step_on_window(self, window: list[tuple[int, list[Tensor]]]) -> None:
        pieces: list[tuple[Tensor, State]] = []
        for row, (parameter, gradient, *values) in window:
            self._counted[row] = _copied(self._others[row])
            state = {**dict(zip(self._ranged[row], values, strict=True)), **self._counted[row]}
            pieces += _cut(parameter, gradient, state, self._range_elements)
        self._run_code(pieces)


def _split_state(parameter: Tensor, state: State) -> tuple[State, State]:
    """What has an element for each of the parameter's, and the rest: step counts and the like."""
    ranged = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    }
    return ranged, {key: value for key, value in state.items() if key not in ranged}


def _has_one_layout(parameter: Tensor, ranged: State) -> bool:
    return all(value.stride() == parameter.stride() for value in ranged.values())


def _copied(state: State) -> State:
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def _cut(
    parameter: Tensor, gradient: Tensor, state: State, range_elements: int
) -> Iterator[tuple[Tensor, State]]:
    """Ranges of a parameter, each with its gradient attached, and the state of each.

    The first range has the parameter's own step count; the others have copies, so that it is
    counted once.
    """
    ranged, others = _split_state(parameter, state)
    if parameter.numel() <= range_elements or not _has_one_layout(parameter, ranged):
        parameter.grad = gradient
        yield parameter, state
        return
    rows = zip(
        *(_ranges_of(value, range_elements) for value in (parameter, gradient, *ranged.values())),
        strict=True,
    )
    num_copies = (parameter.numel() - 1) // range_elements
    copies = [others, *(_copied(others) for _ in range(num_copies))]
    for (piece, piece_gradient, *values), rest in zip(rows, copies, strict=True):
        piece.grad = piece_gradient
        yield piece, {**dict(zip(ranged, values, strict=True)), **rest}


def _ranges_of(tensor: Tensor, range_elements: int) -> tuple[Tensor, ...]:
    """In the order of memory."""
    return torch.split(tensor.as_strided((tensor.numel(),), (1,)), range_elements)


def _code_of_step(optimizer_type: type) -> Callable[[Any], Any]:
    """The class's ``step`` without what torch wraps around it: hooks and gradient mode."""
    return inspect.unwrap(optimizer_type.step)  # type: ignore[attr-defined, no-any-return]
