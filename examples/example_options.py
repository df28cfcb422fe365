# SPDX-License-Identifier: Apache-2.0
"""The command line that the example scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """Parses a count of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def parse_options(description: str) -> argparse.Namespace:
    """Returns the parsed command line; `description` is the first line of the help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "text", nargs="*", type=Path, help="text files; none: the Python standard library's sources"
    )
    add_model_options(parser)
    add_training_options(parser)
    return parser.parse_args()


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what the model is."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", type=Path, help="folder of saved weights; the sizes below are then ignored"
    )
    model.add_argument("--layers", type=positive, default=6, help="number of transformer layers")
    model.add_argument("--width", type=positive, default=384, help="hidden size")
    model.add_argument("--heads", type=positive, default=6, help="number of attention heads")
    model.add_argument(
        "--positions", type=positive, default=128, help="longest text the model can read, in tokens"
    )
    model.add_argument(
        "--vocab", type=positive, default=4096, help="size of the tokenizer trained on the text"
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Adds how it is trained, in which memory, and what is written."""
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=100, help="number of optimizer steps")
    training.add_argument("--batch-size", type=positive, default=8, help="examples in a step")
    training.add_argument(
        "--tokens", type=positive, help="tokens in an example; none: what fits, at most 128"
    )
    training.add_argument("--lr", type=float, default=5e-4, help="learning rate of Adam")
    training.add_argument(
        "--bf16", action="store_true", help="run the forward under torch.autocast in bfloat16"
    )
    training.add_argument(
        "--checkpointing", action="store_true", help="recompute activations in the backward"
    )
    training.add_argument(
        "--seed", type=int, default=0, help="seed of weights, order of the text and dropout"
    )
    training.add_argument(
        "--threads", type=positive, help="threads of PyTorch; none: PyTorch's own choice"
    )

    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--host-memory", help="budget of PatrickStar, for example 64MiB; none: measured"
    )
    memory.add_argument(
        "--spill-dir", type=Path, help="folder for what does not fit; none: a cache folder"
    )
    memory.add_argument(
        "--plain", action="store_true", help="train without PatrickStar, which is never imported"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--save", type=Path, metavar="FOLDER", help="save weights and tokenizer here at the end"
    )
    output.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write losses, hashes of the result and statistics",
    )
