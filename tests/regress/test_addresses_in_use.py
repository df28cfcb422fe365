# SPDX-License-Identifier: Apache-2.0
"""Addresses that are in use while their tensors are resized, die or are replaced."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import patrickstar
import pytest
import torch
from helpers import evict_everything, managed
from patrickstar import _C
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


def test_asking_for_an_address_does_not_look_at_every_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(1024.0)
    patrickstar.manage(tensor)

    def all_chunks() -> None:
        raise AssertionError("stats() walks over all chunks")

    monkeypatch.setattr(_C, "stats", all_chunks)
    assert tensor.data_ptr() % 64 == 0
    monkeypatch.undo()
    assert patrickstar.stats().num_leases == 1


def _send(tensor: torch.Tensor) -> None:
    ForkingPickler.dumps(tensor)  # what a queue of torch.multiprocessing does


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda tensor: tensor.share_memory_(), "call share_memory_() of"),
        (_send, "send to another process"),
        (patrickstar.unmanage, "unmanage"),
    ],
    ids=["share_memory_", "send", "unmanage"],
)
def test_what_cannot_be_done_is_named_as_the_user_called_it(
    call: Callable[[torch.Tensor], object], what: str
) -> None:
    layer = nn.Linear(4, 4)
    patrickstar.manage(layer)
    tensor = layer.weight.detach()
    with (
        patrickstar.resident(layer.bias),
        pytest.raises(patrickstar.Unsupported, match=f"cannot {re.escape(what)} 'weight': "),
    ):
        call(tensor)
    call(tensor)
    assert not patrickstar.is_managed(layer.weight)


def test_a_storage_that_cannot_be_resized_is_named() -> None:
    layer = nn.Linear(4, 4)
    patrickstar.manage(layer)
    storage = layer.weight.untyped_storage()
    with pytest.raises(
        patrickstar.Unsupported, match=r"storage of managed tensor 'weight' 1\.0 KiB"
    ):
        storage.resize_(1024)
    with pytest.raises(patrickstar.Unsupported, match="'weight'"):
        layer.weight._typed_storage().resize_(0)
    assert storage.resize_(64) is storage
    assert layer.weight.numel() == 16


def test_storages_are_compared_without_their_bytes() -> None:
    layer = nn.Linear(32, 32)
    patrickstar.manage(layer)
    evict_everything()
    is_alias_of, is_copy_on_write = torch._C._is_alias_of, torch._C._is_cow_tensor
    weight, row = layer.weight, layer.weight.detach()[3]
    assert is_alias_of(weight, row) and is_alias_of(row, weight)
    assert not is_alias_of(weight, layer.bias)
    assert not is_alias_of(weight, torch.zeros(1)) and not is_alias_of(torch.zeros(1), weight)
    plain = torch.zeros(4)
    assert is_alias_of(plain, plain[1:]) and not is_alias_of(plain, torch.zeros(4))
    assert not is_copy_on_write(weight)
    assert is_copy_on_write(torch.zeros(4)._lazy_clone())


def test_ids_of_dead_groups_are_used_again() -> None:
    groups = set()
    for _ in range(50):
        tensor = torch.zeros(16)
        patrickstar.manage(tensor)
        groups.add(_C.group_of(tensor))
        del tensor
        _C.free_dead_slots()
    assert len(groups) == 1
