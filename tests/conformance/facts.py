# SPDX-License-Identifier: Apache-2.0
"""What must not differ between two runs: everything that can be seen of their values."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Fact = tuple[Any, ...]


def facts_of(tree: Any, *, are_bytes_defined: bool = True) -> list[Fact]:
    """Describes every value in lists, tuples and dictionaries; tensors down to their bytes.

    Args:
        tree: Any value.
        are_bytes_defined: False where an op returns memory that nobody has written.
    """
    return [_fact_of(leaf, are_bytes_defined) for leaf in tree_leaves(tree)]


def _fact_of(value: Any, are_bytes_defined: bool) -> Fact:
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, value if isinstance(value, str) else repr(value))
    fact = (str(value.dtype), str(value.layout), tuple(value.shape), value.requires_grad)
    if value.is_nested:
        return (*fact[:2], *(_fact_of(part, are_bytes_defined) for part in value.unbind()))
    if value.layout is torch.sparse_coo:
        parts = (value._indices(), value._values())
        return (*fact, value.is_coalesced(), *(_fact_of(part, True) for part in parts))
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (value.crow_indices(), value.col_indices(), value.values())
        return (*fact, *(_fact_of(part, True) for part in parts))
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (value.ccol_indices(), value.row_indices(), value.values())
        return (*fact, *(_fact_of(part, True) for part in parts))
    if value.layout is not torch.strided or value.is_quantized:
        return (*fact, repr(value))
    flags = (value.stride(), value.storage_offset(), value.is_conj(), value.is_neg())
    return (*fact, *flags, _digest(value) if are_bytes_defined else None)


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data.hex() if len(data) <= 32 else hashlib.blake2b(data, digest_size=16).hexdigest()
