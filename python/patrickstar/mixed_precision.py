# SPDX-License-Identifier: Apache-2.0
"""ForwardAutocast: ``torch.autocast`` around every outermost module call.

Note [Outermost]: A call is outermost when it runs inside no other module call of its thread, inside
no ``torch.autocast`` of the user's own (whose wish counts, also when it is off), and not because
backward recomputes a checkpoint: there, torch has restored what was on. But a checkpoint that was
made outside of all modules, ``checkpoint(block, x)``, recomputes a call that was outermost itself;
so a module that was outermost before, recomputed where autocast is off, is outermost again.

A patch of ``nn.Module.__call__`` and no hook: hooks of the user's own must run inside,
``compile()`` of a module would carry ours into its graph, and a global hook makes every call
slower.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch import nn

from patrickstar.patches import Function, Patches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Inside(threading.local):
    """Whether this thread is inside a module call."""

    value: bool = False


class ForwardAutocast:
    """Runs outermost module calls in a 16-bit type where torch's autocast rules say so.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._patches = Patches()
        self._were_outermost: weakref.WeakValueDictionary[int, nn.Module] = (
            weakref.WeakValueDictionary()
        )

    def open(self) -> None:
        self._patches.replace(nn.Module, "__call__", self._wrapped(nn.Module.__call__))

    def close(self) -> None:
        self._patches.close()

    def _wrapped(self, original: Function) -> Function:
        inside = _Inside()
        dtype = self._dtype
        is_outermost = self._is_outermost

        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if inside.value:
                return original(self, *args, **kwargs)
            if torch.compiler.is_compiling():  # of a function that calls a module
                is_entered = not (torch.compiler.is_exporting() or torch.is_autocast_enabled("cpu"))
            else:
                is_entered = is_outermost(self)
            inside.value = True
            try:
                if not is_entered:
                    return original(self, *args, **kwargs)
                with torch.autocast("cpu", dtype):
                    return original(self, *args, **kwargs)
            finally:
                inside.value = False

        return call

    def _is_outermost(self, module: nn.Module) -> bool:
        if torch._C._get_tracing_state() is not None:
            return False
        if torch._C._current_graph_task_id() != -1:
            was_outermost = self._were_outermost.get(id(module)) is module
            return was_outermost and not torch.is_autocast_enabled("cpu")
        is_alone = torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        if is_alone:
            self._were_outermost[id(module)] = module
        return is_alone
