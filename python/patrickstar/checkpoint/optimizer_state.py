# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer in a checkpoint, by the names of parameters, a tensor at a time.

An optimizer with a way of its own to save and load - overridden methods, hooks on them, or no
subclass of torch's - is asked by that way, and its state dict is stored as it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from patrickstar.checkpoint.module_state import listed
from patrickstar.checkpoint.tree import (
    Damaged,
    add_tensor,
    check,
    check_tensor,
    of_type,
    pack,
    unpack,
)
from patrickstar.errors import Error, InvalidArgument
from patrickstar.tensor_file import TensorFile

_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
_OWN_STATE = re.compile(r"own\.state\.(\d+)\.")


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters of an optimizer."""
    return [p for group in _groups_of(optimizer) for p in group["params"]]


def pack_optimizer(
    optimizer: Any, names: Mapping[int, str], prefix: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Turns an optimizer's state into JSON.

    Args:
        optimizer: Of torch, or with its methods.
        names: The names of the parameters that modules save. Parameters without one are saved here.
        prefix: Before the names of its tensors.
        tensors: Receives the tensors.
    """
    keys = [_keys_of(group, number, names) for number, group in enumerate(_groups_of(optimizer))]
    parameters = dict(zip(itertools.chain(*keys), parameters_of(optimizer), strict=True))
    loose = {
        key: add_tensor(parameter, prefix + key, tensors)
        for key, parameter in parameters.items()
        if id(parameter) not in names
    }
    tree: dict[str, Any] = {"params": keys, "loose": loose}
    if _has_own_methods(optimizer):
        return tree | {"own": pack(dict(optimizer.state_dict()), f"{prefix}own", tensors)}
    tree["options"] = [
        pack(_options_of(group), f"{prefix}group {number}", tensors)
        for number, group in enumerate(optimizer.param_groups)
    ]
    tree["state"] = {
        key: pack(dict(optimizer.state[parameter]), prefix + key, tensors)
        for key, parameter in parameters.items()
        if parameter in optimizer.state
    }
    others = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    return tree | {"others": pack(others, f"{prefix}others", tensors)}


def check_optimizer(
    optimizer: Any, names: Mapping[int, str], tree: Any, name: str, file: TensorFile
) -> None:
    """Checks that a saved state can be loaded, before anything is changed.

    Raises:
        InvalidArgument: It is another optimizer's.
        Damaged: It is no state.
    """
    check_optimizer_tree(tree, name, file)
    groups = _groups_of(optimizer)
    if len(tree["params"]) != len(groups):
        raise InvalidArgument(
            f"cannot load the {name}: {len(tree['params'])} parameter groups were saved, it has "
            f"{len(groups)}; build it as it was"
        )
    for number, (saved, group) in enumerate(zip(tree["params"], groups, strict=True)):
        differing = set(saved) ^ set(_keys_of(group, number, names))
        if differing:
            raise InvalidArgument(
                f"cannot load the {name}: its group {number} has other parameters than the "
                f"saved one, such as {listed(sorted(differing))}; build it as it was"
            )
        for key, parameter in _by_key(group, number, names).items():
            if key in tree["loose"]:
                file.check_shape(tree["loose"][key], key, parameter.shape)


def check_optimizer_tree(tree: Any, name: str, file: TensorFile) -> None:
    """Raises: Damaged when a tree is not what ``pack_optimizer`` returned."""
    of_type(tree, dict, name)
    expected = {"params", "loose"}
    expected |= {"own"} if "own" in tree else {"options", "state", "others"}
    if tree.keys() != expected:
        raise Damaged(name, f"has the keys {listed(sorted(tree))}")
    keys = set()
    for number, group in enumerate(of_type(tree["params"], list, f"{name}.params")):
        for key in of_type(group, list, f"{name}.params.{number}"):
            keys.add(of_type(key, str, f"{name}.params.{number}"))
    for key, stored in of_type(tree["loose"], dict, f"{name}.loose").items():
        check_tensor(stored, f"{name}.loose.{key}", file)
    if "own" in tree:
        _check_mapping(tree["own"], f"{name}.own", file)
        return
    if len(of_type(tree["options"], list, f"{name}.options")) != len(tree["params"]):
        raise Damaged(f"{name}.options", f"has {len(tree['options'])} groups")
    for number, options in enumerate(tree["options"]):
        _check_mapping(options, f"{name}.options.{number}", file)
    for key, state in of_type(tree["state"], dict, f"{name}.state").items():
        if key not in keys:
            raise Damaged(f"{name}.state.{key}", "is the state of no parameter")
        _check_mapping(state, f"{name}.state.{key}", file)
    _check_mapping(tree["others"], f"{name}.others", file)


