# SPDX-License-Identifier: Apache-2.0
"""MemoryCap: a memory control group, version 1 or 2, that a child process is started in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class MemoryCap:
    """A control group whose processes the kernel kills when they pass `limit_bytes`.

    Raises:
        PermissionError, OSError: Control groups cannot be made here.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._folder, self._limit_file = _new_group()
        (self._folder / self._limit_file).write_text(str(limit_bytes))

    def run(self, command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Runs a command inside the group."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=self._join,
            check=False,
        )

    def popen(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts a command inside the group."""
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=self._join,
        )

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in range(50):  # the kernel lets go of a dead process a little later
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)

    def _join(self) -> None:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))


def can_cap() -> bool:
    """Whether this process may make memory control groups."""
    try:
        with MemoryCap(1 << 30):
            return True
    except OSError:
        return False


def _new_group() -> tuple[Path, str]:
    name = f"patrickstar-{uuid.uuid4().hex[:8]}"
    version_1 = Path("/sys/fs/cgroup/memory")
    if (version_1 / "memory.limit_in_bytes").exists():
        folder = version_1 / name
        folder.mkdir()
        return folder, "memory.limit_in_bytes"
    folder = Path("/sys/fs/cgroup") / name
    folder.mkdir()
    if not (folder / "memory.max").exists():
        folder.rmdir()
        raise OSError("no memory controller for control groups here")
    (folder / "memory.swap.max").write_text("0")
    return folder, "memory.max"
