# SPDX-License-Identifier: Apache-2.0
"""Session: management of this process, from ``init()`` to ``shutdown()``."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.adoption import Adopter
from patrickstar.compiled import CompiledGraphs
from patrickstar.config import Config
from patrickstar.errors import Error, InvalidArgument, OutOfMemory
from patrickstar.observers import Observers
from patrickstar.optimizer_hooks import OptimizerHooks
from patrickstar.raw_access import RawAccess
from patrickstar.report.memory import available_memory, peak_resident_set_bytes
from patrickstar.report.run_log import RunLog
from patrickstar.report.stats import Stats
from patrickstar.report.units import format_bytes
from patrickstar.saving import Saving
from patrickstar.training_rules import TrainingRules

_logger = logging.getLogger("patrickstar")

# A budget that was left out is revised at step boundaries: this share of what memory holds stays
# free, and a change smaller than the second share is not worth evicting for.
_MEASURED_MARGIN = 0.1
_MEASURED_STEP = 0.05


class Session:
    """What ``init()`` returns: the running engine and its settings.

    Attributes:
        config: The settings in force.
        loss_scale: What losses are multiplied by; None without ``mixed_precision="fp16"``.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._log = RunLog(config.log) if config.log is not None else None
        self._adopter = Adopter(pending_bytes=min(config.chunk_size, config.host_memory // 8))
        self._training_rules = TrainingRules(config)
        self.loss_scale = self._training_rules.loss_scale
        self._optimizer_hooks = OptimizerHooks(
            self._adopter,
            self._on_boundary,
            self._training_rules.step_rules,
            form=config.optimizer,
        )
        self._raw_access = RawAccess(self._adopter.adopt_copy, config.spill_dir)
        self._compiled_graphs = CompiledGraphs()
        self._observers = Observers()
        self._saving = Saving()
        self._steps = 0
        self._skipped_steps = 0
        self._start = time.monotonic()
        self._last_record: Mapping[str, Any] = {}

    def open(self) -> None:
        """Starts the engine and opens its doors."""
        config = self.config
        _C.selected_isa()  # says early what is wrong with PATRICKSTAR_ISA
        _C.start(
            host_bytes=config.host_memory,
            chunk_bytes=config.chunk_size,
            spill_dir="" if config.spill_dir is None else str(config.spill_dir),
            disk_bytes=config.disk_space,
            evict="evict" in config.stress,
            poison="poison" in config.stress,
            delay="delay" in config.stress,
        )
        _C.install_guard()
        _C.tune_malloc(True)
        self._last_record = _C.stats()
        self._adopter.open_doors()
        self._optimizer_hooks.open()
        self._raw_access.open()
        self._compiled_graphs.open()
        self._observers.open()
        self._saving.open()
        self._training_rules.open()

    def close(self) -> None:
        """Turns every managed tensor into an ordinary one and stops the engine.

        Raises:
            Error: Tensors are held by ``resident``; management stays on.
            OutOfMemory: Memory cannot take what is on disk; management stays on.
        """
        _C.free_dead_slots()
        self._raw_access.addresses.release()
        counters = _C.stats()
        if counters["num_leases"]:
            raise Error(
                f"cannot shut down: addresses in {counters['num_leases']} chunks are in use, by "
                "patrickstar.resident, by NumPy arrays and DLPack capsules over managed tensors or "
                "by collectives under way; leave the `with` block, drop the arrays or copy them, "
                "and wait() for the collectives"
            )
        outside = counters["managed_bytes"] - counters["host_resident_bytes"]
        room = available_memory()
        if outside > room:
            raise OutOfMemory(
                f"cannot turn {format_bytes(counters['managed_bytes'])} of managed tensors into "
                f"ordinary ones: {format_bytes(outside)} are on disk and {format_bytes(room)} of "
                "memory are free; save the model, delete it and its optimizer, and call "
                "patrickstar.shutdown() again"
            )
        self._adopter.release_reservations()
        _C.stop()
        with contextlib.ExitStack() as stack:  # each is closed, whatever the others do
            stack.callback(set_current, None)
            if self._log is not None:
                stack.callback(self._log.close)
            stack.callback(_C.tune_malloc, False)
            stack.callback(self._observers.close)
            stack.callback(self._compiled_graphs.close)
            stack.callback(self._raw_access.close)
            stack.callback(self._saving.close)
            stack.callback(self._training_rules.close)
            stack.callback(self._optimizer_hooks.close)
            stack.callback(self._adopter.close_doors)

    def leave_alone(self) -> None:
        """For a forked child, which has no access to the spill file: adopts nothing any more."""
        self._training_rules.close()
        self._optimizer_hooks.close()
        self._adopter.close_doors()

    def stats(self) -> Stats:
        """The counters as they are now."""
        _C.free_dead_slots()
        return Stats.from_mapping(self._counters())

    def manage(self, obj: nn.Module | torch.Tensor | Iterable[Any]) -> None:
        """See ``patrickstar.manage``."""
        if isinstance(obj, nn.Module):
            self._adopter.readmit(obj.parameters())
            self._adopter.adopt_module(obj)
        elif isinstance(obj, torch.Tensor):
            self._manage_tensor(obj)
        else:
            for part in _parts(obj, "manage"):
                self.manage(part)

    def unmanage(self, obj: nn.Module | torch.Tensor | Iterable[Any]) -> None:
        """See ``patrickstar.unmanage``."""
        for tensor in _tensors_of(obj, "unmanage"):
            self._adopter.leave_out(tensor)

    def _manage_tensor(self, tensor: torch.Tensor) -> None:
        name = f"tensor of shape {tuple(tensor.shape)}"
        answer = self._adopter.adopt_now(tensor, name)
        if answer == _C.Adoption.ALIASED:
            raise InvalidArgument(
                f"cannot manage a {name}: another tensor shares its memory and would stop "
                "following it; drop that tensor first, or manage a clone()"
            )
        if answer == _C.Adoption.OVERLAPPING:
            raise InvalidArgument(
                f"cannot manage a {name} and strides {tensor.stride()}: several of its elements "
                "share memory; manage a contiguous() copy"
            )
        if answer == _C.Adoption.LEFT_ALONE and tensor.numel() > 0:
            raise InvalidArgument(
                f"cannot manage a {name}, layout {tensor.layout}, device {tensor.device}: "
                "expected an ordinary dense tensor on the CPU, not shared with other processes"
            )

    def _on_boundary(self, is_skipped: bool) -> None:
        self._raw_access.addresses.release()
        _C.install_guard()
        self._adopter.sweep()
        _C.free_dead_slots()
        _C.throw_pending_failure()
        self._steps += 1
        self._skipped_steps += is_skipped
        if self.config.host_memory_measured:
            self._revise_budget()
        if self._log is not None:
            self._write_record(self._log, is_skipped)

    def _counters(self) -> dict[str, Any]:
        counters = _C.stats()
        for internal in ("held_bytes", "mapped_bytes", "mapped_peak_bytes"):
            del counters[internal]
        counters.update(
            steps=self._steps,
            skipped_steps=self._skipped_steps,
            prefetch_hits=0,
            prefetch_late=0,
            prefetch_misses=counters["num_fetches"],
        )
        return counters

    def _revise_budget(self) -> None:
        counters = _C.stats()
        resident = counters["mapped_bytes"]
        others = max(peak_resident_set_bytes() - counters["mapped_peak_bytes"], 0)
        whole = available_memory() + resident
        budget = int((whole + others) * (1 - _MEASURED_MARGIN)) - others
        now = counters["host_budget_bytes"]
        if budget > 0 and abs(budget - now) > _MEASURED_STEP * now:
            _C.set_host_bytes(budget)
            in_force = _C.stats()["host_budget_bytes"]  # not less than what one operation needed
            if in_force != now:
                _logger.info("host_memory is now %s, as measured", format_bytes(in_force))

    def _write_record(self, log: RunLog, is_skipped: bool) -> None:
        counters, before = _C.stats(), self._last_record
        self._last_record = counters
        traffic = ("fetched_bytes", "evicted_bytes", "spilled_bytes", "read_bytes")
        log.write(
            {
                "step": self._steps,
                "time_s": time.monotonic() - self._start,
                "loss": None,
                "memory": {
                    "host": {
                        "resident": counters["host_resident_bytes"],
                        "peak": counters["host_peak_bytes"],
                        "budget": counters["host_budget_bytes"],
                    },
                    "disk": {"used": counters["disk_used_bytes"]},
                },
                "traffic": {name: counters[name] - before[name] for name in traffic},
                "stall_s": counters["stall_seconds"] - before["stall_seconds"],
                "scale": None if self.loss_scale is None else self.loss_scale.scale,
                "skipped": is_skipped,
            }
        )


_session: Session | None = None


def _after_fork_in_child() -> None:
    if _session is not None:
        _session.leave_alone()


os.register_at_fork(after_in_child=_after_fork_in_child)


def current() -> Session | None:
    """The running session, or None."""
    return _session


def set_current(session: Session | None) -> None:
    """Makes a session the one that the module's functions talk to."""
    global _session
    _session = session


def _running() -> Session:
    if _session is None:
        raise Error("management is off; call patrickstar.init() first")
    return _session


def manage(obj: nn.Module | torch.Tensor | Iterable[Any]) -> None:
    """Puts a module, a tensor or several of them under management, in place.

    Usually nobody needs to call this: parameters are found by themselves. Use it for large tensors
    of your own, or to have a module managed before its first call.

    Args:
        obj: A module (all its parameters), a dense strided CPU tensor of any dtype, or an iterable
            of those.

    Raises:
        InvalidArgument: A tensor that cannot be managed; the message says why.
        OutOfMemory: The budgets cannot take it.

    Example:
        >>> import torch, patrickstar
        >>> session = patrickstar.init(host_memory="64MiB")
        >>> table = torch.zeros(1000, 100)
        >>> patrickstar.manage(table)
        >>> patrickstar.is_managed(table)
        True
        >>> patrickstar.shutdown()
    """
    _running().manage(obj)


def unmanage(obj: nn.Module | torch.Tensor | Iterable[Any]) -> None:
    """Makes managed tensors ordinary again, in place; they are not adopted by themselves any more.

    Args:
        obj: A module (all its parameters and their gradients), a tensor, or an iterable of those.

    Raises:
        OutOfMemory: Memory cannot take them.
        Unsupported: They are held by ``resident``.
    """
    _running().unmanage(obj)


def is_managed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes live in a chunk. False for everything when management is off.

    Raises:
        InvalidArgument: Something else than a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"is_managed() got a {type(tensor).__name__}: expected a tensor")
    return _C.is_managed(tensor)


@contextlib.contextmanager
def resident(*objs: nn.Module | torch.Tensor | Iterable[Any]) -> Iterator[None]:
    """Keeps tensors in memory for raw access while the block runs.

    Inside, ``numpy()``, ``data_ptr()`` and the like work on them, and writes through such an
    address count. Arrays and addresses must not be used after the block. The bytes count as part
    of what every operation needs at once.

    Args:
        *objs: Modules (all their parameters), tensors, or iterables of those. What is not managed
            is left alone.

    Raises:
        OutOfMemory: The budget cannot hold them together.

    Example:
        >>> import torch, patrickstar
        >>> session = patrickstar.init(host_memory="64MiB")
        >>> layer = torch.nn.Linear(2, 2)
        >>> patrickstar.manage(layer)
        >>> with patrickstar.resident(layer):
        ...     layer.weight.detach().numpy().shape
        (2, 2)
        >>> patrickstar.shutdown()
    """
    _running()
    tensors = [tensor for obj in objs for tensor in _tensors_of(obj, "resident")]
    with _C.Hold(tensors, is_written=True, what="patrickstar.resident"):
        yield


def stats() -> Stats:
    """The engine's counters: budgets, bytes by tier, traffic, stalls.

    Raises:
        Error: Management is off.
    """
    return _running().stats()


def shutdown() -> None:
    """Turns every managed tensor into an ordinary one and stops the engine. Does nothing when off.

    Raises:
        Error: Tensors are held by ``resident``; management stays on.
        OutOfMemory: Memory cannot take what is on disk; management stays on.
    """
    if _session is not None:
        _session.close()


def _parts(obj: object, caller: str) -> Iterable[Any]:
    if isinstance(obj, (str, bytes)) or not isinstance(obj, Iterable):
        raise InvalidArgument(
            f"{caller}() got a {type(obj).__name__}: expected a module, a tensor, or an iterable "
            "of them"
        )
    return obj.values() if isinstance(obj, Mapping) else obj


def _tensors_of(obj: object, caller: str) -> list[torch.Tensor]:
    if isinstance(obj, nn.Module):
        return list(obj.parameters())
    if isinstance(obj, torch.Tensor):
        return [obj]
    return [tensor for part in _parts(obj, caller) for tensor in _tensors_of(part, caller)]
