# SPDX-License-Identifier: Apache-2.0
"""The guards of single ops: each gives the plain op's bytes while every chunk leaves after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import patrickstar
import pytest
import torch
from helpers import managed

Tensors = Sequence[torch.Tensor]

_VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "alias": torch.ops.aten.alias,
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.expand(3, 4, 4),
    "permute": lambda x: x.permute(1, 0),
    "select": lambda x: x.select(0, 1),
    "slice": lambda x: x[1:3],
    "split": lambda x: x.split(2),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "unbind": lambda x: x.unbind(),
    "unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [16]),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "view": lambda x: x.view(2, 8),
    "view_as_dtype": lambda x: x.view(torch.int32),
}

_OPS: dict[str, Callable[[Tensors], object]] = {
    "add": lambda x: torch.add(x[0], x[1], alpha=2),
    "add_scalar": lambda x: torch.ops.aten.add.Scalar(x[0], 3.0),
    "addmm": lambda x: torch.addmm(x[0], x[1], x[2]),
    "bmm": lambda x: torch.bmm(x[0].unsqueeze(0), x[1].unsqueeze(0)),
    "cat": lambda x: torch.cat(list(x), dim=1),
    "div": lambda x: x[0] / x[1],
    "embedding": lambda x: torch.embedding(x[0], torch.tensor([3, 0, 3])),
    "layer_norm": lambda x: torch.layer_norm(x[0], [4], x[1][0], x[2][0]),
    "mm": lambda x: x[0] @ x[1],
    "mul": lambda x: x[0] * x[1],
    "mul_scalar": lambda x: x[0] * 2.5,
    "sqrt": lambda x: x[0].sqrt(),
    "sub": lambda x: x[0] - x[1],
    "foreach_sqrt": lambda x: torch._foreach_sqrt(list(x)),
}

_WRITES: dict[str, Callable[[Tensors], object]] = {
    "add_": lambda x: x[0].add_(x[1], alpha=2),
    "add_scalar_": lambda x: x[0].add_(3.0),
    "addcdiv_": lambda x: x[0].addcdiv_(x[1], x[2], value=0.5),
    "addcmul_": lambda x: x[0].addcmul_(x[1], x[2], value=0.5),
    "copy_": lambda x: x[0].copy_(x[1]),
    "copy_from_plain": lambda x: x[0].copy_(torch.full((4, 4), 7.0)),
    "div_": lambda x: x[0].div_(x[1]),
    "div_scalar_": lambda x: x[0].div_(3.0),
    "lerp_": lambda x: x[0].lerp_(x[1], 0.25),
    "mul_": lambda x: x[0].mul_(x[1]),
    "mul_scalar_": lambda x: x[0].mul_(3.0),
    "foreach_add_": lambda x: torch._foreach_add_(list(x), 1.0),
    "foreach_add_list_": lambda x: torch._foreach_add_([x[0]], [x[1]], alpha=2),
    "foreach_addcdiv_": lambda x: torch._foreach_addcdiv_([x[0]], [x[1]], [x[2]], [0.5]),
    "foreach_addcmul_": lambda x: torch._foreach_addcmul_([x[0]], [x[1]], [x[2]], 0.5),
    "foreach_div_": lambda x: torch._foreach_div_(list(x), [1.0, 2.0, 3.0]),
    "foreach_lerp_": lambda x: torch._foreach_lerp_([x[0]], [x[1]], 0.25),
    "foreach_mul_": lambda x: torch._foreach_mul_(list(x), 3.0),
    "foreach_mul_tensor_": lambda x: torch._foreach_mul_(list(x), torch.tensor(3.0)),
}


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(4, 4, generator=generator) + 0.5 for _ in range(3)]


def _copies(result: object) -> list[torch.Tensor]:
    results = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(results, list | tuple):
        return []
    return [x.detach().clone() for x in results if isinstance(x, torch.Tensor)]


def _results(op: Callable[[Tensors], object], tensors: Tensors) -> list[torch.Tensor]:
    results = _copies(op(tensors))
    return [*results, *_copies(list(tensors))]


@pytest.mark.parametrize("name", [*_OPS, *_WRITES])
@pytest.mark.parametrize("budget", ["64MiB", "12KiB"])
def test_an_op_on_managed_tensors_has_the_plain_bytes(name: str, budget: str) -> None:
    op = {**_OPS, **_WRITES}[name]
    expected = _results(op, _tensors())
    with managed(budget, stress="evict,poison"):
        tensors = _tensors()
        for tensor in tensors:
            patrickstar.manage([tensor])  # a chunk each
        found = _results(op, tensors)
    assert len(expected) >= len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", ["foreach_add_", "foreach_div_", "foreach_mul_", "foreach_sqrt"])
def test_a_list_larger_than_the_budget_is_taken_in_parts(name: str) -> None:
    op = {**_OPS, **_WRITES}[name]
    expected = _results(op, _tensors())
    with managed("8KiB", stress="evict,poison"):
        tensors = _tensors()
        for tensor in tensors:
            patrickstar.manage([tensor])
        found = _results(op, tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", _VIEWS)
def test_a_view_of_a_managed_tensor_is_managed(name: str) -> None:
    expected = _copies(_VIEWS[name](_tensors()[0]))
    with managed(stress="evict,poison"):
        [tensor, *_] = _tensors()
        patrickstar.manage([tensor])
        result = _VIEWS[name](tensor)
        views = [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
        assert all(patrickstar.is_managed(view) for view in views)
        found = _copies(result)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
