# SPDX-License-Identifier: Apache-2.0
"""``swap_tensors``, alone and as the way in which modules are converted and loaded."""

from __future__ import annotations

from collections.abc import Iterator

import patrickstar
import pytest
import torch
from helpers import Recorder, Stack, evict_everything, managed, sgd, train_stack, twin
from torch import nn


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_managed_tensor_and_a_plain_one_swap() -> None:
    with managed(stress="evict,poison"):
        layer = nn.Linear(8, 8)
        patrickstar.manage(layer)
        weight, wanted = layer.weight, layer.weight.detach().clone()
        other = nn.Parameter(torch.ones(8, 8))
        torch.utils.swap_tensors(weight, other)
        assert torch.equal(weight, torch.ones(8, 8))
        assert torch.equal(other, wanted)
        assert patrickstar.is_managed(other) and not patrickstar.is_managed(weight)
        optimizer = sgd(layer)
        layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert patrickstar.is_managed(weight)
        optimizer.zero_grad()
        layer(torch.ones(2, 8)).sum().backward()
        assert patrickstar.is_managed(weight.grad), "its hook was lost"


def test_two_managed_tensors_swap() -> None:
    with managed(stress="evict,poison"):
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        patrickstar.manage([first, second])
        wanted = first.weight.detach().clone(), second.weight.detach().clone()
        torch.utils.swap_tensors(first.weight, second.weight)
        evict_everything()
        assert torch.equal(first.weight, wanted[1])
        assert torch.equal(second.weight, wanted[0])
        for layer in (first, second):
            layer(torch.ones(2, 8)).sum().backward()
            assert patrickstar.is_managed(layer.weight.grad)


def test_what_torch_refuses_stays_as_it_was() -> None:
    with managed(stress="evict,poison"):
        layer = nn.Linear(8, 8)
        patrickstar.manage(layer)
        kept = layer.weight.view(-1)  # another user of the tensor
        with pytest.raises(RuntimeError, match="use_count"):
            torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(8, 8)))
        assert patrickstar.is_managed(layer.weight)
        del kept
        layer(torch.ones(2, 8)).sum().backward()
        assert patrickstar.is_managed(layer.weight.grad)


@pytest.mark.parametrize("convert", ["double", "half", "to"])
@pytest.mark.usefixtures("swapping")
def test_conversions(convert: str) -> None:
    def loop(recorder: Recorder) -> None:
        model = Stack()
        model(torch.ones(2, 32)).sum().backward()
        parameters = list(model.parameters())
        if convert == "to":
            model.to(torch.bfloat16)
        else:
            getattr(model, convert)()
        recorder.note("same objects", all(map(lambda a, b: a is b, parameters, model.parameters())))
        recorder.note("converted", model)
        model.float()
        train_stack(recorder, num_steps=1)
        optimizer = sgd(model)
        for _ in range(2):
            recorder.train_step("after", model(torch.ones(2, 32)).sum(), model, optimizer)

    twin(loop, must_evict=False)


@pytest.mark.usefixtures("swapping")
def test_load_state_dict() -> None:
    def loop(recorder: Recorder) -> None:
        model, source = Stack(), Stack()
        state = {key: value.clone() for key, value in source.state_dict().items()}
        model(torch.ones(2, 32))
        model.load_state_dict(state)
        recorder.note("loaded", model)
        optimizer = sgd(model)
        for _ in range(2):
            recorder.train_step("after", model(torch.ones(2, 32)).sum(), model, optimizer)
        model.load_state_dict(source.state_dict(), assign=True)
        recorder.note("assigned", model)

    twin(loop, must_evict=False)
