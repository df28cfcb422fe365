# SPDX-License-Identifier: Apache-2.0
"""The loss scale: overflow, skipped steps, growth, its end, its place in logs and checkpoints."""

from __future__ import annotations

import json

import helpers
import patrickstar
import pytest
import torch
from patrickstar import loss_scale
from precisions import Precision, train_step, twin
from torch import nn
from torch.utils.checkpoint import checkpoint

HUGE = 1e4  # squared, and times the first scale, beyond float16


def test_overflow_skips_and_halves_as_a_gradient_scaler_does():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step in range(6):
            batch = torch.randn(4, 32)
            factor = HUGE if step in (1, 2, 4) else 1.0
            loss = by.call(model, batch).float().mul(factor).pow(2).mean()
            by.backward(loss)
            by.unscale(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            recorder.note(f"{step} overflows", not torch.isfinite(norm).item())
            by.step(optimizer)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            recorder.note(f"{step} scale", by.update())
            recorder.note(f"{step}", [model, optimizer])
        assert [recorder.records[f"{step} overflows"] for step in range(6)] == [
            False, True, True, False, True, False,
        ]  # fmt: skip

    twin(loop, "fp16")


def test_accumulated_gradients_of_which_one_overflows():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step in range(4):
            for micro_batch in range(3):
                factor = HUGE if (step, micro_batch) == (1, 1) else 1.0
                output = by.call(model, torch.randn(4, 32)).float().mul(factor)
                by.backward(output.pow(2).mean() / 4)
            by.unscale(optimizer)
            recorder.note(f"{step}", model)
            by.step(optimizer)
            optimizer.zero_grad()
            recorder.note(f"{step} scale", by.update())

    twin(loop, "fp16")


def test_only_the_optimizer_whose_gradients_overflow_skips():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        quiet, loud = helpers.Stack(), helpers.Stack()
        optimizers = [helpers.adamw(quiet), helpers.adamw(loud)]
        for step in range(4):
            factor = HUGE if step == 1 else 1.0
            by.backward(by.call(loud, torch.randn(4, 32)).float().mul(factor).pow(2).mean())
            by.backward(by.call(quiet, torch.randn(4, 32)).pow(2).mean().float())
            for optimizer in optimizers:
                by.step(optimizer)
                optimizer.zero_grad()
            recorder.note(f"{step} scale", by.update())
            recorder.note(f"{step}", [quiet, loud])

    twin(loop, "fp16")


def test_the_scale_grows_after_many_good_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)

    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        if hasattr(by, "scaler"):
            by.scaler.set_growth_interval(2)
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step in range(7):
            factor = HUGE if step == 3 else 1.0
            loss = by.call(model, torch.randn(4, 32)).float().mul(factor).pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)
        assert recorder.records["2 scale"] == 2 * 65536

    twin(loop, "fp16")


