# SPDX-License-Identifier: Apache-2.0
"""A skip that tests/skips.txt does not list fails CI, and only CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import skip_policy

TESTS = Path(__file__).resolve().parents[1]

SUITE = """
import pytest

def test_runs():
    pass

@pytest.mark.xfail(reason="known")
def test_expected_failure():
    assert False

@pytest.mark.parametrize("value", ["a b"])
def test_skips(value):
    pytest.skip("no such machine")

@pytest.mark.full
def test_slow():
    assert False
"""


def run_suite(folder: Path, *arguments: str, skips: str, ci: bool) -> tuple[int, str]:
    for name in ("conftest.py", "skip_policy.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "skips.txt").write_text(skips)
    (folder / "test_suite.py").write_text(SUITE)
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment | ({"CI": "true"} if ci else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_an_unlisted_skip_is_named_and_fails_ci(tmp_path: Path) -> None:
    returncode, output = run_suite(tmp_path, skips="", ci=True)
    assert returncode == 1
    assert "not listed in skips.txt: test_suite.py::test_skips[a b]" in output
    assert "1 passed, 1 skipped, 1 deselected, 1 xfailed" in output


def test_an_unlisted_skip_is_named_and_passes_elsewhere(tmp_path: Path) -> None:
    returncode, output = run_suite(tmp_path, skips="", ci=False)
    assert returncode == 0
    assert "not listed in skips.txt: test_suite.py::test_skips[a b]" in output


def test_a_listed_skip_passes_ci(tmp_path: Path) -> None:
    listed = "test_suite.py::test_skips[*] # the machine is rare\n"
    returncode, output = run_suite(tmp_path, skips=listed, ci=True)
    assert returncode == 0
    assert "not listed" not in output


def test_a_skipped_module_counts(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.skip('no such machine', allow_module_level=True)\n"
    )
    listed = "test_suite.py::* # the machine is rare\n"
    returncode, output = run_suite(tmp_path, skips=listed, ci=True)
    assert returncode == 1
    assert "not listed in skips.txt: test_module.py" in output


def test_all_runs_the_full_suite(tmp_path: Path) -> None:
    returncode, output = run_suite(tmp_path, "--all", skips="", ci=False)
    assert returncode == 1
    assert "FAILED test_suite.py::test_slow" in output


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "skips.txt"
    path.write_text("# comment\n\ntest_x.py::test_y\n")
    with pytest.raises(ValueError, match=r"skips\.txt:3: expected '<test> # <reason>'"):
        skip_policy.read_allowed(path)


def test_the_skips_of_ctest_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(
        "100% tests passed, 0 tests failed out of 9\n\n"
        "The following tests did not run:\n\t  7 - OsFile.NeedsDirectIo (Skipped)\n"
    )
    monkeypatch.setenv("CI", "true")
    assert skip_policy.main([str(log)]) == 1
    assert "ctest:OsFile.NeedsDirectIo" in capsys.readouterr().out
    monkeypatch.delenv("CI")
    assert skip_policy.main([str(log)]) == 0
