# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` of managed models: the bits of the same compiled model in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import helpers
import patrickstar
import pytest
import torch
from patrickstar import _C
from patrickstar.compiled import CompiledGraphs
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global hooks:UserWarning"
)


class Gated(nn.Module):
    """A layer whose parameters are all read by generated code, not only by torch's operations."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight * torch.sigmoid(self.linear.weight)
        return torch.tanh(self.norm(x @ weight + self.linear.bias))


def make_model(num_layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Gated() for _ in range(num_layers)))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(
    recorder: helpers.Recorder,
    model: nn.Module,
    call: Callable[[torch.Tensor], torch.Tensor],
    num_steps: int = 2,
    width: int = 32,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = helpers.adamw,
) -> None:
    """Trains, validates, trains again."""
    optimizer = make_optimizer(model)
    for step in range(num_steps):
        loss = call(torch.randn(4, width)).pow(2).mean()
        recorder.train_step(f"step {step}", loss, model, optimizer)
        with torch.no_grad():
            recorder.note(f"validated {step}", call(torch.randn(4, width)))
    recorder.note("end", model)


def train_whole(recorder: helpers.Recorder, num_layers: int = 3, **options: Any) -> None:
    torch._dynamo.reset()
    model = make_model(num_layers)
    train(recorder, model, torch.compile(model, **options))


@pytest.mark.parametrize(
    "backend", [pytest.param("eager", marks=pytest.mark.full), "aot_eager", "inductor"]
)
def test_a_whole_model(backend):
    helpers.twin(lambda recorder: train_whole(recorder, backend=backend), tight="40KiB")


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead"},
        {"options": {"cpp_wrapper": True}},
        {"options": {"wrap_inductor_compiled_regions": True}},
        {"fullgraph": True, "dynamic": True},
        {"backend": "aot_eager_decomp_partition"},
    ],
    ids=str,
)
def test_a_whole_model_in_other_modes(options):
    helpers.twin(lambda recorder: train_whole(recorder, **options), tight="40KiB")


@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.full), "inductor"])
def test_blocks_of_a_model_larger_than_the_budget(backend):
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = make_model(6)
        for layer in model:
            layer.compile(backend=backend)
        train(recorder, model, model)

    helpers.twin(loop, tight="24KiB")  # of more than 24 KiB of weights alone


def test_a_function_that_writes_to_its_inputs():
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        layer = nn.Linear(32, 32)
        layer(torch.randn(1, 32))

        @torch.compile(fullgraph=True)
        def update(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            weight.mul_(0.5).add_(1)
            return weight.sum(0) + bias

        for step in range(2):
            helpers.evict_everything()
            with torch.no_grad():
                recorder.note(f"sum {step}", update(layer.weight, layer.bias))
            helpers.evict_everything()
            recorder.note(f"step {step}", layer)

    helpers.twin(loop, must_evict=False)


def test_outputs_that_are_views_of_inputs():
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        layer = nn.Linear(32, 32)
        layer(torch.randn(1, 32))

        @torch.compile(fullgraph=True)
        def views(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return weight.t(), weight[3:5], weight, weight.detach().view(-1) * 2

        answers = views(layer.weight)
        helpers.evict_everything()
        recorder.note("answers", answers)
        with torch.no_grad():
            answers[0].add_(1)
        helpers.evict_everything()
        recorder.note("layer", layer)
        (answers[0].sum() + answers[1].sum()).backward()
        recorder.note("gradient", layer.weight.grad)

    helpers.twin(loop, must_evict=False)


def test_a_graph_that_does_not_fit_says_what_it_needs():
    with helpers.managed("12KiB"):
        model = helpers.Stack(4)
        patrickstar.manage(model)
        compiled = torch.compile(model)
        with pytest.raises(
            patrickstar.OutOfMemory,
            match=r"for a compiled graph \(.*layers\.0\.weight.*; raise host_memory to at least "
            r"32768 bytes \(32.0 KiB\); or compile smaller parts",
        ):
            compiled(torch.randn(4, 32))
        assert patrickstar.stats().num_leases == 0
    torch._dynamo.reset()
    with helpers.managed(32768):
        model = helpers.Stack(4)
        patrickstar.manage(model)
        assert torch.compile(model)(torch.randn(4, 32)).shape == (4, 32)


def test_reading_makes_nothing_dirty():
    with helpers.managed("64KiB"):
        model = make_model(3)
        compiled, x = torch.compile(model), torch.randn(4, 32)
        with torch.no_grad():
            compiled(x)
            helpers.evict_everything()
            before = patrickstar.stats()
            num_chunks = before.num_chunks
            compiled(x)
            helpers.evict_everything()
        after = patrickstar.stats()
        assert after.fetched_bytes - before.fetched_bytes == num_chunks * helpers.CHUNK_BYTES
        assert after.spilled_bytes == before.spilled_bytes


def test_leases_end_when_a_graph_throws():
    @torch.library.custom_op("patrickstar_tests::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")

    refuse.register_fake(lambda x: torch.empty_like(x))
    with helpers.managed():
        layer = nn.Linear(32, 32)
        patrickstar.manage(layer)

        @torch.compile(fullgraph=True)
        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return refuse(x @ weight + 1)

        with pytest.raises(ValueError, match="not today"), torch.no_grad():
            call(torch.randn(4, 32), layer.weight)
        assert patrickstar.stats().num_leases == 0


def test_graphs_without_managed_inputs_are_not_held():
    tensors = [torch.zeros(3), 7, torch.ones(2)]
    assert _C.hold_inputs(tensors, set(), "nothing") is None
    with helpers.managed():
        assert _C.hold_inputs(tensors, set(), "nothing") is None
        patrickstar.manage(tensors[2])
        hold = _C.hold_inputs(tensors, set(), "something")
        assert hold is not None
        assert patrickstar.stats().num_leases == 1
        hold.release()
        assert patrickstar.stats().num_leases == 0


def test_shutdown_takes_the_patch_away():
    from torch._inductor.output_code import CompiledFxGraph

    original = CompiledFxGraph.__call__
    model, x = make_model(2), torch.randn(4, 32)
    compiled = torch.compile(model)
    expected = compiled(x)
    with helpers.managed(stress="evict,poison"):
        assert CompiledFxGraph.__call__ is not original
        assert torch.equal(compiled(x), expected)
        patrickstar.manage(model)
        assert torch.equal(compiled(x), expected)
    assert CompiledFxGraph.__call__ is original
    assert torch.equal(compiled(x), expected)


def test_inductor_is_patched_when_it_is_imported_and_not_before():
    result = helpers.run_script(
        """
        import sys
        import helpers, torch
        name = "torch._inductor.output_code"
        with helpers.managed():
            assert name not in sys.modules, "init() imported inductor"
            from torch._inductor.output_code import CompiledFxGraph
            assert hasattr(CompiledFxGraph.__call__, "__wrapped__")
        assert not hasattr(CompiledFxGraph.__call__, "__wrapped__")
        finders = len(sys.meta_path)
        del sys.modules[name]
        with helpers.managed():
            assert len(sys.meta_path) == finders + 1
        assert len(sys.meta_path) == finders
        """
    )
    assert result.returncode == 0, result.stderr


def test_another_inductor_is_refused(monkeypatch):
    other = ModuleType("torch._inductor.output_code")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.raises(patrickstar.Unsupported, match=r"has no torch\._inductor"):
        CompiledGraphs().open()


class Block(nn.Module):
    """A transformer block, recomputed in backward."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.stack = make_model(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return x + checkpoint(self.stack, x, use_reentrant=False)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_transformer_blocks(dtype):
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = nn.Sequential(*(Block() for _ in range(3)))
        for block in model:
            block.compile()

        def call(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
                return model(x.expand(2, 4, 32)).float()

        train(recorder, model, call)

    helpers.twin(loop, tight="72KiB")


@pytest.mark.full
def test_an_optimizer_step():
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = helpers.Stack(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @torch.compile(fullgraph=False)
        def step() -> None:
            optimizer.step()

        for index in range(3):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            recorder.step(f"step {index}", loss, model)
            step()
            optimizer.zero_grad()
        recorder.note("end", model)

    helpers.twin(loop, tight="64KiB", must_evict=False)


@pytest.mark.full
def test_compiled_autograd():
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = make_model(2)
        with torch._dynamo.config.patch(compiled_autograd=True):
            train(recorder, model, torch.compile(model))

    helpers.twin(loop, tight="32KiB")


@pytest.mark.full
def test_adoption_after_compilation():
    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model, x = make_model(2), torch.randn(4, 32)
        compiled = torch.compile(model)
        if _C.is_running():
            patrickstar.unmanage(model)
        recorder.note("before", compiled(x))
        if _C.is_running():
            patrickstar.manage(model)
            assert patrickstar.is_managed(model[0].linear.weight)
        train(recorder, model, compiled)

    helpers.twin(loop, tight="32KiB")


@pytest.mark.full
def test_gpt2_by_blocks():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )

    def loop(recorder: helpers.Recorder) -> None:
        torch._dynamo.reset()
        model = transformers.GPT2LMHeadModel(config)
        for block in model.transformer.h:
            block.compile()
        optimizer = helpers.adamw(model)
        for step in range(2):
            tokens = torch.randint(64, (2, 16))
            loss = model(tokens, labels=tokens, use_cache=False).loss
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop, tight="140KiB")
