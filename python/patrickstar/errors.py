# SPDX-License-Identifier: Apache-2.0
"""The exception tree of the engine, with the same names as in the C++ core.

Every class also derives from the builtin (or torch) exception that a plain PyTorch script would
expect, so existing handlers keep working. ``str(error)`` is always the plain message.
"""

from __future__ import annotations

import torch


class Error(RuntimeError):
    """Base of everything the engine raises on purpose."""


class InvalidArgument(Error, ValueError):  # noqa: N818
    """A value the caller passed cannot be used."""


class OutOfMemory(Error, torch.OutOfMemoryError, MemoryError):  # noqa: N818
    """A budget cannot hold what one operation needs."""


class IoError(Error, OSError):
    """The operating system refused an I/O operation.

    Args:
        message: What failed, with the path.
        error_number: The ``errno`` of the failure, kept in the ``errno`` attribute; None when it is
            not known.
    """

    def __init__(self, message: str, error_number: int | None = None) -> None:
        # OSError with two arguments would print "[Errno n] ..." instead of our message.
        super().__init__(message)
        self.errno = error_number

    def __reduce__(self) -> tuple[type[IoError], tuple[str, int | None]]:
        return type(self), (str(self), self.errno)


class CorruptData(Error):  # noqa: N818
    """Bytes read back are not the bytes that were written."""


class Unsupported(Error):  # noqa: N818
    """A valid request for something that this build or state cannot do.

    Not a ``NotImplementedError``: torch and transformers catch that one to try another way, which
    would hide ours.
    """


class Timeout(Error, TimeoutError):  # noqa: N818
    """A bounded wait ended without the awaited event."""
