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
from collections.abc import Iterator, Mapping, MutableMapping
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
        # Everything is checked before anything is changed.
        _check_model(model, index["model"], files.get("model"), folder)
        if optimizer is not None:
            _check_optimizer(optimizer, _names_of(model), index["optimizer"])
        _load_model(model, index["model"], files.get("model"))
        if optimizer is not None:
            file = files.get("optimizer")
            _load_optimizer(optimizer, _names_of(model), index["optimizer"], file)
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
        place = (
            value.untyped_storage()._cdata,
            value.storage_offset(),
            value.shape,
            value.stride(),
            value.dtype,
        )
        first = known.setdefault(place, name) if value.numel() else name
        tree[name] = {"tensor": first}
        if first == name:
            tensors[name] = value
    return tree


def _check_model(
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
    for name, entry in tree.items():
        if "tensor" in entry and isinstance(state[name], torch.Tensor):
            _whole(file).check_shape(entry["tensor"], name, state[name].shape)


class _SavedState(MutableMapping[str, Any]):
    """A model's saved state dict, whose tensors are read when they are asked for."""

    def __init__(self, tree: dict[str, Any], file: TensorFile | None) -> None:
        self._tree = tree
        self._read = _reader(file)
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

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)


def _load_model(model: nn.Module, tree: dict[str, Any], file: TensorFile | None) -> None:
    """As ``load_state_dict`` does it, by each module's own method, a tensor at a time."""
    saved = _SavedState(tree, file)
    errors: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        metadata = {"version": module._version}
        module._load_from_state_dict(saved, prefix, metadata, False, [], [], errors)
    if errors:
        raise InvalidArgument(f"cannot load the model: {'; '.join(errors)}; build the same model")


def _parameter_keys(group: Mapping[str, Any], number: int, names: dict[int, str]) -> list[str]:
    return [
        names.get(id(parameter), f"group {number}, parameter {position}")
        for position, parameter in enumerate(group["params"])
    ]


def _pack_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    groups = []
    state = {}
    for number, group in enumerate(optimizer.param_groups):
        keys = _parameter_keys(group, number, names)
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": keys, "options": pack(options, f"group {number}", tensors)})
        for key, parameter in zip(keys, group["params"], strict=True):
            if parameter in optimizer.state:
                state[key] = pack(dict(optimizer.state[parameter]), key, tensors)
    others = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    return {"groups": groups, "state": state, "others": pack(others, "others", tensors)}


def _check_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[int, str], tree: dict[str, Any]
) -> None:
    if len(tree["groups"]) != len(optimizer.param_groups):
        raise InvalidArgument(
            f"cannot load the optimizer: {len(tree['groups'])} parameter groups were saved, it has "
            f"{len(optimizer.param_groups)}; build it as it was"
        )
    groups = zip(tree["groups"], optimizer.param_groups, strict=True)
    for number, (saved, group) in enumerate(groups):
        differing = set(saved["params"]) ^ set(_parameter_keys(group, number, names))
        if differing:
            raise InvalidArgument(
                f"cannot load the optimizer: its group {number} has other parameters than the "
                f"saved one, such as {_listed(sorted(differing))}; build it as it was"
            )


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
    for number, (saved, group) in enumerate(
        zip(tree["groups"], optimizer.param_groups, strict=True)
    ):
        keys = _parameter_keys(group, number, names)
        first = len(parameters)
        parameters.update(zip(keys, group["params"], strict=True))
        indexes = list(range(first, len(parameters)))
        groups.append({"params": indexes, **unpack(saved["options"], read)})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    for key, packed in tree["state"].items():
        parameter = parameters[key]
        read_state = functools.partial(_state_tensor, file, parameter)
        optimizer.state[parameter] = unpack(packed, read_state)
    optimizer.state.update(unpack(tree["others"], read))


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
    old = _named_files(folder)  # what is there is replaced only if it is a checkpoint
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
        named = _named_files(folder)  # the index may be the new one already
        for path in written:
            if path.name not in named:
                path.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for name in old:
        (folder / name).unlink(missing_ok=True)


def _named_files(folder: Path) -> set[str]:
    """The files that belong to the checkpoint in a folder; none when there is no index."""
    return set(_read_index(folder)["files"].values()) if (folder / _INDEX).exists() else set()


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
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"cannot load a checkpoint from {folder}: there is no {_INDEX}; name a folder that "
            "patrickstar.save_checkpoint wrote"
        ) from None
    try:
        index = json.loads(text)
        found = index["format"]
        is_whole = found != _FORMAT or (
            all(isinstance(index[part], dict) for part in _PARTS)
            and all(isinstance(name, str) for name in index["files"].values())
        )
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
