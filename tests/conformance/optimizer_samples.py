# SPDX-License-Identifier: Apache-2.0
"""The runs of one optimizer of ``optim_db``: every set of its options with every flag."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from copies import Copier
from runs import Run
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

_NUM_STEPS = 3
_SHAPES = ((5, 3), (3, 4))  # every optimizer takes matrices
_OTHER_SHAPES = ((7,), ())


def optimizers() -> list[OptimizerInfo]:
    return list(optim_db)


def title(optimizer: OptimizerInfo) -> str:
    return str(optimizer.optim_cls.__name__)


def runs_of(optimizer: OptimizerInfo) -> list[Run]:
    """A few steps with each set of options: no flag, and one flag at a time."""
    flags = [
        flag
        for flag in optimizer.supported_impls
        if flag != "fused" or "cpu" in optimizer.supports_fused_on
    ]
    return [
        Run(name or "no flag", partial(_prepare, optimizer, {**given.kwargs, **chosen}), _train)
        for given in optimizer.optim_inputs_func(device="cpu")
        for name in (None, *flags)
        for chosen in [{flag: flag == name for flag in flags}]
    ]


def _prepare(optimizer: OptimizerInfo, options: dict[str, Any], copier: Copier) -> Any:
    is_sparse = optimizer.only_supports_sparse_grads
    shapes = _SHAPES if is_sparse or title(optimizer) == "Muon" else _SHAPES + _OTHER_SHAPES
    # A differentiable step writes in place to what must not be a leaf that requires a gradient.
    requires_grad = not options.get("differentiable", False)
    parameters = [nn.Parameter(torch.randn(shape), requires_grad) for shape in shapes]
    for parameter in parameters:
        copier.adopt(parameter)
    made = optimizer.optim_cls(parameters, **copier.copy(options))
    return made, parameters, is_sparse


def _train(prepared: Any) -> Any:
    optimizer, parameters, is_sparse = prepared

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = [_loss(parameter, is_sparse) for parameter in parameters]
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss

    for _ in range(_NUM_STEPS):
        if parameters[0].requires_grad:
            optimizer.step(closure)
            continue
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return list(parameters), [parameter.grad for parameter in parameters], state


def _loss(parameter: torch.Tensor, is_sparse: bool) -> torch.Tensor:
    if is_sparse:
        rows = torch.tensor([0, len(parameter) - 1, 0])
        return nn.functional.embedding(rows, parameter, sparse=True).pow(2).sum()
    return (parameter * torch.randn(parameter.shape)).sum() + parameter.pow(2).sum()
