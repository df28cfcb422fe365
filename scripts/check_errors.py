#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that docs/errors.md lists exactly the errors that the code can raise.

A message is written as in the page: values are `...`, backticks and the remedy after the
semicolon are left out. In Python it is the first argument of an exception; in C++ that of an
exception of our tree, of a TORCH_CHECK or of a helper named `...Error`, and what a constant or a
function named `...Message` holds. A message that is only passed on is found where it is made.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path("docs/errors.md")
PYTHON = "python/patrickstar"
CPP = ("core", "glue")
# The tree itself, and assertions of what only our own bug can break.
LEFT_OUT = {"errors.py", "error.h", "check.h"}

_VALUE = "..."
_TREE = ("InvalidArgument", "OutOfMemory", "CorruptData", "Unsupported", "Timeout")
_CPP_SITE = re.compile(rf"\b(?:\w*Error|{'|'.join(_TREE)}|TORCH_CHECK\w*|PyErr_\w+|\w+_error)\(")
_CPP_MESSAGE = re.compile(
    r"\b(?:k\w*Message\[\] =|std::string \w*Message\([^)]*\) (?:const )?\{\s*return)\s*"
)
_CPP_CONSTANT = re.compile(r"\b(?P<name>k\w+)\[\] =\s*(?P<value>(?:\"(?:\\.|[^\"\\])*\"\s*)+);")
_CPP_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|.', re.DOTALL)
_LITERALS = re.compile(r'(?:"(?:\\.|[^"\\])*"\s*)+')
_PAGE_ENTRY = re.compile(r"^\| `(?P<message>.+?)` \|", re.MULTILINE)


def normalized(message: str) -> str:
    """What the page shows of a message: one line, without the remedy."""
    text = " ".join(message.split()).split(";")[0].replace("`", "")
    return re.sub(r"\.{4,}", _VALUE, text).strip()


def python_messages(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the message of each exception that a Python file makes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in (*_TREE, "Error", "IoError", "ImportError"):  # others are caught inside
                yield node.lineno, _python_text(node.args[0])


def _python_text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_python_text, node.values))
    if isinstance(node, ast.BinOp):
        return _python_text(node.left) + _python_text(node.right)
    return _VALUE


def cpp_messages(text: str, constants: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yields the line and the message of each exception that a C++ file makes."""
    code = "".join("" if t.startswith("//") else t for t in _CPP_TOKEN.findall(text))
    for match in _CPP_SITE.finditer(code):
        line = code.count("\n", 0, match.start()) + 1
        parts = [
            _cpp_text(_definition(argument, code[: match.start()]), constants)
            for argument in _arguments(code, match.end())
        ]
        if match[0].startswith("TORCH_CHECK"):
            yield line, "".join(parts[1:])  # it joins what follows the condition
        else:
            yield line, next((part for part in parts if part.strip(". ")), "")
    for match in _CPP_MESSAGE.finditer(code):
        value = next(_arguments(code, match.end(), end=";"))
        yield code.count("\n", 0, match.start()) + 1, _cpp_text(value, constants)


def _arguments(code: str, start: int, end: str = ")") -> Iterator[str]:
    """Yields the arguments between `start` and the closing parenthesis of the call."""
    depth, argument = 0, ""
    for token in _CPP_TOKEN.findall(code[start:]):
        if depth == 0 and token in (end, ","):
            yield argument.strip()
            argument = ""
            if token == end:
                return
            continue
        depth += (token in "([{") - (token in ")]}")
        argument += token


def _definition(argument: str, before: str) -> str:
    """What a local variable was last set to; anything else as it is."""
    if not re.fullmatch(r"[a-z]\w*", argument):
        return argument
    found = list(re.finditer(rf"\b{argument} =\s*(?=StrCat\()", before))
    return before[found[-1].end() :].split(";\n")[0] if found else argument


def _cpp_text(expression: str, constants: dict[str, str]) -> str:
    """The text of literals, of constants, and of StrCat of those; a value for the rest."""
    if _LITERALS.fullmatch(expression):
        parts = re.findall(r'"((?:\\.|[^"\\])*)"', expression)
        return "".join(parts).replace('\\"', '"')
    if expression.startswith("StrCat("):
        return "".join(_cpp_text(part, constants) for part in _arguments(expression, 7))
    return constants.get(expression.split("::")[-1], _VALUE)


def messages(root: Path) -> dict[str, str]:
    """Returns every message of the code, with one place where it is made."""
    found: dict[str, str] = {}
    python = [p for p in sorted((root / PYTHON).rglob("*.py")) if p.name not in LEFT_OUT]
    cpp = [
        path
        for folder in CPP
        for path in sorted((root / folder).rglob("*.*"))
        if path.suffix in {".h", ".cc"}
        and path.name not in LEFT_OUT
        and not path.stem.endswith("_test")
        and "testing" not in path.parts
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in [*python, *cpp]}
    constants = {
        match["name"]: _cpp_text(match["value"].strip(), {})
        for path in cpp
        for match in _CPP_CONSTANT.finditer(texts[path])
    }
    for path, text in texts.items():
        is_python = path.suffix == ".py"
        for line, message in python_messages(text) if is_python else cpp_messages(text, constants):
            short = normalized(message)
            if short.strip(". "):
                found.setdefault(short, f"{path.relative_to(root)}:{line}")
    return found


def main() -> int:
    """Prints what only the code or only the page has; nonzero if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    in_code = messages(root)
    page = (root / PAGE).read_text(encoding="utf-8") if (root / PAGE).exists() else ""
    on_page = {match["message"] for match in _PAGE_ENTRY.finditer(page)}
    problems = [
        f"{place}: {PAGE} does not list: {message}"
        for message, place in in_code.items()
        if message not in on_page
    ]
    problems += [f"{PAGE}: no code raises: {m}" for m in sorted(on_page - in_code.keys())]
    print("\n".join(problems) or f"errors: {PAGE} lists all {len(in_code)} messages")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
