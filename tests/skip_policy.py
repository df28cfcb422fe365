# SPDX-License-Identifier: Apache-2.0
"""Which skipped tests CI accepts: those that tests/skips.txt lists with a reason.

The pytest hooks in conftest.py use it for the Python tests; run as a program it
judges the log of a ctest run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SKIPS_FILE = Path(__file__).parent / "skips.txt"
_CTEST_SKIP = re.compile(r"^\s*\d+ - (?P<name>\S+) \((?:Skipped|Disabled|Not Run)\)", re.MULTILINE)


def read_allowed(path: Path = SKIPS_FILE) -> dict[str, str]:
    """Returns the accepted patterns and their reasons.

    Raises:
        ValueError: if a line has no reason.
    """
    allowed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, reason = line.partition(" # ")
        if not reason.strip():
            raise ValueError(f"{path.name}:{number}: expected '<test> # <reason>', got '{line}'")
        allowed[pattern.strip()] = reason.strip()
    return allowed


def unlisted(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the names that no pattern covers; ``*`` stands for any characters."""
    regexes = [
        re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
        for pattern in patterns
    ]
    return [name for name in names if not any(regex.fullmatch(name) for regex in regexes)]


def ctest_skips(log: str) -> list[str]:
    """Returns the tests that a ctest log lists as not run, as ``ctest:<Suite.Name>``."""
    return [f"ctest:{match['name']}" for match in _CTEST_SKIP.finditer(log)]


def is_enforced() -> bool:
    """Whether an unlisted skip is a failure: in CI it is."""
    return bool(os.environ.get("CI"))


def main(arguments: Sequence[str]) -> int:
    """Prints the skips of a ctest log that are not listed; nonzero if CI must fail."""
    skips = ctest_skips(Path(arguments[0]).read_text(encoding="utf-8"))
    surprises = unlisted(skips, read_allowed())
    for name in surprises:
        print(f"skipped but not listed in {SKIPS_FILE.name}: {name}")
    return 1 if surprises and is_enforced() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
