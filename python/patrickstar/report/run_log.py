# SPDX-License-Identifier: Apache-2.0
"""RunLog: one JSON record a step, for people and plots to read while the training runs."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from patrickstar.errors import InvalidArgument, IoError
from patrickstar.report.disk import reason

_FIELDS = ("step", "time_s", "loss", "memory", "traffic", "stall_s", "scale", "skipped")


class RunLog:
    """Appends one line of JSON to a file for each step.

    A record has these fields: ``step``; ``time_s``, seconds since ``init()``; ``loss``, null until
        it is known;
    ``memory``, by tier: ``host`` with ``resident``, ``peak`` and ``budget``, ``disk`` with
    ``used``, all in bytes; ``traffic`` of this step: ``fetched_bytes``, ``evicted_bytes``,
    ``spilled_bytes``, ``read_bytes``; ``stall_s``, seconds this step waited for chunks;
    ``scale``, that of the loss from the next step on, null without one;
    ``skipped``, true for a step that changed nothing.

    Args:
        path: The file; created when missing, appended to when there. Its folder must exist.

    Raises:
        InvalidArgument: The path is a folder or lies in one that does not exist.
        IoError: The file cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> record = {"step": 1, "time_s": 0.5, "loss": None, "memory": {}, "traffic": {}}
        >>> with RunLog(path) as log:
        ...     log.write({**record, "stall_s": 0.0, "scale": None, "skipped": False})
        >>> json.loads(path.read_text())["step"]
        1
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._has_warned = False
        self._is_line_cut = False
        try:
            self._file = self._path.open("ab", buffering=0)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise InvalidArgument(
                f"cannot open the run log {self._path}: {reason(error)}; pass log= a file in an "
                "existing folder"
            ) from error
        except OSError as error:
            raise IoError(
                f"cannot open the run log {self._path}: {reason(error)}; pass log= a file that "
                "can be written",
                error.errno,
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record, at once.

        A write that fails warns the first time and loses the record: a full disk must not end the
        training.

        Args:
            record: Exactly the fields named above. A number that is not finite is written as null.

        Raises:
            InvalidArgument: A field is missing or unknown.
        """
        if record.keys() != set(_FIELDS):
            raise InvalidArgument(
                f"cannot write a record to the run log {self._path}: expected the fields "
                f"{', '.join(_FIELDS)}; got {', '.join(map(str, record))}"
            )
        line = json.dumps({name: _as_json(record[name]) for name in _FIELDS}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"cannot write to the run log {self._path}: {reason(error)}; training goes on "
                    "without these records",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Closes the file; calling it again does nothing."""
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        if self._is_line_cut:
            line = b"\n" + line
        num_written = 0
        try:
            while num_written < len(line):
                num_written += self._file.write(line[num_written:])
        finally:
            # A disk that filled up in the middle leaves half a line, which must not swallow the
            # next record.
            self._is_line_cut = 0 < num_written < len(line) or (
                self._is_line_cut and num_written == 0
            )


def _as_json(value: Any) -> Any:
    """JSON has no NaN or infinity, and a reader would stumble over the ones Python writes."""
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
