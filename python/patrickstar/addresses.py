# SPDX-License-Identifier: Apache-2.0
"""The addresses that ``data_ptr()`` of managed tensors and storages gives out.

An address is good until the next step: a lease keeps the bytes where they are. Leases of all of a
model larger than memory cannot be had, but who asks a whole model for the addresses of its storages
wants to know which are the same: beyond half of the budget a storage answers with the address of a
copy that is mapped from a file on the spill disk.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import torch

from patrickstar import _C
from patrickstar.errors import OutOfMemory
from patrickstar.report.units import format_bytes
from patrickstar.tensor_file import pieces

# Leases that addresses keep are for at most this share of the budget: operations need room.
_LEASED_SHARE = 0.5


class Addresses:
    """What stands behind the addresses given out since the last step.

    Args:
        spill_dir: Where copies go; None when everything has to fit in memory.
    """

    def __init__(self, spill_dir: Path | None) -> None:
        self._spill_dir = spill_dir
        self._holds: dict[int, _C.Hold] = {}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def keep(self, storage: torch.UntypedStorage, what: str) -> None:
        """Keeps the bytes of a managed storage where they are until ``release``.

        Raises:
            OutOfMemory: There is no room for all that is asked for.
        """
        if storage._cdata in self._holds:
            return
        hold = _C.Hold([storage], is_written=True, what=what)
        budget, leased = _C.host_bytes(), _C.held_bytes()
        if leased > budget * _LEASED_SHARE:
            hold.release()
            raise OutOfMemory(
                f"cannot call {what}: addresses in use would keep {format_bytes(leased)} in "
                f"memory, more than half of the host_memory of {format_bytes(budget)}; to compare "
                "identity use `is` or id(), else raise host_memory, or use "
                "`with patrickstar.resident(tensor):` for a few at a time"
            )
        self._holds[storage._cdata] = hold

    def of_copy(self, storage: torch.UntypedStorage) -> int:
        """The address of the bytes as they are now, on disk: reads are right, writes are lost.

        Raises:
            OSError: The spill folder cannot take the copy.
        """
        if storage._cdata not in self._copies:
            with tempfile.TemporaryFile(dir=self._spill_dir) as file:
                for piece in pieces(_C.flat_view(storage, torch.uint8)):
                    file.write(piece.numpy().data)
                file.flush()
                mapped = mmap.mmap(file.fileno(), storage.nbytes(), flags=mmap.MAP_PRIVATE)
            # The storage is kept as well: no other may get its place while the copy stands for it.
            self._copies[storage._cdata] = storage, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._copies[storage._cdata][1].data_ptr()

    def has_copy_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage has answered with the address of a copy."""
        return storage._cdata in self._copies

    def release(self) -> None:
        """Lets the bytes move again."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()
        self._copies.clear()
