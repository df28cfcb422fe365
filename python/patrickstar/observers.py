# SPDX-License-Identifier: Apache-2.0
"""Observers: profilers of torch, which ask every operation's arguments for their addresses.

They do so before the guard has fetched anything, and not all of them survive the error that an
evicted tensor answers. While one is on, an evicted tensor answers with a null address instead.
"""

from __future__ import annotations

import functools

from torch.autograd import profiler
from torch.profiler import profiler as traces

from patrickstar import _C
from patrickstar.patches import Function, Patches

# Modules, and the functions through which they turn their observer on and off.
_SWITCHES = (
    (profiler, "_enable_profiler", "_disable_profiler"),
    (traces, "_enable_execution_trace_observer", "_disable_execution_trace_observer"),
)


class Observers:
    """Knows whether a profiler is on."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._num_active = 0

    def open(self) -> None:
        for module, enable, disable in _SWITCHES:
            self._patches.replace(module, enable, self._turning_on(getattr(module, enable)))
            self._patches.replace(module, disable, self._turning_off(getattr(module, disable)))
        if profiler._is_profiler_enabled:
            self._count(1)

    def close(self) -> None:
        self._patches.close()

    def _count(self, change: int) -> None:
        self._num_active = max(self._num_active + change, 0)
        _C.set_observed(self._num_active > 0)

    def _turning_on(self, original: Function) -> Function:
        @functools.wraps(original)
        def enable(*args: object, **kwargs: object) -> object:
            self._count(1)
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._count(-1)
                raise

        return enable

    def _turning_off(self, original: Function) -> Function:
        @functools.wraps(original)
        def disable(*args: object, **kwargs: object) -> object:
            try:
                return original(*args, **kwargs)
            finally:
                self._count(-1)

        return disable
