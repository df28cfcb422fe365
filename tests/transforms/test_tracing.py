# SPDX-License-Identifier: Apache-2.0
"""Tracers, exporters, profilers and dispatch modes over managed models."""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

TIGHT = "12KiB"


def make_model(num_layers: int = 3) -> helpers.Stack:
    """Adopted and evicted."""
    model = helpers.Stack(num_layers)
    with torch.no_grad():
        model(torch.zeros(1, 32))
    helpers.evict_everything()
    return model


def note_training(recorder: helpers.Recorder, call, model: nn.Module) -> None:
    """Two steps through `call`, which shares its parameters with `model`."""
    helpers.train(recorder, model, helpers.sgd(model), call=call, num_steps=2)


def test_fx_symbolic_trace_and_a_transformed_graph():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        traced = fx.symbolic_trace(model)
        for node in traced.graph.nodes:
            if node.target is torch.tanh:
                node.target = torch.sigmoid
        traced.recompile()
        recorder.note("code", traced.code)
        note_training(recorder, traced, model)

    helpers.twin(loop, tight="28KiB")


def test_fx_interpreter():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        recorder.note("output", fx.Interpreter(fx.symbolic_trace(model)).run(torch.randn(4, 32)))

    helpers.twin(loop, tight=TIGHT)


@pytest.mark.parametrize(
    "tracing_mode",
    [
        pytest.param("real", marks=pytest.mark.full),
        "fake",
        pytest.param("symbolic", marks=pytest.mark.full),
    ],
)
def test_make_fx(tracing_mode):
    def loop(recorder: helpers.Recorder) -> None:
        model, x = make_model(), torch.randn(4, 32)
        parameters = dict(model.named_parameters())

        def call(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,))

        graph = make_fx(call, tracing_mode=tracing_mode)(parameters, x)
        helpers.evict_everything()
        recorder.note("output", graph(parameters, x * 2))

    helpers.twin(loop, tight=TIGHT)


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
def test_jit_trace():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        traced = torch.jit.trace(model, torch.randn(4, 32))
        recorder.note("graph", str(traced.graph).count("aten::") + str(traced.code).count("tanh"))
        note_training(recorder, traced, model)

    helpers.twin(loop, tight="28KiB")


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
def test_jit_script():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        note_training(recorder, torch.jit.script(model), model)

    helpers.plain(loop)  # its first runs are compiled otherwise than its later ones
    helpers.twin(loop, tight="28KiB")


def test_export():
    def loop(recorder: helpers.Recorder) -> None:
        model, x = make_model(), torch.randn(4, 32)
        program = torch.export.export(model, (x,))
        recorder.note("signature", list(program.graph_signature.parameters))
        helpers.evict_everything()
        exported = program.module()
        recorder.note("output", exported(x))
        with torch.no_grad():
            model.layers[0].weight.mul_(2)
        recorder.note("follows", exported(x))
        recorder.note("decomposed", program.run_decompositions().module()(x))

    helpers.twin(loop, tight=TIGHT)


def test_strict_export():
    """It takes no module while there is a hook on all of them."""
    with helpers.managed(stress="evict,poison"):
        model, late = make_model(), helpers.Stack(1)
        x = torch.randn(4, 32)
        program = torch.export.export(model, (x,), strict=True)
        assert helpers.same(program.module()(x).detach(), model(x).detach())
        late.layers[0].weight.data = torch.ones(32, 32)
        late(x)
        assert patrickstar.is_managed(late.layers[0].weight), "the hook did not come back"


def test_an_exported_program_is_saved_as_in_plain_pytorch(tmp_path):
    x = torch.randn(4, 32)
    with helpers.managed(stress="evict,poison"):
        model = make_model()
        expected = model(x).detach()
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(loaded(x), expected)


def test_saving_an_exported_program_that_does_not_fit_is_an_error(tmp_path):
    with helpers.managed(TIGHT):
        program = torch.export.export(make_model(), (torch.randn(4, 32),))
        with pytest.raises(patrickstar.OutOfMemory, match=r"layers\.\d\..*raise host_memory"):
            torch.export.save(program, tmp_path / "program.pt2")


