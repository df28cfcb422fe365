#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists functions, classes and files that are larger than the guide sizes.

The guides are a sign that a noun is missing, not a limit: only a file over
MAX_FILE_LINES fails. C++ is read by braces, which is right for code that
clang-format has laid out.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GUIDE_LINES = {"function": 60, "class": 350, "file": 600}
MAX_FILE_LINES = 800
ROOTS = ("core", "glue", "python", "tests", "benchmarks", "examples", "scripts")

_NOISE = re.compile(
    r"""R"(?P<tag>[^()\s]*)\(.*?\)(?P=tag)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'"""
    r"""|^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_CLASS = re.compile(r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(?P<name>\w+)[^()=]*$")
_FUNCTION = re.compile(r"(?P<name>[~\w:]+|operator\S+)\s*\(")


class Piece(NamedTuple):
    """Something that has a size."""

    kind: str
    path: Path
    line: int
    name: str
    num_lines: int


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _classify(head: str) -> tuple[str, str] | None:
    head = head.strip()
    if match := _CLASS.search(head):
        return "class", match["name"]
    if head.startswith(("namespace", "extern", "enum", "union")) or head.endswith(("=", ",", "(")):
        return None
    if match := _FUNCTION.search(head):
        return "function", match["name"]
    return None


def cpp_pieces(path: Path, text: str) -> Iterator[Piece]:
    """Yields the classes and the outermost functions of a C++ file."""
    code = _NOISE.sub(_blank, text)
    open_pieces: list[tuple[str, str, int] | None] = []
    head_start = 0
    line = 1
    for index, char in enumerate(code):
        if char == "\n":
            line += 1
        elif char == "{":
            inside_function = any(piece and piece[0] == "function" for piece in open_pieces)
            found = None if inside_function else _classify(code[head_start:index])
            first_line = line - code[head_start:index].lstrip().count("\n")
            open_pieces.append((*found, first_line) if found else None)
        elif char == "}" and open_pieces and (piece := open_pieces.pop()):
            yield Piece(piece[0], path, piece[2], piece[1], line - piece[2] + 1)
        if char in "{};":
            head_start = index + 1


def python_pieces(path: Path, text: str) -> Iterator[Piece]:
    """Yields the classes and functions of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Piece(kind, path, node.lineno, node.name, num_lines)


def pieces(path: Path) -> Iterator[Piece]:
    """Yields everything in a file that has a size, and the file."""
    text = path.read_text(encoding="utf-8")
    yield Piece("file", path, 1, path.name, text.count("\n"))
    yield from (python_pieces if path.suffix == ".py" else cpp_pieces)(path, text)


def sources(root: Path) -> Iterator[Path]:
    """Yields the source files of the repository, in order."""
    for folder in ROOTS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".h", ".cc", ".py"}:
                yield path


def main() -> int:
    """Prints what is over its guide; nonzero if a file is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    everything = [piece for path in sources(root) for piece in pieces(path)]
    for piece in everything:
        if piece.num_lines > GUIDE_LINES[piece.kind]:
            place = f"{piece.path.relative_to(root)}:{piece.line}"
            guide = GUIDE_LINES[piece.kind]
            print(f"{place}: {piece.kind} {piece.name} has {piece.num_lines} lines, guide {guide}")
    too_long = [p for p in everything if p.kind == "file" and p.num_lines > MAX_FILE_LINES]
    for piece in too_long:
        print(f"{piece.path.relative_to(root)}: over the limit of {MAX_FILE_LINES} lines; split it")
    num_functions = sum(piece.kind == "function" for piece in everything)
    num_files = sum(piece.kind == "file" for piece in everything)
    print(f"sizes: {num_functions} functions in {num_files} files")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
