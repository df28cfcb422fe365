# SPDX-License-Identifier: Apache-2.0
"""What an example shows of its training: progress, a summary, a record to compare two runs by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

# With no terminal there is no bar to redraw; a line every so many steps takes its place.
STEPS_PER_LINE = 10


def format_bytes(num_bytes: float) -> str:
    """Returns a size for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def process_memory_bytes(*, peak: bool) -> int:
    """Returns the memory this process has in RAM (RSS), now or at its highest so far."""
    name = "VmHWM:" if peak else "VmRSS:"
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc here: the peak below is the best there is
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def hash_tensor(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and bytes."""
    copy = (
        tensor.detach().clone().contiguous()
    )  # a plain copy, whoever owned the bytes of the original
    digest = hashlib.sha256(f"{copy.dtype} {tuple(copy.shape)} ".encode())
    digest.update(copy.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns hashes of the optimizer's state tensors, named 'parameter/key'."""
    hashes = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            hashes[f"{name}/{key}"] = hash_tensor(torch.as_tensor(value))
    return hashes


class TrainingReport:
    """Follows one training run.

    Args:
        num_steps: the number of steps to come.
        stats: `patrickstar.stats`, or None in a plain run.
    """

    def __init__(self, num_steps: int, stats: Callable[[], Any] | None = None) -> None:
        self.num_steps = num_steps
        self.losses: list[float] = []
        self.sample = ""
        self._stats = stats
        self._num_tokens = 0
        self._seconds = 0.0
        self._memory_before_bytes = process_memory_bytes(peak=False)
        self._peak_memory_bytes = 0
        self._final_stats: Any = None

    def follow(self, batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields the batches behind a progress bar, which shows what `add` was told of each."""
        start = time.perf_counter()
        with tqdm(batches, total=self.num_steps, unit="step", disable=None) as bar:
            for batch in bar:
                yield batch
                self._seconds = time.perf_counter() - start
                self._show(bar)
        self._peak_memory_bytes = process_memory_bytes(peak=True)
        self._final_stats = self._stats() if self._stats else None

    def add(self, loss: float, num_tokens: int) -> None:
        """Notes the loss of a step and the number of tokens it read."""
        self.losses.append(loss)
        self._num_tokens += num_tokens

    def summary(self) -> str:
        """Returns a few lines for the end of the run."""
        peak, before = self._peak_memory_bytes, self._memory_before_bytes
        rows = {
            "steps": f"{len(self.losses)} in {self._seconds:.1f} s,"
            f" {self._tokens_per_second():.0f} tokens/s",
            "loss": f"{self.losses[0]:.4f} -> {self.losses[-1]:.4f}",
            "process memory": f"{format_bytes(peak)} at most,"
            f" {format_bytes(before)} of it before the model was built",
        }
        if self._final_stats:
            stats = self._final_stats
            rows["model data"] = (
                f"{format_bytes(stats.managed_bytes)}, of it in memory at most"
                f" {format_bytes(stats.host_peak_bytes)};"
                f" the budget is {format_bytes(stats.host_budget_bytes)}"
            )
            rows["disk"] = (
                f"{format_bytes(stats.spilled_bytes)} spilled,"
                f" {format_bytes(stats.read_bytes)} read, waited {stats.stall_seconds:.1f} s for it"
            )
        return "\n".join(f"{title:<15} {text}" for title, text in rows.items())

    def write_record(
        self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Writes what two runs are compared by: exact losses and hashes of every final tensor."""
        record = {
            "losses": [loss.hex() for loss in self.losses],
            "weights": {name: hash_tensor(tensor) for name, tensor in model.state_dict().items()},
            "optimizer_state": hash_optimizer(model, optimizer),
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "seconds": self._seconds,
            "tokens_per_second": self._tokens_per_second(),
            "memory_before_bytes": self._memory_before_bytes,
            "peak_memory_bytes": self._peak_memory_bytes,
            "stats": dataclasses.asdict(self._final_stats) if self._final_stats else None,
            "sample": self.sample,
            "imported_patrickstar": "patrickstar" in sys.modules,
        }
        path.write_text(json.dumps(record, indent=1))

    def _tokens_per_second(self) -> float:
        return self._num_tokens / max(self._seconds, 1e-9)

    def _show(self, bar: tqdm[torch.Tensor]) -> None:
        fields = {"loss": f"{self.losses[-1]:.4f}", "tokens/s": f"{self._tokens_per_second():.0f}"}
        if self._stats:
            stats = self._stats()
            fields["resident"] = format_bytes(stats.host_resident_bytes)
            fields["spilled"] = format_bytes(stats.spilled_bytes)
        if not bar.disable:
            bar.set_postfix(fields, refresh=False)
        elif len(self.losses) % STEPS_PER_LINE == 0 or len(self.losses) == self.num_steps:
            shown = "  ".join(f"{name} {value}" for name, value in fields.items())
            print(f"step {len(self.losses)}/{self.num_steps}  {shown}", file=sys.stderr, flush=True)
