# SPDX-License-Identifier: Apache-2.0
"""Models that die, are copied, re-pointed, cast or replaced while they are managed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import helpers
import patrickstar
import pytest
import torch
from torch import nn


def test_memory_is_back_at_the_baseline_when_a_model_dies():
    with helpers.managed("64KiB"):
        for _ in range(3):
            helpers.plain(lambda recorder: helpers.train_stack(recorder, num_steps=1))
            helpers.assert_nothing_left("after a model died")
        survivor = helpers.Stack(2)
        patrickstar.manage(survivor)
        gc.collect()
        level = patrickstar.stats().managed_bytes
        helpers.plain(lambda recorder: helpers.train_stack(recorder, num_steps=1))
        gc.collect()
        patrickstar._C.free_dead_slots()
        assert patrickstar.stats().managed_bytes == level
        del survivor


def test_a_parameter_at_the_address_of_a_dead_one_is_managed_too():
    with helpers.managed(chunk_size="1MiB"):  # so that registration adopts nothing yet
        for _ in range(20):
            nn.Linear(4, 4)
        layers = [nn.Linear(4, 4) for _ in range(20)]
        for layer in layers:
            layer(torch.randn(2, 4))
            assert patrickstar.is_managed(layer.weight)
            assert patrickstar.is_managed(layer.bias)


def test_a_tensor_that_outlives_its_model_keeps_its_bytes():
    with helpers.managed("32KiB"):
        model = helpers.Stack(6)
        patrickstar.manage(model)
        wanted = model.layers[0].weight.detach().clone()
        kept = model.layers[0].weight.detach()[3:9]
        del model
        helpers.evict_everything()
        assert torch.equal(kept, wanted[3:9])
        del kept
        helpers.assert_nothing_left()


def test_a_graph_that_outlives_its_model():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        x = torch.randn(4, 32, requires_grad=True)
        loss = model(x).pow(2).mean()
        del model
        gc.collect()
        helpers.evict_everything()
        loss.backward()
        recorder.note("gradient", x.grad)

    helpers.twin(loop, tight="16KiB")


def change_in_the_middle(change: Callable[[nn.Module], nn.Module | None]) -> helpers.Loop:
    """A loop that trains, changes its model, and trains on with a new optimizer."""

    def loop(recorder: helpers.Recorder) -> None:
        model: nn.Module = helpers.Stack(4)
        for part in ("before", "after"):
            optimizer = helpers.adamw(model)
            for step in range(2):
                dtype = next(model.parameters()).dtype
                loss = model(torch.randn(4, 32).to(dtype)).pow(2).mean()
                recorder.train_step(f"{part} {step}", loss, model, optimizer)
            if part == "before":
                model = change(model) or model
                recorder.note("changed", model)
        recorder.note("end", model)
        if patrickstar._C.is_running():
            assert all(patrickstar.is_managed(p) for p in model.parameters())

    return loop


def repoint(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def load_with_assign(model: nn.Module) -> None:
    model.load_state_dict(
        {k: v.detach().clone() for k, v in model.state_dict().items()}, assign=True
    )


def load_in_place(model: nn.Module) -> None:
    model.load_state_dict(helpers.Stack(4).state_dict())


def edit_by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)
            parameter.data[0] = 0.5
            nn.init.zeros_(parameter[1:2])


@pytest.mark.parametrize(
    "change",
    [
        repoint,
        load_with_assign,
        load_in_place,
        edit_by_hand,
        copy.deepcopy,
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half().float(),
        lambda model: model.to("cpu"),
        lambda model: nn.Sequential(model, nn.Linear(32, 32)),
    ],
    ids=[
        "re-pointed",
        "assigned",
        "loaded",
        "edited",
        "copied",
        "double",
        "bfloat16",
        "half and back",
        "moved",
        "grown",
    ],
)
def test_a_model_changed_in_the_middle_trains_on(change):
    helpers.twin(change_in_the_middle(change))


def test_a_model_whose_type_changes_frees_what_it_had():
    with helpers.managed():
        model = helpers.Stack(4)
        optimizer = helpers.sgd(model)
        model(torch.randn(2, 32)).sum().backward()
        optimizer.step()
        del optimizer
        model.zero_grad()
        gc.collect()
        patrickstar._C.free_dead_slots()
        before = patrickstar.stats().managed_bytes
        model.double()
        model(torch.randn(2, 32, dtype=torch.float64)).sum().backward()
        helpers.sgd(model, lr=0.0).step()
        model.zero_grad()
        gc.collect()
        patrickstar._C.free_dead_slots()
        assert all(patrickstar.is_managed(p) for p in model.parameters())
        assert patrickstar.stats().managed_bytes <= 2 * before + 8 * helpers.CHUNK_BYTES
        del model


def test_a_copy_of_a_managed_model_is_its_own():
    with helpers.managed("32KiB"):
        model = helpers.Stack(4)
        patrickstar.manage(model)
        twin = copy.deepcopy(model)
        shallow = copy.copy(model)
        assert shallow.layers[0].weight is model.layers[0].weight
        wanted = [helpers.as_bytes(p) for p in model.parameters()]
        with torch.no_grad():
            for parameter in twin.parameters():
                assert type(parameter) is nn.Parameter
                parameter.add_(1)
        assert [helpers.as_bytes(p) for p in model.parameters()] == wanted
        assert all(patrickstar.is_managed(p) for p in twin.parameters())
        del model, twin, shallow, parameter


def test_ties_survive_a_copy():
    with helpers.managed():
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        model["b"].weight = model["a"].weight
        patrickstar.manage(model)
        twin = copy.deepcopy(model)
        assert twin["b"].weight is twin["a"].weight
        assert twin["a"].weight is not model["a"].weight


def test_several_models_and_optimizers_at_once():
    def loop(recorder: helpers.Recorder) -> None:
        generator, critic = helpers.Stack(3), helpers.Stack(3)
        optimizers = [
            helpers.adamw(generator),
            helpers.sgd(critic),
            torch.optim.RMSprop([p for p in critic.parameters() if p.dim() == 1], lr=1e-3),
        ]
        for step in range(4):
            noise = torch.randn(4, 32)
            critic_loss = critic(generator(noise).detach()).mean() - critic(noise).mean()
            critic_loss.backward()
            optimizers[1 + step % 2].step()
            critic.zero_grad()
            loss = -critic(generator(noise)).mean()
            loss.backward()
            optimizers[0].step()
            recorder.step(f"step {step}", loss, generator, optimizers[0])
            recorder.step(f"step {step}", critic_loss, critic, optimizers[1])
            generator.zero_grad()
            critic.zero_grad(set_to_none=False)
        recorder.note("end", [generator, critic, *optimizers])

    helpers.twin(loop)


def test_parameters_frozen_and_unfrozen_on_the_way():
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.Sequential(helpers.Stack(3), helpers.Stack(2))
        model[0].requires_grad_(False)
        optimizer = helpers.adamw(model[1])
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            if step == 4:
                model[1].requires_grad_(False)
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            if step == 3:
                model[0].layers[0].weight.grad = None
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop)


def test_types_of_all_kinds_in_one_model():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(
                torch.randint(0, 255, (64, 64), dtype=torch.uint8), requires_grad=False
            )
            self.mask = nn.Parameter(torch.rand(64, 64) < 0.5, requires_grad=False)
            self.index = nn.Parameter(torch.arange(64), requires_grad=False)
            self.scale = nn.Parameter(torch.tensor(0.01, dtype=torch.float64))
            self.low = nn.Linear(64, 64).to(torch.bfloat16)
            self.shift = nn.Parameter(torch.randn(64).half())
            self.adapter = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = (self.base.float() - 127) * self.mask * self.scale.float()
            x = x[:, self.index] @ weight + self.shift.float()
            return torch.tanh(self.adapter(x)) + self.low(x.bfloat16()).float()

    def loop(recorder: helpers.Recorder) -> None:
        model = Mixed()
        helpers.train(recorder, model, width=64)
        for _ in range(10):
            helpers.evict_everything()
            model(torch.randn(2, 64))
        recorder.note("after ten moves", model)

    helpers.twin(loop, tight="80KiB")
