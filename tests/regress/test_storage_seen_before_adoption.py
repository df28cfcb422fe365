# SPDX-License-Identifier: Apache-2.0
"""A parameter whose storage somebody looked at, or still holds, before it is adopted."""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import nn


@pytest.mark.parametrize(
    "look",
    [
        lambda tensor: tensor.untyped_storage().nbytes(),
        lambda tensor: tensor.is_shared(),
        lambda tensor: tensor.detach().numpy().sum(),
        lambda tensor: tensor.data_ptr(),
    ],
    ids=["untyped_storage", "is_shared", "numpy", "data_ptr"],
)
def test_a_look_at_a_storage_does_not_keep_it_out(look):
    """Loaders look for tied weights this way, and torch keeps the storage's Python object."""
    with helpers.managed(chunk_size="1MiB"):  # so that building the model adopts nothing yet
        model = helpers.Stack()
        for parameter in model.parameters():
            look(parameter)
        patrickstar.manage(model)
        assert all(patrickstar.is_managed(p) for p in model.parameters())
        del parameter, model


def test_a_storage_that_somebody_holds_waits_until_it_is_let_go():
    with helpers.managed(chunk_size="1MiB"):
        layer = nn.Linear(4, 4)
        optimizer = helpers.sgd(layer)
        held = layer.weight.untyped_storage()
        layer(torch.randn(2, 4)).sum().backward()
        optimizer.step()  # a graph may still hold it: nothing is said yet
        with pytest.warns(UserWarning, match="weight.* not managed yet: other tensors share"):
            optimizer.step()
        assert not patrickstar.is_managed(layer.weight)
        assert patrickstar.is_managed(layer.bias)
        with pytest.raises(patrickstar.InvalidArgument, match="another tensor shares its memory"):
            patrickstar.manage(layer.weight)
        del held
        optimizer.step()
        assert patrickstar.is_managed(layer.weight)
