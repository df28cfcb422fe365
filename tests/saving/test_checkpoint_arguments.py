# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint cannot take is refused by one clear error, before anything is written."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import patrickstar
import pytest
import safetensors.torch
import torch
from torch import nn

_MODEL = nn.Linear(2, 2)
_OPTIMIZER = torch.optim.SGD(_MODEL.parameters(), lr=0.1)
_SCHEDULER = torch.optim.lr_scheduler.StepLR(_OPTIMIZER, 1)

_WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "no path": ((None, _MODEL), "NoneType as the path"),
    "number": ((3, _MODEL), "int as the path"),
    "bytes": ((b"folder", _MODEL), "bytes as the path"),
    "empty": (("", _MODEL), "path='' is no folder's name"),
    "null": (("a\0b", _MODEL), "is no folder's name"),
    "path and model": ((_MODEL, "folder"), "Linear as the path"),
    "no model": (("folder", None), "NoneType as the model"),
    "state": (("folder", _MODEL.state_dict()), "OrderedDict as the model"),
    "class": (("folder", nn.Linear), "the class Linear as the model"),
    "list": (("folder", [_MODEL]), "list as the model"),
    "swapped": (("folder", _OPTIMIZER, _MODEL), "SGD as the model"),
    "two models": (("folder", _MODEL, _MODEL), "Linear as the optimizer"),
    "scheduler": (("folder", _MODEL, _SCHEDULER), "StepLR as the optimizer"),
    "optimizer class": (("folder", _MODEL, torch.optim.SGD), "the class SGD as the optimizer"),
    "optimizer state": (("folder", _MODEL, _OPTIMIZER.state_dict()), "dict as the optimizer"),
    "another": (
        ("folder", nn.Linear(2, 2), _OPTIMIZER),
        "SGD with this model: none of its 2 parameters",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_wrong_argument_is_named(
    name: str, is_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = _WRONG[name]
    call = patrickstar.load_checkpoint
    if is_saved:
        call = patrickstar.save_checkpoint
    elif name == "another":
        patrickstar.save_checkpoint("folder", _MODEL, _OPTIMIZER)
    with pytest.raises(patrickstar.InvalidArgument) as caught:
        call(*arguments)
    assert expected in str(caught.value)
    assert is_saved is False or not list(tmp_path.iterdir())


class Color(enum.IntEnum):
    RED = 3


def test_odd_names_come_back(tmp_path: Path) -> None:
    names = ["__metadata__", "", "tensor", '"', "a\nb", "\0", "ä", "\U0001f600", "a" * 5000]

    def made(value: float) -> nn.Module:
        model = nn.Module()
        for number, name in enumerate(filter(None, names)):
            model._buffers[name] = torch.full((2,), value + number)
        return model

    saved, loaded = made(1.0), made(-50.0)
    table = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    objects = {"__metadata__": torch.ones(1), "odd name": 3, "table": table}
    patrickstar.save_checkpoint(tmp_path, saved, **objects)
    values = patrickstar.load_checkpoint(tmp_path, loaded, table=None, __metadata__=None)
    for name, buffer in saved._buffers.items():
        assert torch.equal(loaded._buffers[name], buffer)
    assert values["odd name"] == 3
    assert values["__metadata__"].tolist() == [1.0]
    assert {name: value.item() for name, value in values["table"].items()} == {
        name: value.item() for name, value in table.items()
    }
    for file in tmp_path.glob("*.safetensors"):
        assert safetensors.torch.load_file(file)


def test_odd_values_come_back(tmp_path: Path) -> None:
    values = {
        "red": Color.RED,
        "large": 10**6000,
        "zero": -0.0,
        "tiny": 5e-324,
        "kinds": {"tensor": 1, "mapping": {"tuple": ()}, "": [{}]},
        "text": "\0\ud7ff\U0010ffff",
        "odd": {(): 1, (1, ("a", None)): 2, 1.5: 3, True: 4},
    }
    patrickstar.save_checkpoint(tmp_path, _MODEL, **values)
    found = patrickstar.load_checkpoint(tmp_path, _MODEL)
    assert found == values
    assert str(found["zero"]) == "-0.0"


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _deep(make: Any) -> Any:
    value: Any = 1
    for _ in range(100_000):
        value = make(value)
    return value


_UNSTORABLE: dict[str, tuple[Any, str]] = {
    "surrogate": ("a\udc80", r"objects\.odd"),
    "surrogate key": ({"\ud800": 1}, r"a key of objects\.odd"),
    "surrogate in a tuple": ({("\ud800",): 1}, r"a key of objects\.odd"),
    "surrogate of a tensor": ({"\ud800": torch.ones(2)}, r"a key of objects\.odd"),
    "tensor key": ({(torch.ones(1),): 1}, r"objects\.odd"),
    "large key": ({10**6000: 1}, r"objects\.odd"),
    "endless": (_endless(), "contains itself"),
    "deep": (_deep(lambda value: [value]), "nested too deeply"),
    "deep dict": (_deep(lambda value: {"a": value}), "nested too deeply"),
    "set": ({1, 2}, r"objects\.odd"),
    "complex": (1j, r"objects\.odd"),
    "function": (len, r"objects\.odd"),
    "sparse": (torch.eye(3).to_sparse(), r"objects\.odd"),
    "meta": (torch.ones(2, device="meta"), r"objects\.odd"),
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"objects\.odd"),
    "quantized": (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), r"objects\.odd"),
}


@pytest.mark.parametrize("name", _UNSTORABLE)
def test_what_cannot_be_stored_is_told_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    value, expected = _UNSTORABLE[name]
    with pytest.raises(patrickstar.InvalidArgument, match=expected):
        patrickstar.save_checkpoint(folder, _MODEL, odd=value)
    assert not folder.exists()


def test_odd_names_of_objects_and_parameters_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(patrickstar.InvalidArgument, match="surrogate"):
        patrickstar.save_checkpoint(folder, _MODEL, **{"a\udc80": 1})
    model = nn.Module()
    model.register_parameter("a\udc80", nn.Parameter(torch.ones(1)))
    with pytest.raises(patrickstar.InvalidArgument, match="surrogate"):
        patrickstar.save_checkpoint(folder, model)
    with pytest.raises(patrickstar.InvalidArgument, match=r"'weight': it has no shape yet"):
        patrickstar.save_checkpoint(folder, nn.LazyLinear(3))
    assert not folder.exists()


def test_a_lazy_model_takes_its_shapes_from_a_checkpoint(tmp_path: Path) -> None:
    patrickstar.save_checkpoint(tmp_path, _MODEL)
    lazy = nn.LazyLinear(2)
    patrickstar.load_checkpoint(tmp_path, lazy)
    assert torch.equal(lazy.weight, _MODEL.weight)