def test_sparse_gradients():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        table = nn.Embedding(64, 32, sparse=True)
        model = nn.Sequential(table, nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = by.call(model, torch.randint(64, (16,))).float().pow(2).mean()
            by.backward(loss)
            by.unscale(optimizer)
            recorder.note(f"{step} table", table.weight.grad.to_dense())
            by.step(optimizer)
            optimizer.zero_grad()
            by.update()
            recorder.note(f"{step}", list(model.state_dict().values()))

    twin(loop, "fp16", must_evict=False, stress=())


def test_hooks_on_parameters_and_gradients_of_inputs_are_unscaled():
    torch.manual_seed(0)
    seen = []
    with helpers.managed(mixed_precision="fp16"):
        model = nn.Linear(8, 8)
        model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        batch = torch.randn(4, 8, requires_grad=True)
        loss = model(batch).float().pow(2).mean()
        (expected, of_batch) = torch.autograd.grad(
            loss * 65536, [model.weight, batch], retain_graph=True
        )
        loss.backward()
        assert patrickstar.is_managed(model.bias.grad)
        assert helpers.same(model.weight.grad, expected / 65536)
        assert helpers.same(batch.grad, of_batch / 65536)
        by_grad, by_backward, accumulated = seen
        assert helpers.same(by_grad, expected)  # as asked of torch.autograd.grad
        assert helpers.same(by_backward, expected / 65536)
        assert helpers.same(accumulated, expected / 65536)


def test_backward_towards_some_inputs_and_from_several_outputs():
    torch.manual_seed(0)
    with helpers.managed(mixed_precision="fp16"):
        model = helpers.Stack(2)
        first, second = model.layers
        a, b = first(torch.randn(4, 32)).float(), second(torch.randn(4, 32)).float()
        seeds = [torch.randn(4, 32), torch.randn(4, 32)]
        expected = torch.autograd.grad(
            [a, b], [first.weight], [seed * 65536 for seed in seeds], retain_graph=True
        )[0]
        torch.autograd.backward([a, b], seeds, inputs=[first.weight])
        assert helpers.same(first.weight.grad, expected / 65536)
        assert second.weight.grad is None and first.bias.grad is None


def test_functions_that_run_backward_inside_of_backward():
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.x, ctx.layer = x.detach(), layer
            return layer(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.x.requires_grad_()
            other = torch.ones(1, requires_grad=True)
            with torch.enable_grad():
                output, loss = ctx.layer(x), other * 3
            output.backward(gradient)
            loss.backward()
            assert other.grad.item() == 3
            return x.grad, None

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(2)
        for step in range(2):
            hidden = model.layers[0](torch.randn(4, 32))
            loss = Recomputing.apply(hidden, model.layers[1]).pow(2).mean()
            loss.backward()
            recorder.note(f"{step}", model)

    expected = helpers.plain(loop).records
    with helpers.managed(mixed_precision="fp16"), torch.autocast("cpu", enabled=False):
        helpers.assert_same(helpers.plain(loop).records, expected, "nested")


def test_functions_that_ask_for_gradients_inside_of_backward():
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.leaves = x.detach(), weight
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.leaves
            x.requires_grad_()
            with torch.enable_grad():
                output = x @ weight
            return torch.autograd.grad(output, [x, weight], gradient)

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(2)
        hidden = model.layers[0](torch.randn(4, 32))
        Recomputing.apply(hidden, model.layers[1].weight).pow(2).mean().backward()
        recorder.note("after", model)

    expected = helpers.plain(loop).records
    with helpers.managed(mixed_precision="fp16"), torch.autocast("cpu", enabled=False):
        helpers.assert_same(helpers.plain(loop).records, expected, "nested")


def test_a_torch_function_mode_scales_once():
    with helpers.managed(mixed_precision="fp16"), torch.device("cpu"):
        weight = torch.ones(1, requires_grad=True)
        torch.autograd.backward(weight * 3)
        assert weight.grad.item() == 3


def test_a_tensor_that_only_a_reentrant_checkpoint_saw_is_refused():
    with helpers.managed(mixed_precision="fp16"):
        weight = torch.randn(8, 8, requires_grad=True)
        batch = torch.randn(4, 8, requires_grad=True)
        checkpoint(lambda x: x @ weight, batch, use_reentrant=True).sum().backward()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with pytest.raises(patrickstar.Error, match=r"\(8, 8\): it is still scaled, since only a"):
            optimizer.step()


def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path):
    path = tmp_path / "run.jsonl"
    called = []
    with helpers.managed(mixed_precision="fp16", log=path) as session:
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        for factor in (1.0, float("inf"), 1.0):
            before = [p.detach().clone() for p in model.parameters()]
            (model(torch.randn(4, 32)).float().pow(2).mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            is_same = all(
                helpers.same(p, old) for p, old in zip(model.parameters(), before, strict=True)
            )
            assert is_same == (factor != 1.0)
        stats = patrickstar.stats()
        assert (stats.steps, stats.skipped_steps) == (3, 1)
        assert called == ["before", "after"] * 2
        assert optimizer.state[model.layers[0].weight]["step"] == 2
        assert session.loss_scale.scale == 32768
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["skipped"] for record in records] == [False, True, False]
    assert [record["scale"] for record in records] == [65536, 32768, 32768]


def test_gradients_given_up_do_not_skip_the_next_step():
    with helpers.managed(mixed_precision="fp16") as session:
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        (model(torch.randn(4, 32)).float().mean() * float("inf")).backward()
        optimizer.zero_grad()
        model(torch.randn(4, 32)).float().mean().backward()
        optimizer.step()
        assert patrickstar.stats().skipped_steps == 0
        assert session.loss_scale.scale == 65536


def test_a_gradient_that_stays_inf_skips_until_it_is_gone():
    with helpers.managed(mixed_precision="fp16"):
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        for factor in (float("inf"), 1.0, 1.0):
            (model(torch.randn(4, 32)).float().mean() * factor).backward()
            optimizer.step()
        assert patrickstar.stats().skipped_steps == 3
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, 32)).float().mean().backward()
        optimizer.step()
        assert patrickstar.stats().skipped_steps == 3


