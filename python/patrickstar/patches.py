# SPDX-License-Identifier: Apache-2.0
"""Patches: replaced functions of other packages, each put back by ``close()``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from patrickstar import _C

Function = Callable[..., Any]


class Patches:
    """What one part of the engine has replaced."""

    def __init__(self) -> None:
        self._originals: list[tuple[type | ModuleType, str, Any]] = []

    def replace(self, owner: type | ModuleType, name: str, replacement: Function) -> None:
        """Puts `replacement` in the place of a method or function."""
        self._originals.append((owner, name, owner.__dict__.get(name)))  # None: inherited
        setattr(owner, name, replacement)

    def on_managed(
        self, owner: type | ModuleType, name: str, handler_of: Callable[[Function], Function]
    ) -> None:
        """Lets ``handler_of(original)`` answer when the first argument is managed.

        Everything else reaches the original after one test in C.
        """
        original = getattr(owner, name)
        reader = _C.RawReader(original, handler_of(original))
        functools.update_wrapper(reader, original)
        self.replace(owner, name, reader)

    def close(self) -> None:
        """Puts the originals back."""
        for owner, name, original in reversed(self._originals):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()
