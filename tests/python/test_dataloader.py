# SPDX-License-Identifier: Apache-2.0
"""patrickstar.data.DataLoader gives what torch's gives."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.utils.data
from patrickstar.data import DataLoader
from torch.utils.data import BatchSampler, IterableDataset, SubsetRandomSampler, TensorDataset


class Countdown(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first = 0 if worker is None else worker.id
        step = 1 if worker is None else worker.num_workers
        return iter(range(first, 11, step))


def pairs():
    return TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11))


def batch_sampler():
    generator = torch.Generator().manual_seed(3)
    return BatchSampler(SubsetRandomSampler(range(11), generator), batch_size=4, drop_last=True)


CASES = {
    "shuffle": lambda: (pairs(), {"batch_size": 4, "shuffle": True}),
    "own generator": lambda: (
        pairs(),
        {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(9)},
    ),
    "drop last": lambda: (pairs(), {"batch_size": 4, "drop_last": True}),
    "batch sampler": lambda: (pairs(), {"batch_sampler": batch_sampler()}),
    "iterable": lambda: (Countdown(), {"batch_size": 3}),
    "no batches": lambda: (pairs(), {"batch_size": None}),
}


def batches(kind, make, num_workers):
    torch.manual_seed(5)
    dataset, options = make()
    loader = kind(dataset, num_workers=num_workers, **options)
    return list(loader) + list(loader)  # two epochs: the second has another order


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_torch(case, num_workers):
    ours = batches(DataLoader, CASES[case], num_workers)
    torchs = batches(torch.utils.data.DataLoader, CASES[case], num_workers)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    assert len(ours) > 2


def test_signature_and_type_are_torchs():
    expected = inspect.signature(torch.utils.data.DataLoader.__init__)
    assert inspect.signature(DataLoader.__init__) == expected
    assert isinstance(DataLoader(pairs()), torch.utils.data.DataLoader)
    assert len(DataLoader(pairs(), 4)) == 3
