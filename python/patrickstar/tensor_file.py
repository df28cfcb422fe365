# SPDX-License-Identifier: Apache-2.0
"""Files in the safetensors format, written and read tensor by tensor.

The library of that name wants the addresses of all tensors at once; here one piece of one tensor is
in memory at a time. The format (https://github.com/huggingface/safetensors): the length of the
header as 8 bytes little-endian, the header in JSON, padded by spaces to 8 bytes, the data.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from patrickstar.errors import CorruptData, InvalidArgument, IoError
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


# What the format keeps for texts about the file.
METADATA_NAME = "__metadata__"


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as one safetensors file.

    Args:
        file: Open for writing, at its start.
        tensors: By name. Strided, of any shape and strides; they are stored contiguous.
        metadata: Texts for the header.

    Raises:
        InvalidArgument: A name or a tensor that the format does not have.
    """
    TensorWriter(tensors, metadata).write(file)


class TensorWriter:
    """Tensors that are known to fit a safetensors file, and its header.

    Args:
        tensors: By name. Strided, of any shape and strides; they are stored contiguous.
        metadata: Texts for the header.

    Raises:
        InvalidArgument: A name or a tensor that the format does not have.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, tensor in tensors.items():
            _check_storable(name, tensor)
        self._tensors = tensors
        self._names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
        header: dict[str, Any] = {} if metadata is None else {METADATA_NAME: dict(metadata)}
        start = 0
        for name in self._names:
            tensor = tensors[name]
            end = start + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        self._header = text + b" " * (-len(text) % 8)
        self.num_bytes = 8 + len(self._header) + start

    @property
    def header_checksum(self) -> int:
        """The CRC-32 of the header."""
        return zlib.crc32(self._header)

    def write(self, file: BinaryIO, checksums: dict[str, int] | None = None) -> None:
        """Writes all of them, a piece in memory at a time.

        Args:
            file: Open for writing, at its start.
            checksums: Receives the CRC-32 of each tensor's bytes.
        """
        file.write(len(self._header).to_bytes(8, "little"))
        file.write(self._header)
        for name in self._names:
            checksum = 0
            for piece in pieces(self._tensors[name].detach()):
                data = piece.contiguous().view(torch.uint8).numpy().data
                file.write(data)
                if checksums is not None:
                    checksum = zlib.crc32(data, checksum)
            if checksums is not None:
                checksums[name] = checksum


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if not is_plain_text(name) or name == METADATA_NAME:
        raise InvalidArgument(
            f"cannot store a tensor by the name {name!r}: safetensors has no such name; rename it"
        )
    if is_lazy(tensor):
        raise InvalidArgument(
            f"cannot store tensor {name!r}: it has no shape yet; call the model once before"
        )
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    is_strided = tensor.layout == torch.strided and not tensor.is_nested and not is_wrapper
    if not is_strided or tensor.dtype not in _DTYPE_NAMES or tensor.device.type == "meta":
        raise InvalidArgument(
            f"cannot store tensor {name!r} of {tensor.dtype}, layout {tensor.layout}, device "
            f"{tensor.device}, class {type(tensor).__name__}: expected a strided tensor with data "
            "of a type that safetensors has; convert it first"
        )


def is_plain_text(text: str) -> bool:
    """Whether a text is one in Unicode: lone surrogates, as in odd file names, are none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        header_checksum: The CRC-32 that its header must have.
        checksums: The CRC-32 of each tensor's bytes, by name.

    Raises:
        CorruptData: It is gone, or not the file that was written.
        IoError: It cannot be read.
    """

    def __init__(self, path: Path, header_checksum: int, checksums: Mapping[str, int]) -> None:
        self._path = path
        self._checksums = checksums
        self._entries: dict[str, dict[str, Any]] = {}
        with _reading(path):
            self._file = path.open("rb")
        try:
            with _reading(path):
                header, size = self._read_header()
            self._parse_header(header, size, header_checksum)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

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
            CorruptData: Other bytes than were written; the target has some of them.
            IoError: The file cannot be read.
        """
        self.check_shape(name, name, target.shape)
        start, end = self._entries[name]["data_offsets"]
        self._file.seek(self._data_start + start)
        dtype = self.dtype(name)
        checksum = 0
        is_flat = target.is_contiguous()
        flat = target.view(-1) if is_flat else torch.empty(target.numel(), dtype=dtype)
        step = PIECE_BYTES // dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            data = self._read_bytes(name, part.numel() * dtype.itemsize)
            checksum = zlib.crc32(data, checksum)
            part.copy_(torch.frombuffer(data, dtype=torch.uint8).view(dtype))
        if not is_flat:
            target.copy_(flat.view(target.shape))
        if checksum != self._checksums[name]:
            raise CorruptData(
                f"cannot load {name!r} from {self._path}: expected checksum "
                f"{self._checksums[name]:08x}, got {checksum:08x} over "
                f"{format_bytes(end - start)}; use another checkpoint"
            )

    def _read_bytes(self, name: str, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        with _reading(self._path):
            found = self._file.readinto(data)
        if found != num_bytes:
            raise CorruptData(
                f"cannot read {name!r} from {self._path}: expected {format_bytes(num_bytes)}, the "
                f"file ends after {format_bytes(found)}; use another checkpoint"
            )
        return data

    def _read_header(self) -> tuple[bytes, int]:
        size = self._path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise self._corrupt("its header is not whole")
        self._data_start = 8 + length
        return self._file.read(length), size

    def _parse_header(self, text: bytes, size: int, checksum: int) -> None:
        try:
            header = json.loads(text)
            header.pop(METADATA_NAME, None)
            self._entries = header
            ends = [self._checked_end(name) for name in header]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._corrupt(f"its header cannot be read ({error})") from error
        expected = self._data_start + max(ends, default=0)
        if size < expected:
            raise self._corrupt(f"expected {expected} bytes, got {size}")
        if zlib.crc32(text) != checksum:
            raise self._corrupt(
                f"expected checksum {checksum:08x} of its header, got {zlib.crc32(text):08x}"
            )
        unknown = sorted(header.keys() ^ self._checksums.keys())
        if unknown:
            raise self._corrupt(f"it and the index differ in {unknown[0]!r}")

    def _checked_end(self, name: str) -> int:
        start, end = self._entries[name]["data_offsets"]
        shape = self._entries[name]["shape"]
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError(f"tensor {name!r} of shape {shape} at {start} to {end}")
        num_bytes = math.prod(shape) * self.dtype(name).itemsize
        if end - start != num_bytes:
            raise ValueError(f"tensor {name!r} of {num_bytes} bytes at {start} to {end}")
        return int(end)

    def _corrupt(self, reason: str) -> CorruptData:
        return CorruptData(
            f"cannot read {self._path} as a safetensors file: {reason}; use another checkpoint"
        )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CorruptData(f"cannot read {path}: it is gone; use another checkpoint") from None
    except OSError as error:
        raise IoError(
            f"cannot read {path}: {error.strerror or error}; check its permissions and the disk",
            error.errno,
        ) from error
