# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: resuming changes no bit, and nothing that fails while saving harms the last one."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import patrickstar
import pytest
import safetensors.torch
import torch
from helpers import evict_everything, managed
from patrickstar.data import DataLoader
from torch import nn

STEPS = 7  # of 4 batches an epoch: a checkpoint may lie in the middle of one


class Model(nn.Module):
    """Dropout, batch statistics, tied and frozen weights, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 16))
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.head(self.norm(self.frozen(self.body(self.embedding(x)))) * self.scale)

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Dataset(torch.utils.data.Dataset[torch.Tensor]):
    """Draws from all three generators for each sample."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = random.randrange(40) + int(numpy.random.randint(40)) + int(torch.randint(40, ()))
        return torch.tensor((index + drawn) % 40)


_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adam fused": lambda groups: torch.optim.Adam(groups, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
}


class Training:
    """A model, its optimizer in two groups, a schedule, a loader; and the losses so far."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        self.model = Model()
        decayed = list(self.model.body.parameters())
        others = [p for p in self.model.parameters() if all(p is not q for q in decayed)]
        groups = [{"params": decayed, "lr": 0.01, "weight_decay": 0.1}, {"params": others}]
        self.optimizer = _OPTIMIZERS[optimizer](groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.loader = DataLoader(Dataset(), batch_size=8, shuffle=True)
        self.losses: list[float] = []

    def objects(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def run(self, num_steps: int, after_step: Callable[[int], None] = lambda step: None) -> None:
        while True:
            for batch in self.loader:
                if len(self.losses) == num_steps:
                    return
                loss = self.model(batch).logsumexp(-1).mean()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                after_step(len(self.losses))
                if len(self.losses) == num_steps:
                    return

    def end(self) -> list[torch.Tensor]:
        """Everything that the next step depends on."""
        states = [self.optimizer.state[p] for g in self.optimizer.param_groups for p in g["params"]]
        return [
            *(
                value.clone()
                for value in self.model.state_dict().values()
                if torch.is_tensor(value)
            ),
            *(v.detach().clone() for s in states for v in s.values() if torch.is_tensor(v)),
            torch.get_rng_state(),
        ]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _save_at(wanted: int, training: Training, folder: Path, step: int) -> None:
    if step == wanted:
        objects = training.objects()
        patrickstar.save_checkpoint(folder, training.model, training.optimizer, **objects)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [2, 4, 5])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    optimizer: str, saved_after: int, tmp_path: Path
) -> None:
    unbroken = Training(optimizer)
    unbroken.run(STEPS)
    with managed("24KiB", stress="evict,poison"):
        first = Training(optimizer)
        first.run(saved_after, functools.partial(_save_at, saved_after, first, tmp_path))
        del first
    for budget in ("40KiB", None):
        with managed(budget, stress="evict,poison") if budget else _unmanaged():
            second = Training(optimizer)
            second.losses = unbroken.losses[:saved_after]
            patrickstar.load_checkpoint(
                tmp_path, second.model, second.optimizer, **second.objects()
            )
            second.run(STEPS)
            assert second.losses == unbroken.losses
            assert _same(second.end(), unbroken.end())
            assert second.model.num_calls == unbroken.model.num_calls


class _unmanaged:  # noqa: N801 - reads like contextlib.nullcontext
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Training, Path]]:
    """A managed training after 3 steps, and its checkpoint."""
    with managed("24KiB", stress="evict,poison"):
        training = Training("adamw")
        training.run(3)
        evict_everything()
        patrickstar.save_checkpoint(tmp_path, training.model, training.optimizer, epoch=1)
        yield training, tmp_path


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_safetensors_reads_the_files(saved: tuple[Training, Path]) -> None:
    training, folder = saved
    [file] = folder.glob("model-*.safetensors")
    state = {k: v for k, v in training.model.state_dict().items() if torch.is_tensor(v)}
    loaded = safetensors.torch.load_file(file)
    assert set(loaded) == set(state) - {"head.weight"}  # tied: stored once
    assert all(torch.equal(loaded[name], state[name].clone()) for name in loaded)


def test_a_new_checkpoint_takes_the_place_of_the_old_one(saved: tuple[Training, Path]) -> None:
    training, folder = saved
    before = set(_files(folder))
    training.run(4)
    patrickstar.save_checkpoint(folder, training.model, training.optimizer, epoch=2)
    after = set(_files(folder))
    assert len(after) == len(before)
    assert after & before == {"index.json"}
    assert patrickstar.load_checkpoint(folder, training.model, training.optimizer) == {"epoch": 2}


class _Failing:
    def state_dict(self) -> dict[str, object]:
        return {"function": lambda: None}


@pytest.mark.parametrize("place", ["model", "optimizer", "index"])
def test_a_failure_while_saving_leaves_the_last_checkpoint_whole(
    saved: tuple[Training, Path], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, folder = saved
    before = _files(folder)
    training.run(5)
    real_open = Path.open

    def failing_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith(place) and "w" in str(args):
            real_open(path, *args, **kwargs).close()
            raise OSError(28, "No space left on device", str(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing_open)
    with pytest.raises(OSError, match="No space left"):
        patrickstar.save_checkpoint(folder, training.model, training.optimizer, epoch=2)
    monkeypatch.undo()
    assert _files(folder) == before


def test_an_interrupt_right_after_the_index_was_replaced_keeps_the_new_checkpoint(
    saved: tuple[Training, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, folder = saved
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        replace(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patrickstar.save_checkpoint(folder, training.model, epoch=2)
    assert patrickstar.load_checkpoint(folder, training.model) == {"epoch": 2}


class CountingModel(nn.Module):
    """Saves and loads in ways of its own; its buffer is another view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("other", torch.randn(3, 3).t())
        self.number = 1
        self._register_state_dict_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].clone()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "number"] = torch.tensor(self.number)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.number = int(state_dict.pop(prefix + "number"))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_model_with_its_own_way_of_saving(tmp_path: Path) -> None:
    saved, loaded = nn.Sequential(CountingModel()), nn.Sequential(CountingModel())
    saved[0].number = 7
    patrickstar.save_checkpoint(tmp_path, saved)
    patrickstar.load_checkpoint(tmp_path, loaded)
    assert loaded[0].number == 7
    assert torch.equal(loaded[0].weight, saved[0].weight)
    assert torch.equal(loaded[0].other, saved[0].other)


