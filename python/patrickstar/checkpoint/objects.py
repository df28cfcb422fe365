# SPDX-License-Identifier: Apache-2.0
"""The other objects of a checkpoint, each by its kind: modules, optimizers, generators, values.

In the index an object is a JSON object of one key, its kind, with what the kind needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint.module_state import (
    check_module,
    check_module_tree,
    load_module,
    pack_module,
    unpack_module,
)
from patrickstar.checkpoint.optimizer_state import (
    check_optimizer,
    check_optimizer_tree,
    load_optimizer,
    pack_optimizer,
    unpack_optimizer,
)
from patrickstar.checkpoint.tree import Damaged, check, has_tensors, of_type, pack, unpack
from patrickstar.errors import InvalidArgument
from patrickstar.tensor_file import TensorFile

_MODULE, _OPTIMIZER, _GENERATOR = "module", "optimizer", "generator"
_STATE, _VALUE = "state", "value"  # what state_dict() returned; the object itself
_KINDS = (_MODULE, _OPTIMIZER, _GENERATOR, _STATE, _VALUE)


def pack_object(
    obj: Any, name: str, names: Mapping[int, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Turns the state of an object, or a plain value, into JSON.

    Args:
        obj: The object.
        name: Its name.
        names: The names of the parameters that modules save.
        tensors: Receives the tensors.
    """
    label = f"objects.{name}"
    if isinstance(obj, nn.Module):
        return {_MODULE: pack_module(obj, f"{label}.", tensors)}
    if isinstance(obj, torch.optim.Optimizer):
        return {_OPTIMIZER: pack_optimizer(obj, names, f"{label}.", tensors)}
    if isinstance(obj, torch.Generator):
        return {_GENERATOR: pack(obj.get_state(), label, tensors)}
    if hasattr(obj, "state_dict"):
        return {_STATE: pack(obj.state_dict(), label, tensors)}
    return {_VALUE: pack(obj, label, tensors)}


def check_object(
    obj: Any, tree: Any, name: str, names: Mapping[int, str], file: TensorFile, folder: Path
) -> None:
    """Checks that what was saved can be loaded into an object, before anything is changed.

    Raises:
        InvalidArgument: It is another object's.
        Damaged: It is no state.
    """
    label = f"objects.{name}"
    if len(of_type(tree, dict, label)) != 1 or next(iter(tree)) not in _KINDS:
        raise Damaged(label, f"has the keys {sorted(tree)}, expected one of {', '.join(_KINDS)}")
    [(kind, state)] = tree.items()
    if kind == _MODULE and isinstance(obj, nn.Module):
        check_module(obj, state, name, file, folder)
    elif kind == _MODULE:
        check_module_tree(state, label, file)
    elif kind == _OPTIMIZER and isinstance(obj, torch.optim.Optimizer):
        check_optimizer(obj, names, state, name, file)
    elif kind == _OPTIMIZER:
        check_optimizer_tree(state, label, file)
    else:
        check(state, label, file)
    is_loaded = isinstance(obj, torch.Generator) or hasattr(obj, "load_state_dict")
    if is_loaded and not _fits(obj, kind, state):
        raise InvalidArgument(
            f"cannot load {name} from {folder} into a {type(obj).__name__}: it was saved from a "
            f"{kind}; pass an object like the one that was saved, or {name}=None for what is there"
        )


def _fits(obj: Any, kind: str, state: Any) -> bool:
    if isinstance(obj, torch.Generator):  # also for what get_state() returned
        return kind == _GENERATOR or (kind == _VALUE and "tensor" in _kind_of(state))
    if isinstance(obj, (nn.Module, torch.optim.Optimizer)):
        own = _MODULE if isinstance(obj, nn.Module) else _OPTIMIZER
        return kind == own or (kind in (_STATE, _VALUE) and "mapping" in _kind_of(state))
    return kind == _STATE or "mapping" in _kind_of(state) or kind in (_MODULE, _OPTIMIZER)


def _kind_of(state: Any) -> Any:
    return state if isinstance(state, dict) else ()


def load_object(
    obj: Any, tree: dict[str, Any], name: str, names: Mapping[int, str], file: TensorFile
) -> bool:
    """Loads an object in place; returns False for a plain value, or when it is not asked for."""
    [(kind, state)] = tree.items()
    if isinstance(obj, torch.Generator):
        obj.set_state(unpack(state, file.read))
    elif kind == _MODULE and isinstance(obj, nn.Module):
        load_module(obj, state, name, file.read)
    elif kind == _OPTIMIZER and isinstance(obj, torch.optim.Optimizer):
        load_optimizer(obj, names, state, name, file)
    elif hasattr(obj, "load_state_dict"):
        obj.load_state_dict(_unpack(kind, state, file))
    else:
        return False
    return True


def unpack_value(
    tree: dict[str, Any], name: str, is_asked: bool, file: TensorFile
) -> dict[str, Any]:
    """The saved value by its name; nothing when it holds tensors that nobody asked for."""
    [(kind, state)] = tree.items()
    if not is_asked and (kind in (_MODULE, _OPTIMIZER) or has_tensors(state)):
        return {}
    return {name: _unpack(kind, state, file)}


def _unpack(kind: str, state: Any, file: TensorFile) -> Any:
    if kind == _MODULE:
        return unpack_module(state, file.read)
    if kind == _OPTIMIZER:
        return unpack_optimizer(state, file)
    return unpack(state, file.read)
