# SPDX-License-Identifier: Apache-2.0
"""What random programs are made of: blocks from width to width, the model, the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from program import Plan
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

WIDTH = 32
NUM_TOKENS = 48


class Linear(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.inner(x)))


class Adapter(nn.Module):
    """A frozen layer with a trainable pair beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):  # not every CPU has an LSTM in bf16
            return self.inner(x.float())[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Scalars(nn.Module):
    """Parameters without dimensions, with one element, with none, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.transposed) / self.temperature + self.shift + self.empty.sum()


class Experts(nn.Module):
    """Each token goes to one of three layers; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        shares, chosen = self.router(rows).softmax(-1).max(-1)
        answer = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            here = (chosen == index).nonzero().flatten()
            if len(here):
                routed = shares[here, None] * expert(rows[here])
                answer = answer.index_add(0, here, routed.to(answer.dtype))
        return answer.reshape(x.shape)


class ReadByParent(nn.Module):
    """Reads its child's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.child.weight[:, :16].repeat(1, 2), self.child.bias * 2)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def make_block(kind: str) -> nn.Module:
    """A block that keeps the width."""
    simple = {
        "linear": Linear, "adapter": Adapter, "attention": Attention, "recurrent": Recurrent,
        "convolution": Convolution, "scalars": Scalars, "experts": Experts,
        "read by parent": ReadByParent, "batch norm": BatchNorm,
    }  # fmt: skip
    if kind in simple:
        return simple[kind]()
    if kind == "dropout":
        return Linear(dropout=0.3)
    if kind == "norm":
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    if kind == "odd":
        return nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH, bias=False))
    if kind == "wide":
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    assert kind == "parametrized"
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


class Model(nn.Module):
    """An embedding, the blocks of a plan, and an output layer."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        if plan.is_embedding_tied:
            self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList()
        for block in plan.blocks:
            if block.same_as is not None:
                self.blocks.append(self.blocks[block.same_as])
                continue
            module = make_block(block.kind).to(getattr(torch, block.dtype))
            if block.tied_to is not None:
                module.inner.weight = self.blocks[block.tied_to].inner.weight
            if block.is_frozen:
                module.requires_grad_(False)
            self.blocks.append(module)
        self.raises_before: int | None = None

    def forward(self, tokens: torch.Tensor, route: Sequence[int]) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in route:
            if index == self.raises_before:
                raise InterruptedError("stop")
            x = x + self._run(index, x)
        return self.head(x.float())

    def _run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        block = self.plan.blocks[index]
        given = x.to(getattr(torch, block.dtype))
        if block.recompute and torch.is_grad_enabled():
            is_reentrant = block.recompute == "reentrant"
            answer = checkpoint(self.blocks[index], given, use_reentrant=is_reentrant)
        else:
            answer = self.blocks[index](given)
        return torch.tanh(answer.to(x.dtype))


class ByHand(torch.optim.Optimizer):
    """An optimizer that somebody wrote: momentum with a decay by sign."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["average"] * group["lr"] + parameter.sign() * 1e-5)


Maker = Callable[[Any], torch.optim.Optimizer]


def make_optimizer(
    name: str, parameters: Sequence[torch.Tensor], num_groups: int
) -> torch.optim.Optimizer:
    """An optimizer by its name in a plan; a second group has a rate of its own."""
    maker = {**_plain_makers(), **_makers_with_flags()}[name]
    if name == "adafactor":
        parameters = [parameter for parameter in parameters if parameter.numel()]
    if num_groups == 1:
        return maker(parameters)
    return maker([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003}])


def make_scheduler(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler by its name in a plan."""
    if name == "step":
        return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if name == "exponential":
        return lr_scheduler.ExponentialLR(optimizer, 0.9)
    if name == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    assert name == "one cycle"
    cycles = "betas" in optimizer.defaults or "momentum" in optimizer.defaults
    return lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100, cycle_momentum=cycles)


def _makers_with_flags() -> dict[str, Maker]:
    """Those of torch's element-wise optimizers, and forms, beside the usual ones."""
    t = torch.optim
    return {
        "adam tensor lr": lambda p: t.Adam(p, torch.tensor(0.01), foreach=False),
        "amsgrad fused": lambda p: t.Adam(p, 0.01, amsgrad=True, fused=True),
        "sgd dampening": lambda p: t.SGD(p, 0.1, 0.9, 0.3, weight_decay=0.01, maximize=True),
        "sgd nesterov foreach": lambda p: t.SGD(p, 0.1, 0.9, nesterov=True, foreach=True),
        "sgd fused": lambda p: t.SGD(p, 0.1, fused=True),
        "rmsprop foreach": lambda p: t.RMSprop(p, 1e-3, weight_decay=0.1, foreach=True),
        "adagrad decay": lambda p: t.Adagrad(p, 0.01, lr_decay=0.1, weight_decay=0.1),
        "adagrad fused": lambda p: t.Adagrad(p, 0.01, fused=True),
        "adadelta maximize": lambda p: t.Adadelta(p, 0.1, maximize=True, foreach=True),
        "adamax foreach": lambda p: t.Adamax(p, 0.01, weight_decay=0.1, foreach=True),
        "nadam foreach": lambda p: t.NAdam(p, 0.01, weight_decay=0.1, foreach=True),
        "nadam decoupled": lambda p: t.NAdam(
            p, 0.01, weight_decay=0.1, decoupled_weight_decay=True
        ),
        "radam foreach": lambda p: t.RAdam(p, 0.01, (0.5, 0.7), foreach=True),
        "radam decoupled": lambda p: t.RAdam(
            p, 0.01, (0.5, 0.7), weight_decay=0.1, decoupled_weight_decay=True
        ),
    }


def _plain_makers() -> dict[str, Maker]:
    return {
        "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        "adamw loop": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
        "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        "adamw maximize": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "sgd nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
        "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
        "adamax": lambda p: torch.optim.Adamax(p, 0.01),
        "nadam": lambda p: torch.optim.NAdam(p, 0.01),
        "radam": lambda p: torch.optim.RAdam(p, 0.01),
        "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
        "asgd": lambda p: torch.optim.ASGD(p, 0.01),
        "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
        "by hand": lambda p: ByHand(p, 0.01),
    }