def test_views_of_other_strides_are_no_ties(tmp_path: Path) -> None:
    def model(is_tied: bool) -> nn.Module:
        made = nn.Module()
        made.register_buffer("first", torch.randn(3, 3))
        made.register_buffer("second", made.first.t() if is_tied else torch.randn(3, 3))
        return made

    saved, loaded = model(is_tied=True), model(is_tied=False)
    patrickstar.save_checkpoint(tmp_path, saved)
    patrickstar.load_checkpoint(tmp_path, loaded)
    assert torch.equal(loaded.second, saved.second)


def test_an_optimizer_keeps_state_of_no_parameter(tmp_path: Path) -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 2}
    patrickstar.save_checkpoint(tmp_path, layer, optimizer)
    other = torch.optim.SGD(layer.parameters(), lr=0.2)
    patrickstar.load_checkpoint(tmp_path, layer, other)
    assert other.state["global"] == {"count": 2}


def test_a_load_that_is_refused_changes_nothing(saved: tuple[Training, Path]) -> None:
    training, folder = saved
    training.run(4)
    before = training.end()
    one_group = torch.optim.AdamW(training.model.parameters())
    with pytest.raises(patrickstar.InvalidArgument, match="parameter groups"):
        patrickstar.load_checkpoint(folder, training.model, one_group)
    assert _same(training.end(), before)


def test_what_cannot_be_stored_is_named(saved: tuple[Training, Path]) -> None:
    training, folder = saved
    before = _files(folder)
    with pytest.raises(patrickstar.InvalidArgument, match=r"objects\.odd\.function"):
        patrickstar.save_checkpoint(folder, training.model, odd=_Failing())
    assert _files(folder) == before


