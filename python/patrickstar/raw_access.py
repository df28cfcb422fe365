# SPDX-License-Identifier: Apache-2.0
"""The patches of torch, all of them: readers that never meet the dispatcher.

Each tests the managed bit first and costs that one test otherwise; ``close()`` restores torch.
On a managed tensor they raise our error unless the tensor is held by ``patrickstar.resident``,
because an address they gave out would dangle after the next eviction. ``tolist`` gives the right
answer; so does ``deepcopy``, and its result is managed too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.errors import Unsupported

_READERS = (
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "const_data_ptr",
    "is_shared",
    "__reduce_ex__",
)
# Of an evicted storage torch would end the process in this one; the others raise by themselves.
_STORAGE_READERS = ("is_shared",)
# These give the memory itself to others, and it is not ours to give.
_GIVERS = ("share_memory_",)
_STORAGE_GIVERS = ("_share_fd_cpu_", "_share_filename_cpu_")


class RawAccess:
    """Installs the patches and takes them away again."""

    def __init__(self, adopt_copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._adopt_copy = adopt_copy
        self._originals: list[tuple[type, str, Any]] = []

    def open(self) -> None:
        self._refuse(torch.Tensor, _READERS, _C.is_held)
        self._refuse(torch.UntypedStorage, _STORAGE_READERS, _C.is_held)
        self._refuse(torch.Tensor, _GIVERS, _never)
        self._refuse(torch.UntypedStorage, _STORAGE_GIVERS, _never)
        self._patch(torch.Tensor, "tolist", _cloning(torch.Tensor.tolist))
        self._patch(torch.Tensor, "new_tensor", _on_plain(torch.Tensor.new_tensor))
        for owner in (torch.Tensor, nn.Parameter):
            copying = _copying(owner, owner.__deepcopy__, self._adopt_copy)
            self._patch(owner, "__deepcopy__", copying)

    def close(self) -> None:
        for owner, name, original in self._originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()

    def _refuse(self, owner: type, names: Iterable[str], is_allowed: Callable[[Any], bool]) -> None:
        for name in names:
            self._patch(owner, name, _refusing(name, getattr(owner, name), is_allowed))

    def _patch(self, owner: type, name: str, replacement: Callable[..., Any]) -> None:
        original = owner.__dict__.get(name)  # None: inherited from the C type
        self._originals.append((owner, name, original))
        setattr(owner, name, replacement)


def _never(tensor_or_storage: object) -> bool:
    return False


def _refusing(
    name: str, original: Callable[..., Any], is_allowed: Callable[[Any], bool]
) -> Callable[..., Any]:
    """Refuses on what is managed, unless it `is_allowed`."""

    @functools.wraps(original)
    def read(self: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if _C.is_managed(self) and not is_allowed(self):
            remedy = "use tensor.detach().clone() for a copy"
            if is_allowed is not _never:
                remedy += ", or `with patrickstar.resident(tensor):` around the access"
            raise Unsupported(
                f"cannot call {name} on managed tensor {_C.name_of(self)!r}: its memory moves; "
                + remedy
            )
        return original(self, *args, **kwargs)

    return read


def _on_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Asks a plain tensor of the same type: for methods that need no data of their own."""

    @functools.wraps(original)
    def make(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = torch.empty(0, dtype=self.dtype) if _C.is_managed(self) else self
        return original(plain, *args, **kwargs)

    return make


def _cloning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self.detach().clone() if _C.is_managed(self) else self, *args, **kwargs)

    return read


def _copying(
    owner: type,
    original: Callable[..., Any],
    adopt_copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not _C.is_managed(self) or not self.is_leaf or type(self) is not owner:
            return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        copy = self.detach().clone(memory_format=torch.preserve_format)
        if owner is nn.Parameter:
            copy = nn.Parameter(copy, self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        adopt_copy(self, copy)
        return copy

    return deepcopy
