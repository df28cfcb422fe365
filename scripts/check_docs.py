#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that links between pages resolve and that the snippets of the docs run.

Every ```python block of README.md and docs/ runs, those of one page in one process
and one after the other, unless the line above it is <!-- not run: reason -->.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 300
_FENCE = re.compile(r"^(?P<fence>```+|~~~+)\s*(?P<language>\w*)")
_NOT_RUN = re.compile(r"^<!-- not run: \S.* -->$")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HIDDEN = {"build", "dist", "node_modules"}


class Block(NamedTuple):
    """A fenced block: the language, where its first line is, its lines, the line above it."""

    language: str
    first_line: int
    lines: list[str]
    above: str


def split_page(text: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """Returns the fenced blocks of a page, and its other lines with their numbers."""
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _FENCE.match(line.strip())
        if fence:
            if line.strip() == fence:
                fence = ""
            else:
                blocks[-1].lines.append(line)
        elif match:
            fence = match["fence"]
            above = prose[-1][1].strip() if prose else ""
            blocks.append(Block(match["language"], number + 1, [], above))
        else:
            prose.append((number, line))
    return blocks, prose


def anchors(text: str) -> set[str]:
    """Returns the anchors that the headings of a page define, as GitHub makes them."""
    headings = [line.lstrip("#").strip() for _, line in split_page(text)[1] if line.startswith("#")]
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def check_links(page: Path, root: Path) -> Iterator[str]:
    """Yields one message per relative link of a page that leads nowhere."""
    for number, line in split_page(page.read_text(encoding="utf-8"))[1]:
        for match in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target, _, anchor = match["target"].partition("#")
            if ":" in target:
                continue
            place = f"{page.relative_to(root)}:{number}"
            path = (page.parent / target).resolve() if target else page
            if not path.exists():
                yield f"{place}: link to {target}, which does not exist"
            elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
                yield f"{place}: {path.name} has no heading for #{anchor}"


def snippet_program(page: Path) -> str:
    """Returns the snippets of a page as one program, each line at its own line number."""
    program: list[str] = []
    for block in split_page(page.read_text(encoding="utf-8"))[0]:
        if block.language == "python" and not _NOT_RUN.match(block.above):
            program.extend([""] * (block.first_line - 1 - len(program)))
            program.extend(block.lines)
    return "\n".join(program)


def run_snippets(page: Path, root: Path, timeout_s: float = TIMEOUT_S) -> str | None:
    """Runs the snippets of a page; returns what went wrong, or None."""
    program = snippet_program(page)
    if not program.strip():
        return None
    name = str(page.relative_to(root))
    with tempfile.TemporaryDirectory() as folder:
        # The name of the page in tracebacks; its line numbers are right already.
        path = Path(folder) / page.with_suffix(".md.py").name
        path.write_text(program + "\n", encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(path)],
                cwd=folder,
                timeout=timeout_s,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            return f"{name}: snippets ran longer than {timeout_s} s"
    return f"{name}: snippets failed\n{done.stdout}" if done.returncode else None


def pages(root: Path) -> list[Path]:
    """Returns the Markdown pages of the repository, in order."""
    found = []
    for path in sorted(root.rglob("*.md")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(".") or part in _HIDDEN for part in parts):
            found.append(path)
    return found


def main() -> int:
    """Prints every broken link and failed page; nonzero if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root.resolve()
    every_page = pages(root)
    errors = [error for page in every_page for error in check_links(page, root)]
    with_snippets = [
        page
        for page in every_page
        if page.parts[len(root.parts)] == "docs" or page.name == "README.md"
    ]
    errors += filter(None, (run_snippets(page, root) for page in with_snippets))
    print("\n".join(errors) or f"docs: links of {len(every_page)} pages resolve, snippets run")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
