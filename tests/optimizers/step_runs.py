# SPDX-License-Identifier: Apache-2.0
"""What tests of optimizers share: torch's element-wise ones with their flags, and runs of them.

A run makes parameters of every kind, gives them seeded gradients through backward, steps, and
notes parameters, gradients and all state. Ranges are a few elements long, so that small tensors
have many.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import helpers
import torch
from patrickstar import ranged_step
from torch import nn
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

NUM_STEPS = 3
NUM_STEPS_OF_RADAM = 7  # it is rectified from the sixth on
RANGE = 128  # elements; none of the sizes below is a multiple

Options = dict[str, Any]

_DECAY = {"weight_decay": 0.1}

# By optimizer, its sets of options; each is also run in every form.
OPTIONS: Mapping[type[Optimizer], Mapping[str, Options]] = {
    Adam: {
        "plain": {},
        "amsgrad": {"amsgrad": True, **_DECAY},
        "maximize": {"maximize": True, "lr": 0.02},
        "decoupled": {"decoupled_weight_decay": True, **_DECAY},
        "betas": {"betas": (0.5, 0.7), "eps": 1e-3},
    },
    AdamW: {
        "plain": {},
        "amsgrad": {"amsgrad": True, "weight_decay": 0.3},
        "maximize": {"maximize": True, "weight_decay": 0},
    },
    SGD: {
        "plain": {},
        "decay": {"maximize": True, **_DECAY},
        "momentum": {"momentum": 0.9},
        "dampening": {"momentum": 0.9, "dampening": 0.3, **_DECAY},
        "nesterov": {"momentum": 0.9, "nesterov": True},
        "nesterov maximize": {"momentum": 0.9, "nesterov": True, "maximize": True, **_DECAY},
    },
    Adagrad: {
        "plain": {},
        "decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.2, **_DECAY},
        "maximize": {"maximize": True, "eps": 1e-3},
    },
    RMSprop: {
        "plain": {},
        "centered": {"centered": True, **_DECAY},
        "momentum": {"momentum": 0.5, "maximize": True},
        "all": {"centered": True, "momentum": 0.5, "alpha": 0.9, **_DECAY},
    },
    NAdam: {
        "plain": {},
        "decay": {"momentum_decay": 0.01, "maximize": True, **_DECAY},
        "decoupled": {"decoupled_weight_decay": True, **_DECAY},
    },
    RAdam: {
        "plain": {},
        "decay": {"maximize": True, **_DECAY},
        "decoupled": {"decoupled_weight_decay": True, **_DECAY},
    },
    Adamax: {"plain": {}, "decay": _DECAY, "maximize": {"maximize": True}},
    Adadelta: {"plain": {}, "decay": {"rho": 0.5, **_DECAY}, "maximize": {"maximize": True}},
}

FORMS: Mapping[str, Options] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "tensor lr": {"lr": "tensor"},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def forms_of(optimizer: type[Optimizer]) -> list[str]:
    """The names of the forms that an optimizer has on the CPU; some of them raise there."""
    names = list(FORMS)
    if optimizer not in (Adam, AdamW, SGD, Adagrad):
        names.remove("fused")
    if optimizer in (SGD, Adagrad):
        names.remove("capturable")
    return names


def options_of(optimizer: type[Optimizer], options: str, form: str) -> Options:
    given = {"lr": 0.05, **OPTIONS[optimizer][options], **FORMS[form]}
    if given["lr"] == "tensor":
        given["lr"] = torch.tensor(0.05)
    return given


class Parts(nn.Module):
    """Parameters of every kind that an optimizer may meet.

    Args:
        optimizer: Sparse and complex ones are there only for those that take them.
        scale: Multiplies the sizes of the first two.
    """

    def __init__(self, optimizer: type[Optimizer], scale: int = 1) -> None:
        super().__init__()
        self.odd = _parameter(1003 * scale)
        self.matrix = _parameter(33, 31 * scale)
        self.channels_last = nn.Parameter(
            torch.randn(4, 8, 5, 5).to(memory_format=torch.channels_last)
        )
        self.transposed = nn.Parameter(torch.randn(20, 30).t())
        self.no_dimension = nn.Parameter(torch.tensor(0.7))
        self.one_element = _parameter(1)
        self.empty = _parameter(0, 5)
        self.in_bf16 = _parameter(517, dtype=torch.bfloat16)
        self.in_float64 = _parameter(301, dtype=torch.float64)
        self.frozen = _parameter(300).requires_grad_(False)
        self.without_gradient = _parameter(170)
        self.rare = _parameter(600)
        if optimizer in (SGD, Adagrad):
            self.sparse = _parameter(20, 32)
        if optimizer is not RMSprop:  # it takes the absolute value of the whole
            self.in_complex = _parameter(301, dtype=torch.complex64)

    def backward(self, step: int) -> None:
        """Adds a seeded gradient to each parameter that gets one in this step."""
        loss = torch.zeros(())
        for name, parameter in self.named_parameters():
            if name in ("frozen", "without_gradient") or (name == "rare" and step % 3 == 1):
                continue
            if name == "sparse":
                rows = torch.randint(len(parameter), (7,))
                loss = loss + nn.functional.embedding(rows, parameter, sparse=True).pow(2).sum()
                continue
            product = parameter * torch.randn_like(parameter)
            if product.is_complex():
                product = torch.view_as_real(product)
            loss = loss + product.sum().float()
        loss.backward()


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def note_all(
    recorder: helpers.Recorder, name: str, module: nn.Module, optimizer: Optimizer
) -> None:
    """Notes parameters, gradients, state with its keys and order, and the groups."""
    for key, parameter in module.named_parameters():
        note_tensor(recorder, f"{name} {key}", parameter)
        note_tensor(recorder, f"{name} {key}.grad", parameter.grad)
    saved = optimizer.state_dict()
    recorder.note(f"{name} keys", str([(key, list(s)) for key, s in saved["state"].items()]))
    for index, state in saved["state"].items():
        for key, value in state.items():
            note_tensor(recorder, f"{name} state {index} {key}", value)
    for index, group in enumerate(saved["param_groups"]):
        for key, value in group.items():
            recorder.note(f"{name} group {index} {key}", str(value))


def note_tensor(recorder: helpers.Recorder, name: str, value: torch.Tensor | None) -> None:
    """Notes a tensor; a sparse one by its parts as they are."""
    if value is not None and value.layout == torch.sparse_coo:
        recorder.note(f"{name} indices", value._indices())
        value = value._values()
    recorder.note(name, value)


def try_step(recorder: helpers.Recorder, name: str, optimizer: Optimizer) -> None:
    """Steps, or notes what torch says against it."""
    try:
        optimizer.step()
    except (RuntimeError, AssertionError, KeyError, ValueError) as error:
        recorder.note(f"{name} raised", f"{type(error).__name__}: {error}")


Loop = Callable[[helpers.Recorder], None]


def loop_of(optimizer: type[Optimizer], options: Options, parts: Callable[[], Parts]) -> Loop:
    """A loop of some steps that notes everything after each."""

    def loop(recorder: helpers.Recorder) -> None:
        module = parts()
        given = {key: v.clone() if torch.is_tensor(v) else v for key, v in options.items()}
        made = optimizer(module.parameters(), **given)
        for step in range(NUM_STEPS_OF_RADAM if optimizer is RAdam else NUM_STEPS):
            module.backward(step)
            try_step(recorder, f"step {step}", made)
            note_all(recorder, f"step {step}", module, made)
            made.zero_grad(set_to_none=step % 2 == 0)

    return loop


@contextlib.contextmanager
def small_ranges(num_elements: int = RANGE) -> Iterator[None]:
    """Ranges of a few elements while the block runs."""
    with mock.patch.object(ranged_step, "RANGE_ELEMENTS", num_elements):
        yield


def model_data_bytes(optimizer: type[Optimizer], options: Options, module: nn.Module) -> int:
    """Bytes of parameters, gradients and state, in whole pages, as a budget counts them."""
    made = optimizer(module.parameters(), **options)
    states = 3 if options.get("amsgrad") else 2
    parameters = [p for group in made.param_groups for p in group["params"]]
    page = helpers.CHUNK_BYTES
    return sum((2 + states) * math.ceil(p.nbytes / page) * page for p in parameters)


def check(loop: Loop, **settings: Any) -> None:
    """Compares a loop over few parameters with its twin, in ranges of a few elements."""
    with small_ranges():
        helpers.twin(loop, **{"tight": "100KiB", "must_evict": False, **settings})


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A seeded parameter; 1003 elements by default, so that it has many ranges."""
    return _parameter(*(shape or (1003,)), dtype=dtype)


def give_gradients(*parameters: torch.Tensor) -> None:
    """Gradients that no backward made: plain tensors."""
    for each in parameters:
        each.grad = torch.randn_like(each)


def note(
    recorder: helpers.Recorder,
    name: str,
    parameters: Sequence[torch.Tensor],
    *optimizers: Optimizer,
) -> None:
    """``note_all`` of parameters outside any module."""
    for optimizer in optimizers:
        note_all(recorder, name, nn.ParameterList(parameters), optimizer)
