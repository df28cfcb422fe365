# SPDX-License-Identifier: Apache-2.0
"""Layers quantized from managed ones: what they pack keeps tensors that no guard sees again."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import Recorder, Stack, evict_everything, twin
from torch import nn

_PARTS = {
    "linear": (lambda: Stack(), lambda: torch.randn(4, 32)),
    "lstm": (lambda: nn.LSTM(32, 32, num_layers=2), lambda: torch.randn(3, 4, 32)),
    "gru": (lambda: nn.GRU(32, 32), lambda: torch.randn(3, 4, 32)),
}


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16], ids=str)
@pytest.mark.parametrize("part", _PARTS)
def test_dynamically_quantized(part: str, dtype: torch.dtype) -> None:
    make, batch = _PARTS[part]

    def loop(recorder: Recorder) -> None:
        model = make()
        x = batch()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the module
            model(x)
            evict_everything()
            kinds = {nn.Linear, nn.LSTM, nn.GRU}
            quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(model), kinds, dtype)
            evict_everything()
            out = quantized(x)
        recorder.note("out", out if isinstance(out, torch.Tensor) else out[0])
        del quantized
        recorder.note("model", model)

    twin(loop, tight="64KiB", must_evict=False)
