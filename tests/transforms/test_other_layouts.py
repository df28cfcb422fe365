# SPDX-License-Identifier: Apache-2.0
"""Nested and sparse tensors, and fused kernels, that meet managed parameters."""

from __future__ import annotations

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.nn import functional

TIGHT = "16KiB"


def make_linear(width: int = 32) -> nn.Linear:
    layer = nn.Linear(width, width)
    with torch.no_grad():
        layer(torch.zeros(1, width))
    helpers.evict_everything()
    return layer


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs(layout):
    def loop(recorder: helpers.Recorder) -> None:
        layer = make_linear()
        parts = [torch.randn(3, 32), torch.randn(5, 32)]
        nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
        out = layer(nested)
        helpers.evict_everything()
        out.to_padded_tensor(0.0).pow(2).sum().backward()
        recorder.note("parts", list(out.unbind()))
        recorder.note("layer", layer)

    helpers.twin(loop, must_evict=False)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_made_of_managed_ones(layout):
    def loop(recorder: helpers.Recorder) -> None:
        first, second = make_linear(), make_linear()
        copied = torch.nested.nested_tensor(
            [first.weight.detach(), second.weight.detach()], layout=layout
        )
        graphed = torch.nested.as_nested_tensor([first.weight, second.weight], layout=layout)
        helpers.evict_everything()
        recorder.note("copied", list(copied.unbind()))
        (graphed * 2).to_padded_tensor(0.0).sum().backward()
        recorder.note("first", first)

    helpers.twin(loop, must_evict=False)


@pytest.mark.filterwarnings("ignore:Sparse .* in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_operands(layout):
    def loop(recorder: helpers.Recorder) -> None:
        layer = make_linear()
        dense = torch.randn(32, 32) * (torch.rand(32, 32) < 0.2)
        sparse = dense.to_sparse(layout=layout)
        out = (
            torch.sparse.mm(sparse, layer.weight)
            if layout != torch.sparse_csc
            else (sparse @ layer.weight)
        )
        helpers.evict_everything()
        out.pow(2).sum().backward()
        recorder.note("out", out)
        recorder.note("layer", layer)

    helpers.twin(loop, must_evict=False)


@pytest.mark.filterwarnings("ignore:Sparse .* in beta:UserWarning")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]
)
def test_sparse_copies_of_a_managed_tensor(layout):
    def loop(recorder: helpers.Recorder) -> None:
        layer = make_linear()
        blocks = {"blocksize": (4, 4)} if layout is torch.sparse_bsr else {}
        sparse = layer.weight.detach().to_sparse(layout=layout, **blocks)
        with torch.no_grad():
            layer.weight.zero_()
        helpers.evict_everything()
        recorder.note("dense again", sparse.to_dense())
        recorder.note("sum", torch.sparse_coo_tensor.__name__)
        recorder.note("layer", layer)

    helpers.twin(loop, must_evict=False)


def test_sparse_masks_and_semi_structured_products():
    def loop(recorder: helpers.Recorder) -> None:
        layer = make_linear()
        mask = torch.eye(32).to_sparse()
        recorder.note("masked", layer.weight.detach().sparse_mask(mask.coalesce()).to_dense())
        with torch.no_grad():
            layer.weight.add_(mask, alpha=0.5)
        helpers.evict_everything()
        recorder.note("sum", layer)

    helpers.twin(loop, must_evict=False)


@pytest.mark.parametrize("values", ["parameter", "slice"])
def test_coo_tensor_over_managed_values(values):
    """Its values are those of the parameter, not a copy: right while they move, or an error."""
    with helpers.managed(TIGHT, stress="evict,poison"):
        layer = make_linear()
        source = layer.bias.detach() if values == "parameter" else layer.weight.detach()[3]
        expected = source.clone()
        indices = torch.arange(32).unsqueeze(0)
        try:
            sparse = torch.sparse_coo_tensor(indices, source, (32,))
            helpers.evict_everything()
            dense = sparse.to_dense()
        except patrickstar.Unsupported as error:
            assert "clone" in str(error)
        else:
            assert torch.equal(dense, expected)


def test_sparse_gradients():
    def loop(recorder: helpers.Recorder) -> None:
        table = nn.Embedding(64, 32, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        for step in range(3):
            loss = table(torch.randint(64, (5,))).pow(2).sum()
            loss.backward()
            recorder.note(f"gradient {step}", table.weight.grad.coalesce().to_dense())
            optimizer.step()
            optimizer.zero_grad()
            helpers.evict_everything()
        recorder.note("table", table)

    helpers.twin(loop, must_evict=False)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_fast_path_of_transformer_layers(is_masked):
    """In eval mode, without gradients, whole layers run as one fused operation."""

    def loop(recorder: helpers.Recorder) -> None:
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(3, 5, 32)
        mask = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [2]]) if is_masked else None
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                recorder.note("output", model(x, src_key_padding_mask=mask))
            helpers.evict_everything()
        model.train()
        torch.manual_seed(3)
        model(x, src_key_padding_mask=mask).sum().backward()
        recorder.note("model", model)

    helpers.twin(loop, tight="96KiB")


def test_the_fast_path_of_attention():
    def loop(recorder: helpers.Recorder) -> None:
        attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
        x = torch.randn(2, 6, 32)
        with torch.no_grad():
            for needs_weights in (True, False):
                helpers.evict_everything()
                out, weights = attention(x, x, x, need_weights=needs_weights)
                recorder.note("out", out)
                recorder.note("weights", weights)

    helpers.twin(loop, tight="24KiB")


def test_scaled_dot_product_attention_over_managed_operands():
    def loop(recorder: helpers.Recorder) -> None:
        table = nn.Embedding(16, 32)
        table(torch.zeros(1, dtype=torch.long))
        heads = table.weight.view(1, 2, 8, 32)
        for is_causal in (False, True):
            helpers.evict_everything()
            out = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)
            recorder.note("out", out)
            out.sum().backward(retain_graph=True)
            recorder.note("table", table)

    helpers.twin(loop, must_evict=False)


def test_plain_tensors_that_take_a_managed_one_by_set():
    def loop(recorder: helpers.Recorder) -> None:
        layer = make_linear()
        plain = torch.empty(0)
        plain.set_(layer.weight.detach())
        helpers.evict_everything()
        recorder.note("plain", plain)
        plain.mul_(2)
        helpers.evict_everything()
        recorder.note("layer", layer)
        view = torch.empty(0)
        view.data = layer.bias.detach()
        recorder.note("view", view + 1)

    helpers.twin(loop, must_evict=False)
