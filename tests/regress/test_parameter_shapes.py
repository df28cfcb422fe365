# SPDX-License-Identifier: Apache-2.0
"""Parameters with one element, none, no dimension, odd sizes, or strides of their own."""

from __future__ import annotations

import warnings

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn import functional


class WithExtra(nn.Module):
    """A stack and one more parameter that multiplies its sum."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.stack = helpers.Stack(4)
        self.extra = nn.Parameter(extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x) * (1 + self.extra.sum())


@pytest.mark.parametrize("num_elements", [1, 3])
def test_a_bias_of_very_few_elements(num_elements):
    helpers.twin(lambda recorder: helpers.train(recorder, WithExtra(torch.randn(num_elements))))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_a_parameter_without_elements_keeps_its_shape(shape):
    def loop(recorder: helpers.Recorder) -> None:
        model = WithExtra(torch.zeros(shape))
        helpers.train(recorder, model)
        helpers.evict_everything()
        assert model.extra.shape == torch.Size(shape)
        assert model.extra.grad is None or model.extra.grad.shape == torch.Size(shape)

    helpers.twin(loop)


def test_a_layer_without_outputs_in_the_loss():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = helpers.Stack(4)
            self.empty = nn.Linear(32, 0, bias=False)
            self.down, self.up = nn.Linear(32, 0, bias=False), nn.Linear(0, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stack(x)
            return x + self.up(self.down(x)) + self.empty(x).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")
        helpers.twin(lambda recorder: helpers.train(recorder, Model()))


def test_a_parameter_without_dimensions_keeps_its_shape():
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = helpers.Stack(4)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.stack(x) / self.temperature).softmax(-1)

    def loop(recorder: helpers.Recorder) -> None:
        model = Temperature()
        helpers.train(recorder, model)
        helpers.evict_everything()
        assert model.temperature.shape == torch.Size([])
        recorder.note("item", model.temperature.item())

    helpers.twin(loop)


def test_odd_sizes_in_chunks_of_an_odd_size():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50257, 7)
            self.inner = nn.Linear(7, 7)
            self.head = nn.Linear(7, 13, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.inner(self.embedding(tokens))))

    def loop(recorder: helpers.Recorder) -> None:
        model = Odd()
        optimizer = helpers.adamw(model)
        for step in range(2):
            loss = model(torch.randint(50257, (4, 8))).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(f"step {step}", loss, model, optimizer)
            optimizer.zero_grad()

    # One tensor of 50257 x 7 is 1.4 MB; the optimizer's largest op takes three of them.
    helpers.twin(loop, tight="4400KB", chunk_size=10007)


@pytest.mark.parametrize("tight", ["16MiB", "100MiB"])
def test_a_weight_five_times_larger_than_a_chunk(tight):
    def loop(recorder: helpers.Recorder) -> None:
        model = nn.Sequential(nn.Embedding(10240, 128), helpers.Stack(1, 128))  # 5 MiB
        optimizer = helpers.adamw(model)  # with gradient and moments 20 MiB; an op takes 15 of them
        for step in range(2):
            loss = model(torch.randint(10240, (4,))).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.note(f"step {step} loss", loss)
        recorder.note("end", model)
        recorder.note("end", optimizer)

    helpers.twin(loop, tight=tight, chunk_size="1MiB", must_evict=tight == "16MiB")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(32, 24).t(), id="transposed"),
        pytest.param(
            lambda: torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last),
            id="channels last",
        ),
        pytest.param(lambda: torch.randn(4, 6, 8).permute(1, 2, 0), id="permuted"),
    ],
)
def test_strides_of_a_dense_parameter_are_kept(make):
    def loop(recorder: helpers.Recorder) -> None:
        model = WithExtra(make())
        strides = model.extra.stride()
        helpers.train(recorder, model)
        helpers.evict_everything()
        assert model.extra.stride() == strides
        if patrickstar._C.is_running():
            assert patrickstar.is_managed(model.extra)

    helpers.twin(loop)


def test_a_convolution_in_channels_last():
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 3, padding=1)
            self.second = nn.Conv2d(16, 32, 3, padding=1)
            self.to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images = x.reshape(-1, 3, 8, 8).to(memory_format=torch.channels_last)
            return self.second(functional.relu(self.first(images)))

    def loop(recorder: helpers.Recorder) -> None:
        helpers.train(recorder, Convolution(), width=192)

    helpers.twin(loop, tight="64KiB")


def test_a_view_of_another_storage_follows_it():
    """Not managed while its base lives, and so says a warning; the numbers are right anyway."""

    def loop(recorder: helpers.Recorder) -> None:
        base = torch.randn(64)
        model = WithExtra(base.as_strided((4, 8), (8, 1), 16))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*share their memory")
            helpers.train(recorder, model)
        recorder.note("base", base)
        recorder.note("follows", torch.equal(base[16:48].reshape(4, 8), model.extra))

    helpers.twin(loop)
    with helpers.managed():
        base = torch.randn(64)
        model = WithExtra(base[16:48])
        with pytest.warns(UserWarning, match="extra.* not managed yet: other tensors share"):
            helpers.train(helpers.Recorder(), model, num_steps=2)
        assert not patrickstar.is_managed(model.extra)
        del base
        helpers.train(helpers.Recorder(), model, num_steps=1)
        assert patrickstar.is_managed(model.extra)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(1, 8).expand(4, 8), id="expanded"),
        pytest.param(lambda: torch.randn(16).as_strided((4, 8), (2, 1)), id="overlapping"),
    ],
)
def test_elements_that_share_memory_are_refused_by_name(make):
    with helpers.managed():
        model = WithExtra(make())
        with pytest.warns(UserWarning, match="'extra' is left out of management: several of its"):
            model(torch.randn(2, 32))
        assert not patrickstar.is_managed(model.extra)
        assert patrickstar.is_managed(model.stack.layers[0].weight)
        with (
            pytest.warns(UserWarning, match="left out of management"),
            pytest.raises(patrickstar.InvalidArgument, match="several of its elements share"),
        ):
            patrickstar.manage(nn.Parameter(make()))
