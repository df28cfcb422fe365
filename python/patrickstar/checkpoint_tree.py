# SPDX-License-Identifier: Apache-2.0
"""State dicts as JSON and tensors: nested values become a tree, their tensors a flat dict."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch

from patrickstar.errors import CorruptData, InvalidArgument

# A tree is JSON: null, booleans, numbers and texts stand for themselves, a list for a list. All
# else is an object with one key, its kind.
_TENSOR, _BYTES, _TUPLE, _MAPPING, _COUNTER = "tensor", "bytes", "tuple", "mapping", "counter"


def pack(value: object, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Turns a nested value into a JSON tree.

    Args:
        value: None, booleans, numbers, texts, bytes, tensors, NumPy arrays and scalars, and lists,
            tuples and mappings of them.
        name: Of the value, for the names of its tensors and for messages.
        tensors: Receives the tensors.

    Raises:
        InvalidArgument: Anything else is inside.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, name, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        kind = _COUNTER if isinstance(value, collections.Counter) else _MAPPING
        for key in value:
            if not isinstance(key, (str, int, float, bool, tuple, type(None))):
                raise _unstorable(f"{name}: a key of type {type(key).__name__}")
        return {kind: [[key, pack(value[key], f"{name}.{key}", tensors)] for key in value]}
    if hasattr(value, "__array__"):
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            if array.ndim == 0:
                return array.item()
            native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
            return _pack_tensor(torch.from_numpy(native), name, tensors)
    raise _unstorable(f"{name}: a {type(value).__name__}")


def _pack_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Keys that look alike in a name, such as 1 and "1", get names of their own."""
    unique, number = name, 0
    while unique in tensors:
        number += 1
        unique = f"{name}#{number}"
    tensors[unique] = tensor
    return {_TENSOR: unique}


def _unstorable(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"cannot save {what} has no place in a checkpoint; expected numbers, texts, tensors, and "
        "lists, tuples and dicts of them"
    )


def unpack(tree: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree.

    Args:
        tree: What ``pack`` returned.
        read: Gives the tensor of a name.

    Raises:
        CorruptData: It is no tree.
    """
    if isinstance(tree, list):
        return [unpack(item, read) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        [(kind, content)] = tree.items()
        if kind == _TENSOR:
            return read(content)
        if kind == _BYTES:
            return base64.b64decode(content)
        if kind == _TUPLE:
            return tuple(unpack(item, read) for item in content)
        if kind in (_MAPPING, _COUNTER):
            items = {_key(key): unpack(item, read) for key, item in content}
            return items if kind == _MAPPING else collections.Counter(items)
    raise CorruptData("cannot read the checkpoint: its index is damaged; use another checkpoint")


def _key(key: Any) -> Any:
    return tuple(_key(part) for part in key) if isinstance(key, list) else key
