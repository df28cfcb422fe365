# SPDX-License-Identifier: Apache-2.0
"""What tests need to see and provoke; not for training scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from patrickstar import _C


def mapped_bytes() -> int:
    """Bytes of chunk memory mapped now, freed slabs that are kept included."""
    return int(_C.stats()["mapped_bytes"])


def mapped_peak_bytes() -> int:
    """The most bytes of chunk memory mapped at once since ``init()``."""
    return int(_C.stats()["mapped_peak_bytes"])


def evict_all() -> None:
    """Evicts every chunk that nobody leases, and waits until it has left."""
    _C.evict_all()


@contextlib.contextmanager
def read_leases_skipped() -> Iterator[None]:
    """Makes the guard forget its leases for reads: a stress run must go red inside."""
    _C.skip_read_leases(True)
    try:
        yield
    finally:
        _C.skip_read_leases(False)
