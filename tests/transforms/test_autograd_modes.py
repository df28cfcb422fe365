# SPDX-License-Identifier: Apache-2.0
"""Autograd in all its modes over managed parameters, against plain PyTorch."""

from __future__ import annotations

import helpers
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize

TIGHT = "12KiB"


def warm(model: nn.Module, *inputs: torch.Tensor) -> nn.Module:
    """Has a model adopted by its first call, and evicted."""
    with torch.no_grad():
        model(*inputs)
    helpers.evict_everything()
    return model


def test_forward_mode():
    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(3), torch.randn(4, 32)
        warm(model, x)
        with forward_ad.dual_level():
            for part in model.layers:
                tangent = torch.ones_like(part.weight)
                weight = forward_ad.make_dual(part.weight, tangent)
                out = nn.functional.linear(x, weight, part.bias)
                recorder.note("jvp", forward_ad.unpack_dual(out).tangent)
                recorder.note("primal", forward_ad.unpack_dual(weight).primal)
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            recorder.note("input jvp", forward_ad.unpack_dual(model(dual)).tangent)

    helpers.twin(loop, tight=TIGHT)


def test_double_backward():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        optimizer = helpers.adamw(model)
        for step in range(3):
            x = torch.randn(4, 32, requires_grad=True)
            loss = model(x).pow(2).mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            total = loss + (slope.norm(dim=1) - 1).pow(2).mean()
            total.backward()
            recorder.step(f"step {step}", total, model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop, tight="32KiB")


def test_backward_with_create_graph():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = None
        penalty.backward()
        recorder.step("second order", penalty, model)
        for parameter in model.parameters():
            parameter.grad = None  # break the cycle between a gradient and its graph

    helpers.twin(loop, tight="32KiB")


def test_hessian_vector_products():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        weights = [layer.weight for layer in model.layers]
        loss = model(torch.randn(4, 32)).pow(2).mean()
        slopes = torch.autograd.grad(loss, weights, create_graph=True)
        recorder.note("hvp", torch.autograd.grad(slopes, weights, [w.detach() for w in weights]))

    helpers.twin(loop, tight="20KiB")


@pytest.mark.parametrize("mode", ["backward", "forward", "second order", "batched"])
def test_gradcheck(mode):
    options = {
        "backward": {},
        "forward": {"check_forward_ad": True},
        "batched": {"check_batched_grad": True},
    }

    def loop(recorder: helpers.Recorder) -> None:
        layer = nn.Linear(3, 2).double()
        norm = nn.LayerNorm(2).double()
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        warm(layer, x)
        warm(norm, layer(x).detach())

        def call(x, weight, bias, scale):
            return nn.functional.layer_norm(
                nn.functional.linear(x, weight, bias), (2,), scale, norm.bias
            ).tanh()

        inputs = (x, layer.weight, layer.bias, norm.weight)
        if mode == "second order":
            recorder.note("passed", torch.autograd.gradgradcheck(call, inputs))
        else:
            recorder.note("passed", torch.autograd.gradcheck(call, inputs, **options[mode]))
        recorder.note("weights", [layer, norm])

    helpers.twin(loop, tight="20KiB", must_evict=False)


def test_saved_tensors_hooks_that_pack_to_copies():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        packed = []

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            packed.append(tuple(tensor.shape))
            return tensor.to(torch.float64), tensor.dtype

        def unpack(pair: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
            return pair[0].to(pair[1])

        for step in range(2):
            with saved_tensors_hooks(pack, unpack):
                loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            recorder.step(f"step {step}", loss, model)
        recorder.note("packed", packed)

    helpers.twin(loop, tight="24KiB")


def test_saved_tensors_hooks_that_keep_identity():
    def loop(recorder: helpers.Recorder) -> None:
        model, kept = helpers.Stack(3), []
        with saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, lambda i: kept[i]):
            loss = model(torch.randn(4, 32)).pow(2).mean()
        helpers.evict_everything()
        loss.backward()
        recorder.step("step", loss, model)
        recorder.note("kept", kept)

    helpers.twin(loop, tight="24KiB")


def test_save_on_cpu():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        with save_on_cpu():
            loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward()
        recorder.step("step", loss, model)

    helpers.twin(loop, tight="24KiB")


def test_changing_a_weight_between_forward_and_backward_is_an_error():
    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(2), torch.randn(4, 32, requires_grad=True)
        loss = model(x).pow(2).mean()
        with torch.no_grad():
            model.layers[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        recorder.note("end", model)

    helpers.twin(loop, tight=TIGHT)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_validation_between_steps(mode):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(3):
            with mode():
                recorder.note(f"validated {step}", model(torch.randn(4, 32)))
            loss = model(torch.randn(4, 32)).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop, tight="40KiB")


def test_a_model_built_and_used_in_inference_mode():
    def loop(recorder: helpers.Recorder) -> None:
        with torch.inference_mode():
            model = helpers.Stack(3)
            recorder.note("output", model(torch.randn(4, 32)))
            model.layers[0].weight.mul_(2)
            recorder.note("output", model(torch.randn(4, 32)))
            recorder.note("copies", [p.clone() for p in model.parameters()])

    helpers.twin(loop, must_evict=False, stress=())


def test_anomaly_mode_and_detect_nothing():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        with torch.autograd.detect_anomaly(check_nan=True):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
        recorder.step("step", loss, model)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        helpers.twin(loop, tight="24KiB")


class Orthogonalish(nn.Module):
    """A parametrization with a right inverse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


PARAMETRIZATIONS = {
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Orthogonalish()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "after"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrization(kind, when):
    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(3), torch.randn(4, 32)
        if when == "after":
            warm(model, x)
        for layer in model.layers:
            PARAMETRIZATIONS[kind](layer)
        optimizer = helpers.adamw(model)
        for step in range(3):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        with parametrize.cached():
            recorder.note("cached", model(x))
        recorder.note("end", model)

    helpers.twin(loop, tight="40KiB")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_taking_a_parametrization_away_again():
    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(4), torch.randn(4, 32)
        warm(model, x)
        first, second, third, fourth = model.layers
        parametrizations.weight_norm(first)
        parametrizations.spectral_norm(second)
        nn.utils.weight_norm(third)
        nn.utils.spectral_norm(fourth)
        model(x).sum().backward()
        helpers.evict_everything()
        parametrize.remove_parametrizations(first, "weight")
        parametrize.remove_parametrizations(second, "weight", leave_parametrized=True)
        nn.utils.remove_weight_norm(third)
        nn.utils.remove_spectral_norm(fourth)
        optimizer = helpers.sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
        recorder.note("end", model)

    helpers.twin(loop, tight="40KiB")


def test_pruning():
    from torch.nn.utils import prune

    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(3), torch.randn(4, 32)
        warm(model, x)
        prune.random_unstructured(model.layers[0], "weight", 0.3)
        prune.l1_unstructured(model.layers[1], "weight", 0.3)
        prune.ln_structured(model.layers[2], "weight", 0.3, n=2, dim=0)
        loss = model(x).pow(2).mean()
        loss.backward()
        recorder.step("step", loss, model)
        for layer in model.layers:
            prune.remove(layer, "weight")
        recorder.note("end", model)

    helpers.twin(loop, tight="32KiB")


def test_vectors_of_parameters():
    def loop(recorder: helpers.Recorder) -> None:
        model, x = helpers.Stack(3), torch.randn(4, 32)
        warm(model, x)
        vector = nn.utils.parameters_to_vector(model.parameters())
        recorder.note("vector", vector)
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        recorder.note("output", model(x))

    helpers.twin(loop, must_evict=False)
