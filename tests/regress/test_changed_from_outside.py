# SPDX-License-Identifier: Apache-2.0
"""Weights edited, replaced, grown, cast or moved by the user; init() called more than once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import _global_optimizer_pre_hooks


class Language(nn.Module):
    """An embedding, a layer, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


def train_language(recorder: helpers.Recorder, model: nn.Module, name: str, num: int) -> None:
    optimizer = helpers.adamw(model)
    for step in range(2):
        tokens = torch.randint(num, (4, 6))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        recorder.train_step(f"{name} {step}", loss, model, optimizer)


def replace_both(model: Language) -> None:
    larger = nn.Embedding(80, 32)
    with torch.no_grad():
        larger.weight[:64] = model.embedding.weight
    model.embedding = larger
    model.head = nn.Linear(32, 80, bias=False)
    model.head.weight = larger.weight


def replace_the_parameters(model: Language) -> None:
    grown = nn.Parameter(torch.cat([model.embedding.weight.detach(), torch.randn(16, 32)]))
    model.embedding.weight = grown
    model.head.weight = grown


def grow_the_data(model: Language) -> None:
    weight = model.embedding.weight
    weight.data = torch.cat([weight.data, torch.randn(16, 32)])
    assert model.head.weight.shape == (80, 32)


def shrink_the_data(model: Language) -> None:
    model.embedding.weight.data = model.embedding.weight.data[:48].clone()


def slice_the_data(model: Language) -> None:
    model.embedding.weight.data = model.embedding.weight.data[8:56]  # still the old storage


