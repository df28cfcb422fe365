# SPDX-License-Identifier: Apache-2.0
"""The place of a data loader: after load_state_dict the batches that would have come."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from patrickstar.data import DataLoader
from patrickstar.random_state import random_state, set_random_state
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset

Batches = list[list[float]]


class Drawing(Dataset[torch.Tensor]):
    """Draws from all three generators, more for later samples; in a worker it counts as well."""

    num_samples = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_samples += torch.utils.data.get_worker_info() is not None
        drawn = random.random() + float(numpy.random.rand()) + float(torch.rand(index + 1).sum())
        return torch.tensor(index + drawn + 100 * self.num_samples, dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(9):
            yield torch.rand(())


def _in_many_processes(**options: Any) -> DataLoader[torch.Tensor]:
    sampler: Any = DistributedSampler(Drawing(), num_replicas=2, rank=1, shuffle=True)
    return DataLoader(Drawing(), batch_size=3, sampler=sampler, **options)


_LOADERS: dict[str, Callable[..., DataLoader[torch.Tensor]]] = {
    "shuffled": lambda **options: DataLoader(Drawing(), batch_size=4, shuffle=True, **options),
    "own generator": lambda **options: DataLoader(
        Drawing(),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        **options,
    ),
    "batch sampler": lambda **options: DataLoader(
        Drawing(),
        batch_sampler=BatchSampler(torch.utils.data.RandomSampler(range(24)), 5, drop_last=False),
        **options,
    ),
    "stream": lambda **options: DataLoader(Stream(), batch_size=4, **options),
    "many processes": _in_many_processes,
}


def _seeded(name: str, workers: str) -> DataLoader[torch.Tensor]:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    options: dict[str, Any] = {"num_workers": 0 if workers == "none" else 2}
    if workers == "persistent":
        options["persistent_workers"] = True
    return _LOADERS[name](**options)


def _run(
    loader: DataLoader[torch.Tensor],
    first: tuple[int, int],
    after_batch: Callable[[int, int], None] = lambda epoch, position: None,
) -> Batches:
    """Four epochs from a place on, the second left after two batches; a loop that draws itself."""
    batches: Batches = []
    for epoch in range(first[0], 4):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        position = first[1] if epoch == first[0] else 0
        for batch in loader:
            batches.append(batch.tolist())
            torch.rand(3)
            after_batch(epoch, position)
            if (epoch, position) == (1, 1):
                break
            position += 1
        after_batch(epoch, -1)
    return batches


@pytest.mark.parametrize("place", [(0, -1), (1, -1), (2, 2)])
@pytest.mark.parametrize("workers", ["none", "new", "persistent"])
@pytest.mark.parametrize("name", _LOADERS)
def test_the_batches_after_a_place_are_those_of_an_unbroken_run(
    name: str, workers: str, place: tuple[int, int]
) -> None:
    state: dict[str, Any] = {}

    def save(*now: int) -> None:
        if now == place:
            state.update(copy.deepcopy(loader.state_dict()), now=random_state())

    loader = _seeded(name, workers)
    unbroken = _run(loader, (0, 0), save)
    set_now = state.pop("now")
    second = _seeded(name, workers)
    second.load_state_dict(state)
    set_random_state(set_now)
    epoch, position = place
    rest = _run(second, (epoch + 1, 0) if position < 0 else (epoch, position + 1))
    assert len(rest) > 2
    assert rest == unbroken[-len(rest) :]


def test_a_loader_whose_workers_run_can_go_back() -> None:
    loader = _seeded("shuffled", "persistent")
    iterator = iter(loader)
    next(iterator)
    state, now = copy.deepcopy(loader.state_dict()), random_state()
    wanted = [batch.tolist() for batch in iterator]
    for _ in range(2):
        loader.load_state_dict(state)
        set_random_state(now)
        assert [batch.tolist() for batch in loader] == wanted
