# SPDX-License-Identifier: Apache-2.0
"""Clipping, called as torch offers it: the bits of plain PyTorch, whatever is in memory."""

from __future__ import annotations

import clipped_loops as loops
import helpers
import pytest
import torch
from clipped_loops import BUDGETS, OPTIMIZERS, STRESS
from torch import nn

FOREACH = {"default": None, "foreach": True, "loop": False}


@pytest.mark.parametrize("percent", list(BUDGETS))
@pytest.mark.parametrize("form", list(FOREACH))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_by_norm(name, form, percent):
    helpers.twin(
        lambda recorder: loops.train_clipped(
            recorder,
            lambda model: loops.clip(model, foreach=FOREACH[form]),
            OPTIMIZERS[name],
            spread=percent < 100,
        ),
        tight=BUDGETS[percent],
        must_evict=False,  # half of a momentum's data fits
        stress=STRESS,
    )


@pytest.mark.parametrize("name", ["adamw loop", "adamw fused", "sgd"])
def test_by_the_setting(name):
    def loop(recorder, clip):
        model = helpers.Stack()
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(4):
            loops.backward(model)
            helpers.evict_everything()
            if clip:
                loops.clip(model)
            optimizer.step()
            recorder.note(f"{step}", [model, optimizer])
            optimizer.zero_grad()

    helpers.twin(
        lambda recorder: loop(recorder, False),
        by_hand=lambda recorder: loop(recorder, True),
        stress=STRESS,
        gradient_clipping=loops.NORM,
    )


@pytest.mark.parametrize("optimizer", ["native", "auto", "fused"])
def test_in_every_form_of_step(optimizer):
    def loop(recorder):
        fused = {"fused": True} if optimizer == "fused" else {}
        loops.train_clipped(recorder, loops.clip, lambda p: helpers.adamw(p, **fused))

    helpers.twin(loop, stress=STRESS, optimizer=optimizer)


@pytest.mark.parametrize("norm_type", [1, 2, 3.5, float("inf")])
def test_norms_of_other_types(norm_type):
    helpers.twin(
        lambda recorder: loops.train_clipped(
            recorder, lambda model: loops.clip(model, norm_type=norm_type)
        ),
        stress=STRESS,
    )


@pytest.mark.parametrize("foreach", [None, False])
def test_by_value(foreach):
    def clip(model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4, foreach=foreach)

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    helpers.twin(
        lambda recorder: loops.train_clipped(recorder, loops.clip, dtype=dtype), stress=STRESS
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -0.0, 1e-30])
def test_norms_that_are_no_use(factor, dtype):
    helpers.twin(
        lambda recorder: loops.train_clipped(
            recorder,
            loops.clip,
            helpers.sgd,
            dtype=dtype,
            factor_of=lambda step: factor if step == 2 else 1.0,
        ),
        stress=STRESS,
        must_evict=False,
    )


def test_a_norm_below_the_limit_leaves_gradients_alone():
    helpers.twin(
        lambda recorder: loops.train_clipped(recorder, lambda model: loops.clip(model, 1e6)),
        stress=STRESS,
    )


def test_an_error_for_a_norm_that_is_not_finite():
    def clip(model):
        try:
            return loops.clip(model, error_if_nonfinite=True)
        except RuntimeError as error:
            return str(error)

    helpers.twin(
        lambda recorder: loops.train_clipped(
            recorder,
            clip,
            factor_of=lambda step: float("inf") if step == 2 else 1.0,
        ),
        stress=STRESS,
    )


def test_norm_and_clipping_apart():
    def clip(model):
        norm = torch.nn.utils.get_total_norm(loops.gradients_of(model))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), loops.NORM, norm)
        return [norm, torch.nn.utils.get_total_norm(loops.gradients_of(model))]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_clipping_twice():
    def clip(model):
        return [loops.clip(model), loops.clip(model, loops.NORM / 3)]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_more_multiplications_than_are_put_off():
    def multiply(model):
        for number in range(40):
            factor = torch.tensor(1.0 + number / 64)
            for gradient in loops.gradients_of(model):
                gradient.mul_(factor)
            factor.fill_(0.0)  # the caller's own, afterwards
            helpers.evict_everything()

    helpers.twin(lambda recorder: loops.train_clipped(recorder, multiply), stress=STRESS)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_factors_of_one_element(shape):
    def multiply(model):
        for layer in model.layers:
            layer.weight.grad.mul_(torch.full(shape, 0.37))
            layer.weight.grad.mul_(torch.full(shape, -1.1, dtype=torch.float64))
            layer.weight.grad[3].mul_(torch.full(shape[:1], 0.9))
            layer.bias.grad.mul_(0.7)

    helpers.twin(lambda recorder: loops.train_clipped(recorder, multiply), stress=STRESS)


def test_the_same_gradient_twice_in_a_list():
    def multiply(model):
        gradients = loops.gradients_of(model)
        torch._foreach_mul_(gradients + gradients[:2], torch.tensor(0.3))
        return torch._foreach_norm(gradients[2:] + gradients)

    helpers.twin(lambda recorder: loops.train_clipped(recorder, multiply), stress=STRESS)


def test_a_list_of_gradients_and_other_tensors():
    def multiply(model):
        others = [torch.ones(3), model.layers[0].weight.detach()]
        tensors = [*loops.gradients_of(model), *others]
        torch._foreach_mul_(tensors, torch.tensor(0.99))
        return [*torch._foreach_norm(tensors), *others]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, multiply), stress=STRESS)


def test_norms_of_views_and_by_dimension():
    def norms(model):
        weight = model.layers[0].weight.grad
        bias = model.layers[0].bias.grad
        norm = torch.linalg.vector_norm
        return [
            norm(weight),
            norm(weight.t()),
            norm(weight[1:]),
            norm(weight, dim=0),
            norm(weight, keepdim=True),
            norm(weight, dtype=torch.float64),
            norm(weight.view(-1)),
            norm(bias.view(torch.int32).view(torch.float32)),
            norm(bias, 1),
            weight.norm(),
            bias.norm(2),
        ]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, norms), stress=STRESS)


def test_a_norm_is_the_callers_own():
    def norms(model):
        gradients = loops.gradients_of(model)
        for norm in torch._foreach_norm(gradients):
            norm.fill_(0.0)
        return torch._foreach_norm(gradients)

    helpers.twin(lambda recorder: loops.train_clipped(recorder, norms), stress=STRESS)


def test_wrong_arguments_are_torchs_errors():
    def fail(model):
        gradients = loops.gradients_of(model)
        errors = []
        for factor in (torch.ones(1), torch.ones(2), torch.ones((1, 1, 1))):
            with pytest.raises(RuntimeError) as raised:
                torch._foreach_mul_(gradients, factor)
            errors.append(str(raised.value))
        return errors

    helpers.twin(lambda recorder: loops.train_clipped(recorder, fail), stress=STRESS)


def test_many_threads_give_the_norms_of_many_threads():
    def loop(recorder):
        model = nn.Linear(256, 256)  # large enough to be split
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            try:
                model(torch.randn(4, 256)).pow(2).mean().backward()
                recorder.note(f"{threads}", loops.clip(model))
                torch.set_num_threads(3 - threads)
                model(torch.randn(4, 256)).pow(2).mean().backward()
                torch.set_num_threads(threads)
                recorder.note(f"{threads} changed", loops.clip(model))
                recorder.note(f"{threads} gradients", loops.gradients_of(model))
                model.zero_grad()
            finally:
                torch.set_num_threads(1)

    helpers.twin(loop, tight="600KiB", must_evict=False)
