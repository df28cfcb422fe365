# SPDX-License-Identifier: Apache-2.0
"""The checks of `make check` find what they are there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(script: str, root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--root", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


LAYERS = {
    "core/patrickstar/base/CMakeLists.txt": "patrickstar_library(base)\n",
    "core/patrickstar/base/error.h": "#include <string>\n",
    "core/patrickstar/io/CMakeLists.txt": "patrickstar_library(io DEPENDS base)\n",
    "core/patrickstar/io/file.h": '#include "patrickstar/base/error.h"\n',
    "core/patrickstar/chunk/CMakeLists.txt": "patrickstar_library(chunk DEPENDS io)\n",
    "core/patrickstar/chunk/store.h": '#include "patrickstar/base/error.h"\n',
    "python/patrickstar/__init__.py": "from patrickstar.session import Session\n",
    "python/patrickstar/session.py": "from patrickstar import _C, config\n",
    "python/patrickstar/config.py": "import os\n",
}


def test_layers_accept_includes_and_imports_that_go_down(tmp_path: Path) -> None:
    write(tmp_path, LAYERS)
    assert run("check_layers.py", tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "core/patrickstar/base/error.h",
            '\n#include "patrickstar/io/file.h"\n',
            "core/patrickstar/base/error.h:2: base must not include patrickstar/io/file.h",
        ),
        (
            "core/patrickstar/io/file.h",
            "#include <ATen/ATen.h>\n",
            "io/file.h:1: the core must not include ATen/ATen.h",
        ),
        (
            "core/patrickstar/base/CMakeLists.txt",
            "patrickstar_library(base DEPENDS chunk)\n",
            "base depends on itself",
        ),
        (
            "core/patrickstar/optim/adam.h",
            "#include <string>\n",
            "folder optim has no patrickstar_library()",
        ),
        (
            "python/patrickstar/config.py",
            "def f():\n    from .session import Session\n",
            "imports in a cycle: patrickstar.config, patrickstar.session",
        ),
        (
            "python/patrickstar/config.py",
            "import patrickstar\n",
            "python/patrickstar/config.py:1: patrickstar.config must not import the public face",
        ),
    ],
)
def test_layers_name_what_goes_up(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, {**LAYERS, name: text})
    returncode, output = run("check_layers.py", tmp_path)
    assert returncode == 1
    assert message in output


def test_layers_leave_type_checking_imports_alone(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import patrickstar.session\n"
    write(tmp_path, {**LAYERS, "python/patrickstar/config.py": typed})
    assert run("check_layers.py", tmp_path)[0] == 0


def test_sizes_list_what_is_over_its_guide(tmp_path: Path) -> None:
    body = '  Call("{");  // }\n' * 60
    function = f"int Store::Take(int a,\n                int b) {{\n{body}}}\n"
    cpp = f"namespace n {{\n\n{function}\n}}  // namespace n\n"
    python = "def short():\n    pass\n\n\nclass Wide:\n" + "    x = 1\n" * 350
    write(tmp_path, {"core/store.cc": cpp, "python/wide.py": python})
    returncode, output = run("size_report.py", tmp_path)
    assert returncode == 0
    assert output.splitlines() == [
        "core/store.cc:3: function Store::Take has 63 lines, guide 60",
        "python/wide.py:5: class Wide has 351 lines, guide 350",
        "sizes: 2 functions in 2 files",
    ]


def test_sizes_refuse_a_file_over_the_limit(tmp_path: Path) -> None:
    write(tmp_path, {"core/a.h": "// x\n" * 800})
    assert run("size_report.py", tmp_path)[0] == 0
    write(tmp_path, {"core/a.h": "// x\n" * 801})
    returncode, output = run("size_report.py", tmp_path)
    assert returncode == 1
    assert "core/a.h: over the limit of 800 lines" in output


PAGE = """# The page

[self](#the-page) [other](docs/other.md#two-words) [web](https://example.org/none)

```python
x = 1
```

```python
assert x == 1
```

<!-- not run: needs a machine of the reader's -->
```python
raise RuntimeError
```

```sh
[no link](nowhere.md)
```
"""


def test_docs_accept_good_links_and_run_snippets_in_one_process(tmp_path: Path) -> None:
    write(tmp_path, {"README.md": PAGE, "docs/other.md": "## Two words\n"})
    assert run("check_docs.py", tmp_path) == (0, "docs: links of 2 pages resolve, snippets run\n")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("docs/other.md#", "docs/gone.md#", "README.md:3: link to docs/gone.md"),
        ("#two-words", "#three", "README.md:3: other.md has no heading for #three"),
        ("#the-page", "#a-page", "README.md:3: README.md has no heading for #a-page"),
        ("x == 1", "x == 2", 'README.md.py", line 10, in <module>'),
        ("<!-- not run: needs", "<!-- because it needs", "RuntimeError"),
    ],
)
def test_docs_name_what_is_broken(tmp_path: Path, before: str, after: str, message: str) -> None:
    write(tmp_path, {"README.md": PAGE.replace(before, after), "docs/other.md": "## Two words\n"})
    returncode, output = run("check_docs.py", tmp_path)
    assert returncode == 1
    assert message in output


ERRORS_IN_PYTHON = """
def _unbuilt(name):
    return Unsupported(f"{name}={1} is not built yet; leave {name} out")
def read(path, error):
    raise IoError(
        f"cannot read {path}: {error}; "
        "pass another file", error.errno
    ) from error
    raise IoError(message)
"""
ERRORS_IN_CPP = """
constexpr char kAdvice[] = "; name a folder";
static constexpr char kForkedMessage[] =
    "this process was "
    "forked; stop";
std::string RawMessage(const Slot& slot) {
  return StrCat("the data of '", slot.name, "' is away; clone it");
}
void Check(int x) {  // throw Error("not me")
  if (x == 0) throw InvalidArgument(StrCat("spill_dir \\"", x, "\\" is empty", kAdvice));
  TORCH_CHECK(x == 1, "expected ", x, " of ", max(x, 2));
  std::string message = StrCat("cannot fetch ", Name(x, 3), ": ", x);
  if (x == 2) message += "; free memory";
  throw OutOfMemory(message);
  Complete(std::make_exception_ptr(Error(kForkedMessage)));
}
"""
ERRORS_PAGE = """# Errors
| message | when |
|---|---|
| `...=... is not built yet` | |
| `cannot read ...: ...` | |
| `this process was forked` | |
| `the data of '...' is away` | |
| `spill_dir "..." is empty` | |
| `expected ... of ...` | |
| `cannot fetch ...: ...` | |
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "", "errors: docs/errors.md lists all 7 messages"),
        *(
            (line, "", f"docs/errors.md does not list: {line.split('`')[1]}")
            for line in ERRORS_PAGE.splitlines()[3:]
        ),
        ("cannot read", "cannot load", "docs/errors.md: no code raises: cannot load ...: ..."),
    ],
)
def test_errors_in_code_and_page_are_the_same(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    files = {
        "python/patrickstar/config.py": ERRORS_IN_PYTHON,
        "core/patrickstar/io/file.cc": ERRORS_IN_CPP,
        "core/patrickstar/io/file_test.cc": 'throw Error("not me");',
        "docs/errors.md": ERRORS_PAGE.replace(before, after) if before else ERRORS_PAGE,
    }
    write(tmp_path, files)
    returncode, output = run("check_errors.py", tmp_path)
    assert returncode == (1 if before else 0)
    assert message in output
