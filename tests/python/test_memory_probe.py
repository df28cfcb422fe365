# SPDX-License-Identifier: Apache-2.0
"""Available memory as control groups of both versions allow it, on made-up /proc and /sys trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patrickstar.report import memory

GIB = 1 << 30
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
V2_MOUNTS = "41 31 0:38 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n"


class Machine:
    """A root folder with 16 GiB of memory, 12 GiB of it available."""

    def __init__(self, root: Path, *, groups: str, mounts: str) -> None:
        self.root = root
        self.put("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\nHuge: 0\n")
        self.put("proc/self/cgroup", groups)
        self.put("proc/self/mountinfo", mounts)

    def put(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def limit_v1(self, folder: str, limit: int, usage: int, inactive: int = 0) -> None:
        self.put(f"{folder}/memory.limit_in_bytes", limit)
        self.put(f"{folder}/memory.usage_in_bytes", usage)
        self.put(f"{folder}/memory.stat", f"cache 1\ntotal_inactive_file {inactive}")

    def limit_v2(self, folder: str, limit: int | str, usage: int, inactive: int = 0) -> None:
        self.put(f"{folder}/memory.max", limit)
        self.put(f"{folder}/memory.current", usage)
        self.put(f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}")

    def available(self) -> int:
        return memory.available_memory(self.root)


@pytest.fixture
def v1(tmp_path):
    return Machine(tmp_path, groups="5:devices:/\n4:memory:/job/task\n0::/\n", mounts=V1_MOUNTS)


@pytest.fixture
def v2(tmp_path):
    return Machine(tmp_path, groups="0::/job/task\n", mounts=V2_MOUNTS)


def test_without_limits_the_machine_decides(v1):
    v1.limit_v1("sys/fs/cgroup/memory", 9223372036854771712, GIB)
    assert v1.available() == 12 * GIB


def test_v1_limit_less_usage_with_file_pages_counted_as_free(v1):
    v1.limit_v1("sys/fs/cgroup/memory/job/task", 4 * GIB, 3 * GIB, inactive=GIB)
    assert v1.available() == 2 * GIB


def test_v2_limit_less_usage_with_file_pages_counted_as_free(v2):
    v2.limit_v2("sys/fs/cgroup/job/task", 4 * GIB, 3 * GIB, inactive=GIB)
    assert v2.available() == 2 * GIB


def test_limit_of_an_enclosing_group_counts(v2):
    v2.limit_v2("sys/fs/cgroup/job/task", "max", GIB)
    v2.limit_v2("sys/fs/cgroup/job", 2 * GIB, GIB)
    assert v2.available() == GIB


def test_group_over_its_limit_has_nothing_available(v2):
    v2.limit_v2("sys/fs/cgroup/job/task", GIB, 2 * GIB)
    assert v2.available() == 0


def test_container_that_mounts_only_its_own_group(tmp_path):
    mounts = "41 31 0:38 /job /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    container = Machine(tmp_path, groups="0::/job/task\n", mounts=mounts)
    container.limit_v2("sys/fs/cgroup/task", 3 * GIB, GIB)
    assert container.available() == 2 * GIB


def test_process_outside_the_mounted_part_uses_the_mount_point(tmp_path):
    outside = Machine(tmp_path, groups="0::/../other\n", mounts=V2_MOUNTS)
    outside.limit_v2("sys/fs/cgroup", 3 * GIB, GIB)
    outside.limit_v2("sys/fs/other", GIB, GIB)
    assert outside.available() == 2 * GIB


def test_both_versions_mounted_take_the_tighter(tmp_path):
    hybrid = Machine(tmp_path, groups="4:memory:/job\n0::/job\n", mounts=V1_MOUNTS + V2_MOUNTS)
    hybrid.limit_v1("sys/fs/cgroup/memory/job", 4 * GIB, GIB)
    hybrid.limit_v2("sys/fs/cgroup/job", 5 * GIB, 3 * GIB)
    assert hybrid.available() == 2 * GIB


def test_this_machine_answers():
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_memory() <= whole


def test_the_peak_remembers_memory_that_was_given_back():
    program = """
from patrickstar.report.memory import peak_resident_set_bytes
size = 64 << 20
before = peak_resident_set_bytes()
block = bytearray(b"x") * size
grown = peak_resident_set_bytes()
del block
print(before, grown, peak_resident_set_bytes(), size)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    before, grown, after, size = map(int, answer.stdout.split())
    slack = 4 << 20  # the kernel counts pages in batches per thread
    assert grown >= before + size - slack
    assert after >= grown - slack
