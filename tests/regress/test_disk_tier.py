# SPDX-License-Identifier: Apache-2.0
"""Payloads of every length survive the disk, on every file system we meet."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import helpers
import patrickstar
import pytest
import torch

LENGTHS = (1, 511, 513, 4095, 28824000)


@contextlib.contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    """Mounts something for the block; skips the test where this process may not."""
    point.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@contextlib.contextmanager
def file_system(kind: str, folder: Path) -> Iterator[Path]:
    """A spill folder on a file system of some kind."""
    if kind == "here":
        yield folder
    elif kind == "loop-mounted ext4":
        with small_disk(folder, "64M") as disk:
            yield disk
    else:
        for name in ("lower", "upper", "work"):
            (folder / name).mkdir()
        options = ",".join(
            f"{option}={folder / name}"
            for option, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work"))
        )
        with mounted(folder / "overlay", "-t", "overlay", "overlay", "-o", options) as disk:
            yield disk


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A loop-mounted ext4 of that size."""
    image = folder / "image"
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    with mounted(folder / "disk", "-o", "loop", str(image)) as disk:
        yield disk


@pytest.mark.parametrize("kind", ["here", "loop-mounted ext4", "overlay"])
def test_payloads_of_every_length_come_back_bit_for_bit(kind, tmp_path):
    with file_system(kind, tmp_path) as folder:
        generator = torch.Generator().manual_seed(7)
        wanted = [
            torch.randint(256, (length,), dtype=torch.uint8, generator=generator)
            for length in LENGTHS
        ]
        with helpers.managed("64MiB", spill_dir=folder):
            tensors = [tensor.clone() for tensor in wanted]
            patrickstar.manage(tensors)
            for _ in range(3):
                helpers.evict_everything()
                assert patrickstar.stats().host_resident_bytes == 0
                for tensor, expected in zip(tensors, wanted, strict=True):
                    assert torch.equal(tensor, expected)
                tensors[0].bitwise_xor_(85)  # written again, so that it is spilled again
                wanted[0] = wanted[0] ^ 85
            stats = patrickstar.stats()
            # Whole pages: 1, 1, 1, 1 and 7038 of them, and the first once more in each round.
            assert stats.spilled_bytes == (4 + 7038 + 2) * 4096
            assert stats.read_bytes == 3 * (4 + 7038) * 4096
        assert list(folder.glob("*")) in ([], [folder / "lost+found"]) or kind == "overlay"
