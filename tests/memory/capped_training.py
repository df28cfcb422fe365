# SPDX-License-Identifier: Apache-2.0
"""One training or building run of a GPT, for a process whose memory is capped from outside.

Prints one JSON object: the losses, the peak of resident memory, and the engine's counters. The
plain side never imports patrickstar.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    report: dict[str, Any] = {}
    if options.host_memory:
        import patrickstar

        patrickstar.init(host_memory=options.host_memory, spill_dir=options.spill_dir)
    model = build(options)
    report["parameter_bytes"] = sum(p.nbytes for p in model.parameters())
    if options.steps:
        report["losses"] = train(model, options)
    if options.save_to:
        model.save_pretrained(options.save_to)
    report["peak_bytes"] = peak_bytes()
    if options.host_memory:
        stats = patrickstar.stats()
        report["host_peak_bytes"] = stats.host_peak_bytes
        report["spilled_bytes"] = stats.spilled_bytes
        report["num_evictions"] = stats.num_evictions
    else:
        assert "patrickstar" not in sys.modules
    print(json.dumps(report), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--host-memory", type=int, default=0, help="bytes; 0: plain PyTorch")
    parser.add_argument("--spill-dir")
    parser.add_argument("--load-from", type=Path)
    parser.add_argument("--save-to", type=Path)
    return parser.parse_args()


def build(options: argparse.Namespace) -> GPT2LMHeadModel:
    if options.load_from:
        return GPT2LMHeadModel.from_pretrained(options.load_from)
    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.width // 64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def train(model: GPT2LMHeadModel, options: argparse.Namespace) -> list[float]:
    """Trains on one fixed batch of 2 x 128 tokens with gradient checkpointing."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, options.vocabulary, (2, 128))
    losses = []
    for _ in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def peak_bytes() -> int:
    """The most bytes of this process that were in memory at once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
