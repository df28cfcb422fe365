# SPDX-License-Identifier: Apache-2.0
"""Folders on file systems that tests make: small ones, read-only ones, other kinds."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    """Mounts something for the block; skips the test where this process may not."""
    point.mkdir(parents=True, exist_ok=True)
    command = ["mount", *arguments, str(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A loop-mounted ext4 of that size."""
    image = folder / "image"
    subprocess.run(["truncate", "-s", size, str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    with mounted(folder / "disk", "-o", "loop", str(image)) as disk:
        (disk / "lost+found").rmdir()
        yield disk


@contextlib.contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """An overlay file system, as containers have."""
    layers = {"lowerdir": "lower", "upperdir": "upper", "workdir": "work"}
    for name in layers.values():
        (folder / name).mkdir()
    options = ",".join(f"{option}={folder / name}" for option, name in layers.items())
    with mounted(folder / "merged", "-t", "overlay", "overlay", "-o", options) as disk:
        yield disk


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder again, mounted so that nobody can write, root included."""
    with mounted(folder.with_name(folder.name + "-read-only"), "--bind", str(folder)) as point:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(point)], check=True)
        yield point
