# SPDX-License-Identifier: Apache-2.0
"""The settings for accumulation and clipping: the bits of a loop that does both by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

K = 3
NORM = 1e-3  # below the norms of these models

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": helpers.sgd,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
MODEL_BYTES = 4 * 4 * (32 * 32 + 32)  # of a Stack; AdamW has four times as much to keep
BUDGETS = {percent: 4 * MODEL_BYTES * percent // 100 for percent in (100, 50, 25)}


def by_hand(
    recorder: helpers.Recorder, make: Callable[[Any], Optimizer], clip: bool = True
) -> None:
    model = helpers.Stack()
    optimizer = make(model.parameters())
    for call in range(2 * K + 1):
        loss = model(torch.randn(4, 32)).pow(2).mean()
        (loss / K).backward()
        recorder.note(f"{call} loss", loss)
        if call % K == K - 1:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            recorder.note(f"{call} stepped", [model, optimizer])
            optimizer.zero_grad()
        recorder.note(f"{call}", model)


def by_setting(recorder: helpers.Recorder, make: Callable[[Any], Optimizer]) -> None:
    model = helpers.Stack()
    optimizer = make(model.parameters())
    for call in range(2 * K + 1):
        loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward()
        recorder.note(f"{call} loss", loss)
        optimizer.step()
        if call % K == K - 1:
            recorder.note(f"{call} stepped", [model, optimizer])
        optimizer.zero_grad()
        recorder.note(f"{call}", model)


def twin(loop: Callable[..., None], **options: Any) -> None:
    """Compares a loop under the settings with the same loop that does their work by hand."""
    helpers.twin(
        lambda recorder: loop(recorder, is_by_hand=False),
        by_hand=lambda recorder: loop(recorder, is_by_hand=True),
        **options,
    )


@pytest.mark.parametrize("percent", BUDGETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulated_and_clipped(optimizer, percent):
    make = OPTIMIZERS[optimizer]
    helpers.twin(
        lambda recorder: by_setting(recorder, make),
        by_hand=lambda recorder: by_hand(recorder, make),
        tight=BUDGETS[percent],
        must_evict=percent < 50,
        stress=("evict,poison,delay",),
        gradient_accumulation_steps=K,
        gradient_clipping=NORM,
    )


def test_accumulated_only():
    helpers.twin(
        lambda recorder: by_setting(recorder, helpers.adamw),
        by_hand=lambda recorder: by_hand(recorder, helpers.adamw, clip=False),
        gradient_accumulation_steps=K,
    )


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_zero_grad_of_either_before_backward(owner, set_to_none):
    def loop(recorder: helpers.Recorder, is_by_hand: bool) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for call in range(3 * K):
            if not is_by_hand or call % K == 0:
                {"optimizer": optimizer, "model": model}[owner].zero_grad(set_to_none=set_to_none)
            loss = model(torch.randn(4, 32)).pow(2).mean()
            (loss / K if is_by_hand else loss).backward()
            recorder.note(f"{call}", model)
            if not is_by_hand or call % K == K - 1:
                optimizer.step()

    twin(
        loop,
        gradient_accumulation_steps=K,
    )


def test_several_optimizers_and_a_module_that_spans_them():
    def loop(recorder: helpers.Recorder, is_by_hand: bool) -> None:
        model = helpers.Stack()
        first = helpers.adamw(model.layers[:2])
        second = helpers.sgd(model.layers[2:])
        for call in range(4 * K):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            (loss / K if is_by_hand else loss).backward()
            # The second one is called at every other batch only.
            for optimizer, is_called, is_last in (
                (first, True, call % K == K - 1),
                (second, call % 2 == 1, call % (2 * K) == 2 * K - 1),
            ):
                if is_called and (is_last or not is_by_hand):
                    if is_by_hand:
                        parameters = optimizer.param_groups[0]["params"]
                        torch.nn.utils.clip_grad_norm_(parameters, NORM)
                    optimizer.step()
            if is_by_hand:
                for optimizer, count in ((first, call + 1), (second, (call + 1) // 2)):
                    if count % K == 0:
                        optimizer.zero_grad()
            else:
                model.zero_grad()
            recorder.note(f"{call}", model)

    twin(
        loop,
        gradient_accumulation_steps=K,
        gradient_clipping=NORM,
    )


def test_closures_run_at_every_call():
    def loop(recorder: helpers.Recorder, is_by_hand: bool) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)

        def closure() -> torch.Tensor:
            if not is_by_hand or call % K == 0:
                optimizer.zero_grad()
            loss = model(torch.randn(4, 32)).pow(2).mean()
            (loss / K if is_by_hand else loss).backward()
            return loss

        def clipped() -> torch.Tensor:
            loss = closure()
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            return loss

        for call in range(2 * K):
            if not is_by_hand:
                loss = optimizer.step(closure) if call % 2 else optimizer.step(closure=closure)
            else:
                loss = optimizer.step(clipped) if call % K == K - 1 else closure()
            recorder.note(f"{call} loss", loss)
            recorder.note(f"{call}", model)

    twin(
        loop,
        gradient_accumulation_steps=K,
        gradient_clipping=NORM,
    )


def test_hooks_on_the_optimizer_run_when_it_steps():
    def loop(recorder: helpers.Recorder, is_by_hand: bool) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        calls: list[str] = []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            calls.append("before")
            for parameter in model.parameters():
                parameter.grad.mul_(1.5)  # of clipped ones

        optimizer.register_step_pre_hook(before)
        handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for call in range(3 * K):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            (loss / K if is_by_hand else loss).backward()
            if is_by_hand and call % K == K - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            if not is_by_hand or call % K == K - 1:
                optimizer.step()
                optimizer.zero_grad()
            if call == 2 * K - 1:
                handle.remove()
            recorder.note(f"{call}", [model, " ".join(calls)])

    twin(
        loop,
        gradient_accumulation_steps=K,
        gradient_clipping=NORM,
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_with_mixed_precision_and_an_overflow(precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    is_scaled = precision == "fp16"

    def hand_loop(recorder: helpers.Recorder) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for call in range(4 * K):
            with torch.autocast("cpu", dtype):
                output = model(torch.randn(4, 32))
            loss = output.float().mul(1e4 if is_scaled and call == K + 1 else 1).pow(2).mean()
            scaler.scale(loss / K).backward()
            if call % K == K - 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
                scaler.step(optimizer)
                recorder.note(f"{call}", [model, optimizer])
                optimizer.zero_grad()
                scaler.update()

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for call in range(4 * K):
            output = model(torch.randn(4, 32))
            loss = output.float().mul(1e4 if is_scaled and call == K + 1 else 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            if call % K == K - 1:
                recorder.note(f"{call}", [model, optimizer])
            optimizer.zero_grad()
        stats = patrickstar.stats()
        assert (stats.steps, stats.skipped_steps) == (4, is_scaled)

    helpers.twin(
        loop,
        by_hand=hand_loop,
        mixed_precision=precision,
        gradient_accumulation_steps=K,
        gradient_clipping=NORM,
    )


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(torch.optim).values()
     if isinstance(kind, type) and issubclass(kind, Optimizer)
     and kind not in (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)],
)  # fmt: skip
def test_a_call_that_only_counts_touches_nothing(kind):
    with helpers.managed(gradient_accumulation_steps=2):
        weight = nn.Parameter(torch.ones(4, 4))
        optimizer = kind([weight], lr=0.1)
        state = repr(optimizer.state_dict()["state"])
        (weight * torch.arange(16.0).view(4, 4)).sum().backward()
        optimizer.step()
        assert weight.detach().eq(1).all() and repr(optimizer.state_dict()["state"]) == state
        assert patrickstar.stats().steps == 0
        optimizer.step()
        assert not weight.detach().eq(1).all() and optimizer.state[weight] is not None
        assert patrickstar.stats().steps == 1


def test_a_closure_that_raises_gives_the_hooks_back():
    with helpers.managed(gradient_accumulation_steps=2):
        optimizer = helpers.sgd([torch.ones(4, requires_grad=True)])
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def closure() -> torch.Tensor:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            optimizer.step(closure)
        assert len(optimizer._optimizer_step_post_hooks) == 1
        optimizer.step()
        assert calls == []
        optimizer.step()
        assert calls == ["after"]


def test_an_optimizer_with_a_zero_grad_of_its_own():
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    weight = torch.ones(4, requires_grad=True)
    with helpers.managed(gradient_accumulation_steps=2):
        optimizer = Own([weight], lr=1.0)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert weight.tolist() == [0.0] * 4
        assert weight.grad is None
    assert "wrapped" not in repr(Own.zero_grad) and not hasattr(Own.zero_grad, "__wrapped__")


def test_torch_autograd_grad_is_left_alone():
    with helpers.managed(gradient_accumulation_steps=2):
        weight = torch.ones(4, requires_grad=True)
        assert torch.autograd.grad((weight * 3).sum(), weight)[0].tolist() == [3.0] * 4
        (weight * 3).sum().backward()
        assert weight.grad.tolist() == [1.5] * 4


def test_several_outputs_and_given_gradients():
    with helpers.managed(gradient_accumulation_steps=4):
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.backward(iter([weight.sum(), weight * 2]), iter([None, torch.ones(2)]))
        assert weight.grad.tolist() == [0.75] * 2
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (weight * 2).backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).backward()


def test_lbfgs_is_refused():
    with helpers.managed(gradient_accumulation_steps=2):
        optimizer = torch.optim.LBFGS([torch.ones(4, requires_grad=True)])
        with pytest.raises(patrickstar.Unsupported, match="LBFGS with gradient_accumulation_steps"):
            optimizer.step(lambda: torch.ones(()))


def test_lbfgs_is_clipped_at_each_evaluation():
    def loop(recorder: helpers.Recorder, is_by_hand: bool) -> None:
        model = helpers.Stack(2)
        batch = torch.randn(4, 32)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            if is_by_hand:
                torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            return loss

        for step in range(2):
            recorder.note(f"{step} loss", optimizer.step(closure))
            recorder.note(f"{step}", model)

    twin(
        loop,
        must_evict=False,
        gradient_clipping=NORM,
    )


def test_nothing_is_patched_without_the_setting():
    def functions() -> tuple[Any, ...]:
        return nn.Module.zero_grad, Optimizer.zero_grad, torch.autograd.backward

    before = functions()
    with helpers.managed(gradient_clipping=1.0):
        helpers.plain(helpers.train_stack)
        assert functions() == before
    with helpers.managed(gradient_accumulation_steps=2):
        helpers.plain(helpers.train_stack)
        assert not set(functions()) & set(before)
    assert functions() == before
