# SPDX-License-Identifier: Apache-2.0
"""The engine's own kernels give the bits of torch's fused ones, on every instruction set."""

from __future__ import annotations

import itertools
from pathlib import Path

import helpers
import pytest
import torch
from patrickstar import _C
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

FLAGS = [
    (Adam, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "maximize": True}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]
SHAPES = [(1,), (7,), (8,), (33,), (129, 31), (300, 257)]

COMPARE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import test_kernels

    test_kernels.compare_all()
"""


def steps_of(optimizer_type, flags, *, is_fused):
    """Parameters and state after a few steps over odd shapes and odd values."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = optimizer_type(parameters, fused=is_fused, **flags)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
            parameter.grad.view(-1)[0] = (0.0, -0.0, 1e-40, float("inf"))[step]
        optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*parameters, *(value for value in values if isinstance(value, torch.Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def compare_all():
    for (optimizer_type, flags), num_threads in itertools.product(FLAGS, (1, 2)):
        torch.set_num_threads(num_threads)
        wanted = steps_of(optimizer_type, flags, is_fused=True)
        for setting in ("auto", "fused"):
            calls = []
            with helpers.managed(optimizer=setting), CountedKernels(calls):
                is_fused = True if setting == "auto" else None
                found = steps_of(optimizer_type, flags, is_fused=is_fused)
            assert calls, "no kernel of ours ran"
            for left, right in zip(wanted, found, strict=True):
                # A NaN is a NaN: its sign and payload are nobody's promise.
                assert torch.equal(left.isnan(), right.isnan())
                assert torch.equal(
                    left.nan_to_num(0.0).view(torch.int32), right.nan_to_num(0.0).view(torch.int32)
                ), (optimizer_type, flags, num_threads, setting)


class CountedKernels:
    """Notes each call of a kernel while the block runs."""

    def __init__(self, calls):
        self.patch = pytest.MonkeyPatch()
        self.calls = calls

    def __enter__(self):
        for name in ("fused_adam_step", "fused_sgd_step", "fused_adagrad_step"):
            self.patch.setattr(_C, name, self.counted(name, getattr(_C, name)))

    def __exit__(self, *exception):
        self.patch.undo()

    def counted(self, name, kernel):
        def call(*args, **kwargs):
            self.calls.append(name)
            kernel(*args, **kwargs)

        return call


def test_kernels_give_the_bits_of_torch():
    compare_all()


def test_every_instruction_set_gives_the_same():
    folder = Path(__file__).parent
    done = helpers.run_script(COMPARE, folder, environment={"PATRICKSTAR_ISA": "scalar"})
    assert done.returncode == 0, done.stderr


def test_an_unknown_instruction_set_is_refused():
    program = """
        import patrickstar
        try:
            patrickstar.init(host_memory="64MiB")
        except patrickstar.InvalidArgument as error:
            print(error)
    """
    done = helpers.run_script(program, environment={"PATRICKSTAR_ISA": "mmx"})
    assert "PATRICKSTAR_ISA=mmx: this machine and build have scalar" in done.stdout, done.stderr
