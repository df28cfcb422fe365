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
from copy import deepcopy as deepcopy_of
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

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
# Of an evicted storage torch would end the process in is_shared; writes would be lost at eviction.
_STORAGE_READERS = ("is_shared", "data_ptr", "fill_", "copy_", "__setitem__")
# These give the memory itself to others, and it is not ours to give.
_GIVERS = ("share_memory_",)
_STORAGE_GIVERS = ("_share_fd_cpu_", "_share_filename_cpu_")


class RawAccess:
    """Installs the patches and takes them away again."""

    def __init__(self, adopt_copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._adopt_copy = adopt_copy
        self._originals: list[tuple[type | ModuleType, str, Any]] = []

    def open(self) -> None:
        self._refuse(torch.Tensor, _READERS, _C.is_held)
        self._refuse(torch.UntypedStorage, _STORAGE_READERS, _C.is_held)
        self._refuse(torch.Tensor, _GIVERS, _never)
        self._refuse(torch.UntypedStorage, _STORAGE_GIVERS, _never)
        self._patch(torch.Tensor, "tolist", _cloning(torch.Tensor.tolist))
        self._patch(torch.Tensor, "new_tensor", _on_plain(torch.Tensor.new_tensor))
        self._patch(torch.Tensor, "set_", _not_sharing(torch.Tensor.set_))
        to_dlpack = getattr(dlpack, "to_dlpack")  # noqa: B009 - torch does not list it
        for module in (torch, dlpack):
            self._patch(module, "to_dlpack", _refusing("to_dlpack", to_dlpack, _C.is_held))
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

    def _patch(self, owner: type | ModuleType, name: str, replacement: Callable[..., Any]) -> None:
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


def _not_sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to build a tensor over the storage of a managed one: it would not be managed."""

    @functools.wraps(original)
    def set_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("source")
        is_whole_tensor = isinstance(source, torch.Tensor) and len(args) + len(kwargs) == 1
        if isinstance(source, torch.storage.TypedStorage):
            source = source._untyped_storage
        if (
            isinstance(source, (torch.Tensor, torch.UntypedStorage))
            and not is_whole_tensor
            and _C.is_managed(source)
            and not _C.is_held(source)
        ):
            raise Unsupported(
                f"cannot call set_ with the storage of managed tensor {_C.name_of(source)!r}: its "
                "memory moves; use copy_(), or a view of the tensor"
            )
        return original(self, *args, **kwargs)

    return set_


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
        if owner is torch.Tensor:  # as torch does, for parameters it does not
            copy.__dict__ = deepcopy_of(self.__dict__, memo)
            if self.grad is not None:
                copy.grad = deepcopy_of(self.grad, memo)
        return copy

    return deepcopy
