# SPDX-License-Identifier: Apache-2.0
"""Models used by other methods than forward, part by part, generating, or compiled."""

from __future__ import annotations

from collections.abc import Callable

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn import functional


@pytest.mark.parametrize("make", ["meta", "lazy"])
def test_parameters_that_get_their_bytes_after_a_first_call(make: str) -> None:
    with helpers.managed():
        if make == "meta":
            with torch.device("meta"):
                model: nn.Module = helpers.Stack()
                model(torch.zeros(1, 32))
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        else:
            model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
            model(torch.ones(1, 32))
        model(torch.ones(1, 32))
        assert all(map(patrickstar.is_managed, model.parameters()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def qk(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) * torch.sigmoid(self.key(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.qk(x)


class Encoder(nn.Module):
    """Reads its own weight in forward, and has methods beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.own = nn.Parameter(torch.randn(32, 32) * 0.2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encode(x))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


CALLS: dict[str, Callable[[Wrapper], Callable[[torch.Tensor], torch.Tensor]]] = {
    "another method": lambda model: model.encoder.encode,
    "a part": lambda model: model.encoder,
    "a method of a part of a part": lambda model: model.encoder.layers[0].qk,
    "forward of the type": lambda model: lambda x: type(model).forward(model, x),
    "forward itself": lambda model: model.encoder.forward,
    "functional_call": lambda model: (
        lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    ),
    "a lambda over its weights": lambda model: (
        lambda x: functional.linear(x, model.encoder.own.t()) @ model.encoder.layers[1].key.weight
    ),
}


def use(
    recorder: helpers.Recorder,
    model: Wrapper,
    call: Callable[[torch.Tensor], torch.Tensor],
    num_steps: int = 3,
) -> None:
    optimizer = helpers.adamw(model)
    for step in range(num_steps):
        with torch.no_grad():
            recorder.note(f"step {step} without gradients", call(torch.randn(2, 32)))
        loss = call(torch.randn(4, 32)).pow(2).mean()
        recorder.train_step(f"step {step}", loss, model, optimizer)
    recorder.note("end", model)


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_not_those_of_the_model(name):
    def loop(recorder: helpers.Recorder) -> None:
        model = Wrapper()
        use(recorder, model, CALLS[name](model))

    helpers.twin(loop, tight="64KiB")


@pytest.mark.parametrize("name", CALLS)
def test_what_was_bound_before_init(name):
    def build() -> tuple[Wrapper, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(helpers.SEED)
        model = Wrapper()
        return model, CALLS[name](model)

    expected, got = helpers.Recorder(), helpers.Recorder()
    use(expected, *build())
    model, call = build()
    with helpers.managed("64KiB", stress="evict,poison"):
        use(got, model, call)
        assert all(patrickstar.is_managed(p) for p in model.parameters())
    helpers.assert_same(got.records, expected.records, name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_of_several_lengths_between_steps(mode):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(48, 32)
            self.cell = nn.GRUCell(32, 32)
            self.head = nn.Linear(32, 48, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, token: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.cell(self.embedding(token), hidden)
            return self.head(hidden), hidden

        def generate(self, num_tokens: int) -> list[torch.Tensor]:
            token, hidden, answer = torch.zeros(2, dtype=torch.long), torch.zeros(2, 32), []
            for _ in range(num_tokens):
                logits, hidden = self(token, hidden)
                token = logits.argmax(-1)
                answer.append(token)
            return answer

    def loop(recorder: helpers.Recorder) -> None:
        model = Decoder()
        optimizer = helpers.adamw(model)
        for step, num_tokens in enumerate((3, 7, 0, 5)):
            model.eval()
            with mode():
                recorder.note(f"step {step} generated", model.generate(num_tokens))
            model.train()
            hidden, loss = torch.zeros(4, 32), torch.zeros(())
            for _ in range(3):
                tokens = torch.randint(48, (4,))
                logits, hidden = model(tokens, hidden)
                loss = loss + functional.cross_entropy(logits, tokens)
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop, tight="80KiB")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
def test_a_compiled_model_trains_validates_and_trains_on(backend):
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = helpers.Stack(4)
        compiled = torch.compile(model, backend=backend)
        optimizer = helpers.adamw(model)
        for step in range(4):
            if step == 2:
                compiled.eval()
                with torch.no_grad():
                    recorder.note("validated", compiled(torch.randn(4, 32)))
                compiled.train()
            loss = compiled(torch.randn(4, 32)).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)
        torch._dynamo.reset()

    helpers.twin(loop)
