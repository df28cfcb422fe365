# SPDX-License-Identifier: Apache-2.0
"""The data loader of a script that may later run in many processes, or go on in mid-epoch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
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
    _earlier: tuple[_Place, ...] = ()  # the epochs of the workers that live on

    def __iter__(self) -> Any:
        resumed, self._resumed = self._resumed, None
        epoch = _Epoch(self) if resumed is None else self._resume(resumed)
        self._epoch = weakref.ref(epoch)
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """The position: batches given out in this epoch, and the random states at its start.

        Between two epochs, also after a loop was left early, the states of the loader's own
        generators alone. With ``persistent_workers`` also those of the epochs before, since the
        workers' random generators go on from one epoch to the next. For
        ``patrickstar.save_checkpoint``.
        """
        epoch = None if self._epoch is None else self._epoch()
        is_between = epoch is None or epoch.place.is_over
        if is_between and self._resumed is not None:
            return dict(self._resumed)
        places = self._earlier if self._keeps_workers else ()
        if is_between:
            state: dict[str, Any] = {"generators": _generator_states(self)}
        else:
            assert epoch is not None
            places = places[:-1]
            state = epoch.place.state_dict()
        state["earlier"] = [place.state_dict() for place in places]
        return {key: value for key, value in state.items() if value or key == "num_batches"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next loop start at a saved position.

        The batches before it are loaded once more and thrown away; with ``persistent_workers``
        also those of the epochs before.
        """
        self._epoch = None
        self._earlier = ()
        self._iterator = None  # its workers have gone their own way
        self._resumed = state if state else None
        if "random" not in state:
            _set_generators(self, state.get("generators", ()))

    @property
    def _keeps_workers(self) -> bool:
        return self.persistent_workers and self.num_workers > 0

    def _resume(self, state: Mapping[str, Any]) -> _Epoch:
        now = _Place(self).state_dict()
        for place in state.get("earlier", ()):
            epoch = self._replay(place)
            if place["is_over"]:
                next(epoch, None)
        if "random" in state:
            epoch = self._replay(state)
            set_random_state(now["random"])
            return epoch
        self._start_from(now)
        return _Epoch(self)

    def _replay(self, place: Mapping[str, Any]) -> _Epoch:
        """An epoch up to a place; its batches are made again, for what is drawn for them."""
        self._start_from(place)
        epoch = _Epoch(self)
        for _ in range(place["num_batches"]):
            next(epoch)
        return epoch

    def _start_from(self, place: Mapping[str, Any]) -> None:
        set_random_state(place["random"])
        _set_generators(self, place.get("generators", ()))
        for sampler, number in zip(_numbered_samplers(self), place.get("epochs", ()), strict=False):
            sampler.set_epoch(number)


class _Place:
    """A place in an epoch: what the epoch started from, and how far it went."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.num_batches = 0
        self.is_over = False
        self._random = random_state()
        self._generators = _generator_states(loader)
        self._epochs = [sampler.epoch for sampler in _numbered_samplers(loader)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self._random,
            "generators": self._generators,
            "epochs": self._epochs,
            "num_batches": self.num_batches,
            "is_over": self.is_over,
        }


class _Epoch(Iterator[Any]):
    """One pass over a loader, counted."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.place = _Place(loader)
        if loader._keeps_workers:
            loader._earlier = (*loader._earlier, self.place)
        self._batches = super(DataLoader, loader).__iter__()

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self.place.is_over = True
            raise
        self.place.num_batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = (loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _generator_states(loader: DataLoader[Any]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators(loader)]


def _set_generators(loader: DataLoader[Any], states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def _numbered_samplers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers whose order depends on the number of the epoch, as in many processes."""
    batch_sampler = loader.batch_sampler
    found = (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    numbered = [
        sampler
        for sampler in found
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)
    ]
    return list({id(sampler): sampler for sampler in numbered}.values())
