# SPDX-License-Identifier: Apache-2.0
"""Readers and writers of a tensor's memory that never meet the dispatcher.

Each is patched: on a managed tensor it finds the bytes in memory, and they stay there for as long
as somebody may use the address it gave out: an array for its life, ``data_ptr()`` until the next
step. What gives the memory itself to other processes makes the tensor ordinary first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy as deepcopy_of
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

from patrickstar import _C
from patrickstar.addresses import Addresses
from patrickstar.errors import OutOfMemory, Unsupported
from patrickstar.patches import Function, Patches
from patrickstar.report.units import format_bytes
from patrickstar.saving import is_saving

# Functions of safetensors, transformers, peft and accelerate that compare the storages of a whole
# model: they get a number that no other storage has, and nothing needs to be kept.
_IDENTITY_READERS = ("storage_ptr", "id_tensor_storage")
_IDENTITY_PACKAGES = ("safetensors", "transformers", "peft", "accelerate")

_STORAGE_CALLS = ("__setitem__", "fill_", "_write_file", "_set_from_file", "byteswap")
_SHARING_CALLS = {  # what is said when one cannot be done
    "share_memory_": "call share_memory_() of",
    "_share_fd_cpu_": "send to another process",
    "_share_filename_cpu_": "send to another process",
}
_ELEMENT_CALLS = ("apply_", "map_", "map2_")


class RawAccess:
    """Installs the patches and takes them away again."""

    def __init__(
        self, adopt_copy: Callable[[torch.Tensor, torch.Tensor], None], spill_dir: Path | None
    ) -> None:
        self.addresses = Addresses(spill_dir)
        self._adopt_copy = adopt_copy
        self._patches = Patches()

    def open(self) -> None:
        """Installs the patches."""
        on_managed = self._patches.on_managed
        on_managed(torch.Tensor, "numpy", _numpy)
        on_managed(torch.Tensor, "__dlpack__", _on_held_alias)
        for module in (torch, dlpack):
            on_managed(module, "to_dlpack", _on_held_alias)
        for name in ("data_ptr", "const_data_ptr"):
            on_managed(torch.Tensor, name, self._address)
        on_managed(torch.UntypedStorage, "data_ptr", self._storage_address)
        on_managed(torch.UntypedStorage, "is_shared", _answering(False))
        for name, what in _SHARING_CALLS.items():
            on_managed(torch.UntypedStorage, name, _on_ordinary(what))
        on_managed(torch.UntypedStorage, "resize_", _resizing)
        on_managed(torch._C, "_is_cow_tensor", _answering(False))
        is_alias_of = getattr(torch._C, "_is_alias_of")  # noqa: B009 - not in its stub
        self._patches.replace(torch._C, "_is_alias_of", _comparing_storages(is_alias_of))
        for name in _STORAGE_CALLS:
            on_managed(torch.UntypedStorage, name, _holding_arguments)
        on_managed(torch.UntypedStorage, "__getitem__", _get_item)
        self._patches.replace(
            torch.UntypedStorage, "copy_", _holding_arguments(torch.UntypedStorage.copy_)
        )
        for name in _ELEMENT_CALLS:
            method = getattr(torch.Tensor, name)
            self._patches.replace(torch.Tensor, name, _holding_arguments(method))
        on_managed(torch.Tensor, "tolist", _on_copy)
        on_managed(torch.Tensor, "new", _new)
        on_managed(torch.Tensor, "new_tensor", _on_empty)
        on_managed(torch.Tensor, "_lazy_clone", _cloning)
        on_managed(torch.UntypedStorage, "_get_filename", _answering(None))
        on_managed(torch.UntypedStorage, "new", _on_empty_storage)
        self._patches.replace(torch.Tensor, "set_", _setting(torch.Tensor.set_))
        for tensor_type in (torch.Tensor, nn.Parameter):
            on_managed(tensor_type, "__deepcopy__", self._deepcopy_of(tensor_type))

    def close(self) -> None:
        """Takes the patches away."""
        self._patches.close()

    def _address(self, original: Function) -> Function:
        def data_ptr(self_: torch.Tensor) -> Any:
            self.addresses.keep(self_.untyped_storage(), _call(original, self_))
            return original(self_)

        return data_ptr

    def _storage_address(self, original: Function) -> Function:
        def data_ptr(self_: torch.UntypedStorage) -> Any:
            if is_saving() or _is_about_identity(sys._getframe(1)):
                return self_._cdata  # they compare storages
            if self.addresses.has_copy_of(self_):
                return self.addresses.of_copy(self_)
            try:
                self.addresses.keep(self_, _call(original, self_))
            except OutOfMemory:
                return self.addresses.of_copy(self_)
            return original(self_)

        return data_ptr

    def _deepcopy_of(self, owner: type) -> Callable[[Function], Function]:
        def handler_of(original: Function) -> Function:
            def deepcopy(self_: torch.Tensor, memo: dict[int, Any]) -> Any:
                if not self_.is_leaf or type(self_) is not owner:
                    return original(self_, memo)
                return memo[id(self_)] if id(self_) in memo else self._copy(self_, memo)

            return deepcopy

        return handler_of

    def _copy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        """As torch does it: a parameter is cloned, a tensor gets a window of a copied storage."""
        if isinstance(tensor, nn.Parameter):
            parameter = nn.Parameter(
                tensor.detach().clone(memory_format=torch.preserve_format), tensor.requires_grad
            )
            memo[id(tensor)] = parameter
            self._adopt_copy(tensor, parameter)
            return parameter
        storage = tensor.untyped_storage()
        key = ("copy of a managed storage", storage._cdata)
        if key not in memo:
            memo[key] = _C.flat_view(storage, tensor.dtype).clone()
            self._adopt_copy(tensor, memo[key])
        window = _windowed(memo[key], int(tensor.storage_offset()), tensor.shape, tensor.stride())
        copy: torch.Tensor = torch.empty(0, dtype=tensor.dtype).set_(window)  # type: ignore[call-overload]
        copy.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
        copy.__dict__ = deepcopy_of(tensor.__dict__, memo)
        if tensor.grad is not None:
            copy.grad = deepcopy_of(tensor.grad, memo)
        return copy


def _is_about_identity(caller: FrameType) -> bool:
    package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
    return caller.f_code.co_name in _IDENTITY_READERS and package in _IDENTITY_PACKAGES


def _call(function: Function, obj: object) -> str:
    return f"{function.__name__}() of {_C.name_of(obj)!r}"  # type: ignore[arg-type]


def _numpy(original: Function) -> Function:
    """The array keeps a tensor alive as its base; that one gets the lease."""

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        source = self.detach().resolve_conj().resolve_neg() if force else self
        if not _C.is_managed(source):
            return original(source)
        hold = _C.Hold([source], is_written=True, what=_call(original, self))
        array = original(source)
        array.base._patrickstar_hold = hold
        return array

    return numpy


def _on_held_alias(original: Function) -> Function:
    """What is returned keeps the tensor alive that was asked: one with a lease of its own."""

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        alias = torch.ops.aten.alias(self)
        hold = _C.Hold([alias], is_written=True, what=_call(original, self))
        alias._patrickstar_hold = hold
        return original(alias, *args, **kwargs)

    return read


def _answering(value: object) -> Callable[[Function], Function]:
    """For what is the same of every managed tensor."""

    def handler_of(original: Function) -> Function:
        return lambda self: value

    return handler_of


def _on_ordinary(what: str) -> Callable[[Function], Function]:
    """Makes the storage an ordinary one first: its memory is about to be given away."""

    def handler_of(original: Function) -> Function:
        def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            _C.unmanage_storage(self, what)
            return original(self, *args, **kwargs)

        return share

    return handler_of


def _resizing(original: Function) -> Function:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if int(size) == self.nbytes():
            return self
        raise Unsupported(
            f"cannot give the storage of managed tensor {_C.name_of(self)!r} "
            f"{format_bytes(int(size))}: only an operator may resize it; use tensor.resize_(), or "
            "resize a tensor.detach().clone()"
        )

    return resize_


def _comparing_storages(original: Function) -> Function:
    """torch compares addresses. No other storage shares the memory of a managed one."""

    def is_alias_of(first: torch.Tensor, second: torch.Tensor) -> bool:
        if _C.is_managed(first) or _C.is_managed(second):
            return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)
        return bool(original(first, second))

    return is_alias_of


def _get_item(original: Function) -> Function:
    held = _holding_arguments(original)

    def get_item(self: torch.UntypedStorage, index: Any) -> Any:
        if isinstance(index, slice):
            raise Unsupported(
                f"cannot slice the storage of managed tensor {_C.name_of(self)!r}: the slice would "
                "share memory that moves; slice the tensor, or a clone of it"
            )
        return held(self, index)

    return get_item


def _holding_arguments(original: Function) -> Function:
    """For calls that read or write the memory of any of their arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        managed = [x for x in (*args, *kwargs.values()) if _C.is_managed(x)]
        if not managed:
            return original(*args, **kwargs)
        with _C.Hold(managed, is_written=True, what=_call(original, managed[0])):
            return original(*args, **kwargs)

    return call


