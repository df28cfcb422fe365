# SPDX-License-Identifier: Apache-2.0
"""Payloads of every length survive the disk, on every file system we meet."""

from __future__ import annotations

import contextlib

import disks
import helpers
import patrickstar
import pytest
import torch

LENGTHS = (1, 511, 513, 4095, 28824000)


@pytest.mark.parametrize("kind", ["here", "loop-mounted ext4", "overlay"])
def test_payloads_of_every_length_come_back_bit_for_bit(kind, tmp_path):
    with contextlib.ExitStack() as stack:
        folder = tmp_path
        if kind == "overlay":
            folder = stack.enter_context(disks.overlay(tmp_path))
        elif kind != "here":
            folder = stack.enter_context(disks.small_disk(tmp_path, "64M"))
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
        assert list(folder.iterdir()) == []
