# SPDX-License-Identifier: Apache-2.0
"""The runs of one operation of ``op_db`` in one dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from copies import Copier
from runs import SEED, Run, backward
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_map_only

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)

_READING = ("forward", "views", "backward")

# Their results, or what they grow by, are bytes that nobody has written.
_UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}


def title(op: OpInfo) -> str:
    return str(op.formatted_name)


def ops_with(dtype: torch.dtype) -> list[OpInfo]:
    return [op for op in op_db if dtype in op.dtypes]


def runs_of(op: OpInfo, dtype: torch.dtype) -> list[Run]:
    """Every sample as each kind of call that the operation supports."""
    torch.manual_seed(SEED)
    has_gradient = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=has_gradient))
    are_bytes_defined = op.name not in _UNDEFINED
    return [
        Run(variant, prepare, call, are_bytes_defined, is_writing=variant not in _READING)
        for sample in samples
        for variant, prepare, call in _variants(op, sample, has_gradient)
    ]


def _variants(
    op: OpInfo, sample: SampleInput, has_gradient: bool
) -> Iterator[tuple[str, Any, Any]]:
    arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))

    def prepare(copier: Copier, **how: bool) -> Any:
        return copier.copy(arguments, **how)

    in_views = partial(prepare, as_views=True)
    yield "forward", prepare, partial(_apply, op.op)
    yield "views", in_views, partial(_apply, op.op)
    if has_gradient:
        yield (
            "backward",
            partial(prepare, requires_grad=True),
            partial(_with_gradients, op.op, sample),
        )
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in-place", prepare, partial(_apply, op.inplace_variant)
        yield "in-place, views", in_views, partial(_apply, op.inplace_variant)
    if op.supports_out:
        for variant, shape in (("out=", None), ("out=, resized", (1,))):
            yield variant, partial(_prepare_out, op, arguments, shape), partial(_apply, op.op)


def _apply(function: Any, arguments: Any) -> Any:
    first, args, kwargs = arguments
    return function(first, *args, **kwargs)


def _with_gradients(function: Any, sample: SampleInput, arguments: Any) -> Any:
    result = _apply(function, arguments)
    backward(sample.output_process_fn_grad(result))  # of what is differentiable, as torch's tests
    return result


def _prepare_out(op: OpInfo, arguments: Any, shape: tuple[int, ...] | None, copier: Copier) -> Any:
    """Arguments with an ``out`` full of something else, of the result's shape or another one."""
    first, args, kwargs = copier.copy(arguments)

    def fill(result: torch.Tensor) -> torch.Tensor:
        return torch.full_like(result if shape is None else result.new_empty(shape), 3)

    plain = Copier(is_managed=False).copy(arguments)
    outs = tree_map_only(torch.Tensor, fill, _apply(op.op, plain))
    return first, args, {**kwargs, "out": copier.copy(outs)}
