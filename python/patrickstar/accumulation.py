# SPDX-License-Identifier: Apache-2.0
"""Accumulation: of every k calls of an optimizer's ``step()``, the last one steps.

An optimizer is midway after a call that did not step. Until the last call, its gradients add up:
``zero_grad()`` of it, and of modules as far as they share its parameters, does nothing.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from patrickstar.patches import Function, Patches


class Accumulation:
    """Counts the calls of each optimizer.

    Args:
        num_calls: The k above.
    """

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._patched: set[type] = set()
        self._patches = Patches()

    def open(self) -> None:
        self._patches.replace(nn.Module, "zero_grad", self._zeroing_others(nn.Module.zero_grad))

    def close(self) -> None:
        self._patches.close()
        self._patched.clear()

    def is_last(self, optimizer: Optimizer) -> bool:
        """Whether the call of ``step()`` that begins is one that steps."""
        self._patch_zero_grad(type(optimizer))
        return (self._counts.get(optimizer, 0) + 1) % self._num_calls == 0

    def count(self, optimizer: Optimizer) -> None:
        """Notes that a call has ended. A closure inside of it belongs to the calls before."""
        self._counts[optimizer] = (self._counts.get(optimizer, 0) + 1) % self._num_calls

    def _is_midway(self, optimizer: Optimizer) -> bool:
        return self._counts.get(optimizer, 0) != 0

    def _patch_zero_grad(self, optimizer_type: type) -> None:
        """In the class that has the method: its first calls come before any call of ``step()``."""
        owner = next(base for base in optimizer_type.__mro__ if "zero_grad" in base.__dict__)
        if owner not in self._patched:
            self._patched.add(owner)
            self._patches.replace(
                owner, "zero_grad", self._unless_midway(owner.__dict__["zero_grad"])
            )

    def _unless_midway(self, original: Function) -> Function:
        @functools.wraps(original)
        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return None if self._is_midway(optimizer) else original(optimizer, *args, **kwargs)

        return zero_grad

    def _zeroing_others(self, original: Function) -> Function:
        @functools.wraps(original)
        def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            kept = {id(p) for p in self._midway_parameters()}
            if not kept:
                original(module, *args, **kwargs)
                return
            others = [p for p in module.parameters() if id(p) not in kept]
            # All that torch's method asks of a module.
            original(types.SimpleNamespace(parameters=lambda: others), *args, **kwargs)

        return zero_grad

    def _midway_parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self._counts
            if self._is_midway(optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
