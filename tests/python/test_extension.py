# SPDX-License-Identifier: Apache-2.0
"""The compiled part: what it offers, and the torch it accepts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import patrickstar
import pytest
import torch
from patrickstar import _C, _extension


def test_the_stub_lists_what_the_module_has() -> None:
    stub = Path(patrickstar.__file__).with_name("_C.pyi").read_text()
    listed = {
        node.name
        for node in ast.parse(stub).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    present = {name for name in dir(_C) if not name.startswith("_")}
    assert listed == present


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_minor_version_of_torch_is_one_clear_error(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=re.escape(f"torch {version} is installed")):
        _extension.check_torch_version()


def test_a_patch_release_of_torch_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.7+cpu")
    _extension.check_torch_version()


def test_the_check_comes_before_the_extension_is_loaded() -> None:
    script = (
        "import sys, torch\n"
        "torch.__version__ = '2.99.0'\n"
        "try:\n    import patrickstar\n"
        "except ImportError as error:\n    assert 'torch 2.99.0 is installed' in str(error)\n"
        "else:\n    raise SystemExit('imported')\n"
        "assert 'patrickstar._C' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
