# SPDX-License-Identifier: Apache-2.0
"""Saving managed tensors with torch and with safetensors: a chunk in memory at a time.

``torch.save`` writes storages one after the other: each is leased while it is written. safetensors
wants all addresses at once: a dict with managed tensors is written by ``tensor_file`` instead.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C
from patrickstar.patches import Function, Patches
from patrickstar.tensor_file import write_tensors


class Saving:
    """Installs the patches and takes them away again."""

    def __init__(self) -> None:
        self._patches = Patches()

    def open(self) -> None:
        """Installs the patches."""
        replace = self._patches.replace
        serialization = torch.serialization
        replace(serialization, "_save", _leasing_records(getattr(serialization, "_save")))  # noqa: B009
        legacy = getattr(serialization, "_legacy_save")  # noqa: B009
        replace(serialization, "_legacy_save", _while_saving(legacy))
        recursive = getattr(torch.jit, "RecursiveScriptModule")  # noqa: B009 - not in its list
        for script in (torch.jit.ScriptModule, recursive):  # the first has copies of the methods
            for name in ("save", "save_to_buffer"):
                replace(script, name, _holding_module(getattr(script, name)))
        try:
            import safetensors.torch as safetensors
        except ImportError:
            return
        self._patches.on_managed(safetensors, "_is_complete", _fills_its_storage)
        for name, wrap in (
            ("_flatten_as_ptr", _postponing),
            ("serialize_file", _streaming_to_file),
            ("serialize", _streaming_to_bytes),
        ):
            replace(safetensors, name, wrap(getattr(safetensors, name)))

    def close(self) -> None:
        """Takes the patches away."""
        self._patches.close()


class _Thread(threading.local):
    is_saving = False


_thread = _Thread()


def is_saving() -> bool:
    """Whether this thread is inside ``torch.save``, which asks storages for their identity only."""
    return _thread.is_saving


def _while_saving(original: Function) -> Function:
    def save(*args: Any, **kwargs: Any) -> Any:
        before, _thread.is_saving = _thread.is_saving, True
        try:
            return original(*args, **kwargs)
        finally:
            _thread.is_saving = before

    return save


class _LeasingWriter:
    """A zip writer of torch that leases the storages it writes."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write_record(self, name: str, data: object, num_bytes: int) -> None:
        if not _C.is_managed(data):  # type: ignore[arg-type]
            self._writer.write_record(name, data, num_bytes)
            return
        with _C.Hold([data], is_written=False, what="torch.save"):
            self._writer.write_record(name, data, num_bytes)


def _leasing_records(original: Function) -> Function:
    saving = _while_saving(original)

    def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> None:
        saving(obj, _LeasingWriter(zip_file), *args, **kwargs)

    return save


def _holding_module(original: Function) -> Function:
    """TorchScript's writer takes all of a module at once."""

    def save(self: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*self.parameters(), *self.buffers()) if _C.is_managed(x)]
        if not tensors:
            return original(self, *args, **kwargs)
        with _C.Hold(tensors, is_written=False, what="torch.jit.save"):
            return original(self, *args, **kwargs)

    return save


class _Postponed(dict[str, torch.Tensor]):
    """What safetensors was asked to write, to be written tensor by tensor."""


def _fills_its_storage(original: Function) -> Function:
    def is_complete(tensor: torch.Tensor) -> bool:
        num_bytes = tensor.numel() * tensor.element_size()
        return tensor.storage_offset() == 0 and num_bytes == tensor.untyped_storage().nbytes()

    return is_complete


def _postponing(original: Function) -> Function:
    import safetensors.torch as safetensors

    evaluate = getattr(safetensors, "_evaluate_tensors_for_save")  # noqa: B009

    def flatten(tensors: Mapping[str, Any], *args: Any) -> Any:
        if not isinstance(tensors, dict) or not any(map(_C.is_managed, tensors.values())):
            return original(tensors, *args)
        evaluate(tensors)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                return original({name: tensor}, *args)  # raises the library's own error
        return _Postponed(tensors)

    return flatten


def _streaming_to_file(original: Function) -> Function:
    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        if not isinstance(tensors, _Postponed):
            original(tensors, filename, metadata=metadata)
            return
        with open(filename, "wb") as file:
            write_tensors(file, tensors, metadata)

    return serialize_file


def _streaming_to_bytes(original: Function) -> Function:
    def serialize(tensors: Any, metadata: Any = None) -> bytes:
        if not isinstance(tensors, _Postponed):
            return original(tensors, metadata=metadata)  # type: ignore[no-any-return]
        file = io.BytesIO()
        write_tensors(file, tensors, metadata)
        return file.getvalue()

    return serialize
