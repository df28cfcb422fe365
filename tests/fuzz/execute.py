# SPDX-License-Identifier: Apache-2.0
"""Carries a plan out, and compares it with its twin in plain PyTorch.

``python tests/fuzz/execute.py SEED [LAST]`` prints and runs the programs of these seeds.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import helpers
import torch
from parts import NUM_TOKENS, Model, make_optimizer, make_scheduler
from patrickstar import ranged_step
from program import Plan, Step, draw
from torch import nn
from torch.nn import functional

# With the chunks of an op that has most: five operands of an optimizer, or an LSTM's weights.
_MOST_OPERANDS = 6

_LIKE_THE_PARAMETER = ("exp_avg", "momentum_buffer", "square_avg", "sum", "prev", "ax", "average",
                        "exp_inf", "variance")  # fmt: skip


class Program:
    """A plan while it runs: the model, its optimizers, and what was noted.

    Args:
        is_by_hand: Whether the program itself does what settings of the engine do.
    """

    def __init__(self, plan: Plan, recorder: helpers.Recorder, *, is_by_hand: bool) -> None:
        self.plan = plan
        self.recorder = recorder
        self.is_by_hand = is_by_hand
        self.model = Model(plan)
        self.optimizers = self.make_optimizers()
        self.schedulers = self.make_schedulers()
        self.last_loss = 0.0
        self.name = ""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters, names = list(self.model.parameters()), self.plan.optimizers
        return [
            make_optimizer(name, parameters[index :: len(names)], self.plan.num_groups)
            for index, name in enumerate(names)
        ]

    def make_schedulers(self) -> list[Any]:
        name = self.plan.scheduler
        return [make_scheduler(name, optimizer) for optimizer in self.optimizers if name]

    def run(self) -> None:
        for index, step in enumerate(self.plan.steps):
            self.name = f"step {index}"
            self.before(step)
            for route in step.routes:
                self.backward(step, route)
            self.update(step)
            self.after(step)
        self.name = "end"
        self.note_everything()

    def tokens(self) -> torch.Tensor:
        return torch.randint(NUM_TOKENS, (2, 5))

    def loss(self, route: tuple[int, ...], model: nn.Module | None = None) -> torch.Tensor:
        tokens = self.tokens()
        is_cast = self.plan.autocast
        is_cast_by_hand = self.is_by_hand and bool(self.plan.precision) and not is_cast
        with _autocast() if is_cast else nullcontext():
            with _autocast() if is_cast_by_hand else nullcontext():
                logits = (model or self.model)(tokens, route)
            return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    def note_everything(self) -> None:
        self.recorder.note(self.name, self.model)
        for optimizer in self.optimizers:
            self.recorder.note(self.name, optimizer)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.plan.set_to_none)

    def block(self, step: Step) -> nn.Module:
        return self.model.blocks[step.target]

    def before(self, step: Step) -> None:
        """Events between the last update and the first forward."""
        block = self.block(step)
        if "freeze or unfreeze" in step.events:
            for parameter in block.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        if "edit in place" in step.events:
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.mul_(1.5).clamp_(-0.2, 0.2)
                    parameter.view(-1)[:1].fill_(0.25) if parameter.is_contiguous() else None
        if "re-point" in step.events:
            for parameter in block.parameters():
                parameter.data = parameter.data * 0.9
        if "evaluate" in step.events:
            self.model.eval()
            with torch.no_grad():
                self.recorder.note(f"{self.name} evaluated", self.loss(step.routes[-1]))
            self.model.train()
        if "other rate" in step.events:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.7
        if "read it all" in step.events:
            self.note_everything()
        if "new part" in step.events:
            part = nn.Parameter(torch.randn(NUM_TOKENS) * 0.1)
            self.model.head.bias = part
            self.optimizers[0].add_param_group({"params": [part]})
            self.schedulers = self.make_schedulers()

    def backward(self, step: Step, route: tuple[int, ...]) -> None:
        """One forward and backward, with what may go wrong in them."""
        with self.interrupted(step):
            loss = self.loss(route)
            self.recorder.note(f"{self.name} loss", loss)
            self.last_loss = loss.item()
            if "evict" in step.events:
                helpers.evict_everything()
            if not loss.requires_grad:
                return
            if "penalty" in step.events and self.can_differentiate_twice(route):
                loss = loss + self.penalty(loss)
            if "gradients by hand" in step.events and not self.is_reentrant(route):
                self.gradients_by_hand(loss)
                return
            if "backward twice" in step.events:
                loss.backward(retain_graph=True)
                helpers.evict_everything()
            loss.backward()
        if self.plan.is_watched:
            self.recorder.note(f"{self.name} after backward", self.model)

    def is_reentrant(self, route: tuple[int, ...]) -> bool:
        return any(self.plan.blocks[index].recompute == "reentrant" for index in route)

    def can_differentiate_twice(self, route: tuple[int, ...]) -> bool:
        kinds = {self.plan.blocks[index].kind for index in route}
        return not self.is_reentrant(route) and not kinds & {"recurrent", "attention"}

    def leaves(self) -> list[torch.Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def penalty(self, loss: torch.Tensor) -> torch.Tensor:
        """The squares of the gradients, themselves part of the graph."""
        gradients = torch.autograd.grad(loss, self.leaves(), create_graph=True, allow_unused=True)
        return 0.01 * sum(g.float().pow(2).sum() for g in gradients if g is not None)

    def gradients_by_hand(self, loss: torch.Tensor) -> None:
        leaves = self.leaves()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    @contextlib.contextmanager
    def interrupted(self, step: Step) -> Iterator[None]:
        """Raises in the middle where the step says so, and gives that batch up."""
        handles = []
        if "raise in forward" in step.events:
            self.model.raises_before = step.target
        if "raise in backward" in step.events:
            handles = [p.register_hook(_raise) for p in self.block(step).parameters()
                       if p.requires_grad][:1]  # fmt: skip
        try:
            yield
        except InterruptedError:
            self.zero_grad()
        finally:
            self.model.raises_before = None
            for handle in handles:
                handle.remove()

    def update(self, step: Step) -> None:
        if "drop some gradients" in step.events:
            for parameter in self.block(step).parameters():
                parameter.grad = None
        if "give the batch up" in step.events:
            self.zero_grad()
            return
        if self.plan.max_norm:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.max_norm)
            self.recorder.note(f"{self.name} norm", norm)
        for optimizer in self.optimizers:
            self.step(optimizer)
        for scheduler in self.schedulers:
            scheduler.step(*([self.last_loss] if self.plan.scheduler == "plateau" else []))
        if self.plan.is_watched:
            self.note_everything()
        self.zero_grad()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_by_hand and self.plan.clipping:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.plan.clipping)
        optimizer.step()

    def after(self, step: Step) -> None:
        """Events at which models and optimizers are saved, loaded, copied, born and dead."""
        if "load in place" in step.events:
            state = {key: value.clone() * 0.99 if value.is_floating_point() else value
                     for key, value in self.model.state_dict().items()}  # fmt: skip
            self.model.load_state_dict(state)
        if "load by assignment" in step.events:
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=True)
            self.reload_optimizers()
        if "deepcopy" in step.events:
            self.model = copy.deepcopy(self.model)
            self.reload_optimizers()
        if "save and load" in step.events:
            self.save_and_load()
        if "second model" in step.events:
            other = Model(self.plan)
            optimizer = helpers.adamw(other)
            self.loss(step.routes[0], other).backward()
            self.step(optimizer)
            self.recorder.note(f"{self.name} second", other)

    def reload_optimizers(self) -> None:
        """New optimizers over the parameters as they are now, with the old ones' state."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.optimizers = self.make_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            _load_if_it_fits(optimizer, state)
        self.schedulers = self.make_schedulers()

    def save_and_load(self) -> None:
        """Through a file as torch writes it, into fresh objects."""
        file = io.BytesIO()
        states = [self.model.state_dict(), *(o.state_dict() for o in self.optimizers)]
        torch.save(states, file)
        file.seek(0)
        model_state, *states = torch.load(file, weights_only=True)
        frozen = [p.requires_grad for p in self.model.parameters()]
        self.model = Model(self.plan)
        self.model.load_state_dict(model_state)
        for parameter, is_trained in zip(self.model.parameters(), frozen, strict=False):
            parameter.requires_grad_(is_trained)
        self.optimizers = self.make_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            _load_if_it_fits(optimizer, state)
        self.schedulers = self.make_schedulers()


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def _load_if_it_fits(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state unless a new part or a lost tie made it another model's."""
    groups = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    if [len(group["params"]) for group in state["param_groups"]] != list(map(len, groups)):
        return
    shapes = [shape for group in groups for shape in group]
    indexes = [index for group in state["param_groups"] for index in group["params"]]
    for shape, index in zip(shapes, indexes, strict=True):
        parts = state["state"].get(index, {})
        if any(part.dim() and list(part.shape) != shape
               for key, part in parts.items() if key in _LIKE_THE_PARAMETER):  # fmt: skip
            return
    optimizer.load_state_dict(state)


def _raise(gradient: torch.Tensor) -> None:
    raise InterruptedError("stop")


def check(plan: Plan) -> None:
    """Runs a plan and its twin at the plan's budget and stress; raises where they differ."""

    def loop(recorder: helpers.Recorder, *, is_by_hand: bool = False) -> None:
        torch.manual_seed(plan.seed)
        Program(plan, recorder, is_by_hand=is_by_hand).run()
        gc.collect()

    settings = {"mixed_precision": plan.precision, "gradient_clipping": plan.clipping}
    settings = {name: value for name, value in settings.items() if value}
    with (
        warnings.catch_warnings(),
        mock.patch.object(ranged_step, "RANGE_ELEMENTS", plan.range_elements),
    ):
        warnings.simplefilter("ignore")  # torch's own about recomputation and schedulers
        sizes = [p.nbytes for p in Model(plan).parameters()]
        largest = max(*sizes, plan.chunk_bytes)
        own_set = _MOST_OPERANDS * math.ceil(largest / helpers.CHUNK_BYTES) * helpers.CHUNK_BYTES
        tight = max(int(plan.budget_share * 4 * sum(sizes)), own_set)
        helpers.twin(
            loop,
            tight=tight,
            chunk_size=plan.chunk_bytes,
            stress=(plan.stress,),
            must_evict=tight < 2 * sum(sizes),
            by_hand=partial(loop, is_by_hand=True),
            optimizer=plan.setting,
            **settings,
        )


def main() -> None:
    first = int(sys.argv[1])
    for seed in range(first, int(sys.argv[-1]) + 1):
        plan = draw(seed)
        print(plan, flush=True)
        check(plan)


if __name__ == "__main__":
    main()
