# SPDX-License-Identifier: Apache-2.0
"""PatrickStar: train models larger than memory with one added line, and the same numbers.

Example:
    >>> import patrickstar
    >>> session = patrickstar.init(host_memory="64MiB")
    >>> patrickstar.shutdown()
"""

from __future__ import annotations

from patrickstar._extension import check_torch_version

check_torch_version()

from patrickstar import data  # noqa: E402 - nothing may load the extension before the check
from patrickstar.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from patrickstar.errors import (  # noqa: E402
    CorruptData,
    Error,
    InvalidArgument,
    IoError,
    OutOfMemory,
    Timeout,
    Unsupported,
)
from patrickstar.init import init  # noqa: E402
from patrickstar.report.stats import Stats  # noqa: E402
from patrickstar.session import (  # noqa: E402
    Session,
    is_managed,
    manage,
    resident,
    shutdown,
    stats,
    unmanage,
)

__all__ = [
    "CorruptData",
    "Error",
    "InvalidArgument",
    "IoError",
    "OutOfMemory",
    "Session",
    "Stats",
    "Timeout",
    "Unsupported",
    "data",
    "init",
    "is_managed",
    "load_checkpoint",
    "manage",
    "resident",
    "save_checkpoint",
    "shutdown",
    "stats",
    "unmanage",
]
