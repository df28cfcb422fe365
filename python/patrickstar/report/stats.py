# SPDX-License-Identifier: Apache-2.0
"""Stats: one reading of the engine's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from patrickstar.errors import InvalidArgument
from patrickstar.report.units import format_bytes


@dataclass(frozen=True)
class Stats:
    """What the engine holds now and what it has done since ``init()``.

    Attributes:
        host_budget_bytes: Bytes of chunk payloads allowed in host memory.
        host_resident_bytes: Bytes of that budget in use now.
        host_peak_bytes: The most bytes of that budget in use at once; never above
            the budget of that moment.
        managed_bytes: Bytes of all managed tensors, wherever they are.
        disk_budget_bytes: Bytes allowed in the spill file.
        disk_used_bytes: Bytes of the spill file in use now.
        fetched_bytes: Bytes brought to the compute tier.
        evicted_bytes: Bytes taken off the compute tier to make room.
        spilled_bytes: Bytes written to disk.
        read_bytes: Bytes read from disk.
        num_chunks: Chunks that exist now.
        num_fetches: Chunks brought to the compute tier.
        num_evictions: Chunks taken off the compute tier to make room.
        num_leases: Held leases that exist now (``resident``).
        num_op_leases: Leases given to ops so far.
        prefetch_hits: Chunks that were ready when an op asked for them because they were
            prefetched.
        prefetch_late: Prefetched chunks that an op still had to wait for.
        prefetch_misses: Chunks that an op had to fetch itself.
        stall_seconds: Seconds that ops waited for chunks.
        steps: Step boundaries passed, also those of skipped steps.
        skipped_steps: Steps that were skipped because of an overflow.
    """

    host_budget_bytes: int
    host_resident_bytes: int
    host_peak_bytes: int
    managed_bytes: int
    disk_budget_bytes: int
    disk_used_bytes: int
    fetched_bytes: int
    evicted_bytes: int
    spilled_bytes: int
    read_bytes: int
    num_chunks: int
    num_fetches: int
    num_evictions: int
    num_leases: int
    num_op_leases: int
    prefetch_hits: int
    prefetch_late: int
    prefetch_misses: int
    stall_seconds: float
    steps: int
    skipped_steps: int

    @classmethod
    def from_mapping(cls, counters: Mapping[str, int | float]) -> Stats:
        """Builds the reading from counters by name.

        Args:
            counters: Exactly one value for each attribute.

        Raises:
            InvalidArgument: A counter is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if names != counters.keys():
            missing = ", ".join(sorted(names - counters.keys())) or "none"
            unknown = ", ".join(sorted(counters.keys() - names)) or "none"
            raise InvalidArgument(
                f"cannot build Stats: expected exactly its {len(names)} counters; missing: "
                f"{missing}; unknown: {unknown}"
            )
        values = {name: value for name, value in counters.items() if name != "stall_seconds"}
        return cls(
            stall_seconds=float(counters["stall_seconds"]),
            **{name: int(value) for name, value in values.items()},
        )

    def __str__(self) -> str:
        """A table of a few lines, in binary units."""
        rows = (
            (
                "host memory",
                f"{format_bytes(self.host_resident_bytes)} resident, "
                f"{format_bytes(self.host_peak_bytes)} peak, "
                f"{format_bytes(self.host_budget_bytes)} budget",
            ),
            (
                "disk",
                f"{format_bytes(self.disk_used_bytes)} used, "
                f"{format_bytes(self.disk_budget_bytes)} budget",
            ),
            ("managed", f"{format_bytes(self.managed_bytes)} in {self.num_chunks} chunks"),
            ("fetched", f"{format_bytes(self.fetched_bytes)} in {self.num_fetches} fetches"),
            ("evicted", f"{format_bytes(self.evicted_bytes)} in {self.num_evictions} evictions"),
            (
                "disk traffic",
                f"{format_bytes(self.spilled_bytes)} spilled, {format_bytes(self.read_bytes)} read",
            ),
            ("leases", f"{self.num_leases} held now, {self.num_op_leases} given to ops"),
            (
                "prefetch",
                f"{self.prefetch_hits} hits, {self.prefetch_late} late, "
                f"{self.prefetch_misses} misses, {self.stall_seconds:.3f} s stalled",
            ),
            ("steps", f"{self.steps}, {self.skipped_steps} skipped"),
        )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