def test_flop_counter():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        with FlopCounterMode(display=False) as counter:
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
        recorder.note("flops", counter.get_total_flops())
        recorder.step("step", loss, model)

    helpers.twin(loop, tight="24KiB")


@pytest.mark.parametrize(
    "options",
    [
        {"profile_memory": True, "with_flops": True},
        {"record_shapes": True, "profile_memory": True},
        {"with_stack": True, "with_modules": True, "record_shapes": True},
    ],
    ids=lambda options: " ".join(options),
)
def test_profiler(options, capfd):
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        with torch.profiler.profile(**options) as profile:
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
        helpers.evict_everything()
        products = [event for event in profile.events() if event.name == "aten::addmm"]
        recorder.note("shapes", [str(event.input_shapes) for event in products])
        recorder.step("step", loss, model)

    helpers.twin(loop, tight="24KiB")
    assert "Exception" not in capfd.readouterr().err


def test_execution_traces(tmp_path, capfd):
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        path = tmp_path / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward()
        observer.stop()
        observer.unregister_callback()
        recorder.note("products", path.read_text().count("aten::addmm"))
        recorder.step("step", loss, model)

    helpers.twin(loop, tight="24KiB")
    assert "Exception" not in capfd.readouterr().err


def test_raw_reads_are_errors_but_while_a_profiler_is_on():
    original = torch.autograd.profiler._enable_profiler
    with helpers.managed(stress="evict"):
        model, x = make_model(), torch.randn(4, 32)
        weight = model.layers[0].weight.detach()

        def ask_for_address() -> None:
            helpers.evict_everything()
            torch._C._is_cow_tensor.__wrapped__(weight)

        with torch.profiler.profile():
            model(x)
            ask_for_address()
        with pytest.raises(RuntimeError, match=r"'layers.0.weight' is not resident"):
            ask_for_address()
    assert torch.autograd.profiler._enable_profiler is original


class Count(TorchDispatchMode):
    """Notes every operation and what its arguments are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Double(TorchFunctionMode):
    """Changes an operation above autograd."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        return answer * 2 if function is torch.tanh else answer


def test_dispatch_and_function_modes():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        with Count() as count, Double():
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
        recorder.note("operations", count.seen)
        recorder.step("step", loss, model)

    helpers.twin(loop, tight="24KiB")


def test_fake_tensors_of_a_managed_model():
    def loop(recorder: helpers.Recorder) -> None:
        model = make_model()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = model(torch.randn(7, 32))
            recorder.note("shape", tuple(fake.shape))
            converted = mode.from_tensor(model.layers[0].weight)
            recorder.note("converted", (tuple(converted.shape), converted.device.type))
        recorder.note("after", model)

    helpers.twin(loop, tight=TIGHT)


def test_models_built_under_fake_and_meta_are_left_alone():
    with helpers.managed(TIGHT):
        with FakeTensorMode():
            model = helpers.Stack(4)
            assert model(torch.randn(2, 32)).shape == (2, 32)
        with torch.device("meta"):
            skeleton = helpers.Stack(4)
        assert patrickstar.stats().managed_bytes == 0
        skeleton.to_empty(device="cpu")
        for parameter in skeleton.parameters():
            nn.init.constant_(parameter, 0.5)
        x = torch.ones(1, 32)
        assert skeleton(x).shape == (1, 32)
        assert patrickstar.is_managed(skeleton.layers[0].weight)
        assert torch.equal(skeleton.layers[3].weight, torch.full((32, 32), 0.5))


def test_subclasses_that_wrap_a_managed_tensor():
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
            )

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            opened = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
            return function(*opened, **(kwargs or {}))

    def loop(recorder: helpers.Recorder) -> None:
        weight = make_model().layers[0].weight
        wrapped = Wrapped(weight.detach())
        helpers.evict_everything()
        recorder.note("product", torch.mm(torch.randn(4, 32), wrapped))
        viewed = weight.detach().as_subclass(type("Plain", (torch.Tensor,), {}))
        recorder.note("sum", (viewed + 1).sum().as_subclass(torch.Tensor))

    helpers.twin(loop, tight=TIGHT)
