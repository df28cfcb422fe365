# SPDX-License-Identifier: Apache-2.0
"""Notes: what the two sides of a twin must agree in, as text by name.

Nothing here knows of patrickstar.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Notes:
    """Notes of one run.

    Attributes:
        texts: By name; a tensor as its layout and a hash of its bytes.
        model_data_bytes: Bytes of the largest model noted, with gradients and optimizer state.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.model_data_bytes = 0

    def note(self, name: str, value: Any) -> None:
        """Notes a tensor, a mapping or list of them, or a value by its repr."""
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.note(f"{name} {key}", part)
            return
        if isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                self.note(f"{name} {index}", part)
            return
        assert name not in self.texts, f"{name} is noted already"
        self.texts[name] = _text(value)

    def end(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Notes weights, buffers and optimizer state, and counts the bytes of model data."""
        self.note(f"{name} weight", model.state_dict())
        num_bytes = 0
        for key, parameter in model.named_parameters():
            num_bytes += parameter.nbytes * (2 if parameter.requires_grad else 1)
            for part, value in sorted(optimizer.state.get(parameter, {}).items()):
                self.note(f"{name} state {key} {part}", value)
                num_bytes += value.nbytes
        self.model_data_bytes = max(self.model_data_bytes, num_bytes)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone().contiguous()
        data = copy.reshape(-1).view(torch.uint8).numpy().tobytes()
        layout = f"{value.dtype} {tuple(value.shape)} {value.stride()}"
        return f"{layout} {hashlib.sha256(data).hexdigest()}"
    return repr(value)
