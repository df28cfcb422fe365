# SPDX-License-Identifier: Apache-2.0
"""Copier: copies the tensors of a sample, plain or under management.

Both kinds of copy have the same strides, aliases, bits and flags, so that whatever differs
afterwards was made by management.
"""

from __future__ import annotations

from typing import Any

import patrickstar
import torch
from helpers import evict_everything
from patrickstar import _C
from torch import nn
from torch.utils._pytree import tree_map_only


class Copier:
    """Makes the copies of one run and remembers them.

    Args:
        is_managed: Whether every strided tensor with bytes is put under management.

    Attributes:
        tensors: Every copy, and the tensors that copies are views of.
        num_adopted: Tensors under management.
    """

    def __init__(self, is_managed: bool) -> None:
        self._is_managed = is_managed
        self._copies: dict[int, torch.Tensor] = {}
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.tensors: list[Any] = []
        self.num_adopted = 0

    def copy(self, tree: Any, *, requires_grad: bool = False, as_views: bool = False) -> Any:
        """Copies every tensor in lists, tuples and dictionaries; the rest stays as it is.

        Args:
            tree: The arguments of a call.
            requires_grad: Whether copies of tensors that require a gradient do so too.
            as_views: Whether each copy is every second element of a larger tensor.
        """

        def copy_one(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in self._copies:
                copy = self._copy(tensor, as_views)
                assert not self._is_managed or _C.is_managed(copy) or not _is_manageable(copy)
                copy.requires_grad_(requires_grad and tensor.requires_grad)
                self._copies[id(tensor)] = copy
                self.tensors.append(copy)
            return self._copies[id(tensor)]

        return tree_map_only(torch.Tensor, copy_one, tree)

    def adopt(self, made: torch.Tensor | nn.Module) -> None:
        """Puts what a run has made by itself under management, unless the run is plain."""
        if not self._is_managed:
            return
        patrickstar.manage(made)
        parts = made.parameters() if isinstance(made, nn.Module) else [made]
        managed = [part for part in parts if patrickstar.is_managed(part)]
        self.num_adopted += len(managed)

    def evict(self) -> None:
        """Takes what is managed off memory."""
        if self._is_managed:
            evict_everything()

    def num_leases(self) -> int:
        """Leases taken so far."""
        return int(_C.stats()["num_op_leases"]) if self._is_managed else 0

    def _copy(self, tensor: torch.Tensor, as_views: bool) -> torch.Tensor:
        source = tensor.detach()
        if not _is_manageable(source):
            return source.clone()
        if as_views:
            return self._copy_as_view(source)
        if _is_alone(source):
            copy = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            copy.copy_(source)
            self.adopt(copy)
            return copy
        base = self._base(source)
        copy = base.as_strided(source.shape, source.stride(), source.storage_offset())
        if source.is_conj():
            copy = copy.conj()
        return (torch._neg_view(copy) if source.is_neg() else copy).detach()

    def _copy_as_view(self, source: torch.Tensor) -> torch.Tensor:
        base = torch.zeros(*source.shape, 2, dtype=source.dtype)
        base[..., 1] = source
        self._add_base(base)
        return base[..., 1].detach()

    def _base(self, source: torch.Tensor) -> torch.Tensor:
        """A flat copy of everything that the storage of `source` holds."""
        storage = source.untyped_storage()
        key = (storage._cdata, source.dtype)
        if key not in self._bases:
            flat = torch.empty(0, dtype=source.dtype)
            flat.set_(storage, 0, (storage.nbytes() // source.itemsize,), (1,))
            self._bases[key] = self._add_base(flat.clone())
        return self._bases[key]

    def _add_base(self, base: torch.Tensor) -> torch.Tensor:
        self.adopt(base)
        self.tensors.append(base)
        return base


def _is_manageable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its storage, so that a copy needs no base."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    is_dense = torch.empty_like(tensor).stride() == tensor.stride()
    return is_whole and is_dense and not tensor.is_conj() and not tensor.is_neg()
