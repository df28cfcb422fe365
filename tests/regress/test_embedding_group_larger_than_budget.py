# SPDX-License-Identifier: Apache-2.0
"""A group of parameter, gradient and two moments larger than the whole budget still steps."""

from __future__ import annotations

import patrickstar
import pytest
import torch
from helpers import managed
from torch import nn

_ROWS, _WIDTH = 4000, 64
_TABLE_BYTES = _ROWS * _WIDTH * 4
# A native element-wise optimizer needs two whole operands at once, and a chunk for the rest.
_BUDGET = 2 * _TABLE_BYTES + 64 * 1024


def _train(optimizer_class: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    table = nn.Embedding(_ROWS, _WIDTH)
    optimizer = optimizer_class(table.parameters(), lr=0.01)
    tokens = torch.randint(0, _ROWS, (4, 16))
    for _ in range(3):
        optimizer.zero_grad()
        table(tokens).pow(2).mean().backward()
        optimizer.step()
    state = optimizer.state[table.weight]
    kept = [table.weight, table.weight.grad, *state.values()]
    return [tensor.detach().clone() for tensor in kept if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize(
    ("optimizer_class", "num_operands"),
    [(torch.optim.Adam, 4), (torch.optim.AdamW, 4), (torch.optim.Adagrad, 3)],
)
def test_steps_within_the_budget(
    optimizer_class: type[torch.optim.Optimizer], num_operands: int
) -> None:
    plain = _train(optimizer_class)
    with managed(_BUDGET, chunk_size=64 * 1024):
        within = _train(optimizer_class)
        stats = patrickstar.stats()
    assert num_operands * _TABLE_BYTES > _BUDGET
    assert stats.host_peak_bytes <= _BUDGET
    assert stats.num_evictions > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))
