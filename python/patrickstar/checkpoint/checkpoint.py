# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of training: model, optimizer and what else has a state, a piece in memory at a time.

A checkpoint is a folder: ``index.json`` and the safetensors files that it names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint.folder import (
    nesting_is_bounded,
    open_checkpoint,
    told_of,
    write_checkpoint,
)
from patrickstar.checkpoint.module_state import (
    check_module,
    listed,
    load_module,
    named_parameters,
    pack_module,
)
from patrickstar.checkpoint.objects import (
    check_object,
    load_object,
    pack_object,
    unpack_value,
)
from patrickstar.checkpoint.optimizer_state import (
    check_optimizer,
    load_optimizer,
    pack_optimizer,
    parameters_of,
)
from patrickstar.checkpoint.tree import Damaged, check, checked_text, pack, unpack
from patrickstar.errors import InvalidArgument
from patrickstar.random_state import random_state, set_random_state
from patrickstar.tensor_file import TensorFile, TensorWriter

_OPTIMIZER_METHODS = ("param_groups", "state_dict", "load_state_dict")


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> None:
    """Saves everything that a later process needs to go on as if nothing had happened.

    The random states of torch, Python and NumPy are always part of it. Memory use rises by one
    chunk and 16 MiB at most, beside what the objects' own ``state_dict()`` makes. It works with
    and without management, and whatever the budget.

    Args:
        path: A folder, created if missing; an older checkpoint in it is replaced at the very end,
            and files that killed saves left there are removed.
        model: Parameters, buffers and extra state, by their names in ``model.state_dict()``;
            wrappers (DDP, ``torch.compile``) leave no trace in the names.
        optimizer: Its state by the names of the model's parameters, and its parameter groups; its
            own ``state_dict()`` where it has one that is not torch's. Parameters of no model are
            saved with it.
        **objects: More modules and optimizers; anything with ``state_dict()``: learning-rate
            schedulers, gradient scalers, ``patrickstar.data.DataLoader``; a ``torch.Generator``;
            or plain values.

    Raises:
        InvalidArgument: An argument of another type, or an object whose state cannot be stored;
            the message names it, and nothing was written.
        IoError: The folder cannot be written; the previous checkpoint is whole.

    Example:
        >>> import tempfile, torch, patrickstar
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     patrickstar.save_checkpoint(folder, layer, optimizer, epoch=3)
        ...     patrickstar.load_checkpoint(folder, layer, optimizer, epoch=None)["epoch"]
        3
    """
    folder = _checked(path, model, optimizer)
    names = _names_of(model, objects)
    tensors: dict[str, dict[str, torch.Tensor]] = {"model": {}, "objects": {}}
    with nesting_is_bounded():
        index: dict[str, Any] = {"model": pack_module(model, "", tensors["model"])}
        if optimizer is not None:
            _check_shared(optimizer, names)
            tensors["optimizer"] = {}
            index["optimizer"] = pack_optimizer(optimizer, names, "", tensors["optimizer"])
        index["objects"] = {
            checked_text(name, "an object"): pack_object(obj, name, names, tensors["objects"])
            for name, obj in objects.items()
        }
        index["random"] = pack(random_state(), "random", tensors["objects"])
    write_checkpoint(folder, index, {part: TensorWriter(found) for part, found in tensors.items()})


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Loads a checkpoint in place.

    Only what is asked for is read. Model, optimizer, and modules and optimizers among the objects
    are read a tensor at a time; the states of other objects, and of optimizers with a
    ``load_state_dict()`` of their own, are whole in memory while they are loaded.

    Args:
        path: The folder.
        model: Of the same names and shapes as the saved one. The dtypes may differ.
        optimizer: Over the same parameters in groups of the same lengths. Without one the saved
            state is left alone.
        **objects: By the names used at saving. What has ``load_state_dict()`` is loaded in place;
            None asks for the saved value or state itself.

    Returns:
        By name, the saved values and states that were not loaded in place: those asked for, and
        those that hold no tensors.

    Raises:
        InvalidArgument: An argument of another type; or the folder holds no checkpoint, or one of
            another model, optimizer or set of objects. Nothing was changed.
        CorruptData: The checkpoint is damaged. Where the damage is in a tensor, those before it
            have been loaded.
        IoError: The checkpoint cannot be read.
    """
    folder = _checked(path, model, optimizer)
    names = _names_of(model, objects)
    with open_checkpoint(folder) as (index, files), told_of(folder):
        _check_all(folder, index, files, names, model, optimizer, objects)
        load_module(model, index["model"], "model", files["model"].read)
        if optimizer is not None:
            load_optimizer(optimizer, names, index["optimizer"], "optimizer", files["optimizer"])
        values = {}
        for name, tree in index["objects"].items():
            if not load_object(objects.get(name), tree, name, names, files["objects"]):
                values.update(unpack_value(tree, name, name in objects, files["objects"]))
        _set_random_state(unpack(index["random"], files["objects"].read))
    return values


def _check_all(
    folder: Path,
    index: dict[str, Any],
    files: Mapping[str, TensorFile],
    names: Mapping[int, str],
    model: nn.Module,
    optimizer: Any,
    objects: Mapping[str, Any],
) -> None:
    """Checks everything before anything is changed."""
    if optimizer is not None and "optimizer" not in index:
        raise InvalidArgument(
            f"cannot load the optimizer from {folder}: it was saved without one; call "
            "load_checkpoint(path, model)"
        )
    check_module(model, index["model"], "model", files["model"], folder)
    if optimizer is not None:
        _check_shared(optimizer, names)
        check_optimizer(optimizer, names, index["optimizer"], "optimizer", files["optimizer"])
    for name, tree in index["objects"].items():
        check_object(objects.get(name), tree, name, names, files["objects"], folder)
    missing = [name for name in objects if name not in index["objects"]]
    if missing:
        raise InvalidArgument(
            f"cannot load {listed(missing)} from {folder}: it was not saved there, only "
            f"{listed(list(index['objects']))}; use the names given to save_checkpoint"
        )
    check(index["random"], "random", files["objects"])


def _set_random_state(state: Any) -> None:
    try:
        set_random_state(state)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Damaged("random", f"is no state of random generators ({error})") from error


def _names_of(model: nn.Module, objects: Mapping[str, Any]) -> dict[int, str]:
    """The names of all parameters that modules save, by their ids; the model's first."""
    names: dict[int, str] = {}
    for name, obj in objects.items():
        if isinstance(obj, nn.Module):
            names.update(named_parameters(obj, f"{name}."))
    return names | named_parameters(model)


