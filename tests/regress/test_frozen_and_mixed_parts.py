# SPDX-License-Identifier: Apache-2.0
"""Models that are partly frozen, adapted, unfrozen on the way, or of several dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import helpers
import patrickstar
import pytest
import torch
from torch import nn


def half_frozen() -> nn.Module:
    model = helpers.Stack(6)
    model.layers[:3].requires_grad_(False)
    return model


@pytest.mark.parametrize("stress", ["", "evict,poison"])
@pytest.mark.parametrize("who", ["all", "trainable"])
def test_half_of_a_model_is_frozen_before_init(who, stress):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(helpers.SEED)
        model = half_frozen()
        parameters = [p for p in model.parameters() if who == "all" or p.requires_grad]
        return model, helpers.adamw(parameters)

    expected, got = helpers.Recorder(), helpers.Recorder()
    helpers.train(expected, *build(), num_steps=4)
    model, optimizer = build()
    with helpers.managed("32KiB", stress=stress):
        helpers.train(got, model, optimizer, num_steps=4)
        assert all(patrickstar.is_managed(p) for p in model.parameters())
        assert patrickstar.stats().num_evictions > 0
        # Twelve parameters, a page each; a gradient's place and two moments of the six that train.
        assert patrickstar.stats().managed_bytes == (12 + 3 * 6) * 4096
    helpers.assert_same(got.records, expected.records, f"{who}, stress={stress!r}")


class Adapted(nn.Module):
    """A frozen weight, a trainable low-rank pair and a trainable bias in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.base.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(32, 4) * 0.1)
        self.up = nn.Parameter(torch.zeros(4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down @ self.up)


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_adapter_inside_each_layer(is_merged):
    """Merging adds the pair to the frozen weight in place, and takes it off again."""

    def loop(recorder: helpers.Recorder) -> None:
        model = nn.Sequential(*[Adapted() for _ in range(5)])
        optimizer = helpers.adamw(p for p in model.parameters() if p.requires_grad)
        for step in range(4):
            loss = (model(torch.randn(4, 32)) - 0.5).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
            if is_merged and step == 1:
                with torch.no_grad():
                    for layer in model:
                        layer.base.weight += (layer.down @ layer.up).t()
                        recorder.note("merged", layer.base(torch.ones(1, 32)))
                        layer.base.weight.data -= (layer.down @ layer.up).t()
        recorder.note("end", model)

    helpers.twin(loop, tight="24KiB")


def unfreeze_now(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        model.layers[:3].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[:3].parameters()), "lr": 0.02})


def freeze_now(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        model.layers[3:].requires_grad_(False)  # with gradients and moments still there
        model.layers[:3].requires_grad_(True)


def alternate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index % 2 == step % 2)


def unfreeze_weight_by_weight(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    model.layers[step % 6].weight.requires_grad_(True)
    model.layers[(step + 1) % 6].bias.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [unfreeze_now, freeze_now, alternate, unfreeze_weight_by_weight],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize(
    "is_cleared",
    [pytest.param(True, id="cleared"), pytest.param(False, id="kept", marks=pytest.mark.full)],
)
def test_what_is_trained_changes_on_the_way(
    change: Callable[[nn.Module, torch.optim.Optimizer, int], None], is_cleared
):
    def loop(recorder: helpers.Recorder) -> None:
        model = half_frozen()
        optimizer = helpers.adamw(
            p for p in model.parameters() if change is not unfreeze_now or p.requires_grad
        )
        for step in range(7):
            change(model, optimizer, step)
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            if step % 3 == 1:  # for some weights only
                model.layers[4].weight.grad = None
                model.layers[0].bias.grad = None
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=is_cleared)
        recorder.note("end", model)

    helpers.twin(loop)


class ManyTypes(nn.Module):
    """Layers in bf16 and fp16, norms in fp32 and a scalar in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.low = nn.Linear(32, 32).to(torch.bfloat16)
        self.middle = nn.Linear(32, 32).half()
        self.adapter = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = self.low(x.bfloat16()).float() + self.middle(x.half()).float()
        return torch.tanh(self.adapter(x)) * self.scale.float()


@pytest.mark.parametrize("chunk_size", [4096, "64KiB"])
def test_dtypes_of_one_unit_stay_what_they_are(chunk_size):
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.Sequential(ManyTypes(), ManyTypes())
        optimizer = helpers.adamw(model)
        for step in range(3):
            loss = (model(torch.randn(4, 32)) - 0.3).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
            helpers.evict_everything()
        for key, tensor in model.state_dict().items():
            recorder.note(f"dtype {key}", tensor.dtype)
        for parameter in model.parameters():
            dtypes = [s.dtype for k, s in optimizer.state[parameter].items() if k != "step"]
            assert dtypes == [parameter.dtype] * 2

    helpers.twin(loop, tight="48KiB" if chunk_size == 4096 else "384KiB", chunk_size=chunk_size,
                 must_evict=chunk_size == 4096)  # fmt: skip


@pytest.fixture
def mixed() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    with helpers.managed("48KiB", stress="evict"):
        model = nn.Sequential(half_frozen(), Adapted())
        model.register_parameter(
            "codes", nn.Parameter(torch.arange(4096).to(torch.uint8), requires_grad=False)
        )
        optimizer = helpers.adamw(p for p in model.parameters() if p.requires_grad)
        model(torch.randn(4, 32)).pow(2).mean().backward()
        yield model, optimizer


def test_every_public_function_takes_a_model_that_is_partly_frozen(mixed):
    model, optimizer = mixed
    patrickstar.manage(model)
    assert all(patrickstar.is_managed(p) for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    norms = [p.grad.norm() for p in trained]
    whole = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.equal(whole, torch.linalg.vector_norm(torch.stack(norms)))
    optimizer.step()
    assert "managed" in str(patrickstar.stats())
    frozen = model[0].layers[0].weight
    with patrickstar.resident(frozen, model.codes, trained[0]):
        assert len(frozen.detach().numpy()) == 32
    with patrickstar.resident(model[1]):
        assert patrickstar.stats().num_leases > 0
    patrickstar.unmanage([frozen, model.codes])
    assert not patrickstar.is_managed(model.codes)
    assert model.codes[300].item() == 300 % 256
    patrickstar.manage(model)
    optimizer.zero_grad()
    model(torch.randn(4, 32)).pow(2).mean().backward()
    assert frozen.grad is None
    optimizer.step()
    patrickstar.shutdown()
    assert frozen.detach().numpy().shape == (32, 32)
