# SPDX-License-Identifier: Apache-2.0
"""Few open files, no locked memory, little address space."""

from __future__ import annotations

import re

import helpers
import pytest

TRAIN = """
    import resource, sys, helpers, patrickstar
    expected = helpers.plain(helpers.train_stack).records
    for kind, value in zip(sys.argv[2::2], map(int, sys.argv[3::2])):
        if kind == "RLIMIT_AS":  # beside what torch has mapped by now
            value += int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(getattr(resource, kind), (value, value))
    with helpers.managed("48KiB", spill_dir=sys.argv[1]):
        got = helpers.plain(helpers.train_stack).records
        assert patrickstar.stats().spilled_bytes > 0
    helpers.assert_same(got, expected, "under limits")
    print("the same numbers")
"""

# Threads of the disk tier map a stack each; the rest is torch's own appetite.
_ADDRESS_SPACE = 512 << 20


LIMITS = {"RLIMIT_NOFILE": 24, "RLIMIT_MEMLOCK": 0, "RLIMIT_AS": _ADDRESS_SPACE}


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(list(LIMITS), id="all"),
        *(pytest.param([kind], marks=pytest.mark.full, id=kind) for kind in LIMITS),
    ],
)
def test_training_under_low_limits(kinds, tmp_path):
    arguments = [word for kind in kinds for word in (kind, str(LIMITS[kind]))]
    done = helpers.run_script(TRAIN, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "the same numbers" in done.stdout
    assert list(tmp_path.iterdir()) == []


REFUSED = """
    import resource, sys, patrickstar, torch
    kind, value = sys.argv[2], int(sys.argv[3])
    if kind == "RLIMIT_AS":
        value += int(open("/proc/self/statm").read().split()[0]) * 4096
    if kind == "RLIMIT_NOFILE":
        import os
        value += len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(getattr(resource, kind), (value, value))
    try:
        patrickstar.init(host_memory="4GiB", spill_dir=sys.argv[1], chunk_size="64MiB")
        patrickstar.manage(torch.empty(1 << 20))
        tensors = []
        for _ in range(64):
            tensors.append(torch.empty(1 << 20))
            patrickstar.manage(tensors[-1])
    except patrickstar.Error as error:
        print(type(error).__name__, error)
    except (RuntimeError, MemoryError) as error:
        print("torch", error)
    else:
        print("nothing was refused")
"""


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("RLIMIT_NOFILE", 0, "IoError cannot .*Too many open files"),
        (
            "RLIMIT_AS",
            96 << 20,
            "(OutOfMemory cannot map .*ulimit -v|torch .*memory|IoError cannot start a thread)",
        ),
    ],
)
def test_a_limit_that_leaves_nothing_is_one_clear_error(kind, value, words, tmp_path):
    done = helpers.run_script(REFUSED, tmp_path, kind, str(value))
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout
    assert list(tmp_path.iterdir()) == []
