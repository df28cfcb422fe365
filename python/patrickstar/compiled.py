# SPDX-License-Identifier: Apache-2.0
"""CompiledGraphs: held leases around the graphs that ``torch.compile`` makes with inductor.

A compiled graph reads and writes its inputs by address, where no guard sees it. So all managed
ones are brought to memory together when it is called, and stay until it returns; this is also what
limits the size of one graph. The one patch that this takes, of ``CompiledFxGraph.__call__``, covers
forward and backward of every inductor mode. Backends that run torch's own operations ("eager",
"aot_eager") need nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from patrickstar import _C
from patrickstar.errors import OutOfMemory, Unsupported
from patrickstar.patches import Patches

_MODULE = "torch._inductor.output_code"
_CLASS = "CompiledFxGraph"
_WRITTEN_INPUTS = "mutated_input_idxs"  # attribute of a graph: indexes of its inputs

_Call = Callable[[Any, Sequence[Any]], Any]


class CompiledGraphs:
    """Installs the patch, at once or as soon as inductor is imported, and takes it away again."""

    def __init__(self) -> None:
        self._finder = _AfterImport(self._patch)
        self._patches = Patches()

    def open(self) -> None:
        """Raises: Unsupported when this torch has no such class."""
        module = sys.modules.get(_MODULE)
        if module is not None:
            self._patch(module)
        else:
            sys.meta_path.insert(0, self._finder)  # inductor takes long to import

    def close(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._patches.close()

    def _patch(self, module: ModuleType) -> None:
        graph_class = getattr(module, _CLASS, None)
        attributes = getattr(graph_class, "__annotations__", {})
        if graph_class is None or _WRITTEN_INPUTS not in attributes:
            raise Unsupported(
                f"cannot make torch.compile safe for managed tensors: torch {torch.__version__} "
                f"has no {_MODULE}.{_CLASS} with {_WRITTEN_INPUTS}; expected that of 2.13; use "
                'torch.compile(..., backend="aot_eager"), or leave torch.compile out'
            )
        self._patches.replace(graph_class, "__call__", _holding(graph_class.__call__))


class _AfterImport(MetaPathFinder):
    """Calls `then` with inductor's module when somebody has imported it."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _holding(original: _Call) -> _Call:
    @functools.wraps(original)
    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        try:
            hold = _C.hold_inputs(inputs, graph.mutated_input_idxs, "a compiled graph")
        except OutOfMemory as error:
            raise OutOfMemory(
                f"{error}; or compile smaller parts, such as each block of the model by itself"
            ) from None
        if hold is None:
            return original(graph, inputs)
        with hold:
            return original(graph, inputs)

    return call
