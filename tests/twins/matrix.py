# SPDX-License-Identifier: Apache-2.0
"""Which cases exist, and a small set of them in which every two choices meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Case = dict[str, str]

AXES: Mapping[str, Sequence[str]] = {
    "model": (
        "gpt2",
        "bert",
        "lstm",
        "conv",
        "conv-channels-last",
        "encoder-decoder",
        "encoder",
        "tied",
        "experts",
    ),
    "precision": ("fp32", "bf16"),
    "checkpointing": ("off", "reentrant", "non-reentrant"),
    "optimizer": (
        "adam",
        "adamw-loop",
        "adamw-foreach",
        "adamw-fused",
        "sgd",
        "rmsprop",
        "adagrad",
        "adafactor",
        "hand-written",
    ),
    # Percent of the model data, or the least with which every op has its own set.
    "budget": ("100", "50", "25", "smallest"),
    "stress": ("none", "full"),
    "chunks": ("16KiB", "64KiB", "512KiB"),
}

PLAIN_AXES = ("model", "precision", "checkpointing", "optimizer")


def case_id(case: Mapping[str, str], axes: Sequence[str] = tuple(AXES)) -> str:
    """The name of a case: its choices, in the order of the axes."""
    return "_".join(case[axis] for axis in axes)


def full_product(axes: Mapping[str, Sequence[str]] = AXES) -> list[Case]:
    """Every combination, each with one of the chunk sizes in turn."""
    others = {axis: choices for axis, choices in axes.items() if axis != "chunks"}
    sizes = itertools.cycle(axes["chunks"])
    return [
        {**dict(zip(others, choices, strict=True)), "chunks": size}
        for choices, size in zip(itertools.product(*others.values()), sizes, strict=False)
    ]


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """The pairs of (axis, choice) that a case covers."""
    return set(itertools.combinations(sorted(case.items()), 2))


def pairwise_cover(axes: Mapping[str, Sequence[str]] = AXES) -> list[Case]:
    """Few cases that together hold every pair of choices of two axes.

    Greedy: a case starts from a pair not yet covered, then each further axis, those with most
    choices first, takes the choice that covers most new pairs.
    """
    missing = {
        tuple(sorted(((first, a), (second, b))))
        for first, second in itertools.combinations(axes, 2)
        for a, b in itertools.product(axes[first], axes[second])
    }
    by_size = sorted(axes, key=lambda axis: (-len(axes[axis]), axis))
    uses = {(axis, choice): 0 for axis in axes for choice in axes[axis]}
    cover = []
    while missing:
        case = dict(min(missing))
        for axis in by_size:
            if axis in case:
                continue

            gains = {}
            for choice in axes[axis]:
                new = {tuple(sorted(((axis, choice), known))) for known in case.items()}
                gains[choice] = len(new & missing), -uses[axis, choice]
            case[axis] = max(gains, key=gains.__getitem__)
        missing -= pairs(case)
        for choice in case.items():
            uses[choice] += 1
        cover.append({axis: case[axis] for axis in axes})
    return cover
