# SPDX-License-Identifier: Apache-2.0
"""Budgets that cannot be used, and models that do not fit: one clear error, nothing lost."""

from __future__ import annotations

import re

import helpers
import patrickstar
import pytest
import torch
from torch import nn


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_memory": "12 parsecs"}, "host_memory='12 parsecs' .* unknown unit 'parsecs'"),
        ({"host_memory": -5}, "host_memory=-5 .* more than 0 bytes"),
        ({"host_memory": 0}, "host_memory=0 .* more than 0 bytes"),
        ({"host_memory": "-1GiB"}, "host_memory='-1GiB'"),
        ({"host_memory": 1.5}, "host_memory=1.5 .* fraction"),
        ({"host_memory": "1MiB", "disk_space": "lots"}, "disk_space='lots'"),
        ({"host_memory": "1MiB", "disk_space": -1}, "disk_space=-1"),
        ({"host_memory": "1MiB", "chunk_size": "2MiB"}, "chunk_size='2MiB' is 2.0 MiB, more than"),
        ({"config": {"host_memroy": "1MiB"}}, "unknown setting 'host_memroy' .* host_memory"),
    ],
)
def test_settings_that_cannot_be_used_start_nothing(settings, words, tmp_path):
    with pytest.raises(patrickstar.InvalidArgument, match=words):
        patrickstar.init(spill_dir=tmp_path, **settings)
    assert not patrickstar._C.is_running()
    with pytest.raises(patrickstar.Error, match=r"management is off; call patrickstar\.init"):
        patrickstar.stats()
    with helpers.managed():
        helpers.plain(helpers.train_stack)


def test_an_unknown_variable_names_the_nearest(monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_HOST_MEMROY", "1GiB")
    with pytest.raises(patrickstar.InvalidArgument, match="PATRICKSTAR_HOST_MEMORY"):
        patrickstar.init()


def smallest_named(message: str) -> int:
    """The bytes that a message says would do."""
    match = re.search(r"raise host_memory to at least ([\d.]+) (bytes|KiB|MiB)", message)
    assert match is not None, message
    return int(float(match[1]) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}[match[2]])


def test_a_budget_too_small_for_one_op_names_the_smallest_that_does():
    """Repeating with the budget of the message ends at one that works and is the smallest."""
    expected = helpers.plain(lambda recorder: helpers.train_stack(recorder, width=64))
    budget = 8 << 10
    for _ in range(10):
        with helpers.managed(budget):
            try:
                got = helpers.plain(lambda recorder: helpers.train_stack(recorder, width=64))
                break
            except patrickstar.OutOfMemory as error:
                message = str(error)
        assert "operation needs" in message
        larger = smallest_named(message)
        assert larger > budget
        budget = larger
    else:
        pytest.fail(f"still too small at {budget}: {message}")
    helpers.assert_same(got.records, expected.records, f"at {budget}")
    with (
        helpers.managed(budget - 4096),
        pytest.raises(patrickstar.OutOfMemory, match="raise host_memory to at least"),
    ):
        helpers.plain(lambda recorder: helpers.train_stack(recorder, width=64))


def test_out_of_memory_is_what_plain_scripts_catch():
    with helpers.managed("16KiB"):
        weight = nn.Parameter(torch.randn(64, 64))
        for kind in (MemoryError, torch.OutOfMemoryError, RuntimeError):
            with pytest.raises(kind, match=r"of the 16\.0 KiB budget"):
                patrickstar.manage([weight.detach().clone(), torch.randn(128, 64)])
                (weight.detach().clone() @ torch.randn(64, 64)).sum()


def test_without_a_disk_what_fits_trains():
    expected = helpers.plain(helpers.train_stack)
    with helpers.managed(disk_space=0, spill_dir=None):
        got = helpers.plain(helpers.train_stack)
        assert patrickstar.stats().disk_budget_bytes == 0
    helpers.assert_same(got.records, expected.records, "disk_space=0")


def test_without_a_disk_and_without_room_nothing_is_lost():
    with helpers.managed("48KiB", disk_space=0, spill_dir=None):
        kept = [torch.full((32, 32), float(index)) for index in range(12)]  # a page each
        patrickstar.manage(kept)
        words = r"48\.0 KiB budget.*host_memory"
        with pytest.raises(patrickstar.OutOfMemory, match=words) as caught:
            patrickstar.manage(torch.zeros(32, 32))
        assert "disk_space" in str(caught.value) or "spill_dir" in str(caught.value)
        for index, tensor in enumerate(kept):
            assert torch.equal(tensor, torch.full((32, 32), float(index)))
        del kept[-1], tensor
        patrickstar.manage(torch.zeros(32, 32))  # in the room of the one that died


def test_the_peak_never_passes_the_budget():
    with helpers.managed("48KiB") as session:
        for _ in range(3):
            helpers.plain(helpers.train_stack)
        stats = session.stats()
    assert 0 < stats.host_peak_bytes <= stats.host_budget_bytes == 48 << 10
