# SPDX-License-Identifier: Apache-2.0
"""Addresses that are in use while their tensors are resized, die or are replaced."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import patrickstar
import pytest
import torch
from helpers import evict_everything, managed
from torch import nn


@pytest.fixture(autouse=True)
def _management() -> Iterator[None]:
    with managed("24KiB", stress="evict,poison"):
        yield


def test_a_held_tensor_that_is_resized_leaves_its_chunk_when_the_hold_ends() -> None:
    tensor = torch.arange(1024.0)
    patrickstar.manage(tensor)
    before = patrickstar.stats().managed_bytes
    with patrickstar.resident(tensor):
        tensor.resize_(2048)
        patrickstar.manage(nn.Linear(4, 4))
        assert tensor[:1024].tolist() == list(range(1024))
    patrickstar.manage(nn.Linear(4, 4))
    gc.collect()
    torch.ones(1) + nn.Linear(4, 4).weight[0, 0].detach()
    assert patrickstar.stats().managed_bytes < before
    assert tensor[:1024].tolist() == list(range(1024))


def test_an_array_outlives_its_tensor() -> None:
    tensor = torch.arange(1024.0)
    patrickstar.manage(tensor)
    array = tensor.numpy()
    del tensor
    gc.collect()
    others = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
    patrickstar.manage(others)
    others[3](torch.ones(1, 32))
    assert array.tolist() == list(range(1024))


def test_a_copy_behind_an_address_is_not_taken_for_that_of_a_later_storage() -> None:
    held = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
    patrickstar.manage(held)
    kept = [layer.weight.untyped_storage().data_ptr() for layer in held]
    assert len(set(kept)) == len(kept)
    for value in range(20):
        tensor = torch.full((1024,), float(value))
        patrickstar.manage(tensor)
        storage = tensor.untyped_storage()
        storage.data_ptr()
        evict_everything()
        seen = patrickstar.session._session._raw_access.addresses._copies[storage._cdata][1]
        assert seen.view(torch.float32).eq(float(value)).all()
        del tensor, storage
