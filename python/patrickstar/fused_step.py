# SPDX-License-Identifier: Apache-2.0
"""The engine's one-pass kernels in place of torch's fused ones, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from patrickstar import _C
from patrickstar.step_stub import Group, State


def has_kernel(optimizer: Optimizer, parameter: Tensor, state: State) -> bool:
    """Whether a kernel steps this: all is fp32, and a ``GradScaler`` has left nothing to do."""
    is_unscaling = getattr(optimizer, "grad_scale", None) is not None
    may_be_skipped = getattr(optimizer, "found_inf", None) is not None
    gradient = parameter.grad
    assert gradient is not None
    is_alike = all(
        t.dtype == torch.float32 and t.stride() == parameter.stride()
        for t in (parameter, gradient, *_arrays(state))
    )
    return type(optimizer) in _KERNELS and is_alike and not is_unscaling and not may_be_skipped


def step_with_kernel(optimizer: Optimizer, group: Group, parameter: Tensor, state: State) -> None:
    """One step of a parameter of ordinary memory with its gradient attached."""
    if "step" in state:
        state["step"] += 1
    assert parameter.grad is not None
    _KERNELS[type(optimizer)](group, [parameter.detach(), parameter.grad, *_arrays(state)], state)


def _arrays(state: State) -> list[Tensor]:
    """In the order that the kernels take them."""
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
    return [state[name] for name in names if isinstance(state.get(name), Tensor)]


def _step_adam(group: Group, tensors: list[Tensor], state: State) -> None:
    beta1, beta2 = group["betas"]
    _C.fused_adam_step(
        tensors,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        is_decoupled=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        step=state["step"].item(),
    )


def _step_sgd(group: Group, tensors: list[Tensor], state: State) -> None:
    _C.fused_sgd_step(
        tensors,
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


def _step_adagrad(group: Group, tensors: list[Tensor], state: State) -> None:
    _C.fused_adagrad_step(
        tensors,
        lr=float(group["lr"]),
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
        step=state["step"].item(),
    )


_KERNELS: dict[type, Callable[[Group, list[Tensor], State], None]] = {
    Adagrad: _step_adagrad,
    Adam: _step_adam,
    AdamW: _step_adam,
    SGD: _step_sgd,
}
