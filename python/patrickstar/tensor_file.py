# SPDX-License-Identifier: Apache-2.0
"""Files in the safetensors format, written and read tensor by tensor.

The library of that name wants the addresses of all tensors at once; here one piece of one tensor is
in memory at a time. The format (https://github.com/huggingface/safetensors): the length of the
header as 8 bytes little-endian, the header in JSON, padded by spaces to 8 bytes, the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from patrickstar.errors import CorruptData, InvalidArgument
from patrickstar.report.units import format_bytes

PIECE_BYTES = 16 << 20

# In the order in which the library lays tensors out: the widest first.
_DTYPE_NAMES = {
    torch.complex128: "C128",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as one safetensors file.

    Args:
        file: Open for writing, at its start.
        tensors: By name. Strided, of any shape and strides; they are stored contiguous.
        metadata: Texts for the header.

    Raises:
        InvalidArgument: A tensor of a dtype or layout that the format does not have.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPE_NAMES:
            raise InvalidArgument(
                f"cannot store tensor {name!r} of {tensor.dtype}, layout {tensor.layout}: expected "
                "a strided tensor of a type that safetensors has; convert it first"
            )
    ordered = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    start = 0
    for name in ordered:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in ordered:
        for piece in pieces(tensors[name].detach()):
            file.write(piece.contiguous().view(torch.uint8).numpy().data)


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat copies of the elements, of at most ``PIECE_BYTES`` where the tensor is contiguous."""
    if tensor.numel() == 0:
        return
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    step = PIECE_BYTES // tensor.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].clone()


class TensorFile:
    """A safetensors file, read tensor by tensor.

    Args:
        path: The file.

    Raises:
        CorruptData: It is not a whole safetensors file.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return torch.Size(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return _DTYPES[self._entries[name]["dtype"]]

    def check_shape(self, name: str, shown_name: str, expected: torch.Size) -> None:
        """Raises: InvalidArgument when a tensor has another shape than the one to load into."""
        if self.shape(name) != expected:
            raise InvalidArgument(
                f"cannot load {shown_name!r} from {self._path}: it has shape "
                f"{tuple(self.shape(name))}, the tensor to load into has {tuple(expected)}; build "
                "the same model"
            )

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a new one."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copies a tensor into one of its shape; the dtype may differ, as in ``copy_``.

        Raises:
            InvalidArgument: Another shape.
            CorruptData: The file ends too early.
        """
        self.check_shape(name, name, target.shape)
        start, end = self._entries[name]["data_offsets"]
        self._file.seek(self._data_start + start)
        if not target.is_contiguous():
            target.copy_(self._read_elements(name, end - start).view(target.shape))
            return
        flat = target.view(-1)
        dtype = self.dtype(name)
        step = PIECE_BYTES // dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            part.copy_(self._read_elements(name, part.numel() * dtype.itemsize))

    def _read_elements(self, name: str, num_bytes: int) -> torch.Tensor:
        data = bytearray(num_bytes)
        found = self._file.readinto(data)
        if found != num_bytes:
            raise CorruptData(
                f"cannot read {name!r} from {self._path}: expected {format_bytes(num_bytes)}, the "
                f"file ends after {format_bytes(found)}; use another checkpoint"
            )
        if num_bytes == 0:
            return torch.empty(0, dtype=self.dtype(name))
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype(name))

    def _read_header(self) -> None:
        size = self._path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise self._corrupt("its header is not whole")
        try:
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            self._entries: dict[str, dict[str, Any]] = header
            self._data_start = 8 + length
            ends = [self._checked_end(name) for name in header]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(f"its header cannot be read ({error})") from error
        expected = self._data_start + max(ends, default=0)
        if size < expected:
            raise self._corrupt(f"expected {expected} bytes, got {size}")

    def _checked_end(self, name: str) -> int:
        start, end = self._entries[name]["data_offsets"]
        num_bytes = math.prod(self.shape(name)) * self.dtype(name).itemsize
        if start < 0 or end - start != num_bytes:
            raise ValueError(f"tensor {name!r} of {num_bytes} bytes at {start} to {end}")
        return int(end)

    def _corrupt(self, reason: str) -> CorruptData:
        return CorruptData(
            f"cannot read {self._path} as a safetensors file: {reason}; use another checkpoint"
        )
