# SPDX-License-Identifier: Apache-2.0
"""Whoever reads or changes a gradient after it was clipped finds it clipped."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import clipped_loops as loops
import helpers
import numpy as np
import patrickstar
import pytest
import torch
from clipped_loops import STRESS
from patrickstar import _C
from torch import nn


def _read_numpy(gradient):
    return torch.from_numpy(gradient.numpy().copy())


def _read_saved(gradient):
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file)


def _read_address(gradient):
    address = gradient.data_ptr()
    storage = gradient.untyped_storage()
    return [gradient.clone(), address % 4, storage[0], len(storage.tolist())]


READERS = {
    "sum": lambda g: g.sum(),
    "numpy": _read_numpy,
    "array": lambda g: torch.from_numpy(np.asarray(g).copy()),
    "dlpack": lambda g: torch.from_dlpack(g).clone(),
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(-1)[3:7].clone(),
    "print": repr,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": _read_saved,
    "tolist": lambda g: g.tolist(),
    "item": lambda g: g.view(-1)[5].item(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "address": _read_address,
    "equal": lambda g: torch.equal(g, torch.zeros_like(g)),
    "cat": lambda g: torch.cat([g.view(-1), g.view(-1)]),
    "to": lambda g: g.to(torch.bfloat16),
    "allclose": lambda g: torch.allclose(g, g * 1.5),
    "foreach": lambda g: torch._foreach_add([g, g], 1.0),
    "norm": lambda g: g.norm(),
}


@pytest.mark.parametrize("name", list(READERS))
def test_reading(name):
    def clip(model):
        norm = loops.clip(model)
        return [norm, *(READERS[name](gradient) for gradient in loops.gradients_of(model))]

    tight = "80KiB" if name == "address" else "48KiB"  # addresses stay in use until the step
    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), tight=tight, stress=STRESS)


def _write_numpy(gradient):
    gradient.numpy()[...] += 0.25


def _write_element(gradient):
    gradient.view(-1)[2] = 3.0


def _write_storage(gradient):
    gradient.untyped_storage().fill_(0)


WRITERS = {
    "add": lambda g: g.add_(0.01),
    "scale": lambda g: g.mul_(2.0),
    "divide": lambda g: g.div_(torch.tensor(3.0)),
    "element": _write_element,
    "numpy": _write_numpy,
    "clamp": lambda g: g.clamp_(-1e-4, 1e-4),
    "copy": lambda g: g.copy_(torch.ones_like(g)),
    "zero": lambda g: g.zero_(),
    "out": lambda g: torch.add(g, g, out=g),
    "foreach": lambda g: torch._foreach_add_([g], 0.5),
    "view": lambda g: g.view(-1)[4:].mul_(torch.tensor(0.5)),
    "storage": _write_storage,
    "mul": lambda g: g.mul_(torch.tensor(0.5)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", list(WRITERS))
def test_writing(name, when):
    def clip(model):
        if when == "before":
            for gradient in loops.gradients_of(model):
                WRITERS[name](gradient)
        norm = loops.clip(model)
        if when == "after":
            for gradient in loops.gradients_of(model):
                WRITERS[name](gradient)
        return norm

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_accumulating():
    def clip(model):
        norms = [loops.clip(model)]
        loops.backward(model)
        norms.append(torch.nn.utils.get_total_norm(loops.gradients_of(model)))
        loops.backward(model)
        return [*norms, loops.clip(model)]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_freed_and_replaced_gradients():
    def clip(model):
        norm = loops.clip(model)
        first, second, third, fourth = (layer.weight for layer in model.layers)
        first.grad = None
        second.grad = second.grad.clone()
        third.grad.data = torch.full_like(third, 0.1)
        fourth.grad, fourth.bias = fourth.grad * 2, None
        helpers.evict_everything()
        return [norm, loops.clip(model)]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_gradients_set_to_zero():
    def clip(model):
        norm = loops.clip(model)
        model.zero_grad(set_to_none=False)
        loops.backward(model)
        return norm

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_gradients_cleared_instead_of_a_step():
    def clip(model):
        norm = loops.clip(model)
        model.zero_grad()
        loops.backward(model)
        return [norm, *loops.gradients_of(model)]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_before(fused):
    def loop(recorder):
        model = helpers.Stack()
        optimizer = helpers.adamw(model, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(4):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            helpers.evict_everything()
            scaler.unscale_(optimizer)
            recorder.note(f"{step} norm", loops.clip(model))
            helpers.evict_everything()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        recorder.note("end", [model, optimizer])

    helpers.twin(loop, stress=STRESS)


def test_unscaling_left_to_the_step():
    def loop(recorder):
        model = helpers.Stack()
        optimizer = helpers.adamw(model, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(3):
            scaler.scale(model(torch.randn(4, 32)).pow(2).mean()).backward()
            helpers.evict_everything()
            recorder.note(f"{step} norm", loops.clip(model))  # of scaled gradients
            helpers.evict_everything()
            scaler.step(optimizer)
            recorder.note(f"{step} gradients", loops.gradients_of(model))
            scaler.update()
            optimizer.zero_grad()
        recorder.note("end", [model, optimizer])

    helpers.twin(loop, stress=STRESS)


@pytest.mark.parametrize("how", ["unmanage", "shutdown", "resident", "share", "state_dict"])
def test_ways_out_of_management(how):
    def clip(model):
        norm = loops.clip(model)
        gradients = loops.gradients_of(model)
        if _C.is_running():
            if how == "unmanage":
                patrickstar.unmanage(gradients)
            elif how == "shutdown":
                patrickstar.shutdown()
            elif how == "resident":
                with patrickstar.resident(*gradients):
                    return [norm, *(torch.from_numpy(g.numpy().copy()) for g in gradients)]
            elif how == "share":
                for gradient in gradients:
                    gradient.share_memory_()
        return [norm, *(g.clone() for g in gradients)]

    expected = helpers.plain(lambda recorder: loops.train_clipped(recorder, clip))
    with helpers.managed("48KiB", stress="evict,poison"):
        got = helpers.plain(lambda recorder: loops.train_clipped(recorder, clip))
    helpers.assert_same(got.records, expected.records, how)


def test_an_array_sees_what_is_multiplied_later():
    def clip(model):
        gradient = model.layers[0].weight.grad
        array = gradient.numpy()
        loops.clip(model)
        gradient.mul_(torch.tensor(0.5))
        return [float(array.sum()), torch.from_numpy(array.copy())]

    helpers.twin(lambda recorder: loops.train_clipped(recorder, clip), stress=STRESS)


def test_a_neighbour_in_the_chunk_is_read():
    def clip(model):
        loops.clip(model)
        return [model.layers[0].bias.grad.clone(), model.layers[0].weight.grad.clone()]

    helpers.twin(
        lambda recorder: loops.train_clipped(recorder, clip),
        tight="64KiB",
        chunk_size="16KiB",
        stress=STRESS,
    )


def test_a_step_in_windows():
    """One layer's parameter, gradient and state are more than the budget."""

    def loop(recorder, foreach, nesterov):
        model = nn.Linear(256, 256, bias=False)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, foreach=foreach
        )
        for step in range(4):
            model(torch.randn(4, 256)).pow(2).mean().backward()
            helpers.evict_everything()
            recorder.note(f"{step} norm", loops.clip(model))
            helpers.evict_everything()
            optimizer.step()
            helpers.evict_everything()
            recorder.note(f"{step}", [model, optimizer])
            optimizer.zero_grad()

    for foreach, nesterov in ((False, False), (True, True)):
        helpers.twin(
            lambda recorder, f=foreach, n=nesterov: loop(recorder, f, n),
            tight="640KiB",
            chunk_size="256KiB",
            stress=STRESS,
        )


