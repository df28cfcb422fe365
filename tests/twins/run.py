# SPDX-License-Identifier: Apache-2.0
"""One process of a twin: runs cases one after the other and writes a JSON line for each.

    python tests/twins/run.py --cases cases.json --out out.jsonl            # plain PyTorch
    python tests/twins/run.py --cases cases.json --out out.jsonl --managed  # with patrickstar

A managed case also names "budget_bytes", "chunks", "stress" and "spill_dir". Its budget is raised
to what each OutOfMemory names until the case runs; every budget that was tried is written down.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import workloads

NAMED_BUDGET = re.compile(r"host_memory to at least (\d+) bytes")
STRESS = {"none": "", "full": "evict,poison,delay"}
MOST_ATTEMPTS = 40
SECONDS_PER_CASE = 120


def run_plain(case: Mapping[str, Any], keep: Path | None) -> dict[str, Any]:
    return _answer(workloads.train(case, keep_tensors=keep is not None), case, keep)


def run_without_leases(case: Mapping[str, Any], keep: Path | None) -> dict[str, Any]:
    """A managed run whose guard forgets to lease what ops read."""
    import patrickstar.testing

    with patrickstar.testing.read_leases_skipped():
        return run_managed(case, keep)


def run_managed(case: Mapping[str, Any], keep: Path | None) -> dict[str, Any]:
    """Trains at the case's budget, or at the smallest that the engine's own messages lead to.

    When that is not the first budget, one byte less is tried too: that must not be enough.
    """
    refusals = []
    budget = case["budget_bytes"]
    while True:
        answer = attempt(case, budget, keep)
        if "out_of_memory" not in answer:
            break
        refusals.append({"budget_bytes": budget, "message": answer["out_of_memory"]})
        named = NAMED_BUDGET.search(answer["out_of_memory"])
        if named is None or int(named[1]) <= budget or len(refusals) == MOST_ATTEMPTS:
            return {**answer, "refusals": refusals}
        budget = int(named[1])
    answer.update(refusals=refusals, budget_bytes=budget)
    if refusals:
        answer["one_byte_less"] = attempt(case, budget - 1, None).get("out_of_memory")
    return answer


def attempt(case: Mapping[str, Any], budget: int, keep: Path | None) -> dict[str, Any]:
    """One training run under one budget."""
    import patrickstar
    import patrickstar.testing

    os.environ["PATRICKSTAR_STRESS"] = STRESS[case["stress"]]
    try:
        patrickstar.init(
            host_memory=budget,
            chunk_size=min(_chunk_bytes(case["chunks"]), budget),
            spill_dir=case["spill_dir"],
            optimizer="native",
        )
        answer = _answer(workloads.train(case, keep_tensors=keep is not None), case, keep)
        answer["stats"] = dataclasses.asdict(patrickstar.stats())
        answer["mapped_peak_bytes"] = patrickstar.testing.mapped_peak_bytes()
    except patrickstar.OutOfMemory as error:
        answer = {"out_of_memory": str(error)}
        traceback.clear_frames(error.__traceback__)
    gc.collect()  # the model is gone before the engine is
    patrickstar.shutdown()
    return answer


def _chunk_bytes(text: str) -> int:
    return int(text.removesuffix("KiB")) << 10


def _answer(
    numbers: workloads.Numbers, case: Mapping[str, Any], keep: Path | None
) -> dict[str, Any]:
    if keep is not None:
        torch.save(numbers.tensors, keep / f"{case['id']}.pt")
    numbers.tensors = None
    return dataclasses.asdict(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, required=True, help="a JSON list of cases")
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON line for each case")
    parser.add_argument("--managed", action="store_true", help="train under patrickstar")
    parser.add_argument("--skip-leases", action="store_true", help="break the engine on purpose")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch's kernels")
    parser.add_argument("--keep", type=Path, help="a folder that gets all tensors of each case")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    run = run_managed if options.managed else run_plain
    if options.skip_leases:
        run = run_without_leases
    with options.out.open("a") as out:
        for case in json.loads(options.cases.read_text()):
            faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
            start = time.monotonic()
            try:
                answer = run(case, options.keep)
            except Exception:
                answer = {"error": traceback.format_exc()}
            answer = {"id": case["id"], **answer, "seconds": round(time.monotonic() - start, 3)}
            out.write(json.dumps(answer) + "\n")
            out.flush()
    if not options.managed:
        assert "patrickstar" not in sys.modules, "the plain side of a twin imported patrickstar"


if __name__ == "__main__":
    main()
