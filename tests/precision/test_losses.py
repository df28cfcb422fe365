# SPDX-License-Identifier: Apache-2.0
"""Losses that do not come out of one module call: the numbers of precision written by hand."""

from __future__ import annotations

import helpers
import pytest
import torch
from precisions import DTYPES, Precision, batches, train_step, twin
from torch import nn
from torch.nn import functional

both = pytest.mark.parametrize("precision", list(DTYPES))


@both
def test_one_loss(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            output = by.call(model, batch)
            recorder.note(f"output {step}", output)
            train_step(recorder, f"{step}", output.float().pow(2).mean(), model, optimizer, by)

    twin(loop, precision)


@both
def test_a_loss_in_16_bits(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            train_step(recorder, f"{step}", by.call(model, batch).mean(), model, optimizer, by)

    twin(loop, precision)


@both
def test_a_penalty_on_weights(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            loss = by.call(model, batch).float().pow(2).mean()
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = helpers.Stack()
        self.head = nn.Linear(32, 32)
        self.auxiliary = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden), self.auxiliary(hidden)


@both
def test_an_auxiliary_loss(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = TwoHeads()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            output, auxiliary = by.call(model, batch)
            loss = functional.mse_loss(output.float(), batch) + 0.3 * auxiliary.float().abs().mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


@both
def test_losses_one_after_the_other_add_up(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = TwoHeads()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            output, auxiliary = by.call(model, batch)
            by.backward(output.float().pow(2).mean(), retain_graph=True)
            loss = auxiliary.float().abs().mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


@both
def test_parts_and_a_head_read_outside_of_the_model(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = TwoHeads()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            hidden = by.call(model.body, batch)
            output = functional.linear(hidden.float(), model.head.weight, model.head.bias)
            recorder.note(f"output {step}", output)
            loss = output.pow(2).mean() + by.call(model.auxiliary, hidden).float().mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


@both
def test_loss_and_logits_of_a_language_model(precision):
    transformers = pytest.importorskip("transformers")

    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        optimizer = helpers.adamw(model)
        for step in range(3):
            tokens = torch.randint(64, (2, 16))
            output = by.call(model, input_ids=tokens, labels=tokens)
            loss = output.loss + 0.01 * output.logits.float().pow(2).mean()
            train_step(recorder, f"{step}", loss, model, optimizer, by)
        model.eval()
        prompt = torch.randint(64, (1, 4))
        tokens = by.call(
            model.generate,
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        recorder.note("generated", tokens)

    twin(loop, precision, tight="96KiB")


@both
def test_two_models_a_kept_graph_and_a_step_between(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        generator, critic = helpers.Stack(), helpers.Stack()
        of_generator, of_critic = helpers.adamw(generator), helpers.adamw(critic)
        for step, batch in enumerate(batches(3)):
            fake = by.call(generator, batch)
            judged = by.call(critic, fake.detach()).float().mean()
            loss = judged - by.call(critic, torch.randn(4, 32)).float().mean()
            kept = by.call(generator, torch.randn(4, 32)).float().pow(2).mean()
            by.backward(kept, retain_graph=True)
            by.backward(loss)
            by.unscale(of_critic)
            recorder.note(f"{step} critic", critic)
            by.step(of_critic)
            of_critic.zero_grad()
            by.backward(-by.call(critic, fake).float().mean())
            with pytest.raises(RuntimeError, match="second time"):
                by.backward(-fake.float().mean())
            by.unscale(of_generator)
            recorder.note(f"{step} generator", generator)
            by.step(of_generator)
            of_generator.zero_grad()
            of_critic.zero_grad()
            by.update()
        recorder.note("end", [generator, critic])

    twin(loop, precision)


@both
def test_a_penalty_on_gradients(precision):
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(3)):
            batch.requires_grad_(True)
            loss = by.call(model, batch).float().pow(2).mean()
            gradients = torch.autograd.grad(loss, [batch, *model.parameters()], create_graph=True)
            recorder.note(f"{step} gradients", list(gradients))
            loss = loss + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)
            train_step(recorder, f"{step}", loss, model, optimizer, by)

    twin(loop, precision)


def test_a_second_backward_through_accumulated_gradients():
    def loop(recorder: helpers.Recorder, by: Precision) -> None:
        model = helpers.Stack()
        optimizer = helpers.adamw(model)
        for step, batch in enumerate(batches(2)):
            loss = by.call(model, batch).float().pow(2).mean()
            loss.backward(create_graph=True)
            penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
            train_step(recorder, f"{step}", penalty, model, optimizer, by)

    twin(loop, "bf16")


def test_accumulated_gradients_with_a_graph_are_unscaled():
    torch.manual_seed(0)
    batch, model = torch.randn(4, 8), nn.Linear(8, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(batch).pow(4).mean().backward(create_graph=True)
        first = [p.grad for p in model.parameters()]
        sum(gradient.pow(2).sum() for gradient in first).backward()
        return [p.grad.detach().clone() for p in model.parameters()]

    expected = gradients()
    with helpers.managed(mixed_precision="fp16"), torch.autocast("cpu", enabled=False):
        got = gradients()
    assert all(helpers.same(a, b) for a, b in zip(got, expected, strict=True))
