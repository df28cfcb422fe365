# SPDX-License-Identifier: Apache-2.0
"""BackwardPatch: what ``backward()`` starts with, its seeds, multiplied and divided.

Note [Seeds]: What a loop would write as ``scaler.scale(loss / k).backward()`` multiplies the seed
of backward (the gradient it starts with, 1 for a loss) by the scale and divides it by k. So the
seed is where both enter: all paths of a graph start there, also those that cross no module's
output.

A backward inside another one that is given its seeds goes on with that one (a checkpoint, a
function of the user's own): they carry the factors already. One without is a loss of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from patrickstar.loss_scale import LossScale
from patrickstar.patches import Function, Patches

_NO_TASK = -1  # the number of the backward that is running, when none is


class _Entered(threading.local):
    """The backward, or none, inside which this thread has entered the patch last."""

    task: int | None = None


class BackwardPatch:
    """Patches ``torch.autograd.backward``, which every ``Tensor.backward()`` calls.

    Args:
        divisor: What seeds are divided by.
        loss_scale: What they are multiplied by before; None for nothing.
    """

    def __init__(self, divisor: int, loss_scale: LossScale | None) -> None:
        self._divisor = divisor
        self._loss_scale = loss_scale
        self._patches = Patches()
        self._entered = _Entered()

    def open(self) -> None:
        self._patches.replace(torch.autograd, "backward", self._seeding(torch.autograd.backward))
        if self._loss_scale is not None:
            grad = _left_alone(self._loss_scale, torch.autograd.grad)
            self._patches.replace(torch.autograd, "grad", grad)

    def close(self) -> None:
        self._patches.close()

    def _seeding(self, original: Function) -> Function:
        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            task = torch._C._current_graph_task_id()
            rest = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
            name = "grad_tensors" if grad_variables is None else "grad_variables"
            given = grad_tensors if grad_variables is None else grad_variables
            if task == self._entered.task:  # a torch function mode calls what it was given
                original(tensors, **{name: given}, **rest)
                return
            # What is an iterator can be read once only.
            tensors = tensors if _is_one(tensors) else tuple(tensors)
            given = given if given is None or _is_one(given) else tuple(given)
            outputs = (tensors,) if _is_one(tensors) else tensors
            seeds = (given,) if given is None or _is_one(given) else given
            is_continued = task != _NO_TASK and any(seed is not None for seed in seeds)
            with self._entering(task, outputs, is_continued=is_continued) as scale:
                if not is_continued:
                    given = self._changed(outputs, seeds, scale)
                original(tensors, **{name: given}, **rest)

        return backward

    @contextlib.contextmanager
    def _entering(
        self, task: int, outputs: Sequence[Any], *, is_continued: bool
    ) -> Iterator[float]:
        outer, self._entered.task = self._entered.task, task
        try:
            if self._loss_scale is None:
                yield 1.0
            else:
                with self._loss_scale.backward(outputs, is_continued=is_continued) as scale:
                    yield scale
        finally:
            self._entered.task = outer

    def _changed(self, outputs: Sequence[Any], seeds: Sequence[Any], scale: float) -> Any:
        """The seeds with both factors. What torch will refuse stays as it is."""
        if len(seeds) != len(outputs):
            if seeds != (None,):
                return seeds
            seeds = (None,) * len(outputs)
        changed = []
        for output, given in zip(outputs, seeds, strict=True):
            seed = _implied_seed(output) if given is None else given
            if seed is not None and scale != 1.0:
                seed = seed * scale
            if seed is not None and self._divisor != 1:
                seed = seed / self._divisor
            changed.append(seed)
        return tuple(changed)


def _is_one(tensors: Any) -> bool:
    return isinstance(tensors, (torch.Tensor, torch.autograd.graph.GradientEdge))


def _implied_seed(output: Any) -> torch.Tensor | None:
    """What torch starts with when nothing is given; None where it refuses to, or starts nothing."""
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        return None
    if output.numel() != 1 or not output.is_floating_point():
        return None
    return torch.ones_like(output, memory_format=torch.preserve_format)


def _left_alone(loss_scale: LossScale, original: Function) -> Function:
    """Gradients that are returned, also inside of a scaled backward, are not unscaled."""

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        with loss_scale.set_aside():
            return original(*args, **kwargs)

    return grad
