# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may use and uses, as the kernel tells it.

A control group (version 1 or 2) may allow less than the machine has; every group from the process's
own up to the root counts. All functions read ``/proc`` and the mounted control groups below
``root``, which tests replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class _GroupFiles:
    """The names of one control group version's files."""

    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat that counts file pages the kernel gives back first


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that can still be allocated without swapping or meeting a control group's
    limit."""
    rooms = [max(limit - used, 0) for limit, used in _group_limits(root)]
    return min([_fields(root / "proc/meminfo")["MemAvailable"], *rooms])


def peak_resident_set_bytes() -> int:
    """The most bytes of this process that were in memory at once.

    Read from ``VmHWM``: ``ru_maxrss`` would start from the peak of the process that started this
    one.
    """
    return _fields(Path("/proc/self/status"))["VmHWM"]


def _fields(path: Path) -> dict[str, int]:
    """The ``Name:  123 kB`` lines of a file of /proc, in bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes used that cannot be given back) of every limited group the process is
    in."""
    for folder, files in _group_folders(root):
        limit = _read_count(folder / files.limit)
        used = _read_count(folder / files.usage)
        if limit is not None and used is not None:
            yield limit, max(used - _read_stat(folder / "memory.stat", files.reclaimable), 0)


def _group_folders(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yields the memory control groups of this process, from its own up to the mount point."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = _group_mounts(root)
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if number == "0":
            version, files = "cgroup2", _V2
        elif "memory" in controllers.split(","):
            version, files = "cgroup", _V1
        else:
            continue
        if version not in mounts:
            continue
        mounted_group, mount_point = mounts[version]
        folder = mount_point / _relative_group(group, mounted_group)
        while folder != mount_point:
            yield folder, files
            folder = folder.parent
        yield mount_point, files


def _group_mounts(root: Path) -> dict[str, tuple[str, Path]]:
    """Maps a control group version to (the group mounted, the mount point)."""
    mounts = {}
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        mounted_group, mount_point = mount.split()[3:5]
        kind, _, options = source.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounts[kind] = mounted_group, root / mount_point.lstrip("/")
    return mounts


def _relative_group(group: str, mounted_group: str) -> str:
    """The group's path below the mount point; a container may mount only its own part of the
    tree."""
    if ".." in group.split("/"):
        return ""  # the process sits outside the part it can see
    if mounted_group != "/" and (group + "/").startswith(mounted_group + "/"):
        group = group[len(mounted_group) :]
    return group.strip("/")


def _read_count(path: Path) -> int | None:
    """The number in a control group file; None when there is none or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
