# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of both kinds over shared, frozen and input-less blocks."""

from __future__ import annotations

import warnings

import helpers
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_one_layer_recomputed_six_times(use_reentrant):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = helpers.Stack(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for _ in range(6):
                x = checkpoint(self.layer, x, use_reentrant=use_reentrant)
            return x

    num_calls: list[int] = []

    def loop(recorder: helpers.Recorder) -> None:
        model = Shared()

        def note_gradient(parameter: torch.Tensor) -> None:
            num_calls.append(1)
            recorder.note(f"hook call {len(num_calls)}", parameter.grad)

        num_calls.clear()
        for parameter in model.parameters():  # a hook sees the gradient of all uses
            parameter.register_post_accumulate_grad_hook(note_gradient)
        helpers.train(recorder, model)

    helpers.twin(loop)


class Adapter(nn.Module):
    """A frozen layer and norm with a trainable pair beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.LayerNorm(32).requires_grad_(False)
        self.down = nn.Linear(32, 8)
        self.up = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.frozen(x)) + self.up(torch.tanh(self.down(x)))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_frozen_weights_in_recomputed_blocks(num_micro_batches):
    def loop(recorder: helpers.Recorder) -> None:
        blocks = nn.ModuleList(Adapter() for _ in range(4))
        optimizer = helpers.adamw(p for p in blocks.parameters() if p.requires_grad)
        for step in range(3):
            for micro_batch in range(num_micro_batches):
                x = torch.randn(4, 32)
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                loss = x.pow(2).mean()
                loss.backward()
                recorder.step(f"step {step}.{micro_batch}", loss, blocks)
            optimizer.step()
            recorder.note(f"step {step}", optimizer)
            optimizer.zero_grad()
        recorder.note("end", blocks)

    helpers.twin(loop, tight="24KiB")


def test_recomputation_of_inputs_that_need_no_gradient():
    def loop(recorder: helpers.Recorder) -> None:
        embedding = nn.Embedding(64, 32).requires_grad_(False)
        block = helpers.Stack(4)
        model = nn.ModuleList([embedding, block])
        optimizer = helpers.adamw(block)

        def step(name: str) -> None:
            hidden = embedding(torch.randint(64, (4, 6)))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                hidden = checkpoint(block, hidden, use_reentrant=True)
            told = [w for w in caught if "requires_grad=True" in str(w.message)]
            recorder.note(f"{name} warned", len(told))
            if hidden.requires_grad:
                hidden.pow(2).mean().backward()
            recorder.step(name, hidden, model)
            optimizer.step()
            recorder.note(name, optimizer)
            optimizer.zero_grad()

        step("without gradients")  # torch's own rule: a warning, no gradients
        assert recorder.records["without gradients warned"] == 1
        assert recorder.records["without gradients 1.layers.0.weight.grad"] is None
        handle = embedding.register_forward_hook(
            lambda module, args, output: output.requires_grad_(True)
        )
        step("with gradients")
        step("with gradients again")
        handle.remove()
        assert recorder.records["with gradients 1.layers.0.weight.grad"] is not None

    helpers.twin(loop)
