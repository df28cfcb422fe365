# SPDX-License-Identifier: Apache-2.0
"""Which calls run under autocast: outermost ones, also recomputed, compiled, without gradients."""

from __future__ import annotations

import helpers
import pytest
import torch
from precisions import DTYPES, Precision, batches, train_step, twin
from torch import nn
from torch.utils.checkpoint import checkpoint

both = pytest.mark.parametrize("precision", list(DTYPES))
reentrant = pytest.mark.parametrize("use_reentrant", [True, False])


class Observer(nn.Module):
    """Notes the type in which a matrix product runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.eye(2) @ torch.eye(2)).dtype)
        return x


def seen_in(call) -> list[torch.dtype]:
    observer = Observer()
    call(observer)
    return observer.seen


def test_a_call_runs_in_16_bits_and_nothing_around_it():
    with helpers.managed(mixed_precision="bf16"):
        assert seen_in(lambda observer: observer(torch.ones(2))) == [torch.bfloat16]
        assert seen_in(lambda observer: observer.forward(torch.ones(2))) == [torch.float32]
        assert not torch.is_autocast_enabled("cpu")
        assert (torch.eye(2) @ torch.eye(2)).dtype == torch.float32
    assert seen_in(lambda observer: observer(torch.ones(2))) == [torch.float32]


def test_a_call_that_raises_leaves_the_region():
    class Failing(nn.Module):
        def forward(self) -> None:
            raise ValueError("no")

    with helpers.managed(mixed_precision="bf16"):
        with pytest.raises(ValueError, match="no"):
            Failing()()
        assert not torch.is_autocast_enabled("cpu")
        assert seen_in(lambda observer: observer(torch.ones(2))) == [torch.bfloat16]


def test_a_region_of_the_users_own_counts():
    def without(observer: Observer) -> None:
        with torch.autocast("cpu", enabled=False):
            observer(torch.ones(2))

    def within(observer: Observer) -> None:
        with torch.autocast("cpu", torch.float16):
            observer(torch.ones(2))

    class Inner(nn.Module):
        def __init__(self, observer: Observer) -> None:
            super().__init__()
            self.observer = observer

        def forward(self) -> None:
            self.observer(torch.ones(2))
            without(self.observer)
            within(self.observer)

    with helpers.managed(mixed_precision="bf16"):
        assert seen_in(without) == [torch.float32]
        assert seen_in(within) == [torch.float16]
        expected = [torch.bfloat16, torch.float32, torch.float16]
        assert seen_in(lambda observer: Inner(observer)()) == expected


def test_hooks_of_the_users_own_run_inside():
    seen = []
    with helpers.managed(mixed_precision="bf16"):
        model = Observer()
        model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        model(torch.ones(2))
    assert seen == [True, True]


def test_a_traced_or_exported_model_has_no_casts():
    with helpers.managed(mixed_precision="bf16"):
        model = nn.Linear(4, 4)
        batch = torch.randn(2, 4)
        traced = torch.jit.trace(model, batch, check_trace=False)
        exported = torch.export.export(model, (batch,))
        for copy in (traced, exported.module()):
            with torch.autocast("cpu", enabled=False):
                assert copy(batch).dtype == torch.float32


class Checkpointed(nn.Module):
    """A block in 16 bits and one in fp32, both recomputed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(helpers.Stack(2) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=self.use_reentrant).float()
        with torch.autocast("cpu", enabled=False):
            return checkpoint(self.blocks[1], x, use_reentrant=self.use_reentrant)


@both
@reentrant
def test_recomputation_inside_of_a_model(precision, use_reentrant):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = Checkpointed(use_reentrant)
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            batch.requires_grad_(True)
            loss = by.call(model, batch).float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


@both
@reentrant
def test_recomputation_of_an_outermost_call(precision, use_reentrant):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)

        def block(x: torch.Tensor) -> torch.Tensor:
            return by.call(model, x)

        for step, batch in enumerate(batches(3)):
            batch.requires_grad_(True)
            output = checkpoint(block, batch, use_reentrant=use_reentrant)
            train_step(recorder, f"{step}", output.float().pow(2).mean(), model, optimizer, by)

    twin(loop, precision)


@both
def test_evaluation_between_steps(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    recorder.note(f"{step} evaluated", by.call(model.eval(), batch))
            loss = by.call(model.train(), batch).float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


class Normed(nn.Module):
    """Convolutions with batch norm, one of them in bfloat16, and a buffer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3).bfloat16()
        self.register_buffer("shift", torch.randn(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        return x + self.shift


def test_batch_norm_and_mixed_types():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = Normed()
        optimizer = helpers.sgd(model)
        for step in range(3):
            loss = by.call(model, torch.randn(2, 3, 12, 12)).float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, "bf16", tight="12KiB", must_evict=False)


def test_a_model_in_bfloat16():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack().bfloat16()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            loss = by.call(model, batch).float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, "bf16", tight="24KiB")


COMPILED = {
    "the model": lambda model, backend: torch.compile(model, backend=backend),
    "the model in place": lambda model, backend: model.compile(backend=backend) or model,
    "each layer": lambda model, backend: (
        [layer.compile(backend=backend) for layer in model.layers] and model
    ),
    "a function": lambda model, backend: torch.compile(lambda x: model(x) * 2, backend=backend),
}


@both
@pytest.mark.parametrize("what", list(COMPILED))
def test_compiled(precision, what):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        torch.compiler.reset()
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        call = COMPILED[what](model, "aot_eager")
        for step, batch in enumerate(batches(3)):
            loss = by.call(call, batch).float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision, tight="24KiB")


def test_nothing_is_patched_without_the_setting():
    before = (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad)
    with helpers.managed():
        assert (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad) == before
    with helpers.managed(mixed_precision="fp16"):
        during = (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad)
        assert not set(during) & set(before)
    assert (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad) == before
