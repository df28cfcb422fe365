# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tied, listed twice, read by others than their module, or never used."""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn import functional


class TiedHead(nn.Module):
    """An embedding that is also the output layer, with another layer registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32)
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def train_tied_head(recorder: helpers.Recorder) -> tuple[TiedHead, torch.Tensor]:
    model = TiedHead()
    optimizer = helpers.adamw(model)
    tokens = torch.randint(64, (4, 8))
    for step in range(2):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        recorder.train_step(f"step {step}", loss, model, optimizer)
    return model, tokens


def test_a_tied_weight_keeps_both_names_and_its_true_partner():
    def loop(recorder: helpers.Recorder) -> None:
        model, tokens = train_tied_head(recorder)
        with torch.no_grad():
            before = model(tokens).clone()
        helpers.evict_everything()
        assert model.head.weight is model.embedding.weight
        state = model.state_dict()
        assert set(state) == {"middle.weight", "middle.bias", "embedding.weight", "head.weight"}
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        recorder.note("state", list(state.values()))
        fresh = TiedHead()
        fresh.load_state_dict(state, strict=True)
        with torch.no_grad():
            assert torch.equal(fresh(tokens), before)
            assert torch.equal(model(tokens), before)
        assert fresh.head.weight is fresh.embedding.weight

    helpers.twin(loop)


def test_a_parameter_under_three_names_has_one_slot_and_one_pair_of_moments():
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(32, 32, bias=False)
            self.layers = nn.ModuleList([shared, nn.Linear(32, 32, bias=False), shared])
            self.alias = shared.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x @ self.alias

    def loop(recorder: helpers.Recorder) -> None:
        model = Repeated()
        helpers.train(recorder, model)

    helpers.twin(loop, tight="24KiB")

    with helpers.managed():
        model = Repeated()
        optimizer = helpers.adamw(model.parameters())
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        # Two weights of one page, each with a gradient and two moments.
        assert patrickstar.stats().managed_bytes == 2 * 4 * 4096
        assert len(optimizer.state) == 2
        del model, optimizer


def test_a_parent_that_reads_its_childs_weights_gets_their_values():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(32, 32)
            self.child.scale = nn.Parameter(torch.randn(32))
            self.stack = helpers.Stack(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stack(x) + self.child.bias * self.child.scale

    helpers.twin(lambda recorder: helpers.train(recorder, Parent()))


def test_a_loss_outside_the_model_reads_its_head_by_attribute():
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.ModuleDict({"body": helpers.Stack(4), "head": nn.Linear(32, 48)})
        optimizer = helpers.adamw(model)
        for step in range(3):
            hidden, target = model["body"](torch.randn(8, 32)), torch.randint(48, (8,))
            head = model["head"]
            loss = functional.cross_entropy(
                functional.linear(hidden, head.weight, head.bias), target
            )
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop)


@pytest.mark.parametrize("kind", ["attention with other key sizes", "encoder layer"])
def test_attention_modules_that_read_weights_of_their_parts(kind):
    def loop(recorder: helpers.Recorder) -> None:
        if kind == "encoder layer":
            model = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
            arguments = [torch.randn(2, 5, 32)]
        else:
            model = nn.MultiheadAttention(32, 4, kdim=48, vdim=16, batch_first=True)
            arguments = [torch.randn(2, 5, size) for size in (32, 48, 16)]
        optimizer = helpers.adamw(model)
        for step in range(3):
            answer = model(*arguments)
            answer = answer[0] if isinstance(answer, tuple) else answer
            loss = answer.pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        model.eval()
        with torch.no_grad():  # the fast path reads every weight by itself
            answer = model(*arguments)
            recorder.note("eval", answer if isinstance(answer, torch.Tensor) else answer[0])

    helpers.twin(loop)


def test_a_weight_applied_three_times_in_a_forward():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x

    def loop(recorder: helpers.Recorder) -> None:
        helpers.train(recorder, Recurrent(), width=48)

    helpers.twin(loop, tight="36KiB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_shared_by_encoder_decoder_and_output(dtype):
    class EncoderDecoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Embedding(64, 48)
            self.encoder = nn.LSTM(48, 48, batch_first=True)
            self.decoder = nn.LSTM(48, 48, batch_first=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            _, state = self.encoder(self.shared(tokens))
            hidden, _ = self.decoder(self.shared(tokens.flip(1)), state)
            return functional.linear(hidden, self.shared.weight)

    def loop(recorder: helpers.Recorder) -> None:
        model = EncoderDecoder().to(dtype)
        optimizer = helpers.adamw(model)
        tokens = torch.randint(64, (2, 6))
        for step in range(3):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model(tokens))

    helpers.twin(loop, tight="320KiB" if dtype == torch.float32 else "160KiB")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_trainable_weight_that_no_forward_uses(set_to_none):
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.ModuleDict({"used": helpers.Stack(4), "unused": nn.Linear(32, 32)})
        optimizer = helpers.adamw(model, weight_decay=0.1)
        if not set_to_none:  # a zero gradient is not a missing one: it decays
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        for step in range(5):
            loss = model["used"](torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            for name, parameter in model.named_parameters():
                recorder.note(f"step {step} {name} has a gradient", parameter.grad is not None)
        recorder.note("end", model)
        recorder.note("state", optimizer)
        moved = [name for name, p in model["unused"].named_parameters() if p in optimizer.state]
        assert bool(moved) == (not set_to_none)

    helpers.twin(loop)
