# SPDX-License-Identifier: Apache-2.0
"""Hooks, graph nodes, saved tensors and version counters outlive any number of moves."""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import nn

NUM_MOVES = 100


def move(parameter: torch.Tensor) -> None:
    """Off memory and back, again and again; each time its address may be another."""
    for _ in range(NUM_MOVES):
        helpers.evict_everything()
        parameter.detach().sum()


def accumulator(parameter: torch.Tensor) -> object:
    """The node that receives the gradient."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("is_adopted_in_the_middle", [False, True])
def test_a_graph_and_its_hooks_after_a_hundred_moves(is_adopted_in_the_middle):
    with helpers.managed("24KiB", stress="poison"):
        weight = nn.Parameter(torch.arange(1024.0).reshape(32, 32))
        if not is_adopted_in_the_middle:
            patrickstar.manage(weight)
        calls: list[str] = []
        weight.register_hook(lambda gradient: calls.append("gradient"))
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
        node, version, identity = accumulator(weight), weight._version, id(weight)
        node.register_hook(lambda *arguments: calls.append("node"))
        loss = (weight * weight).sum()
        if is_adopted_in_the_middle:
            patrickstar.manage(weight)
        assert patrickstar.is_managed(weight)
        move(weight)
        assert patrickstar.stats().num_fetches >= NUM_MOVES
        assert accumulator(weight) is node
        assert id(weight) == identity
        if not is_adopted_in_the_middle:
            assert weight._version == version
        loss.backward()
        assert sorted(calls) == ["accumulated", "gradient", "node"]
        assert torch.equal(weight.grad, 2 * torch.arange(1024.0).reshape(32, 32))
        assert patrickstar.is_managed(weight.grad)


def test_a_write_after_a_tensor_was_saved_is_still_noticed():
    with helpers.managed("24KiB", stress="evict,poison"):
        weight = nn.Parameter(torch.randn(32, 32))
        patrickstar.manage(weight)
        loss = (weight * weight).sum()
        version = weight._version
        with torch.no_grad():
            weight.add_(1)
        assert weight._version == version + 1
        move(weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_step_is_noticed_by_an_old_graph():
    with helpers.managed("24KiB", stress="evict,poison"):
        model = helpers.Stack(2)
        optimizer = helpers.adamw(model)
        x = torch.randn(4, 32)
        old = model(x).sum()
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        move(model.layers[0].weight)
        model(x).sum().backward()  # a new one is fine


def test_views_and_weak_references_follow_their_parameter():
    with helpers.managed("24KiB", stress="poison"):
        weight = nn.Parameter(torch.randn(32, 32))
        patrickstar.manage(weight)
        detached, data, rows = weight.detach(), weight.data, weight.detach()[4:8].t()
        move(weight)
        with torch.no_grad():
            weight.fill_(3.0)
        move(weight)
        for view in (detached, data, rows):
            assert torch.equal(view, torch.full(view.shape, 3.0))
        data[0, 0] = 7.0
        move(weight)
        assert weight[0, 0].item() == 7.0
