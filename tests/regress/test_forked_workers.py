# SPDX-License-Identifier: Apache-2.0
"""Forked workers of a data loader that make models and tensors of their own."""

from __future__ import annotations

import torch
from helpers import Stack, managed
from torch import nn


class Builds(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is made by a module of its own, trained for a step."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return layer.weight.detach().clone()


def _batches() -> list[torch.Tensor]:
    return list(torch.utils.data.DataLoader(Builds(), num_workers=2, batch_size=2, timeout=60))


def test_a_worker_may_build_and_train_a_module() -> None:
    expected = _batches()
    with managed("24KiB", stress="evict,poison"):
        model = Stack(4)
        model(torch.randn(2, 32)).sum().backward()
        assert all(map(torch.equal, _batches(), expected))
        model(torch.randn(2, 32)).sum().backward()