def test_another_model_optimizer_or_object_is_refused(saved: tuple[Training, Path]) -> None:
    training, folder = saved
    load = patrickstar.load_checkpoint
    with pytest.raises(patrickstar.InvalidArgument, match=r"lacks weight and bias|lacks weight"):
        load(folder, nn.Linear(2, 2))
    other = Model()
    other.frozen = nn.Linear(16, 8)
    with pytest.raises(patrickstar.InvalidArgument, match=r"frozen\.weight.*\(16, 16\).*\(8, 16\)"):
        load(folder, other)
    one_group = torch.optim.AdamW(training.model.parameters())
    with pytest.raises(
        patrickstar.InvalidArgument, match="2 parameter groups were saved, it has 1"
    ):
        load(folder, training.model, one_group)
    with pytest.raises(patrickstar.InvalidArgument, match=r"cannot load loader.*epoch"):
        load(folder, training.model, loader=training.loader)
    with pytest.raises(patrickstar.InvalidArgument, match=r"there is no index\.json"):
        load(folder / "missing", training.model)


def test_a_place_that_was_loaded_can_be_saved_again() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Dataset(), batch_size=8, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = DataLoader(Dataset(), batch_size=8, shuffle=True)
    other.load_state_dict(state)
    third = DataLoader(Dataset(), batch_size=8, shuffle=True)
    third.load_state_dict(other.state_dict())
    assert len(list(third)) == 3  # of 4


def test_a_loop_that_was_left_early_is_over() -> None:
    loader = DataLoader(Dataset(), batch_size=8)
    for _ in loader:
        assert loader.state_dict()["num_batches"] == 1
        break
    assert loader.state_dict() == {}


def test_the_generator_of_a_batch_sampler_is_part_of_the_place() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        sampler = torch.utils.data.RandomSampler(
            range(32), generator=torch.Generator().manual_seed(3)
        )
        batches = torch.utils.data.BatchSampler(sampler, 8, drop_last=False)
        return DataLoader(range(32), batch_sampler=batches)

    first = loader()
    list(first)  # the generator goes on
    iterator = iter(first)
    next(iterator)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert [b.tolist() for b in second] == [b.tolist() for b in iterator]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"mine": true}')
    with pytest.raises(patrickstar.CorruptData, match=r"no checkpoint's"):
        patrickstar.save_checkpoint(tmp_path, nn.Linear(1, 1))
    assert _files(tmp_path) == {"index.json": b'{"mine": true}'}


@pytest.mark.parametrize("damage", ["truncated", "gone", "header", "index"])
def test_a_damaged_checkpoint_is_told_by_its_path(
    saved: tuple[Training, Path], damage: str
) -> None:
    training, folder = saved
    [file] = folder.glob("model-*.safetensors")
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "gone":
        file.unlink()
    elif damage == "header":
        file.write_bytes(b"\xff" * 200)
    else:
        (folder / "index.json").write_text('{"format":')
    with pytest.raises(
        patrickstar.CorruptData, match=r"index\.json" if damage == "index" else file.name
    ):
        patrickstar.load_checkpoint(folder, training.model)


def test_plain_values_of_all_kinds_come_back(tmp_path: Path) -> None:
    values = {
        "number": 1.5,
        "infinite": float("inf"),
        "nested": {"a": [1, (2, 3)], 4: None, ((5, 6), 7): b"seven"},
        "alike": {1: torch.ones(2), "1": torch.zeros(2)},
        "text": "eight",
        "large": -(10**5000),
        "generator": torch.Generator().manual_seed(9),
        "array": numpy.arange(3, dtype=">i4")[::-1],
    }
    model = nn.Linear(1, 1)
    patrickstar.save_checkpoint(tmp_path, model, **values)
    generator = torch.Generator()
    loaded = patrickstar.load_checkpoint(
        tmp_path, model, generator=generator, alike=None, array=None
    )
    assert loaded.pop("array").tolist() == [2, 1, 0]
    alike = loaded.pop("alike")
    assert alike[1].tolist() == [1, 1]
    assert alike["1"].tolist() == [0, 0]
    assert torch.equal(generator.get_state(), values.pop("generator").get_state())
    del values["array"], values["alike"]
    assert loaded == values
    assert "format" in json.loads((tmp_path / "index.json").read_text())
