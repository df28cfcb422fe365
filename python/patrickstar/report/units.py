# SPDX-License-Identifier: Apache-2.0
"""Byte counts as people write and read them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import SupportsIndex

from patrickstar.errors import InvalidArgument

_PRINTED_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([a-z]*)\s*", re.I | re.ASCII)
_LARGEST_SIZE = (1 << 63) - 1  # what the core counts with
_SIZE_EXAMPLE = (
    'pass bytes (6442450944), a text with a unit ("6GiB", "512 MiB", "1.5GB"), or a fraction (0.5)'
)


def format_bytes(num_bytes: int) -> str:
    """Writes a byte count in binary units.

    Example:
        >>> format_bytes(512), format_bytes(256 << 20)
        ('512 bytes', '256.0 MiB')
    """
    if abs(num_bytes) < 1024:
        return f"{num_bytes} bytes"
    value = float(num_bytes)
    for unit in _PRINTED_UNITS:
        value /= 1024
        # 1023.95 would print as 1024.0 of the smaller unit.
        if abs(value) < 1023.95 or unit == _PRINTED_UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def parse_size(value: object, name: str, whole: Callable[[], int]) -> int:
    """Turns a size as users write it into bytes.

    Args:
        value: An int (bytes), a text ("6GiB", "512 MiB", "1.5GB", "100kB", "4096", "0.5"; the case
            of the unit does not matter), or a float in (0, 1], the fraction of what is there.
        name: The argument, for the message.
        whole: Gives the bytes that a fraction is of; called only for a fraction.

    Returns:
        Bytes, at least 1.

    Raises:
        InvalidArgument: The value is none of these, or is zero, negative or not finite.

    Example:
        >>> parse_size("1.5GB", "host_memory", whole=lambda: 0)
        1500000000
    """
    if isinstance(value, str):
        return _parse_size_text(value, name, whole)
    if isinstance(value, float):
        return _fraction(value, value, name, whole)
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise _bad_size(name, value, "expected a size")
    return _in_range(operator.index(value), value, name)


def _parse_size_text(value: str, name: str, whole: Callable[[], int]) -> int:
    match = _SIZE.fullmatch(value)
    if match is None:
        raise _bad_size(name, value, "expected a number and a unit")
    number, unit = match[1], match[2].lower()
    if not unit and "." in number:
        return _fraction(float(number), value, name, whole)
    if unit and unit not in _UNITS:
        raise _bad_size(
            name,
            value,
            f"unknown unit {match[2]!r}; expected one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
        )
    scale = _UNITS[unit or "b"]
    size = int(float(number) * scale) if "." in number else int(number) * scale
    return _in_range(size, value, name)


def _in_range(size: int, value: object, name: str) -> int:
    if size <= 0:
        raise _bad_size(name, value, "expected more than 0 bytes")
    if size > _LARGEST_SIZE:
        raise _bad_size(name, value, f"expected at most {_LARGEST_SIZE} bytes")
    return size


def _fraction(fraction: float, value: object, name: str, whole: Callable[[], int]) -> int:
    if not 0 < fraction <= 1:  # NaN too
        raise _bad_size(name, value, "expected a fraction above 0 and at most 1")
    size = int(whole() * fraction)
    if size <= 0:
        raise _bad_size(
            name, value, f"that fraction of the {whole()} bytes there are is less than a byte"
        )
    return size


def _bad_size(name: str, value: object, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name}={value!r} is not a usable size: {problem}; {_SIZE_EXAMPLE}")
