# SPDX-License-Identifier: Apache-2.0
"""A random training program: everything about it follows from one seed.

``draw`` makes the plan, a value that can be printed; ``run`` carries it out, noting what must not
depend on management. A plan mixes shared weights, branches, accumulation, recomputation, frozen
parts, dtypes, optimizers, edits, copies, exceptions and save points.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_STEPS = 10

KINDS = (
    "linear", "norm", "adapter", "attention", "recurrent", "convolution", "scalars", "odd",
    "wide", "experts", "read by parent", "batch norm", "parametrized", "dropout",
)  # fmt: skip
ANY_DTYPE = ("linear", "norm", "odd", "wide", "scalars", "read by parent")
OPTIMIZERS = (
    "adam",
    "amsgrad",
    "adamw loop",
    "adamw foreach",
    "adamw fused",
    "adamw maximize",
    "sgd",
    "sgd nesterov",
    "rmsprop",
    "adagrad",
    "adadelta",
    "adamax",
    "nadam",
    "radam",
    "rprop",
    "asgd",
    "adafactor",
    "by hand",
    "adam tensor lr",
    "amsgrad fused",
    "sgd dampening",
    "sgd nesterov foreach",
    "sgd fused",
    "rmsprop foreach",
    "adagrad decay",
    "adagrad fused",
    "adadelta maximize",
    "adamax foreach",
    "nadam foreach",
    "nadam decoupled",
    "radam foreach",
    "radam decoupled",
)
SCHEDULERS = ("step", "one cycle", "plateau", "exponential")  # fmt: skip
EVENTS = (
    "freeze or unfreeze", "edit in place", "re-point", "load in place", "load by assignment",
    "deepcopy", "save and load", "evaluate", "drop some gradients", "give the batch up",
    "raise in backward", "raise in forward", "penalty", "backward twice", "evict", "second model",
    "other rate", "new part", "gradients by hand", "read it all",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One part of the model.

    Attributes:
        kind: Of ``KINDS``.
        dtype: Of its parameters.
        recompute: Which kind of checkpoint runs it; empty for none.
        same_as: An earlier block that this one is another name of.
        tied_to: An earlier block whose first weight this one has as its own.
        is_frozen: Whether it starts frozen.
    """

    kind: str
    dtype: str = "float32"
    recompute: str = ""
    same_as: int | None = None
    tied_to: int | None = None
    is_frozen: bool = False


@dataclass(frozen=True)
class Step:
    """What happens until the next update.

    Attributes:
        routes: For each backward pass, the blocks its forward goes through.
        events: Of ``EVENTS``, each at its own place in the step.
        target: The block that the events are about.
    """

    routes: tuple[tuple[int, ...], ...]
    events: tuple[str, ...]
    target: int


@dataclass(frozen=True)
class Plan:
    """A whole program.

    Attributes:
        is_embedding_tied: Whether the output layer has the embedding's weight.
        autocast: Whether forwards run under bf16 autocast.
        optimizers: One, or two that share the parameters out.
        max_norm: For clipping; 0 for none.
        set_to_none: What ``zero_grad`` does.
        is_watched: Whether everything is noted in each step, not only at the end.
        chunk_bytes, budget_share, stress: How the managed twin runs.
        num_groups: Parameter groups of each optimizer; the second has options of its own.
        scheduler: Of ``SCHEDULERS``; empty for none.
        setting: The ``optimizer`` setting of the managed twin.
        range_elements: In how large ranges its optimizers step.
        precision: Its ``mixed_precision``, which plain PyTorch writes by hand; empty for none.
        clipping: Its ``gradient_clipping``, which plain PyTorch does by hand; 0 for none.
    """

    seed: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    optimizers: tuple[str, ...]
    is_embedding_tied: bool
    autocast: bool
    max_norm: float
    set_to_none: bool
    is_watched: bool
    chunk_bytes: int
    budget_share: float
    stress: str
    num_groups: int
    scheduler: str
    setting: str
    range_elements: int
    precision: str
    clipping: float


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    choose = random.Random(seed)
    blocks: list[Block] = []
    for _ in range(choose.randint(3, 7)):
        blocks.append(_draw_block(choose, blocks))
    return Plan(
        seed=seed,
        blocks=tuple(blocks),
        steps=tuple(_draw_step(choose, blocks) for _ in range(NUM_STEPS)),
        optimizers=tuple(choose.sample(OPTIMIZERS, choose.choice((1, 1, 2)))),
        is_embedding_tied=choose.random() < 0.5,
        autocast=choose.random() < 0.25,
        max_norm=choose.choice((0, 0, 1e-2, 1.0)),
        set_to_none=choose.random() < 0.7,
        is_watched=choose.random() < 0.7,
        chunk_bytes=choose.choice((4096, 4096, 8192, 10007, 32768)),
        budget_share=choose.choice((0.15, 0.3, 0.6)),
        stress=choose.choice(("evict", "poison", "evict,poison", "evict,poison,delay")),
        num_groups=choose.choice((1, 1, 2)),
        scheduler=choose.choice(("", "", *SCHEDULERS)),
        setting=choose.choice(("auto", "auto", "auto", "native")),
        range_elements=choose.choice((64, 192, 1024, 1 << 17)),
        precision=choose.choice(("", "", "", "bf16")),
        clipping=choose.choice((0, 0, 0, 0.05)),
    )


def _draw_block(choose: random.Random, earlier: list[Block]) -> Block:
    recompute = choose.choice(("", "", "reentrant", "non-reentrant"))
    if earlier and choose.random() < 0.2:
        same_as = choose.randrange(len(earlier))
        return Block(earlier[same_as].kind, earlier[same_as].dtype, recompute, same_as)
    kind = choose.choice(KINDS)
    dtype = "float32"
    if kind in ANY_DTYPE:
        dtype = choose.choice(("float32", "float32", "bfloat16", "float64", "float16"))
    tied_to = None
    partners = [
        index
        for index, block in enumerate(earlier)
        if kind == block.kind == "linear" and dtype == block.dtype and block.same_as is None
    ]
    if partners and choose.random() < 0.5:
        tied_to = choose.choice(partners)
    return Block(kind, dtype, recompute, None, tied_to, is_frozen=choose.random() < 0.2)


def _draw_step(choose: random.Random, blocks: list[Block]) -> Step:
    num_blocks = len(blocks)
    routes = []
    for _ in range(choose.choice((1, 1, 2, 3))):
        route = [index for index in range(num_blocks) if choose.random() < 0.75]
        if route and choose.random() < 0.2:
            route.append(choose.choice(route))  # once more
        if choose.random() < 0.1:
            choose.shuffle(route)
        routes.append(tuple(route))
    events = tuple(
        event
        for event in EVENTS
        if choose.random() < 0.08 and not _is_kept_alive_by_torch(event, blocks)
    )
    return Step(tuple(routes), events, choose.randrange(num_blocks))


def _is_kept_alive_by_torch(event: str, blocks: list[Block]) -> bool:
    """torch's own checkpoint never frees a graph in whose backward somebody raised."""
    return event == "raise in backward" and any(block.recompute for block in blocks)
