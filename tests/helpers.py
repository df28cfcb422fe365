# SPDX-License-Identifier: Apache-2.0
"""What tests of the engine share: management for a block, twin runs, scripts of their own.

``twin`` runs one seeded loop in plain PyTorch first and then under management, at several budgets
and under stress, and compares every tensor that the loop noted, byte by byte.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import patrickstar
import torch
from patrickstar import _C
from torch import nn

EVERYTHING = "64MiB"
CHUNK_BYTES = 4096  # one page: the smallest payload there is
SEED = 1234

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other


@contextlib.contextmanager
def managed(
    host_memory: int | str = EVERYTHING,
    *,
    stress: str = "",
    chunk_size: int | str = CHUNK_BYTES,
    **settings: Any,
) -> Iterator[patrickstar.Session]:
    """Management while the block runs, spilling to a folder of its own.

    Args:
        host_memory: The budget.
        stress: The words of ``PATRICKSTAR_STRESS``.
        chunk_size: Bytes of a chunk.
        settings: The other arguments of ``patrickstar.init``.
    """
    with contextlib.ExitStack() as stack:
        if "spill_dir" not in settings:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="patrickstar-"))
            settings["spill_dir"] = folder
        before = os.environ.get("PATRICKSTAR_STRESS")
        os.environ["PATRICKSTAR_STRESS"] = stress
        try:
            session = patrickstar.init(host_memory=host_memory, chunk_size=chunk_size, **settings)
        finally:
            os.environ.pop("PATRICKSTAR_STRESS")
            if before is not None:
                os.environ["PATRICKSTAR_STRESS"] = before
        try:
            yield session
        finally:
            patrickstar.shutdown()


def evict_everything() -> None:
    """Takes every managed tensor off memory; does nothing when management is off."""
    if _C.is_running():
        _C.evict_all()


class Recorder:
    """Keeps copies of what a loop shows it, by name and in order."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        """Keeps a copy of a tensor, an optimizer's state, a module with its gradients, or a fact.

        Args:
            name: Where in the loop this is; noting it again appends a number.
            value: A tensor, a module, an optimizer, a list of those, or any value with ``==``.
        """
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                self.note(f"{name} {key}", tensor)
            for key, parameter in value.named_parameters():
                self.note(f"{name} {key}.grad", parameter.grad)
        elif isinstance(value, torch.optim.Optimizer):
            for index, state in enumerate(value.state_dict()["state"].items()):
                for key, part in sorted(state[1].items()):
                    self.note(f"{name} state {index} {key}", part)
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                self.note(f"{name} {index}", part)
        else:
            unique = name
            while unique in self.records:
                unique += "'"
            self.records[unique] = _copy(value)

    def step(
        self, name: str, loss: torch.Tensor | None, model: nn.Module, optimizer: Any = None
    ) -> None:
        """Notes a whole step: loss, weights, gradients and optimizer state."""
        self.note(f"{name} loss", loss)
        self.note(name, model)
        if optimizer is not None:
            self.note(name, optimizer)

    def train_step(
        self, name: str, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Runs backward, notes the step with its gradients, updates and clears them."""
        loss.backward()
        self.step(name, loss, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


Loop = Callable[[Recorder], None]


def plain(loop: Loop) -> Recorder:
    """Runs a loop from its seed as it is."""
    recorder = Recorder()
    torch.manual_seed(SEED)
    loop(recorder)
    return recorder


def twin(
    loop: Loop,
    *,
    tight: int | str = "48KiB",
    chunk_size: int | str = CHUNK_BYTES,
    stress: Sequence[str] = ("evict,poison",),
    must_evict: bool = True,
    by_hand: Loop | None = None,
    **settings: Any,
) -> None:
    """Compares a loop under management with the same loop in plain PyTorch.

    It runs with everything resident, at the tight budget, and at that budget under each stress.
    Once the loop is over and its objects are dead, nothing of them may be left.

    Args:
        loop: Builds its model, trains it and notes what must not differ.
        tight: A budget smaller than the model data.
        chunk_size: Bytes of a chunk.
        stress: Values of ``PATRICKSTAR_STRESS``.
        must_evict: Whether the tight budget has to cause evictions; false where the model is too
            small for that, so that only stress evicts.
        by_hand: The loop that plain PyTorch runs, where settings do what it does by hand.
        settings: Other arguments of ``patrickstar.init``.
    """
    expected = plain(by_hand or loop)
    assert expected.records, "the loop noted nothing, so there is nothing to compare"
    gc.collect()
    runs = [(EVERYTHING, ""), (tight, ""), *((tight, words) for words in stress)]
    for host_memory, words in runs:
        where = f"host_memory={host_memory}, stress={words!r}"
        with managed(host_memory, stress=words, chunk_size=chunk_size, **settings):
            got = plain(loop)
            assert_same(got.records, expected.records, where)
            stats = patrickstar.stats()
            assert stats.host_peak_bytes <= stats.host_budget_bytes, where
            if words or (must_evict and host_memory == tight):
                assert stats.num_evictions > 0, f"{where}: nothing was evicted"
            assert_nothing_left(where)


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Compares notes; tensors by type, shape, strides and bytes."""
    for name, wanted in expected.items():
        assert name in got, f"{where}: {name} is missing"
        assert same(got[name], wanted), f"{where}: {name}: got {got[name]}, expected {wanted}"
    assert len(got) == len(expected), f"{where}: unexpected {sorted(set(got) - set(expected))}"


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same; tensors by type, shape, strides and bytes."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return as_bytes(a) == as_bytes(b)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements, in the order of its indexes."""
    flat = tensor.detach().clone().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_nothing_left(where: str = "") -> None:
    """With every managed object dead, no chunk, lease or byte may be left in any tier."""
    gc.collect()
    probe = torch.zeros(1)
    patrickstar.manage(probe)  # a fetch outside backward gives up the room kept for gradients
    del probe
    _C.free_dead_slots()
    stats = patrickstar.stats()
    left = (stats.num_chunks, stats.managed_bytes, stats.host_resident_bytes, stats.num_leases)
    assert left == (0, 0, 0, 0), f"{where}: left chunks, managed, resident, leases: {left}"
    assert stats.disk_used_bytes == 0, f"{where}: {stats.disk_used_bytes} bytes left on disk"


def run_script(
    code: str,
    *arguments: str | os.PathLike[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own and waits for it.

    Args:
        code: The program; its indentation is taken off. This folder is importable in it.
        arguments: Its ``sys.argv[1:]``.
        environment: Variables beside those of this process.
        timeout_s: A program that runs longer fails the test.
        before: Called in the child before the program starts.
    """
    return subprocess.run(
        script_command(code, *arguments),
        env=script_environment(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        preexec_fn=before,
        check=False,
    )


def start_script(
    code: str, *arguments: str | os.PathLike[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts Python code in a process of its own, with pipes; the caller ends it."""
    return subprocess.Popen(
        script_command(code, *arguments),
        env=script_environment(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def script_command(code: str, *arguments: str | os.PathLike[str]) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(os.fspath, arguments)]


def script_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PATRICKSTAR_")}
    folder = str(Path(__file__).parent)
    path = os.pathsep.join(part for part in (folder, kept.get("PYTHONPATH")) if part)
    return {**kept, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **(extra or {})}


def sgd(parameters: Iterable[torch.Tensor] | nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """SGD with momentum, so that there is state."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adamw(parameters: Iterable[torch.Tensor] | nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW at a rate that shows in every weight."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    return torch.optim.AdamW(parameters, lr=options.pop("lr", 0.01), **options)


class Stack(nn.Module):
    """Linear layers with a nonlinearity between: a page of weights each at the usual width.

    Args:
        num_layers: Linear layers.
        width: Features in and out of each.
    """

    def __init__(self, num_layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
    num_steps: int = 3,
    width: int = 32,
) -> None:
    """The usual loop, noted step by step.

    Args:
        recorder: Takes the notes.
        model: Whose weights are noted.
        optimizer: AdamW by default.
        call: What is called with a batch, by default the model.
        num_steps: Steps to take.
        width: Features of a sample.
    """
    optimizer = adamw(model) if optimizer is None else optimizer
    call = model if call is None else call
    for step in range(num_steps):
        loss = call(torch.randn(4, width)).pow(2).mean()
        recorder.train_step(f"step {step}", loss, model, optimizer)
    recorder.note("end", model)


def train_stack(recorder: Recorder, num_steps: int = 3, width: int = 32) -> None:
    """``train`` of a ``Stack``."""
    train(recorder, Stack(width=width), num_steps=num_steps, width=width)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