def _check_mapping(tree: Any, name: str, file: TensorFile) -> None:
    if list(of_type(tree, dict, name)) != ["mapping"]:
        raise Damaged(name, "is no mapping")
    check(tree, name, file)


def load_optimizer(
    optimizer: Any, names: Mapping[int, str], tree: dict[str, Any], name: str, file: TensorFile
) -> None:
    """Loads in place, never all of it in memory where the optimizer is one of torch's.

    Args:
        optimizer: That ``check_optimizer`` found right.
        names: The names of the parameters that modules save.
        tree: The saved state.
        name: Of the optimizer, for messages.
        file: Holds the tensors.

    Raises:
        InvalidArgument: Its own ``load_state_dict`` refuses the state.
        CorruptData: A tensor is not the one that was written.
    """
    parameters: dict[str, torch.Tensor] = {}
    for number, group in enumerate(_groups_of(optimizer)):
        parameters.update(_by_key(group, number, names))
    with torch.no_grad():
        for key, stored in tree["loose"].items():
            file.read_into(stored, parameters[key])
    if "own" in tree or _has_own_methods(optimizer):
        _load_by_own_method(optimizer, unpack_optimizer(tree, file, parameters), name)
        return
    optimizer.load_state_dict({"state": {}, "param_groups": _saved_groups(tree, file)})
    for key, packed in tree["state"].items():
        optimizer.state[parameters[key]] = _unpack_like(packed, file, parameters[key])
    optimizer.state.update(unpack(tree["others"], file.read))


def unpack_optimizer(
    tree: dict[str, Any], file: TensorFile, parameters: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """The state dict of an optimizer, as its own ``state_dict()`` gave it or torch's would.

    Args:
        tree: The saved state.
        file: Holds the tensors.
        parameters: By key: what is managed where they are, leaves memory as it is read.
    """
    keys = list(itertools.chain(*tree["params"]))
    if "own" in tree:

        def read(stored: str) -> torch.Tensor:
            found = _OWN_STATE.search(stored)
            is_known = found is not None and int(found[1]) < len(keys) and parameters is not None
            if not is_known or found is None or parameters is None:
                return file.read(stored)
            return _read_like(stored, file, parameters[keys[int(found[1])]])

        return unpack(tree["own"], read)  # type: ignore[no-any-return]
    positions = {key: position for position, key in enumerate(keys)}
    state: dict[Any, Any] = {
        positions[key]: _unpack_like(packed, file, (parameters or {}).get(key))
        for key, packed in tree["state"].items()
    }
    state.update(unpack(tree["others"], file.read))
    return {"state": state, "param_groups": _saved_groups(tree, file)}


def _load_by_own_method(optimizer: Any, state: dict[str, Any], name: str) -> None:
    try:
        optimizer.load_state_dict(state)
    except Error:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            f"cannot load the {name}: {type(optimizer).__name__}.load_state_dict() refused what "
            f"was saved ({type(error).__name__}: {error}); build it as it was"
        ) from error


def _has_own_methods(optimizer: Any) -> bool:
    if not isinstance(optimizer, Optimizer):
        return True
    methods = (optimizer.state_dict, optimizer.load_state_dict)
    originals = (Optimizer.state_dict, Optimizer.load_state_dict)
    if any(
        getattr(method, "__func__", None) is not original
        for method, original in zip(methods, originals, strict=True)
    ):
        return True
    return any(getattr(optimizer, f"_optimizer_{hook}_hooks", None) for hook in _HOOKS)


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _keys_of(group: Mapping[str, Any], number: int, names: Mapping[int, str]) -> list[str]:
    return [
        names.get(id(parameter), f"group {number}, parameter {position}")
        for position, parameter in enumerate(group["params"])
    ]


def _by_key(
    group: Mapping[str, Any], number: int, names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    return dict(zip(_keys_of(group, number, names), group["params"], strict=True))


def _saved_groups(tree: dict[str, Any], file: TensorFile) -> list[dict[str, Any]]:
    groups, first = [], 0
    for keys, options in zip(tree["params"], tree["options"], strict=True):
        indexes = list(range(first, first + len(keys)))
        first += len(keys)
        groups.append({"params": indexes, **unpack(options, file.read)})
    return groups


def _unpack_like(packed: Any, file: TensorFile, parameter: torch.Tensor | None) -> Any:
    if parameter is None:
        return unpack(packed, file.read)
    return unpack(packed, lambda stored: _read_like(stored, file, parameter))


def _read_like(stored: str, file: TensorFile, parameter: torch.Tensor) -> torch.Tensor:
    """State of the parameter's shape is made like it, so that it may leave memory at once."""
    if file.shape(stored) != parameter.shape or parameter.dim() == 0:
        return file.read(stored)
    with torch.no_grad():
        tensor = torch.zeros_like(parameter, dtype=file.dtype(stored)).detach()
        file.read_into(stored, tensor)
    return tensor
