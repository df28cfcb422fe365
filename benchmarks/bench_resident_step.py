# SPDX-License-Identifier: Apache-2.0
"""A training step with everything resident, against the same step in plain PyTorch.

Two processes, one of which never imports patrickstar, take turns: a GPT-2 of 124 M parameters,
batch 2 x 128 and 8 x 128 tokens, Adam. Prints min, median and max of each and the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

LIMIT_RATIO = 1.05
_BATCHES = (2, 8)
_TOKENS = 128
_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", choices=("plain", "managed"))
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.batch)
        return
    for batch in _BATCHES:
        compare(batch, options.rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {' '.join(sys.argv)}")


def compare(batch: int, rounds: int) -> None:
    workers = {kind: start_worker(kind, batch) for kind in ("plain", "managed")}
    times: dict[str, list[float]] = {"plain": [], "managed": []}
    for index in range(rounds + _WARM_UP):
        for kind, worker in workers.items():
            seconds = ask_step(worker)["seconds"]
            if index >= _WARM_UP:
                times[kind].append(seconds)
    for worker in workers.values():
        worker.communicate()
    ratio = statistics.median(times["managed"]) / statistics.median(times["plain"])
    for kind, seconds in times.items():
        print(
            f"batch {batch} x {_TOKENS}  {kind:8s} min {min(seconds):.3f} s  "
            f"median {statistics.median(seconds):.3f} s  max {max(seconds):.3f} s"
        )
    print(f"batch {batch} x {_TOKENS}  ratio of medians {ratio:.3f}, limit {LIMIT_RATIO}")


def start_worker(kind: str, batch: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", kind, "--batch", str(batch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask_step(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("step\n")
    worker.stdin.flush()
    return dict(json.loads(worker.stdout.readline()))


def work(kind: str, batch: int) -> None:
    """Does one step for each line of standard input."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "managed":
            import patrickstar

            patrickstar.init(host_memory="3GiB", spill_dir=folder)
        model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, 50257, (batch, _TOKENS))
        for _ in sys.stdin:
            start = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
