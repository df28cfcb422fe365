# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of training: model, optimizer and what else has a state, a piece in memory at a time.

A checkpoint is a folder: ``index.json`` and the safetensors files that it names. New files get
names of their own, and the index is replaced last, in one step: whatever fails before that leaves
the previous checkpoint whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint_tree import pack, unpack
from patrickstar.errors import CorruptData, InvalidArgument
from patrickstar.random_state import random_state, set_random_state
from patrickstar.tensor_file import TensorFile, write_tensors

_INDEX = "index.json"
_FORMAT = "patrickstar checkpoint 1"
_PARTS = ("files", "model", "objects", "random")
_EXTRA_STATE = "_extra_state"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> None:
    """Saves everything that a later process needs to go on as if nothing had happened.

    The random states of torch, Python and NumPy are always part of it. Memory use rises by one
    chunk and 16 MiB at most. It works with and without management, and whatever the budget.

    Args:
        path: A folder, created if missing; an older checkpoint in it is replaced at the very end.
        model: Parameters, buffers and extra state, by their names in ``model.state_dict()``.
        optimizer: Its state by the names of the model's parameters, and its parameter groups.
        **objects: Anything with ``state_dict()``: learning-rate schedulers, gradient scalers,
            ``patrickstar.data.DataLoader``; a ``torch.Generator``; or plain values.

    Raises:
        InvalidArgument: An object whose state cannot be stored; the message names it.
        OSError: The folder cannot be written; the previous checkpoint is whole.

    Example:
        >>> import tempfile, torch, patrickstar
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     patrickstar.save_checkpoint(folder, layer, optimizer, epoch=3)
        ...     patrickstar.load_checkpoint(folder, layer, optimizer, epoch=None)["epoch"]
        3
    """
    folder = Path(path)
    files: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "objects": {}}
    index: dict[str, Any] = {"format": _FORMAT, "model": _pack_model(model, files["model"])}
    if optimizer is not None:
        index["optimizer"] = _pack_optimizer(optimizer, _names_of(model), files["optimizer"])
    states = {name: _state_of(obj) for name, obj in objects.items()}
    index["objects"] = pack(states, "objects", files["objects"])
    index["random"] = pack(random_state(), "random", files["objects"])
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, index, {part: tensors for part, tensors in files.items() if tensors})


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Loads a checkpoint in place.

    Args:
        path: The folder.
        model: Of the same names and shapes as the saved one. The dtypes may differ.
        optimizer: Over the same parameters in groups of the same lengths. Without one the saved
            state is left alone.
        **objects: By the names used at saving. What has ``load_state_dict()`` is loaded in place.

    Returns:
        The saved plain values by name.

    Raises:
        InvalidArgument: The folder holds no checkpoint, or one of another model, optimizer or set
            of objects.
        CorruptData: A file is damaged.
    """
    folder = Path(path)
    index = _read_index(folder)
    with contextlib.ExitStack() as stack:
        files = {
            part: stack.enter_context(_open(folder / name)) for part, name in index["files"].items()
        }
        missing = [name for name in objects if name not in _keys_of(index["objects"])]
        if missing:
            raise InvalidArgument(
                f"cannot load {_listed(missing)} from {folder}: it was not saved there, only "
                f"{_listed(_keys_of(index['objects']))}; use the names given to save_checkpoint"
            )
        if optimizer is not None and "optimizer" not in index:
            raise InvalidArgument(
                f"cannot load the optimizer from {folder}: it was saved without one; call "
                "load_checkpoint(path, model)"
            )
        _load_model(model, index["model"], files.get("model"), folder)
        if optimizer is not None:
            _load_optimizer(optimizer, _names_of(model), index["optimizer"], files.get("optimizer"))
        states = unpack(index["objects"], _reader(files.get("objects")))
        values = {}
        for name, state in states.items():
            if not _load_object(objects.get(name), state):
                values[name] = state
        set_random_state(unpack(index["random"], _reader(files.get("objects"))))
    return values


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _pack_model(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tied tensors are stored once: later names refer to the first."""
    tree: dict[str, Any] = {}
    known: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            tree[name] = {"extra": pack(value, name, tensors)}
            continue
        place = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.dtype)
        first = known.setdefault(place, name) if value.numel() else name
        tree[name] = {"tensor": first}
        if first == name:
            tensors[name] = value
    return tree


def _load_model(
    model: nn.Module, tree: dict[str, Any], file: TensorFile | None, folder: Path
) -> None:
    state = model.state_dict(keep_vars=True)
    missing = [name for name in state if name not in tree]
    unexpected = [name for name in tree if name not in state]
    if missing or unexpected:
        raise InvalidArgument(
            f"cannot load the model from {folder}: it lacks {_listed(missing)} and has "
            f"{_listed(unexpected)} too many; build the same model"
        )
    read = _reader(file)
    loaded: set[tuple[Any, ...]] = set()
    with torch.no_grad():
        for name, entry in tree.items():
            owner, _, last = name.rpartition(".")
            if last == _EXTRA_STATE:
                extra = unpack(entry["extra"], read) if "extra" in entry else read(entry["tensor"])
                model.get_submodule(owner).set_extra_state(extra)
                continue
            target = state[name]
            place = (target.untyped_storage()._cdata, target.storage_offset(), entry["tensor"])
            if target.numel() and place in loaded:
                continue
            loaded.add(place)
            _whole(file).read_into(entry["tensor"], target.detach())