def untie(model: Language) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        replace_both,
        replace_the_parameters,
        grow_the_data,
        shrink_the_data,
        slice_the_data,
        untie,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize("has_gradients", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_tied_embedding_of_another_size(change: Callable[[Language], None], has_gradients):
    def loop(recorder: helpers.Recorder) -> None:
        model = Language()
        train_language(recorder, model, "before", 64)
        if has_gradients:
            model(torch.randint(48, (2, 3))).sum().backward()
            model.zero_grad()
        change(model)
        recorder.note("changed", model)
        num = model.embedding.num_embeddings if change is replace_both else 48
        train_language(recorder, model, "after", num)
        recorder.note("end", model)
        if patrickstar._C.is_running() and change is not slice_the_data:
            assert all(patrickstar.is_managed(p) for p in model.parameters())

    helpers.twin(loop, tight="40KiB")


def test_token_embeddings_resized_by_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    def loop(recorder: helpers.Recorder) -> None:
        config = GPT2Config(
            vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        for num_tokens in (50, 71, 40):
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
            assert model.lm_head.weight is model.transformer.wte.weight
            optimizer = helpers.adamw(model)
            for step in range(2):
                tokens = torch.randint(num_tokens, (2, 8))
                loss = model(input_ids=tokens, labels=tokens).loss
                recorder.train_step(f"{num_tokens} tokens, step {step}", loss, model, optimizer)
            del loss  # torch cannot resize what a graph still refers to
        recorder.note("end", model)

    helpers.twin(loop, tight="160KiB")


def to_memory_format(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.contiguous_format)


def empty_and_filled(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def through_meta(model: nn.Module) -> nn.Module:
    return empty_and_filled(model.to("meta"))


def without_an_accelerator(model: nn.Module) -> nn.Module:
    with pytest.raises((AssertionError, RuntimeError)):
        model.to("cuda" if not torch.cuda.is_available() else "xpu")
    return model


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to cpu": lambda model: model.to("cpu"),
    "double": lambda model: model.double(),
    "half and back": lambda model: model.half().float(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "type": lambda model: model.type(torch.float64),
    "float": lambda model: model.float(),
    "requires_grad_": lambda model: model.requires_grad_(True),
    "to_memory_format": to_memory_format,
    "empty_and_filled": empty_and_filled,
    "through_meta": through_meta,
    "without_an_accelerator": without_an_accelerator,
    "apply": lambda model: model.apply(
        lambda part: nn.init.ones_(part.weight) if isinstance(part, nn.Linear) else None
    ),
}


def train_moved(recorder: helpers.Recorder, model: nn.Module, name: str) -> None:
    optimizer = helpers.sgd(model)
    for step in range(2):
        loss = model(torch.randn(4, 32).to(model.layers[0].weight.dtype)).pow(2).mean()
        recorder.train_step(f"{name} {step}", loss, model, optimizer)


@pytest.mark.parametrize("name", MOVES)
def test_a_model_moved_after_init(name):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(5)
        train_moved(recorder, model, "before")
        model = MOVES[name](model)
        train_moved(recorder, model, "after")
        recorder.note("end", model)
        if patrickstar._C.is_running():
            assert all(patrickstar.is_managed(p) for p in model.parameters())

    helpers.twin(loop, tight="40KiB")


@pytest.mark.parametrize("name", MOVES)
def test_a_model_moved_before_init(name):
    def build(recorder: helpers.Recorder) -> nn.Module:
        torch.manual_seed(helpers.SEED)
        model = helpers.Stack(5)
        train_moved(recorder, model, "before")
        return MOVES[name](model)

    expected, got = helpers.Recorder(), helpers.Recorder()
    train_moved(expected, build(expected), "after")
    model = build(got)
    with helpers.managed("40KiB", stress="evict,poison"):
        train_moved(got, model, "after")
        assert all(patrickstar.is_managed(p) for p in model.parameters())
    helpers.assert_same(got.records, expected.records, name)


MASK = (torch.arange(32) % 3 != 0).float()


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)


def prune(model: nn.Module) -> None:
    for layer in model.layers:
        layer.weight.mul_(MASK.to(layer.weight.dtype))
        layer.weight.grad.mul_(MASK.to(layer.weight.dtype)) if layer.weight.grad is not None else 0


def copy_one_to_another(model: nn.Module) -> None:
    model.layers[0].weight.copy_(model.layers[3].weight)


def edit_through_data(model: nn.Module) -> None:
    model.layers[1].weight.data[0] = 0
    model.layers[2].weight.data.t()[3:5].add_(0.5)
    nn.init.zeros_(model.layers[2].bias)
    model.layers[3].weight[4, 4:8] = torch.arange(4.0).to(model.layers[3].weight.dtype)


def load_a_state(model: nn.Module) -> None:
    state = {key: value * 0.5 for key, value in model.state_dict().items()}
    model.load_state_dict(state)


def through_a_vector(model: nn.Module) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.9, model.parameters())


def foreach_and_out(model: nn.Module) -> None:
    weights = [layer.weight for layer in model.layers]
    torch._foreach_mul_(weights, 0.9)
    torch.add(weights[0], weights[1], out=weights[2].detach())


@pytest.mark.parametrize(
    "edit",
    [
        clamp,
        prune,
        copy_one_to_another,
        edit_through_data,
        load_a_state,
        through_a_vector,
        foreach_and_out,
    ],
    ids=lambda function: function.__name__,
)
@pytest.mark.parametrize(
    "when",
    [
        "before step",
        pytest.param("before forward", marks=pytest.mark.full),
        pytest.param("after step", marks=pytest.mark.full),
    ],
)
def test_edits_of_weights_survive_the_next_steps(edit, when):
    """At every place of the loop with one optimizer that goes on, in fp32 and bf16."""

    def loop(recorder: helpers.Recorder) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = helpers.Stack(4).to(dtype)
            optimizer = helpers.adamw(model)
            for step in range(3):
                for place in ("before forward", "before step", "after step"):
                    if place == "before step":
                        loss = model(torch.randn(4, 32).to(dtype)).pow(2).mean()
                        loss.backward()
                    if place == "after step":
                        optimizer.step()
                    if place == when:
                        with torch.no_grad():
                            edit(model)
                recorder.step(f"{dtype} step {step}", loss, model, optimizer)
                optimizer.zero_grad()
            recorder.note(f"{dtype} end", model)

    helpers.twin(loop)


def test_init_again_and_again_hooks_only_once():
    with helpers.managed("64KiB") as session:
        settings = {"spill_dir": session.config.spill_dir, "chunk_size": helpers.CHUNK_BYTES}
        before = num_hooks()
        for _ in range(50):
            assert patrickstar.init(host_memory="64KiB", **settings) is session
        assert num_hooks() == before
        expected = helpers.Stack(2)  # constructors work, and once
        assert len(expected.layers) == 2


def num_hooks() -> tuple[int, int, int]:
    return (
        len(module_hooks._global_forward_pre_hooks),
        len(module_hooks._global_parameter_registration_hooks),
        len(_global_optimizer_pre_hooks),
    )


def test_init_inside_other_contexts_and_in_the_middle_of_a_forward():
    class Calling(nn.Module):
        def __init__(self, call: Callable[[], object]) -> None:
            super().__init__()
            self.stack = helpers.Stack(3)
            self.call = call

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stack(x)
            self.call()
            return self.stack(x)

    def loop(recorder: helpers.Recorder) -> None:
        def call() -> None:
            session = patrickstar.session.current()
            if session is not None:
                patrickstar.init(
                    host_memory=session.config.host_memory,
                    spill_dir=session.config.spill_dir,
                    chunk_size=session.config.chunk_size,
                )

        with torch.no_grad(), torch.device("cpu"):
            call()
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        helpers.train(recorder, Calling(call))

    helpers.twin(loop, stress=())


def test_a_model_goes_through_many_starts_and_ends():
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(helpers.SEED)
        model = helpers.Stack(4)
        return model, helpers.adamw(model)

    def step(recorder: helpers.Recorder, index: int) -> None:
        loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward()
        optimizer.step()
        recorder.step(f"step {index}", loss, model, optimizer)
        optimizer.zero_grad()

    expected, got = helpers.Recorder(), helpers.Recorder()
    model, optimizer = build()
    for index in range(8):
        step(expected, index)
    model, optimizer = build()
    for index in range(8):
        if index % 2:
            with helpers.managed("48KiB", stress="evict,poison"):
                step(got, index)
        else:
            step(got, index)
    helpers.assert_same(got.records, expected.records, "after four starts")


def test_init_after_one_that_failed_in_the_middle_of_a_model(tmp_path):
    with pytest.raises(patrickstar.OutOfMemory), helpers.managed("16KiB", disk_space=0):
        helpers.Stack(8)
    with helpers.managed("64KiB"):
        helpers.plain(helpers.train_stack)
        helpers.assert_nothing_left()


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["adoption.Adopter.open_doors", "raw_access.RawAccess.open"])
def test_init_after_one_that_was_interrupted(monkeypatch, place, error):
    def interrupt(*arguments: object) -> None:
        raise error

    before = num_hooks()
    with monkeypatch.context() as patched:
        patched.setattr(f"patrickstar.{place}", interrupt)
        with pytest.raises(type(error)), helpers.managed("64KiB"):
            pass
    assert not patrickstar._C.is_running()
    assert num_hooks() == before
    with helpers.managed("64KiB"):
        helpers.plain(helpers.train_stack)
        helpers.assert_nothing_left()
