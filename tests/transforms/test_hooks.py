# SPDX-License-Identifier: Apache-2.0
"""Hooks of every kind see managed tensors as they would see plain ones, and may change them."""

from __future__ import annotations

import helpers
import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks


def train(recorder: helpers.Recorder, model: nn.Module, num_steps: int = 2) -> None:
    optimizer = helpers.adamw(model)
    for step in range(num_steps):
        loss = model(torch.randn(4, 32)).pow(2).mean()
        recorder.train_step(f"step {step}", loss, model, optimizer)
        helpers.evict_everything()
    recorder.note("end", model)


def register_module_hooks(model, recorder):
    for name, layer in model.named_modules():
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        layer.register_forward_hook(
            lambda m, args, kwargs, out: out + 0.1, with_kwargs=True, always_call=True
        )
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda m, args, out, name=name: recorder.note(f"{name} seen", m.weight)
            )


def register_module_backward_hooks(model, recorder):
    for name, layer in model.named_modules():
        layer.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 2,))
        layer.register_full_backward_hook(
            lambda m, inputs, outputs, name=name: recorder.note(f"{name} out", list(outputs))
        )


def register_tensor_hooks(model, recorder):
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g: g * 0.5)
        parameter.register_hook(lambda g, name=name: recorder.note(f"{name} hook", g))


def register_post_accumulate_hooks(model, recorder):
    def shrink(parameter: torch.Tensor) -> None:
        recorder.note("accumulated", parameter.grad)
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(shrink)


def register_node_hooks(model, recorder):
    """On the accumulators, as older tools do, and on nodes of the graph."""

    def on_output(module, args, out):
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda outputs: tuple(2 * o for o in outputs))
            out.grad_fn.register_hook(
                lambda i, o: recorder.note("node", [x for x in i if x is not None])
            )

    model.kept = []
    for parameter in model.parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda i, o, p=parameter: recorder.note("leaf", p.grad))
        model.kept.append(accumulator)
    model.layers[1].register_forward_hook(on_output)


def register_hooks_that_replace_gradients(model, recorder):
    def replace(parameter: torch.Tensor) -> None:
        parameter.grad = torch.ones_like(parameter.grad) * 0.01

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(replace)


def register_optimizer_in_backward(model, recorder):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    return [handle.remove for handle in handles]  # or the hooks keep the parameters for ever


def register_state_dict_hooks(model, recorder):
    model.register_state_dict_pre_hook(lambda m, prefix, keep: recorder.note("pre", prefix))
    model.register_state_dict_post_hook(lambda m, d, p, meta: recorder.note("keys", list(d)))
    model.register_load_state_dict_pre_hook(lambda m, d, *rest: recorder.note("load", len(d)))
    model.register_load_state_dict_post_hook(lambda m, keys: recorder.note("loaded", str(keys)))
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})


KINDS = [
    value for name, value in globals().items() if name.startswith("register_") and "hook" in name
]
KINDS.append(register_optimizer_in_backward)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "after"])
@pytest.mark.parametrize("register", KINDS, ids=lambda kind: kind.__name__[len("register_") :])
def test_hooks(register, when):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        if when == "after":
            with torch.no_grad():
                model(torch.zeros(1, 32))
            helpers.evict_everything()
        undo = register(model, recorder)
        train(recorder, model)
        for action in undo or ():
            action()

    helpers.twin(loop, tight="32KiB")


def test_global_hooks():
    def loop(recorder: helpers.Recorder) -> None:
        handles = [
            global_hooks.register_module_forward_pre_hook(lambda m, args: (args[0] * 1.5,)),
            global_hooks.register_module_forward_hook(lambda m, args, out: out * 0.9),
            global_hooks.register_module_full_backward_pre_hook(lambda m, out: (out[0] * 2,)),
            global_hooks.register_module_full_backward_hook(
                lambda m, inputs, outputs: recorder.note("out", list(outputs))
            ),
            global_hooks.register_module_parameter_registration_hook(
                lambda m, name, p: recorder.note("registered", name)
            ),
        ]
        try:
            train(recorder, helpers.Stack(3))
        finally:
            for handle in handles:
                handle.remove()

    helpers.twin(loop, tight="32KiB")


def test_multi_grad_hooks_and_optimizer_hooks():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(3)
        optimizer = helpers.adamw(model)
        weights = [layer.weight for layer in model.layers]
        handle = torch.autograd.graph.register_multi_grad_hook(
            weights, lambda gradients: recorder.note("gradients", list(gradients))
        )

        def halve(optimizer, args, kwargs):
            for weight in weights:
                weight.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: recorder.note("stepped", weights))
        optimizer.register_state_dict_post_hook(lambda o, d: recorder.note("dict", len(d["state"])))
        for step in range(2):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.zero_grad()
        handle.remove()  # it keeps the weights for ever

    helpers.twin(loop, tight="32KiB")