def _on_copy(original: Function) -> Function:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self.detach().clone(), *args, **kwargs)

    return read


def _on_empty(original: Function) -> Function:
    """Asks a plain tensor of the same type: for methods that need no data of their own."""

    def make(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(torch.empty(0, dtype=self.dtype), *args, **kwargs)

    return make


def _new(original: Function) -> Function:
    make = _on_empty(original)

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return torch.ops.aten.alias(args[0].detach())
        return make(self, *args, **kwargs)

    return new


def _on_empty_storage(original: Function) -> Function:
    def make(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return original(torch.empty(0).untyped_storage(), *args, **kwargs)

    return make


def _cloning(original: Function) -> Function:
    """A clone that shares memory until it is written cannot share memory that moves."""

    def clone(self: torch.Tensor) -> torch.Tensor:
        return self.clone()

    return clone


def _setting(original: Function) -> Function:
    """Over the storage of a managed tensor, ``set_`` makes a managed tensor."""

    def set_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            return original(self, args[0])  # type: ignore[no-any-return]
        source: Any = args[0] if args else kwargs.get("source")
        if isinstance(source, torch.storage.TypedStorage):
            source = source._untyped_storage
        is_window = isinstance(source, torch.Tensor) and len(args) + len(kwargs) > 1
        if is_window:
            source = source.untyped_storage()
        if isinstance(source, torch.UntypedStorage) and _C.is_managed(source):
            view = _windowed(_C.flat_view(source, self.dtype), *args[1:], **kwargs)
            return original(self, view)  # type: ignore[no-any-return]
        return original(self, *args, **kwargs)  # type: ignore[no-any-return]

    return set_


def _windowed(
    flat: torch.Tensor,
    storage_offset: int = 0,
    size: Any = None,
    stride: Any = None,
    source: Any = None,
) -> torch.Tensor:
    if size is None:
        return flat[storage_offset:]
    if stride is None:
        stride = torch.empty(size, device="meta").stride()
    return flat.as_strided(size, stride, storage_offset)
