# SPDX-License-Identifier: Apache-2.0
"""What was built runs on other machines of its kind, and needs no tool to run."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import helpers
import pytest
from patrickstar import _C

ROOT = Path(__file__).resolve().parents[2]
IS_X86 = platform.machine() == "x86_64"

# Functions compiled for one instruction set, and called only where the CPU has it. All of the
# namespace kernels is: it is compiled once for each set, into names of its own.
DISPATCHED = re.compile(r"Sse42|Avx2|Avx512|patrickstar::kernels::")

TRAIN = """
    import sys, helpers, patrickstar
    expected = helpers.plain(helpers.train_stack).records
    with helpers.managed("48KiB", spill_dir=sys.argv[1]):
        got = helpers.plain(helpers.train_stack).records
        assert patrickstar.stats().spilled_bytes > 0
    helpers.assert_same(got, expected, "here")
    print("the same numbers")
"""


def objdump(*arguments: str, path: Path = Path(str(_C.__file__))) -> str:
    return subprocess.run(
        ["objdump", *arguments, str(path)], capture_output=True, text=True, check=True
    ).stdout


def with_symbols() -> Path:
    """The extension as it was linked; an installed one may have lost the names."""
    linked = [Path(str(_C.__file__)), *ROOT.glob("build/*/glue/_C.*.so")]
    return next(path for path in linked if "no symbols" not in objdump("-t", path=path))


@pytest.mark.skipif(not IS_X86, reason="needs x86-64")
def test_wide_instructions_are_only_in_functions_that_are_dispatched():
    """The baseline of x86-64 is SSE2; a newer instruction elsewhere ends the process there."""
    code = objdump("-d", "-C", path=with_symbols())
    functions = re.split(r"^[0-9a-f]+ <(.*)>:$", code, flags=re.MULTILINE)
    assert len(functions) > 200
    newer = re.compile(r"\tv[a-z0-9]+\s.*%[xyz]mm|\tvzero|\tcrc32|\tpopcnt|\tpcmp[ei]str|\tmulx")
    found = {
        name
        for name, body in zip(functions[1::2], functions[2::2], strict=True)
        if newer.search(body)
    }
    assert {name for name in found if not DISPATCHED.search(name)} == set()
    assert any("Sse42" in name for name in found)  # or the names and instructions are not seen


def test_the_runtime_that_is_needed_is_no_newer_than_that_of_torch_needs():
    """Nothing newer than the oldest Linux with the compiler that we ask for (GCC 12)."""
    symbols = objdump("-T")
    highest = {
        family: max(
            (tuple(map(int, version.split("."))) for version in re.findall(pattern, symbols)),
            default=(0,),
        )
        for family, pattern in (
            ("GLIBC", r"\(GLIBC_([0-9.]+)\)"),
            ("GLIBCXX", r"\(GLIBCXX_([0-9.]+)\)"),
            ("CXXABI", r"\(CXXABI_([0-9.]+)\)"),
        )
    }
    assert (2, 2) <= highest["GLIBC"] <= (2, 36), highest
    assert (3, 4) <= highest["GLIBCXX"] <= (3, 4, 30), highest
    assert (1, 3) <= highest["CXXABI"] <= (1, 3, 13), highest


def test_no_library_beside_torch_and_the_system_is_needed():
    needed = set(re.findall(r"NEEDED +(\S+)", objdump("-p")))
    system = {name for name in needed if re.match(r"(libstdc\+\+|libgcc_s|libc|libm)\.so", name)}
    assert {re.sub(r"\.so.*", "", name) for name in needed - system} <= {
        "libtorch", "libtorch_cpu", "libtorch_python", "libc10", "ld-linux-x86-64",
    }  # fmt: skip


def test_nothing_is_built_or_started_at_run_time(tmp_path):
    """No PATH, no compiler, a home that cannot be written, a wrong CUDA, twice at once."""
    watch = """
    import sys
    started = []
    sys.addaudithook(lambda event, arguments: started.append(arguments[0])
                     if event in ("subprocess.Popen", "os.posix_spawn", "os.exec") else None)
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("nvcc", "g++", "ninja"):
        (tools / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started-{name}\nexit 1\n")
        (tools / name).chmod(0o755)
    environment = {
        "PATH": str(tools),
        "HOME": "/proc/nowhere",
        "XDG_CACHE_HOME": "/proc/nowhere",
        "CUDA_HOME": str(tmp_path / "no-cuda"),
        "CUDA_VISIBLE_DEVICES": "",
        "CC": "false",
        "CXX": "false",
    }
    folder = tmp_path / "spill"
    processes = [
        subprocess.Popen(
            helpers.script_command(f"{watch}\n{TRAIN}\n    assert not started, started", folder),
            env=helpers.script_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert "the same numbers" in output
    assert not list(tmp_path.glob("started-*"))
    assert list(folder.iterdir()) == []


def deny(*numbers: int, error: int) -> Callable[[], None]:
    """Makes system calls fail for this process, as the filter of a container does."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    load, equals, answer = 0x20, 0x15, 0x06
    code = struct.pack("HBBI", load, 0, 0, 0)
    for number in numbers:
        code += struct.pack("HBBI", equals, 0, 1, number)
        code += struct.pack("HBBI", answer, 0, 0, 0x00050000 | error)
    code += struct.pack("HBBI", answer, 0, 0, 0x7FFF0000)

    def apply() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        program = Program(len(code) // 8, ctypes.cast(code, ctypes.c_void_p))
        no_new_privileges, seccomp, with_filter = 38, 22, 2
        assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
        if libc.prctl(seccomp, with_filter, ctypes.byref(program), 0, 0) != 0:
            os._exit(77)

    return apply


@pytest.mark.skipif(not IS_X86, reason="the numbers of the calls are those of x86-64")
@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        pytest.param((206, 425, 426, 427, 332, 28), 1, id="all of them"),
        pytest.param((206, 425, 426, 427), 1, id="aio and io_uring", marks=pytest.mark.full),
        pytest.param((332,), 38, id="no statx", marks=pytest.mark.full),
        pytest.param((285,), 95, id="no fallocate", marks=pytest.mark.full),
        pytest.param((28,), 38, id="no madvise", marks=pytest.mark.full),
    ],
)
def test_system_calls_that_a_container_denies(numbers, error, tmp_path):
    done = helpers.run_script(TRAIN, tmp_path, before=deny(*numbers, error=error))
    if done.returncode == 77:
        pytest.skip("needs the right to filter system calls")
    assert done.returncode == 0, done.stderr
    assert "the same numbers" in done.stdout


METADATA = """
    import os, sys, sysconfig
    sys.platform = sys.argv[2]
    os.chdir(sys.argv[1])
    from scikit_build_core.settings.skbuild_read_settings import SettingsReader
    from scikit_build_core._vendor.pyproject_metadata import StandardMetadata
    from scikit_build_core._compat import tomllib
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    SettingsReader.from_file("pyproject.toml")
    print(StandardMetadata.from_pyproject(project).as_rfc822())
"""


@pytest.mark.parametrize("name", ["win32", "darwin"])
def test_the_metadata_can_be_read_on_systems_that_are_not_supported(name):
    done = helpers.run_script(METADATA, ROOT, name)
    assert done.returncode == 0, done.stderr
    assert "Name: patrickstar" in done.stdout
    assert "Requires-Python: >=3.10" in done.stdout


@pytest.mark.parametrize("name", ["Windows", "Darwin"])
def test_a_build_for_a_system_that_is_not_supported_declines_with_one_line(name, tmp_path):
    cmake = Path(sys.executable).with_name("cmake")
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path, f"-DCMAKE_SYSTEM_NAME={name}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"patrickstar runs on Linux only, and this is a build for {name}" in done.stderr
    assert "torch" not in done.stderr  # nothing else was looked for
