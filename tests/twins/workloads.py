# SPDX-License-Identifier: Apache-2.0
"""Seeded training runs, written as a user of plain PyTorch would write them.

A case names a model, a precision, a kind of checkpointing and an optimizer; ``train`` builds the
model, runs the loop and returns every number of it as digests of raw bytes. Nothing here knows of
patrickstar: a process that runs only this is the plain side of a twin.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import models
import optimizers
import torch

NUM_STEPS = 3
NUM_MICRO_BATCHES = 2
CLIP_NORM = 0.05  # below the norms of all models here, so clipping changes gradients

PRECISIONS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "fp32": contextlib.nullcontext,
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
}


@dataclass
class Numbers:
    """Everything that must not differ between twins, as one digest for each tensor.

    Attributes:
        losses: One for each micro-batch.
        norms: What ``clip_grad_norm_`` returned at each step.
        gradients: By parameter, as the last backward left them; None where there is none.
        weights: By parameter and buffer, at the end.
        state: By parameter and name in the optimizer's state, at the end.
        model_data_bytes: Bytes of parameters, gradients and the state of an optimizer of torch;
            what else a script allocates is its own.
        largest_parameter_bytes: Bytes of the largest parameter.
        tensors: Copies of the digested tensors, when asked for.
    """

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    gradients: dict[str, str | None] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    model_data_bytes: int = 0
    largest_parameter_bytes: int = 0
    tensors: dict[str, torch.Tensor] | None = None

    def digest(self, name: str, tensor: torch.Tensor) -> str:
        """Type, shape, strides and a hash of the bytes of a tensor."""
        copy = tensor.detach().clone()
        if self.tensors is not None:
            self.tensors[name] = copy
        data = copy.contiguous().reshape(-1).view(torch.uint8).numpy()
        layout = f"{copy.dtype} {tuple(tensor.shape)} {tensor.stride()}"
        return f"{layout} {hashlib.sha256(data.tobytes()).hexdigest()}"


def train(case: Mapping[str, str], *, keep_tensors: bool = False) -> Numbers:
    """Runs one case from its seed.

    Args:
        case: "model", "precision", "checkpointing" and "optimizer", by name.
        keep_tensors: Also keep the tensors, to look at the first difference.
    """
    numbers = Numbers(tensors={} if keep_tensors else None)
    torch.manual_seed(1234)
    workload = models.MODELS[case["model"]](case["checkpointing"])
    workload.train()
    optimizer = optimizers.OPTIMIZERS[case["optimizer"]](list(workload.parameters()))
    data = torch.Generator().manual_seed(99)
    for step in range(NUM_STEPS):
        for micro_batch in range(NUM_MICRO_BATCHES):
            batch = workload.batch(data)
            with PRECISIONS[case["precision"]]():
                loss = workload(*batch)
            (loss / NUM_MICRO_BATCHES).backward()
            numbers.losses.append(numbers.digest(f"loss {step}.{micro_batch}", loss))
        if step == NUM_STEPS - 1:
            _record_gradients(numbers, workload)
        norm = torch.nn.utils.clip_grad_norm_(workload.parameters(), CLIP_NORM)
        numbers.norms.append(numbers.digest(f"norm {step}", norm))
        assert norm > CLIP_NORM, f"clipping does nothing in {case}: the norm is only {norm}"
        optimizer.step()
        if step < NUM_STEPS - 1:
            optimizer.zero_grad()
    _record_end(numbers, workload, optimizer)
    return numbers


def _record_gradients(numbers: Numbers, workload: torch.nn.Module) -> None:
    for name, parameter in workload.named_parameters():
        gradient = parameter.grad
        numbers.gradients[name] = (
            None if gradient is None else numbers.digest(f"gradient {name}", gradient)
        )


def _record_end(numbers: Numbers, workload: torch.nn.Module, optimizer: Any) -> None:
    model_data: list[torch.Tensor] = []
    is_torchs = isinstance(optimizer, torch.optim.Optimizer)
    for name, tensor in workload.state_dict().items():
        numbers.weights[name] = numbers.digest(f"weight {name}", tensor)
    for name, parameter in workload.named_parameters():
        model_data.append(parameter)
        if parameter.grad is not None:
            model_data.append(parameter.grad)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                model_data += [value] if is_torchs else []
                numbers.state[f"{name} {key}"] = numbers.digest(f"state {name} {key}", value)
            else:
                numbers.state[f"{name} {key}"] = repr(value)
    numbers.model_data_bytes = _num_bytes(model_data)
    numbers.largest_parameter_bytes = max(_num_bytes([p]) for p in workload.parameters())


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
