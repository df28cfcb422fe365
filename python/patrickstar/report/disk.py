# SPDX-License-Identifier: Apache-2.0
"""What kind of file system a folder is on, and how much room it has."""

from __future__ import annotations

import os
from pathlib import Path

from patrickstar.errors import InvalidArgument, IoError

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def free_space(folder: Path) -> int:
    """Bytes an unprivileged writer can still put on the file system of an existing folder."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def is_memory_backed(folder: Path) -> bool:
    """Tells whether files of an existing folder are kept in memory (tmpfs and its relatives).

    False where it cannot be known: without /proc, or without a descriptor left.
    """
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == wanted:
            return source.split()[0] in _MEMORY_FILE_SYSTEMS
    return False


def ready_folder(folder: Path) -> Path:
    """Creates the folder if it is missing, and checks that files on a disk can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidArgument(
            f"spill_dir={folder} is or lies under a file; pass a folder"
        ) from error
    except OSError as error:
        raise IoError(
            f"cannot create spill_dir={folder}: {reason(error)}; pass a folder on a disk that can "
            "be written",
            error.errno,
        ) from error
    if is_memory_backed(folder):
        raise InvalidArgument(
            f"spill_dir={folder} is kept in memory (tmpfs), so spilling there would free nothing; "
            "pass a folder on a disk"
        )
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise IoError(f"spill_dir={folder} cannot be written; pass a folder on a disk that can be")
    return folder.resolve()


def reason(error: OSError) -> str:
    """The operating system's words for a failure, as our messages spell them."""
    return (error.strerror or str(error)).lower()
