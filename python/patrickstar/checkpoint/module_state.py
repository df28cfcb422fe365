# SPDX-License-Identifier: Apache-2.0
"""The state of a module in a checkpoint, by name, written and read a tensor at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from patrickstar.checkpoint.tree import (
    Damaged,
    add_tensor,
    check,
    check_tensor,
    checked_text,
    of_type,
    pack,
    unpack,
)
from patrickstar.errors import InvalidArgument
from patrickstar.tensor_file import TensorFile

Reader = Callable[[str], torch.Tensor]


def named_parameters(module: nn.Module, prefix: str = "") -> dict[int, str]:
    """The names of a module's parameters by their ids."""
    plain = _plain_names(module)
    return {id(p): prefix + plain(name) for name, p in module.named_parameters()}


def pack_module(module: nn.Module, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Turns a module's state into JSON.

    Args:
        module: Wrappers (DDP, ``torch.compile``) leave no trace in the names.
        prefix: Before the names of its tensors.
        tensors: Receives the tensors. Tied ones are stored once: later names refer to the first.
    """
    tree: dict[str, Any] = {}
    known: dict[tuple[Any, ...], str] = {}
    plain = _plain_names(module)
    for actual, value in module.state_dict().items():
        name = checked_text(plain(actual), "the model")
        if not isinstance(value, torch.Tensor):
            tree[name] = {"extra": pack(value, prefix + name, tensors)}
            continue
        place = _place_of(value)
        stored = None if place is None else known.get(place)
        if stored is None:
            stored = add_tensor(value, prefix + name, tensors)
            if place is not None:
                known[place] = stored
        tree[name] = {"tensor": stored}
    return tree


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What only tensors of the same elements in the same order share."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return None  # the writer refuses it by name
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def check_module(module: nn.Module, tree: Any, name: str, file: TensorFile, folder: Path) -> None:
    """Checks that a saved state can be loaded, before anything is changed.

    Raises:
        InvalidArgument: It is another module's.
        Damaged: It is no state.
    """
    check_module_tree(tree, name, file)
    state = module.state_dict()
    plain = _plain_names(module)
    values = {plain(actual): value for actual, value in state.items()}
    missing = [key for key in values if key not in tree]
    unexpected = [key for key in tree if key not in values]
    if missing or unexpected:
        raise InvalidArgument(
            f"cannot load the {name} from {folder}: it lacks {listed(missing)} and has "
            f"{listed(unexpected)} too many; build the same model"
        )
    for key, entry in tree.items():
        value = values[key]
        if "tensor" in entry and isinstance(value, torch.Tensor) and not is_lazy(value):
            file.check_shape(entry["tensor"], key, value.shape)


def check_module_tree(tree: Any, name: str, file: TensorFile) -> None:
    """Raises: Damaged when a tree is not what ``pack_module`` returned."""
    for key, entry in of_type(tree, dict, name).items():
        of_type(entry, dict, f"{name}.{key}")
        if "tensor" in entry:
            check_tensor(entry["tensor"], f"{name}.{key}", file)
        elif "extra" in entry:
            check(entry["extra"], f"{name}.{key}", file)
        else:
            raise Damaged(f"{name}.{key}", "has neither a tensor nor an extra state")


def unpack_module(tree: dict[str, Any], read: Reader) -> dict[str, Any]:
    """The state dict of a module, all of it in memory."""
    return dict(_SavedState(tree, read))


def load_module(module: nn.Module, tree: dict[str, Any], name: str, read: Reader) -> None:
    """As ``load_state_dict`` does it, by each module's own method, a tensor at a time.

    A module with a ``load_state_dict`` of its own gets the state as a whole.

    Raises:
        InvalidArgument: A module refuses what was saved for it.
        CorruptData: A tensor is not the one that was written.
    """
    plain = _plain_names(module)
    saved = _SavedState({actual: tree[plain(actual)] for actual in module.state_dict()}, read)
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        module.load_state_dict(dict(saved))
        return
    errors: list[str] = []
    modules = list(module.named_modules(remove_duplicate=False))
    for path, part in modules:
        prefix = f"{path}." if path else ""
        metadata = {"version": part._version}
        part._load_from_state_dict(saved, prefix, metadata, False, [], [], errors)
    if errors:
        raise InvalidArgument(f"cannot load the {name}: {'; '.join(errors)}; build the same model")
    for _, part in reversed(modules):  # a module after its parts
        for hook in part._load_state_dict_post_hooks.values():
            hook(part, _IncompatibleKeys([], []))


class _SavedState(MutableMapping[str, Any]):
    """A module's saved state dict, whose tensors are read when they are asked for."""

    def __init__(self, tree: dict[str, Any], read: Reader) -> None:
        self._tree = tree
        self._read = read
        self._changed: dict[str, Any] = {}  # by hooks of the model
        self._names = dict.fromkeys(tree)

    def __getitem__(self, name: str) -> Any:
        if name in self._changed or name not in self._names:
            return self._changed[name]
        entry = self._tree[name]
        return (
            unpack(entry["extra"], self._read) if "extra" in entry else self._read(entry["tensor"])
        )

    def __setitem__(self, name: str, value: Any) -> None:
        self._names[name] = None
        self._changed[name] = value

    def __delitem__(self, name: str) -> None:
        del self._names[name]
        self._changed.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the mixin would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)


def _plain_names(module: nn.Module) -> Callable[[str], str]:
    """Takes what wrappers put into names out of them."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    prefixes = []  # outer ones first
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(part, compiled):
            prefixes.append((prefix, f"{prefix}_orig_mod."))
        elif isinstance(part, parallel):
            prefixes.append((prefix, f"{prefix}module."))

    def plain(name: str) -> str:
        for short, long in reversed(prefixes):
            if name.startswith(long):
                name = short + name[len(long) :]
        return name

    return plain


def listed(names: list[str]) -> str:
    """The first few of some names."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"
