# SPDX-License-Identifier: Apache-2.0
"""A managed tensor that an op gives another size is right, and an ordinary one until adopted."""

from __future__ import annotations

import warnings

import patrickstar
import pytest
import torch
from helpers import adamw, assert_nothing_left, evict_everything, managed, same
from torch import nn


def _managed_tensor() -> torch.Tensor:
    tensor = torch.arange(4.0)
    patrickstar.manage(tensor)
    evict_everything()
    return tensor


def test_a_growing_resize_keeps_the_values_and_leaves_its_chunk() -> None:
    with managed(stress="evict,poison"):
        tensor = _managed_tensor()
        tensor.resize_(3, 3)
        evict_everything()
        assert tensor.flatten()[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not patrickstar.is_managed(tensor)
        del tensor
        assert_nothing_left()


def test_a_shrinking_resize_stays_managed() -> None:
    with managed(stress="evict,poison"):
        tensor = _managed_tensor()
        tensor.resize_(2)
        evict_everything()
        assert tensor.tolist() == [0.0, 1.0]
        assert patrickstar.is_managed(tensor)


def test_an_out_of_another_shape_is_resized_as_torch_does() -> None:
    with managed(stress="evict,poison"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = _managed_tensor()
        alias = out.view(2, 2)
        torch.matmul(torch.eye(3), torch.full((3, 3), 2.0), out=out)
        evict_everything()
        assert out.tolist() == [[2.0] * 3] * 3
        assert alias.tolist() == [[2.0] * 2] * 2  # over the same storage, as in torch


def test_a_storage_is_not_resized_outside_of_an_operator() -> None:
    with managed(stress="evict,poison"):
        tensor = _managed_tensor()
        with patrickstar.resident(tensor), pytest.raises(patrickstar.Unsupported, match="resize"):
            tensor.untyped_storage().resize_(1024)
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_parameter_whose_storage_was_resized_is_adopted_again_at_the_next_step() -> None:
    with managed(stress="evict,poison"):
        layer = nn.Linear(2, 2)
        optimizer = adamw(layer)
        patrickstar.manage(layer)
        before = layer.weight.detach().clone()
        layer.weight.data.resize_(4, 2)
        assert not patrickstar.is_managed(layer.weight)
        assert same(layer.weight.detach(), before)
        layer.bias.sum().backward()
        optimizer.step()
        evict_everything()
        assert patrickstar.is_managed(layer.weight)
        assert same(layer.weight.detach().clone(), before)