def _checked(path: Any, model: Any, optimizer: Any) -> Path:
    is_path = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)
    if not is_path:
        raise _misplaced(path, "path", "a text or a Path")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise InvalidArgument(f"path={path!r} is no folder's name; pass the folder to save to")
    if not isinstance(model, nn.Module):
        raise _misplaced(model, "model", "a torch.nn.Module")
    is_optimizer = all(hasattr(optimizer, name) for name in _OPTIMIZER_METHODS)
    if optimizer is not None and (not is_optimizer or isinstance(optimizer, type)):
        raise _misplaced(optimizer, "optimizer", "a torch.optim.Optimizer or None")
    return Path(path)


def _misplaced(value: object, role: str, expected: str) -> InvalidArgument:
    what = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return InvalidArgument(
        f"cannot use {what} as the {role} of a checkpoint: expected {expected}; pass path, model, "
        "optimizer in this order, and all else by name, such as scheduler=scheduler"
    )


def _check_shared(optimizer: Any, names: Mapping[int, str]) -> None:
    parameters = parameters_of(optimizer)
    if parameters and all(id(parameter) not in names for parameter in parameters):
        raise InvalidArgument(
            f"cannot use this {type(optimizer).__name__} with this model: none of its "
            f"{len(parameters)} parameters is one of the model's; build the optimizer from "
            "model.parameters(), after the last change of the model"
        )
