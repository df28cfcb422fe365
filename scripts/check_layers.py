#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds every include and import against the order of the layers.

The order of the C++ folders is what DEPENDS says in their CMakeLists.txt. The core
includes neither torch nor Python, and nothing of glue. In the Python package imports
have no cycles, and no module imports the package's public face.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "patrickstar"
_LIBRARY = re.compile(
    r"^patrickstar_library\((?P<name>\w+)(?:\s+DEPENDS(?P<lower>[\s\w]+))?\)", re.M
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](?P<path>[^>"]+)[>"]', re.M)
_FOREIGN_TO_CORE = re.compile(r"^(torch|ATen|c10|pybind11|glue)/|^Python\.h$")

Graph = Mapping[str, set[str]]


def reachable(graph: Graph, start: str) -> set[str]:
    """Returns the nodes on paths of one or more edges from ``start``."""
    found: set[str] = set()
    pending = list(graph.get(start, ()))
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(graph.get(node, ()))
    return found


def read_folder_graph(core: Path) -> dict[str, set[str]]:
    """Returns the folders of the core, each with the folders that it may use."""
    graph = {}
    for path in sorted(core.glob(f"{PACKAGE}/*/CMakeLists.txt")):
        for match in _LIBRARY.finditer(path.read_text(encoding="utf-8")):
            graph[match["name"]] = set((match["lower"] or "").split())
    return graph


def cpp_sources(root: Path) -> list[Path]:
    """Returns the C++ files below ``root``, in order."""
    return sorted(path for path in root.rglob("*") if path.suffix in {".h", ".cc"})


def includes(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line number and the path of each include."""
    text = path.read_text(encoding="utf-8")
    for match in _INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start("path")) + 1, match["path"]


def check_core(root: Path) -> list[str]:
    """Returns one message per include of the core that goes up, sideways or out."""
    core = root / "core"
    graph = read_folder_graph(core)
    errors = [
        f"core/{PACKAGE}/{folder}/CMakeLists.txt: {folder} depends on itself"
        for folder in graph
        if folder in reachable(graph, folder)
    ]
    for path in cpp_sources(core):
        folder = path.relative_to(core / PACKAGE).parts[0]
        allowed = {folder} | reachable(graph, folder)
        for line, included in includes(path):
            place = f"{path.relative_to(root)}:{line}"
            parts = included.split("/")
            if folder not in graph:
                errors.append(f"{place}: folder {folder} has no patrickstar_library()")
                break
            if _FOREIGN_TO_CORE.search(included):
                errors.append(f"{place}: the core must not include {included}")
            elif parts[0] == PACKAGE and len(parts) > 2 and parts[1] not in allowed:
                errors.append(
                    f"{place}: {folder} must not include {included}; it may use {sorted(allowed)}"
                )
    return errors


def module_name(path: Path, package: Path) -> str:
    """Returns the dotted name of a module of the package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not _is_type_checking(child):
            yield from _import_nodes(child)


def _resolve(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    base = name.split(".")
    base = base[: len(base) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(path: Path, name: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yields the line number and the name of each module of the package that ``path`` imports."""
    for node in _import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            source = _resolve(node, name, path.name == "__init__.py")
            below = [f"{source}.{alias.name}" for alias in node.names]
            targets = [full if full in modules else source for full in below]
        for target in dict.fromkeys(targets):
            if target in modules:
                yield node.lineno, target


def check_package(root: Path) -> list[str]:
    """Returns one message per cycle of imports and per import of the public face."""
    package = root / "python" / PACKAGE
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    modules = {*paths, f"{PACKAGE}._C", f"{PACKAGE}._build_info"}
    errors = []
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for line, target in imports(path, name, modules):
            if target == PACKAGE and name != PACKAGE:
                errors.append(
                    f"{path.relative_to(root)}:{line}: {name} must not import the public face"
                )
            elif target != name:
                graph[name].add(target)
    for name in graph:
        others = sorted(
            other for other in reachable(graph, name) if name in reachable(graph, other)
        )
        if others and name == others[0]:
            errors.append(f"imports in a cycle: {', '.join(others)}")
    return errors


def main() -> int:
    """Prints every violation; nonzero if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    errors = check_core(root) + check_package(root)
    print("\n".join(errors) or "layers: every include and import goes down")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
