# SPDX-License-Identifier: Apache-2.0
"""Exceptions, signals, forks and ends: the engine stays usable and the numbers right."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable

import helpers
import patrickstar
import pytest
import torch
from torch import nn


class InterruptedStepError(Exception):
    """What the tests raise in the middle of a step."""


class Raiser(nn.Module):
    """A stack that raises in its third layer when it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.stack = helpers.Stack(4)
        self.error = error
        self.is_armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.stack.layers):
            if index == 2 and self.is_armed:
                raise self.error
            x = torch.tanh(layer(x))
        return x


def in_forward(model: Raiser, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model.is_armed = True
    try:
        model(x)
    finally:
        model.is_armed = False


def in_backward_hook(model: Raiser, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def raise_error(gradient: torch.Tensor) -> None:
        raise model.error

    handle = model.stack.layers[1].weight.register_hook(raise_error)
    try:
        model(x).pow(2).mean().backward()
    finally:
        handle.remove()


def in_accumulate_hook(model: Raiser, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def raise_error(parameter: torch.Tensor) -> None:
        raise model.error

    weight = model.stack.layers[1].weight
    handle = weight.register_post_accumulate_grad_hook(raise_error)
    try:
        model(x).pow(2).mean().backward()
    finally:
        handle.remove()


def in_step(model: Raiser, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def raise_error(*arguments: object) -> None:
        raise model.error

    model(x).pow(2).mean().backward()
    handle = optimizer.register_step_pre_hook(raise_error)
    try:
        optimizer.step()
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "error",
    [InterruptedStepError("stop"), KeyboardInterrupt(), torch.OutOfMemoryError("simulated")],
    ids=["exception", "keyboard interrupt", "out of memory"],
)
@pytest.mark.parametrize(
    "place",
    [in_forward, in_backward_hook, in_accumulate_hook, in_step],
    ids=lambda function: function.__name__,
)
def test_a_batch_skipped_after_an_exception(place, error):
    def loop(recorder: helpers.Recorder) -> None:
        model = Raiser(error)
        optimizer = helpers.adamw(model)
        for step in range(4):
            x = torch.randn(4, 32)
            try:
                if step in (0, 2):
                    place(model, optimizer, x)
            except type(error):
                optimizer.zero_grad()
                error.__traceback__ = None  # its frames hold tensors
                model.stack.layers[1].weight.detach().clone().numpy()  # no step runs any more
                continue
            loss = model(x).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop)


INTERRUPTED = """
    import os, signal, sys, threading, helpers, patrickstar, torch

    is_caught = sys.argv[2] == "caught"
    def steps(model, optimizer, recorder, first, last):
        for step in range(first, last):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.zero_grad()

    def whole(recorder):
        model = helpers.Stack(4)
        steps(model, helpers.adamw(model), recorder, 0, 4)
    expected = helpers.plain(whole).records

    def interrupted(recorder):
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        steps(model, optimizer, recorder, 0, 2)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        print("training", flush=True)
        try:
            while True:  # forward and backward only, so that nothing is trained
                model(torch.randn(4, 32)).pow(2).mean().backward()
        except KeyboardInterrupt:
            if not is_caught:
                raise
        optimizer.zero_grad()
        steps(model, optimizer, recorder, 2, 4)

    patrickstar.init(host_memory="48KiB", spill_dir=sys.argv[1], chunk_size=4096)
    got = helpers.plain(interrupted).records
    helpers.assert_same(got, expected, "after Ctrl-C")
    print("the same numbers")
"""


@pytest.mark.parametrize("kind", ["caught", "not caught"])
def test_ctrl_c_in_the_middle_of_a_step(kind, tmp_path):
    done = helpers.run_script(INTERRUPTED, tmp_path, kind)
    assert "training" in done.stdout
    if kind == "caught":
        assert done.returncode == 0, done.stderr
        assert "the same numbers" in done.stdout
    else:  # what Python itself ends with after an interrupt
        assert done.returncode in (130, -signal.SIGINT), done.stderr
        assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_sys_exit_and_an_uncaught_exception_end_cleanly(tmp_path):
    for ending, status in (("sys.exit(3)", 3), ("raise ValueError('mine')", 1)):
        done = helpers.run_script(
            f"""
            import sys, helpers, patrickstar
            patrickstar.init(host_memory="48KiB", spill_dir=sys.argv[1], chunk_size=4096)
            helpers.plain(helpers.train_stack)
            model = helpers.Stack()
            {ending}
            """,
            tmp_path,
        )
        assert done.returncode == status, done.stderr
        assert list(tmp_path.iterdir()) == []


def test_forked_data_loader_workers_beside_training():
    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(32, generator=torch.Generator().manual_seed(index))

    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for epoch in range(2):
            for index, batch in enumerate(loader):
                loss = model(batch).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.note(f"epoch {epoch} batch {index}", loss)
        recorder.note("end", model)

    helpers.twin(loop)


def in_child(body: Callable[[], str]) -> tuple[int, str]:
    """Runs `body` in a forked child: its exit status, or minus a signal, and what it answers."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, body().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answer


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_a_snapshot_or_is_told():
    with helpers.managed("48KiB") as session:
        tensors = [torch.full((32, 32), float(index)) for index in range(24)]
        patrickstar.manage(tensors)
        before = session.stats()

        def read(tensor: torch.Tensor) -> Callable[[], str]:
            def body() -> str:
                try:
                    return str(tensor.sum().item())
                except patrickstar.Error as error:
                    return f"{type(error).__name__}: {error}"

            return body

        tensors[23].add_(0)  # the last one used is resident, the first is on disk
        assert in_child(read(tensors[23])) == (0, str(23.0 * 1024))
        status, answer = in_child(read(tensors[0]))
        assert status == 0
        assert "was forked from the one that trains" in answer

        def write() -> str:
            try:
                for tensor in tensors:
                    tensor.mul_(0)
            except patrickstar.Error as error:
                return str(error)
            return "written"

        status, answer = in_child(write)
        assert status == 0
        assert "was forked" in answer
        assert session.stats().spilled_bytes >= before.spilled_bytes
        for index, tensor in enumerate(tensors):  # the child changed nothing here
            assert torch.equal(tensor, torch.full((32, 32), float(index)))


def test_threads_that_compute_at_once():
    expected = {seed: _trained(seed) for seed in range(4)}
    with helpers.managed("64KiB", stress="evict,poison"):
        got: dict[int, bytes] = {}
        threads = [
            threading.Thread(target=lambda seed=seed: got.update({seed: _trained(seed)}))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert got == expected


def _trained(seed: int) -> bytes:
    """Weights after two steps from a generator of their own, so that threads do not mix."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(32, 32, generator=generator) for _ in range(3)]
    if patrickstar._C.is_running():
        patrickstar.manage(weights)
    for weight in weights:
        weight.requires_grad_()
    for _ in range(2):
        x = torch.randn(4, 32, generator=generator)
        for weight in weights:
            x = torch.tanh(x @ weight)
        x.pow(2).mean().backward()
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.grad, alpha=0.1)
                weight.grad = None
    return b"".join(map(helpers.as_bytes, weights))


def test_a_second_init_with_the_same_settings_changes_nothing():
    with helpers.managed("64KiB") as session:
        settings = {"spill_dir": session.config.spill_dir, "chunk_size": helpers.CHUNK_BYTES}
        model = helpers.Stack()
        patrickstar.manage(model)
        assert patrickstar.init(host_memory="64KiB", **settings) is session
        assert patrickstar.is_managed(model.layers[0].weight)
        with pytest.raises(patrickstar.Error, match=r"host_memory=65536.*host_memory=131072"):
            patrickstar.init(host_memory="128KiB", **settings)
        with pytest.raises(patrickstar.Error, match="management is already on with log"):
            patrickstar.init(host_memory="64KiB", log="run.jsonl", **settings)
        with pytest.raises(patrickstar.Error, match="called again with disk_space=131072;"):
            patrickstar.init(host_memory="64KiB", disk_space="128KiB", **settings)
        assert patrickstar.init(host_memory="64KiB", **settings) is session
    with helpers.managed("128KiB") as second:
        assert second is not session
        helpers.plain(helpers.train_stack)


def test_a_second_init_asks_for_the_same_in_the_same_words_or_the_same_bytes(monkeypatch):
    room = [1 << 30]
    monkeypatch.setattr("patrickstar.config.available_memory", lambda: room[0])
    with helpers.managed(0.25) as session:
        settings = {"spill_dir": session.config.spill_dir, "chunk_size": helpers.CHUNK_BYTES}
        room[0] = 1 << 29  # memory was used meanwhile
        assert patrickstar.init(host_memory=0.25, **settings) is session
        assert patrickstar.init(host_memory="256MiB", **settings) is session
        with pytest.raises(
            patrickstar.Error, match=r"host_memory=268435456.*host_memory=402653184"
        ):
            patrickstar.init(host_memory=0.75, **settings)


def test_a_failed_init_leaves_nothing_started(tmp_path):
    for settings in ({"log": tmp_path}, {"spill_dir": __file__}, {"device": "cuda"}):
        with pytest.raises(patrickstar.Error):
            patrickstar.init(host_memory="64KiB", **{"spill_dir": tmp_path, **settings})
        assert not patrickstar._C.is_running()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