def test_two_readers_at_once_multiply_once():
    """Every reader finds each gradient multiplied exactly once, however they meet."""
    with helpers.managed("256KiB"):
        tensors = []
        for _ in range(16):
            layer = nn.Linear(32, 32)
            patrickstar.manage(layer)
            for _ in range(2):
                layer(torch.ones(2, 32)).sum().backward()
            tensors.append(layer.weight)
        assert all(_C.is_managed(p.grad) for p in tensors)
        for _ in range(20):
            expected = [p.grad * 0.5 for p in tensors]
            helpers.evict_everything()
            torch._foreach_mul_([p.grad for p in tensors], torch.tensor(0.5))
            barrier = threading.Barrier(4)
            wrong = []

            def read(expected=expected, barrier=barrier, wrong=wrong):
                barrier.wait()
                for p, wanted in zip(tensors, expected, strict=True):
                    if not torch.equal(p.grad.clone(), wanted):
                        wrong.append(p)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong
            torch._foreach_mul_([p.grad for p in tensors], torch.tensor(2.0))


def test_denormals_flushed_while_clipping():
    """torch.set_flush_denormal is a mode of the thread and of the moment."""

    def loop(recorder):
        model = helpers.Stack()
        for step in range(3):
            loops.backward(model, 1e-37)
            helpers.evict_everything()
            torch.set_flush_denormal(step == 1)
            try:
                torch._foreach_mul_(loops.gradients_of(model), torch.tensor(0.5))
            finally:
                torch.set_flush_denormal(False)
            recorder.note(f"{step}", loops.gradients_of(model))
            model.zero_grad()

    helpers.twin(loop, stress=STRESS)
