# SPDX-License-Identifier: Apache-2.0
"""The patches of torch, all of them: readers that never meet the dispatcher.

Each tests the managed bit first and costs that one test otherwise; ``close()`` restores torch.
On a managed tensor they raise our error unless the tensor is held by ``patrickstar.resident``,
because an address they gave out would dangle after the next eviction. ``deepcopy`` and
``tolist`` give the right answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from patrickstar import _C
from patrickstar.errors import Unsupported

_READERS = (
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "is_shared",
    "share_memory_",
    "__reduce_ex__",
    "new_tensor",
)


class RawAccess:
    """Installs the patches and takes them away again."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}

    def open(self) -> None:
        for name in _READERS:
            self._patch(name, _refusing(name, getattr(torch.Tensor, name)))
        self._patch("__deepcopy__", _copying(torch.Tensor.__deepcopy__))
        self._patch("tolist", _cloning(torch.Tensor.tolist))

    def close(self) -> None:
        for name, original in self._originals.items():
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)
        self._originals.clear()

    def _patch(self, name: str, replacement: Callable[..., Any]) -> None:
        self._originals[name] = torch.Tensor.__dict__.get(name)  # None: inherited from the C type
        setattr(torch.Tensor, name, replacement)


def _refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.is_managed(self) and not _C.is_held(self):
            raise Unsupported(
                f"cannot call {name} on managed tensor {_C.name_of(self)!r}: its memory moves; "
                "use tensor.detach().clone() for a copy, or "
                "`with patrickstar.resident(tensor):` around the access"
            )
        return original(self, *args, **kwargs)

    return read


def _cloning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self.detach().clone() if _C.is_managed(self) else self, *args, **kwargs)

    return read


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not _C.is_managed(self) or not self.is_leaf or type(self) is not torch.Tensor:
            return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    return deepcopy
