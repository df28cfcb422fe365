# SPDX-License-Identifier: Apache-2.0
"""Objects of a checkpoint: only what is asked for is read, and each in its own way."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patrickstar
import pytest
import torch
from helpers import managed, same
from patrickstar.tensor_file import TensorFile
from torch import nn


class Average:
    """Has a large state, as averaged weights have."""

    def __init__(self, value: float = 0.0) -> None:
        self.weights = torch.full((4,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "number": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def test_an_object_that_is_not_asked_for_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    patrickstar.save_checkpoint(
        tmp_path, model, average=Average(3.0), other=nn.Linear(2, 2), table=torch.ones(3), step=7
    )
    read: list[str] = []
    read_into = TensorFile.read_into

    def noted(file: TensorFile, name: str, target: torch.Tensor) -> None:
        read.append(name)
        read_into(file, name, target)

    monkeypatch.setattr(TensorFile, "read_into", noted)
    assert patrickstar.load_checkpoint(tmp_path, model) == {"step": 7}
    assert not [name for name in read if name.startswith("objects.")]
    average = Average()
    assert patrickstar.load_checkpoint(tmp_path, model, average=average) == {"step": 7}
    assert [name for name in read if name.startswith("objects.")] == ["objects.average.weights"]
    assert average.weights.tolist() == [3.0] * 4
    values = patrickstar.load_checkpoint(tmp_path, model, average=None, table=None, other=None)
    assert values["average"]["number"] == 2
    assert values["table"].tolist() == [1.0] * 3
    assert set(values["other"]) == {"weight", "bias"}


class Adversaries:
    """Two models with an optimizer each."""

    def __init__(self) -> None:
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizers = [
            torch.optim.Adam(self.first.parameters()),
            torch.optim.Adam(self.second.parameters(), lr=0.01),
        ]

    def step(self) -> None:
        self.second(self.first(torch.randn(4, 8))).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def call(self, function: Callable[..., Any], folder: Path) -> None:
        first, second = self.optimizers
        function(folder, self.first, first, critic=self.second, critic_optimizer=second)

    def weights(self) -> list[torch.Tensor]:
        states = [*self.first.state_dict().values(), *self.second.state_dict().values()]
        return [value.detach().clone() for value in states]


def test_a_second_model_and_its_optimizer_resume_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unbroken = Adversaries()
    unbroken.step()
    unbroken.call(patrickstar.save_checkpoint, tmp_path)
    unbroken.step()
    with managed("24KiB", stress="evict,poison"):
        resumed = Adversaries()
        resumed.call(patrickstar.load_checkpoint, tmp_path)
        resumed.step()
        assert all(map(same, resumed.weights(), unbroken.weights()))


def test_an_object_of_another_kind_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    patrickstar.save_checkpoint(
        tmp_path, model, epoch=3, generator=torch.Generator(), average=Average()
    )
    for name, obj in (
        ("epoch", Average()),
        ("generator", Average()),
        ("average", torch.Generator()),
        ("epoch", nn.Linear(1, 1)),
    ):
        with pytest.raises(
            patrickstar.InvalidArgument, match=rf"cannot load {name} from .* into a"
        ):
            patrickstar.load_checkpoint(tmp_path, model, **{name: obj})
    with pytest.raises(patrickstar.InvalidArgument, match="cannot load the other from"):
        patrickstar.save_checkpoint(tmp_path, model, other=nn.Linear(1, 1))
        patrickstar.load_checkpoint(tmp_path, model, other=nn.Bilinear(1, 1, 1, bias=False))


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights beside those of another optimizer, in attributes of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.num_steps = 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.state = inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for parameter, slow in zip(parameters, self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.slow = [slow.clone() for slow in state["slow"]]
        self.num_steps = state["steps"]


class Sharpness(torch.optim.Optimizer):
    """Goes up before it goes down (SAM); a method of its own for loading only."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups, self.state = self.base.param_groups, self.base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=group["rho"])
                self.state[parameter]["before"] = parameter.detach().clone()
        self.base.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups, self.base.state = self.param_groups, self.state


