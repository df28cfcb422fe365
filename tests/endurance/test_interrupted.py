# SPDX-License-Identifier: Apache-2.0
"""Signals, exceptions in threads, hooks and workers: the engine ends, or stays usable."""

from __future__ import annotations

import os
import signal
import threading

import helpers
import patrickstar
import pytest
import torch
from torch import nn


class InterruptedStepError(Exception):
    """What the tests raise on purpose."""


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


SIGNALLED = """
    import os, signal, sys, threading, helpers, patrickstar, torch

    patrickstar.init(host_memory="48KiB", spill_dir=sys.argv[1], chunk_size=4096)
    model = helpers.Stack(6)
    optimizer = helpers.adamw(model)
    numbers = [signal.Signals[name] for name in sys.argv[2:]]
    if signal.SIGTERM in numbers and "handled" in os.environ.get("KIND", ""):
        signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(7))
    def send():
        for number in numbers:
            os.kill(os.getpid(), number)
    timer = threading.Timer(0.3, send)
    timer.daemon = True
    step = 0
    while True:
        try:
            model(torch.randn(4, 32)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            if len(numbers) > 1:
                os.kill(os.getpid(), numbers[1])  # the second comes while the first is handled
            raise
        step += 1
        if step == 2:
            timer.start()
            print("training", flush=True)
"""


@pytest.mark.parametrize(
    ("names", "kind", "statuses"),
    [
        pytest.param(["SIGTERM"], "", (-signal.SIGTERM,), id="SIGTERM", marks=pytest.mark.full),
        pytest.param(["SIGTERM"], "handled", (7,), id="SIGTERM that leads to sys.exit"),
        pytest.param(["SIGINT", "SIGINT"], "", (130, -signal.SIGINT), id="SIGINT twice"),
        pytest.param(
            ["SIGINT", "SIGTERM"],
            "",
            (-signal.SIGTERM,),
            id="SIGINT, then SIGTERM",
            marks=pytest.mark.full,
        ),
    ],
)
def test_signals_in_the_middle_of_training(names, kind, statuses, tmp_path):
    done = helpers.run_script(SIGNALLED, tmp_path, *names, environment={"KIND": kind})
    assert "training" in done.stdout, done.stderr
    assert done.returncode in statuses, done.stderr
    assert "Fatal Python error" not in done.stderr
    assert "terminate called" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def raise_error(*arguments: object) -> None:
    raise InterruptedStepError("stop")


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert torch.isfinite(ctx.saved_tensors[0]).all()
        raise InterruptedStepError("stop")


def in_own_function(model: nn.Module, x: torch.Tensor) -> None:
    RaisesInBackward.apply(model(x), model.layers[0].weight).sum().backward()


def in_forward_hook(model: nn.Module, x: torch.Tensor) -> None:
    handle = model.layers[2].register_forward_hook(raise_error)
    try:
        model(x)
    finally:
        handle.remove()


def in_full_backward_hook(model: nn.Module, x: torch.Tensor) -> None:
    handle = model.layers[2].register_full_backward_hook(raise_error)
    try:
        model(x).sum().backward()
    finally:
        handle.remove()


def in_a_mode_of_the_user(model: nn.Module, x: torch.Tensor) -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "tanh_backward" in str(function):
                raise InterruptedStepError("stop")
            return function(*args, **(kwargs or {}))

    with Mode():
        model(x).sum().backward()


def in_a_data_loader_worker(model: nn.Module, x: torch.Tensor) -> None:
    class Broken(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 5:
                raise InterruptedStepError("stop")
            return torch.ones(32)

    loader = torch.utils.data.DataLoader(
        Broken(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    for batch in loader:
        model(batch).sum().backward()


def in_another_thread(model: nn.Module, x: torch.Tensor) -> None:
    """A thread dies in the middle of a backward of its own; its exception is handed on."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            in_own_function(model, x)
        except InterruptedStepError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    raise caught[0].with_traceback(None)


def in_an_op_that_is_too_large(model: nn.Module, x: torch.Tensor) -> None:
    """Our own error, in the middle of a step."""
    if patrickstar._C.is_running() and patrickstar.stats().host_budget_bytes < 1 << 20:
        large = torch.zeros(1 << 18)
        with pytest.raises(patrickstar.OutOfMemory):
            patrickstar.manage(large)
            large.add_(1)
    model(x).sum().backward()
    raise InterruptedStepError("stop")


PLACES = (
    in_own_function,
    in_forward_hook,
    in_full_backward_hook,
    in_a_mode_of_the_user,
    in_a_data_loader_worker,
    in_another_thread,
    in_an_op_that_is_too_large,
)


@pytest.mark.parametrize("place", PLACES, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_batch_given_up_after_an_exception(place):
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(4):
            x = torch.randn(4, 32)
            if step in (1, 2):
                with pytest.raises(InterruptedStepError) as caught:
                    place(model, x)
                caught.value.__traceback__ = None  # its frames hold tensors
                del caught
                optimizer.zero_grad()
                continue
            loss = model(x).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    before = num_descriptors()
    helpers.twin(loop)
    assert num_descriptors() == before


def test_an_exception_that_nobody_catches_in_a_thread(tmp_path):
    done = helpers.run_script(
        """
        import sys, threading, helpers, patrickstar, torch
        patrickstar.init(host_memory="48KiB", spill_dir=sys.argv[1], chunk_size=4096)
        model = helpers.Stack(4)
        def work():
            model(torch.randn(4, 32)).sum().backward()
            raise ValueError("mine")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        helpers.plain(helpers.train_stack)
        print("went on")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: mine" in done.stderr
    assert "went on" in done.stdout
    assert list(tmp_path.iterdir()) == []
