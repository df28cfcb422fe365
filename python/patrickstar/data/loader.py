# SPDX-License-Identifier: Apache-2.0
"""The data loader of a script that may later run in many processes, or go on in mid-epoch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch.utils.data

from patrickstar.random_state import random_state, set_random_state

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Loads batches exactly as ``torch.utils.data.DataLoader`` does, with its signature.

    Use this name in a script instead of torch's: in one process the two give the same batches for
    the same seed. ``state_dict()`` says where in an epoch the loop is; after ``load_state_dict()``
    the next loop over the loader starts there, with the batches that would have come.

    Args:
        *args, **kwargs: Those of ``torch.utils.data.DataLoader``.

    Example:
        >>> from patrickstar.data import DataLoader
        >>> [batch.tolist() for batch in DataLoader(range(4), batch_size=2)]
        [[0, 1], [2, 3]]
    """

    _epoch: weakref.ref[_Epoch] | None = None  # the latest; dead when its loop was left
    _resumed: Mapping[str, Any] | None = None

    def __iter__(self) -> Any:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            epoch = _Epoch(self)
        else:
            now = random_state()
            set_random_state(resumed["random"])
            for generator, state in zip(_generators(self), resumed["generators"], strict=False):
                generator.set_state(state)
            epoch = _Epoch(self)
            for _ in range(resumed["num_batches"]):  # again, for what is drawn for them
                next(epoch)
            set_random_state(now)
        self._epoch = weakref.ref(epoch)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """The position: batches given out in this epoch, and the random states at its start.

        Empty between two epochs, also after a loop was left early. For
        ``patrickstar.save_checkpoint``.
        """
        epoch = None if self._epoch is None else self._epoch()
        if epoch is not None and not epoch.is_over:
            return epoch.state_dict()
        return {} if self._resumed is None else dict(self._resumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next loop start at a saved position.

        The batches before it are loaded once more and thrown away.
        """
        self._epoch = None
        self._resumed = state if state else None


class _Epoch(Iterator[Any]):
    """One pass over a loader, counted."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.is_over = False
        self._random = random_state()
        self._generators = [generator.get_state() for generator in _generators(loader)]
        self._num_batches = 0
        self._batches = super(DataLoader, loader).__iter__()

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.is_over = True
            raise
        self._num_batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self._random,
            "generators": self._generators,
            "num_batches": self._num_batches,
        }


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = (loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