def test_overflow_that_never_stops_is_an_error():
    with helpers.managed(mixed_precision="fp16"):
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        with pytest.raises(patrickstar.Error) as caught:
            for _ in range(100):
                (model(torch.randn(4, 32)).float().mean() * float("nan")).backward()
                optimizer.step()
                optimizer.zero_grad()
        message = str(caught.value)
        assert message.startswith("cannot train in float16: 32 steps in a row")
        assert "at a loss scale of 3.05176e-05" in message  # 65536 / 2**31
        assert "'layers.0.weight'" in message
        assert patrickstar.stats().skipped_steps == 31
        helpers.plain(lambda recorder: helpers.train(recorder, model, optimizer, num_steps=1))


def test_a_closure_that_overflows():
    with helpers.managed(mixed_precision="fp16"):
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        num_calls = 0

        def closure() -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            optimizer.zero_grad()
            loss = model(torch.randn(4, 32)).float().mean() * factor
            loss.backward()
            return loss

        for factor in (1.0, float("inf"), 1.0):
            loss = optimizer.step(closure)
            assert torch.isfinite(loss) == (factor == 1.0)
        assert num_calls == 3
        assert patrickstar.stats().skipped_steps == 1
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_what_cannot_be_scaled_is_refused():
    with helpers.managed(mixed_precision="fp16"):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(patrickstar.Unsupported, match='LBFGS with mixed_precision="fp16"'):
            optimizer.step(lambda: model(torch.randn(4, 8)).sum())
        model.half()
        with pytest.raises(patrickstar.InvalidArgument, match="is float16, where"):
            model(torch.randn(4, 8)).float().sum().backward()


def test_a_checkpoint_keeps_the_scale(tmp_path):
    with helpers.managed(mixed_precision="fp16") as session:
        model = nn.Linear(8, 8)
        optimizer = helpers.adamw(model)
        scale = session.loss_scale
        for factor in (float("inf"), 1.0):
            (model(torch.randn(4, 8)).float().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = scale.state_dict()
        assert saved == {"scale": 32768, "num_good_steps": 1, "num_skipped": 0}
        patrickstar.save_checkpoint(tmp_path / "c", model, optimizer, loss_scale=scale)
        scale.load_state_dict({"scale": 2.0, "num_good_steps": 0, "num_skipped": 5})
        patrickstar.load_checkpoint(tmp_path / "c", model, optimizer, loss_scale=scale)
        assert scale.state_dict() == saved
        with pytest.raises(patrickstar.InvalidArgument, match="cannot load the loss scale"):
            scale.load_state_dict({"scale": 1.0})


def test_shutdown_takes_the_hooks_off():
    with helpers.managed(mixed_precision="fp16"):
        model = nn.Linear(8, 8)
        model(torch.randn(4, 8)).float().sum().backward()
        assert model.weight._backward_hooks
    assert not model.weight._backward_hooks
    model.zero_grad()
    model(torch.ones(1, 8)).sum().backward()
    assert model.bias.grad.tolist() == [1] * 8