class Wrapped:
    """No subclass of torch's optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.num_steps
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.num_steps, **self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["steps"]
        self.optimizer.load_state_dict({k: v for k, v in state.items() if k != "steps"})


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    """Counts by hooks on its methods."""
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    optimizer.scale = 1.0

    def save(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "scale": optimizer.scale}

    def load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        optimizer.scale = state["scale"]
        return {key: state[key] for key in ("state", "param_groups")}

    def before(*_: Any) -> None:
        optimizer.scale *= 0.5
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * optimizer.scale

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    optimizer.register_step_pre_hook(before)
    return optimizer


_OWN: dict[str, Callable[[Any], Any]] = {
    "lookahead": lambda parameters: Lookahead(torch.optim.Adam(parameters, lr=0.01)),
    "sharpness": Sharpness,
    "no subclass": lambda parameters: Wrapped(torch.optim.Adam(parameters)),
    "hooks": _hooked,
}


def _trained(make: Callable[[Any], Any], num_steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    optimizer = make(model.parameters())
    for _ in range(num_steps):
        _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", _OWN)
@pytest.mark.parametrize("is_managed", [False, True])
def test_an_optimizer_with_its_own_methods_resumes_to_the_bit(
    name: str, is_managed: bool, tmp_path: Path
) -> None:
    unbroken, _ = _trained(_OWN[name], 6)
    model, optimizer = _trained(_OWN[name], 3)
    patrickstar.save_checkpoint(tmp_path, model, optimizer)
    budget = managed("24KiB", stress="evict,poison") if is_managed else contextlib.nullcontext()
    with budget:
        resumed, other = _trained(_OWN[name], 0)
        patrickstar.load_checkpoint(tmp_path, resumed, other)
        for _ in range(3):
            _step(resumed, other)
        for found, wanted in zip(resumed.parameters(), unbroken.parameters(), strict=True):
            assert same(found.detach().clone(), wanted.detach())


def test_a_state_that_an_own_method_refuses_is_told(tmp_path: Path) -> None:
    model, optimizer = _trained(torch.optim.Adam, 1)
    patrickstar.save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(
        patrickstar.InvalidArgument, match=r"Lookahead\.load_state_dict\(\) refused.*'inner'"
    ):
        patrickstar.load_checkpoint(tmp_path, *_trained(_OWN["lookahead"], 0))


def test_parameters_of_no_module_are_saved_with_their_optimizer(tmp_path: Path) -> None:
    def made(value: float) -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, loose = nn.Linear(2, 2), nn.Parameter(torch.full((3,), value))
        return model, loose, torch.optim.SGD([*model.parameters(), loose], lr=0.1)

    saved, _, optimizer = made(4.0)
    patrickstar.save_checkpoint(tmp_path, saved, optimizer)
    model, loose, optimizer = made(0.0)
    patrickstar.load_checkpoint(tmp_path, model, optimizer)
    assert loose.tolist() == [4.0] * 3
    with pytest.raises(patrickstar.InvalidArgument, match="none of its 2 parameters"):
        patrickstar.save_checkpoint(tmp_path, copy.deepcopy(saved), _sgd(saved))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def _compiled_inside(model: nn.Module) -> nn.Module:
    model[1] = torch.compile(model[1], backend="eager")
    return model


@pytest.mark.parametrize("wrap", [_compiled, _compiled_inside, nn.DataParallel])
@pytest.mark.parametrize("is_saved_wrapped", [False, True])
def test_wrappers_leave_no_trace(
    wrap: Callable[[nn.Module], nn.Module], is_saved_wrapped: bool, tmp_path: Path
) -> None:
    def trained(is_wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        optimizer = torch.optim.Adam(inner.parameters())
        inner(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        return (wrap(inner) if is_wrapped else inner), optimizer

    model, optimizer = trained(is_saved_wrapped)
    patrickstar.save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = trained(not is_saved_wrapped)
    patrickstar.load_checkpoint(tmp_path, other, other_optimizer)
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted)
        for key, value in optimizer.state[wanted].items():
            assert torch.equal(other_optimizer.state[found][key], value)


def test_hooks_after_loading_are_called(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    patrickstar.save_checkpoint(tmp_path, model)
    called: list[str] = []
    model.register_load_state_dict_post_hook(lambda *_: called.append("outer"))
    model[0].register_load_state_dict_post_hook(lambda *_: called.append("inner"))
    patrickstar.load_checkpoint(tmp_path, model)
    assert called == ["inner", "outer"]


class Whole(nn.Linear):
    """Loads in a way of its own."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_loaded = True
        return super().load_state_dict(dict(state_dict), *args, **kwargs)


def test_a_model_that_overrides_load_state_dict_is_asked(tmp_path: Path) -> None:
    saved, loaded = Whole(2, 2), Whole(2, 2)
    patrickstar.save_checkpoint(tmp_path, saved)
    patrickstar.load_checkpoint(tmp_path, loaded)
    assert loaded.is_loaded
    assert torch.equal(loaded.weight, saved.weight)
