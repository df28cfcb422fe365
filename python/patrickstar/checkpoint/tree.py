# SPDX-License-Identifier: Apache-2.0
"""State dicts as JSON and tensors: nested values become a tree, their tensors a flat dict."""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from patrickstar.errors import InvalidArgument
from patrickstar.tensor_file import METADATA_NAME, is_plain_text

# A tree is JSON: null, booleans, numbers and texts stand for themselves, a list for a list. All
# else is an object with one key, its kind.
_TENSOR, _BYTES, _TUPLE, _MAPPING, _COUNTER = "tensor", "bytes", "tuple", "mapping", "counter"
_INTEGER = "integer"  # one with more digits than JSON's readers take
_LARGEST_INTEGER_BITS = 1024


class Damaged(ValueError):  # noqa: N818 - reads like CorruptData
    """An index that no save wrote: ``key`` says where, ``args`` what is wrong."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


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
    if isinstance(value, int) and value.bit_length() > _LARGEST_INTEGER_BITS:
        return {_INTEGER: hex(value)}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return checked_text(value, name)
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
            _check_key(key, name)
        return {kind: [[key, pack(value[key], f"{name}.{key}", tensors)] for key in value]}
    if hasattr(value, "__array__"):
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            if array.ndim == 0:
                return pack(array.item(), name, tensors)
            native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
            return _pack_tensor(torch.from_numpy(native), name, tensors)
    raise _unstorable(f"{name}: a {type(value).__name__}")


def _check_key(key: object, name: str) -> None:
    if isinstance(key, tuple):
        for part in key:
            _check_key(part, name)
    elif isinstance(key, str):
        checked_text(key, f"a key of {name}")
    elif not isinstance(key, (int, float, type(None))) or (
        isinstance(key, int) and key.bit_length() > _LARGEST_INTEGER_BITS
    ):
        raise _unstorable(f"{name}: a key of type {type(key).__name__}")


def checked_text(text: str, name: str) -> str:
    """The text itself.

    Raises:
        InvalidArgument: It is not Unicode.
    """
    if not is_plain_text(text):
        raise InvalidArgument(
            f"cannot save {name}: the text {text!r} has half of a surrogate pair; expected "
            "Unicode, store odd file names as bytes"
        )
    return text


def _pack_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    return {_TENSOR: add_tensor(tensor, name, tensors)}


def add_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Adds a tensor by its name, or one like it: keys such as 1 and "1" look alike in names."""
    unique, number = name, 0
    while unique in tensors or unique == METADATA_NAME:
        number += 1
        unique = f"{name}#{number}"
    tensors[unique] = tensor
    return unique


def _unstorable(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"cannot save {what} has no place in a checkpoint; expected numbers, texts, tensors, and "
        "lists, tuples and dicts of them"
    )


def unpack(tree: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree that ``check`` found right.

    Args:
        tree: What ``pack`` returned.
        read: Gives the tensor of a name.
    """
    if isinstance(tree, list):
        return [unpack(item, read) for item in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == _TENSOR:
        return read(content)
    if kind == _BYTES:
        return _from_base64(content)
    if kind == _INTEGER:
        return _from_hex(content)
    if kind == _TUPLE:
        return tuple(unpack(item, read) for item in content)
    items = {_key(key): unpack(item, read) for key, item in content}
    return items if kind == _MAPPING else collections.Counter(items)


def check(tree: Any, name: str, known: Container[str]) -> None:
    """Checks a tree that was read from a file.

    Args:
        tree: Any JSON.
        name: Of the tree, for the message.
        known: The names of the tensors that there are.

    Raises:
        Damaged: It is no tree.
    """
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            check(item, f"{name}.{index}", known)
        return
    if not isinstance(tree, dict):
        return
    kind, content = next(iter(tree.items())) if len(tree) == 1 else (None, None)
    if kind == _TENSOR:
        check_tensor(content, name, known)
    elif kind in (_BYTES, _INTEGER):
        decode: Callable[[str], object] = _from_base64 if kind == _BYTES else _from_hex
        try:
            decode(of_type(content, str, name))
        except ValueError:
            raise Damaged(name, f"is no {kind}") from None
    elif kind == _TUPLE:
        check(of_type(content, list, name), name, known)
    elif kind in (_MAPPING, _COUNTER):
        for pair in of_type(content, list, name):
            if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]):
                raise Damaged(name, "is no list of keys and values")
            check(pair[1], f"{name}.{pair[0]}", known)
    else:
        raise Damaged(name, f"is an object of {len(tree)} keys, expected one that names its kind")


def check_tensor(stored: object, name: str, known: Container[str]) -> None:
    """Raises: Damaged when a tensor is not in the file."""
    if not isinstance(stored, str) or stored not in known:
        raise Damaged(name, f"names a tensor {stored!r} that is not there")


def of_type(value: Any, kind: type, name: str) -> Any:
    """The value itself.

    Raises:
        Damaged: It is of another type.
    """
    if not isinstance(value, kind):
        raise Damaged(name, f"is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def has_tensors(tree: Any) -> bool:
    """Whether the value of a tree that ``check`` found right holds tensors."""
    if isinstance(tree, list):
        return any(map(has_tensors, tree))
    return isinstance(tree, dict) and (_TENSOR in tree or any(map(has_tensors, tree.values())))


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _from_hex(text: str) -> int:
    return int(text, 16)


def _is_key(key: object) -> bool:
    return all(map(_is_key, key)) if isinstance(key, list) else not isinstance(key, dict)


def _key(key: Any) -> Any:
    return tuple(_key(part) for part in key) if isinstance(key, list) else key
