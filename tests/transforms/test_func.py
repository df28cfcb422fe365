# SPDX-License-Identifier: Apache-2.0
"""``torch.func`` over managed parameters: the answers of plain PyTorch, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import helpers
import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

TIGHT = "12KiB"  # three pages: a weight, a bias and one more
WIDTH = 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def parameters_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return dict(net.named_parameters())


def loss_of(net: nn.Module) -> Callable[..., torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, parameters, (x,)).pow(2).mean()

    return loss


def with_grad(net, x):
    return grad(loss_of(net))(parameters_of(net), x)


def with_grad_and_value(net, x):
    gradients, value = grad_and_value(loss_of(net))(parameters_of(net), x)
    return {**gradients, "value": value}


def with_detached_parameters(net, x):
    detached = {name: p.detach() for name, p in net.named_parameters()}
    return grad(loss_of(net))(detached, x)


def with_per_sample_gradients(net, x):
    return vmap(grad(loss_of(net)), in_dims=(None, 0))(parameters_of(net), x)


def with_per_sample_gradients_in_chunks(net, x):
    per_sample = vmap(grad(loss_of(net)), in_dims=(None, 0), chunk_size=2)
    return per_sample(parameters_of(net), x)


def with_vjp(net, x):
    value, pull = vjp(lambda p: functional_call(net, p, (x,)), parameters_of(net))
    return {**pull(torch.ones_like(value))[0], "value": value}


def with_jvp(net, x):
    parameters = parameters_of(net)
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    value, tangent = jvp(lambda p: functional_call(net, p, (x,)), (parameters,), (tangents,))
    return {"value": value, "tangent": tangent}


def with_linearize(net, x):
    value, push = linearize(lambda p: functional_call(net, p, (x,)), parameters_of(net))
    tangents = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    return {"value": value, "tangent": push(tangents)}


def with_jacrev(net, x):
    return jacrev(lambda p: functional_call(net, p, (x,)).mean(0))(parameters_of(net))


def with_jacfwd_of_a_bias(net, x):
    def out(bias: torch.Tensor) -> torch.Tensor:
        return functional_call(net, {"second.bias": bias}, (x,)).mean(0)

    return {"jacobian": jacfwd(out)(net.second.bias)}


def with_hessian_of_a_bias(net, x):
    def loss(bias: torch.Tensor) -> torch.Tensor:
        return loss_of(net)({"first.bias": bias}, x)

    return {"hessian": hessian(loss)(net.first.bias)}


def with_weights_closed_over(net, x):
    return {"input gradient": grad(lambda y: net(y).pow(2).sum())(x)}


def with_vmap_over_weights_closed_over(net, x):
    return {"output": vmap(net)(x)}


def with_an_ensemble(net, x):
    other = Net()
    parameters, buffers = stack_module_state([net, other])

    def call(p: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(net, (p, b), (x,))

    return {"outputs": vmap(call)(parameters, buffers)}


def with_vmap_over_rows_of_a_weight(net, x):
    return {"products": vmap(lambda row: row.dot(x[0]) * row)(net.second.weight)}


def with_random_vmap(net, x):
    def noisy(row: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(net(row), 0.5)

    return {"output": vmap(noisy, randomness="different")(x)}


def with_functionalize(net, x):
    def update(weight: torch.Tensor) -> torch.Tensor:
        copy = weight * 1
        copy.view(-1)[:5].add_(1)
        return copy @ x.t()

    return {"output": functionalize(update)(net.first.weight)}


def with_gradient_of_gradient(net, x):
    def penalty(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients = grad(loss_of(net))(parameters, x)
        return sum(g.pow(2).sum() for g in gradients.values())

    return grad(penalty)(parameters_of(net))


SAMPLE = {with_grad, with_per_sample_gradients, with_jvp, with_jacrev, with_gradient_of_gradient}
CASES = [
    pytest.param(case, id=name, marks=() if case in SAMPLE else pytest.mark.full)
    for name, case in list(globals().items())
    if name.startswith("with_")
]


@pytest.mark.parametrize("case", CASES)
def test_transform(case):
    def loop(recorder: helpers.Recorder) -> None:
        net, x = Net(), torch.randn(4, WIDTH)
        net(x)
        helpers.evict_everything()
        for name, tensor in case(net, x).items():
            recorder.note(name, tensor)
        recorder.note("after", net)

    helpers.twin(loop, tight=TIGHT)


@pytest.mark.full
def test_a_meta_learning_step():
    def loop(recorder: helpers.Recorder) -> None:
        net = Net()
        optimizer = helpers.adamw(net)
        for step in range(3):
            parameters = parameters_of(net)
            inner = grad(loss_of(net))(parameters, torch.randn(4, WIDTH))
            adapted = {name: p - 0.1 * inner[name] for name, p in parameters.items()}
            loss = loss_of(net)(adapted, torch.randn(4, WIDTH))
            recorder.train_step(f"step {step}", loss, net, optimizer)
        recorder.note("end", net)

    helpers.twin(loop, tight="32KiB")


def test_an_optimizer_step_written_with_functional_calls():
    """Gradients of ``torch.func`` are plain tensors; writing them back is an ordinary update."""

    def loop(recorder: helpers.Recorder) -> None:
        net = Net()
        for step in range(3):
            gradients, loss = grad_and_value(loss_of(net))(
                {name: p.detach() for name, p in net.named_parameters()}, torch.randn(4, WIDTH)
            )
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter -= 0.1 * gradients[name]
            recorder.step(f"step {step}", loss, net)

    helpers.twin(loop, tight=TIGHT)


def test_a_parametrized_call_with_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)
            self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(torch.tanh(self.inner(x)))

    def loop(recorder: helpers.Recorder) -> None:
        net, x = Tied(), torch.randn(4, 32)
        net(x)
        replaced = {"inner.weight": torch.randn(32, 32)}
        recorder.note("tied", functional_call(net, replaced, (x,)))
        recorder.note("untied", functional_call(net, replaced, (x,), tie_weights=False))
        recorder.note("after", net(x))

    helpers.twin(loop, tight=TIGHT)
