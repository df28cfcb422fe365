# SPDX-License-Identifier: Apache-2.0
"""The runs of one module of ``module_db`` in one dtype: forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from copies import Copier
from runs import SEED, Run, backward
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

DTYPES = (torch.float32, torch.float64)
MODES = ("train", "eval")


def modules() -> list[ModuleInfo]:
    return list(module_db)


def title(module: ModuleInfo) -> str:
    return str(module.formatted_name)


def runs_of(module: ModuleInfo, dtype: torch.dtype, mode: str) -> list[Run]:
    """Every sample of the module in one mode."""
    torch.manual_seed(SEED)
    inputs = module.module_inputs_func(
        module, "cpu", dtype, requires_grad=True, training=mode == "train"
    )
    return [Run(mode, partial(_prepare, module, dtype, mode, one), _train) for one in inputs]


def _prepare(
    module: ModuleInfo, dtype: torch.dtype, mode: str, sample: ModuleInput, copier: Copier
) -> Any:
    made = sample.constructor_input
    args, kwargs = copier.copy((tuple(made.args), dict(made.kwargs)))
    built = module.module_cls(*args, **kwargs).to(dtype).train(mode == "train")
    copier.adopt(built)
    given = sample.forward_input
    called_with = ((), {}) if given is None else (tuple(given.args), dict(given.kwargs))
    return built, *copier.copy(called_with, requires_grad=True)


def _train(prepared: Any) -> Any:
    module, args, kwargs = prepared
    result = module(*args, **kwargs)
    backward(result)
    return result, module.state_dict(), [parameter.grad for parameter in module.parameters()]