def _pack_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    groups = []
    state = {}
    for number, group in enumerate(optimizer.param_groups):
        keys = [
            names.get(id(p), f"group {number}, parameter {i}")
            for i, p in enumerate(group["params"])
        ]
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": keys, "options": pack(options, f"group {number}", tensors)})
        for key, parameter in zip(keys, group["params"], strict=True):
            if parameter in optimizer.state:
                state[key] = pack(dict(optimizer.state[parameter]), key, tensors)
    return {"groups": groups, "state": state}


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    tree: dict[str, Any],
    file: TensorFile | None,
) -> None:
    """Groups by the optimizer's own method, state in place: never all of it in memory."""
    read = _reader(file)
    groups = []
    parameters: dict[str, torch.Tensor] = {}
    position = 0
    for number, (saved, group) in enumerate(
        zip(tree["groups"], optimizer.param_groups, strict=False)
    ):
        expected = [
            names.get(id(p), f"group {number}, parameter {i}")
            for i, p in enumerate(group["params"])
        ]
        if sorted(saved["params"]) != sorted(expected):
            differing = set(saved["params"]) ^ set(expected)
            raise InvalidArgument(
                f"cannot load the optimizer: its group {number} has other parameters than the "
                f"saved one, such as {_listed(sorted(differing))}; build it as it was"
            )
        parameters.update(zip(expected, group["params"], strict=True))
        indexes = list(range(position, position + len(expected)))
        position += len(expected)
        groups.append({"params": indexes, **unpack(saved["options"], read)})
    if len(tree["groups"]) != len(optimizer.param_groups):
        raise InvalidArgument(
            f"cannot load the optimizer: {len(tree['groups'])} parameter groups were saved, it has "
            f"{len(optimizer.param_groups)}; build it as it was"
        )
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    for key, packed in tree["state"].items():
        parameter = parameters[key]
        read_state = functools.partial(_state_tensor, file, parameter)
        optimizer.state[parameter] = unpack(packed, read_state)


def _state_tensor(
    optional_file: TensorFile | None, parameter: torch.Tensor, name: str
) -> torch.Tensor:
    """State of the parameter's shape is made like it, so that it may leave memory at once."""
    file = _whole(optional_file)
    if file.shape(name) != parameter.shape or parameter.dim() == 0:
        return file.read(name)
    with torch.no_grad():
        tensor = torch.zeros_like(parameter, dtype=file.dtype(name)).detach()
        file.read_into(name, tensor)
    return tensor


def _state_of(obj: Any) -> Any:
    if isinstance(obj, torch.Generator):
        return obj.get_state()
    return obj.state_dict() if hasattr(obj, "state_dict") else obj


def _load_object(obj: Any, state: Any) -> bool:
    """False when the object is a plain value, or not asked for."""
    if isinstance(obj, torch.Generator):
        obj.set_state(state)
    elif hasattr(obj, "load_state_dict"):
        obj.load_state_dict(state)
    else:
        return False
    return True


def _write(folder: Path, index: dict[str, Any], files: dict[str, dict[str, torch.Tensor]]) -> None:
    generation = uuid.uuid4().hex[:12]
    index["files"] = {part: f"{part}-{generation}.safetensors" for part in files}
    # What is there is replaced only if it is a checkpoint.
    old = set(_read_index(folder)["files"].values()) if (folder / _INDEX).exists() else set()
    written: list[Path] = []
    try:
        for part, tensors in files.items():
            written.append(folder / index["files"][part])
            with _synced(written[-1]) as file:
                write_tensors(file, tensors)
        written.append(folder / f"{_INDEX}.{generation}")
        with _synced(written[-1]) as file:
            file.write(json.dumps(index).encode())
        written[-1].replace(folder / _INDEX)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for name in old:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[Any]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"cannot load a checkpoint from {folder}: there is no {_INDEX}; name a folder that "
            "patrickstar.save_checkpoint wrote"
        ) from None
    try:
        index = json.loads(text)
        found = index["format"]
        is_whole = found != _FORMAT or all(part in index for part in _PARTS)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise CorruptData(
            f"cannot read {path}: it is damaged or no checkpoint's; name another folder"
        )
    if found != _FORMAT:
        raise InvalidArgument(
            f"cannot read {path}: expected format {_FORMAT!r}, got {found!r}; use the version of "
            "patrickstar that wrote it"
        )
    return index  # type: ignore[no-any-return]


def _open(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except FileNotFoundError:
        raise CorruptData(f"cannot read {path}: it is gone; use another checkpoint") from None


def _whole(file: TensorFile | None) -> TensorFile:
    if file is None:
        raise CorruptData(
            "cannot read the checkpoint: its index is damaged; use another checkpoint"
        )
    return file


def _reader(file: TensorFile | None) -> Any:
    return lambda name: _whole(file).read(name)


def _keys_of(tree: Any) -> list[str]:
    return [key for key, _ in tree["mapping"]]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"
