# SPDX-License-Identifier: Apache-2.0
"""Sparse tensors made of managed values have the plain results, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import patrickstar
import pytest
import torch
from helpers import evict_everything, managed, same

_INDICES = [[0, 1, 2], [2, 0, 1]]
_MAKERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "coo": lambda indices, values: torch.sparse_coo_tensor(indices, values, (3, 3)),
    "coo, coalesced": lambda indices, values: torch.sparse_coo_tensor(
        indices, values, (3, 3), is_coalesced=True
    ),
    "csr": lambda indices, values: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3]), indices[1], values, (3, 3)
    ),
    "csc": lambda indices, values: torch.sparse_csc_tensor(
        torch.tensor([0, 1, 2, 3]), indices[1], values, (3, 3)
    ),
}


def _results(maker: str, manage: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
    indices, values = torch.tensor(_INDICES), torch.arange(1.0, 4.0)
    manage(indices)
    manage(values)
    values.requires_grad_()
    sparse = _MAKERS[maker](indices, values)
    evict_everything()
    dense = sparse.to_dense()
    (dense * dense).sum().backward()
    evict_everything()
    assert values.grad is not None
    product = sparse.detach() @ torch.full((3, 2), 2.0)
    parts = sparse.detach().coalesce().values() if maker.startswith("coo") else sparse.values()
    return [dense, values.grad, product, parts, (sparse.detach() * 2).to_dense()]


@pytest.mark.parametrize("maker", _MAKERS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_over_managed_values(maker: str) -> None:
    expected = _results(maker, lambda tensor: None)
    with managed(stress="evict,poison"):
        found = _results(maker, patrickstar.manage)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))
