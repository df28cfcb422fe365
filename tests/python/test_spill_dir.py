# SPDX-License-Identifier: Apache-2.0
"""The spill folder: missing, shared, read-only, a file, in memory, small, full for a while."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path

import disks
import helpers
import patrickstar
import pytest
import torch
from patrickstar.report.disk import is_memory_backed
from torch import nn


def train_and_look(folder: Path) -> None:
    """A run that spills, and whose folder is empty after it."""
    expected = helpers.plain(helpers.train_stack)
    with helpers.managed("48KiB", spill_dir=folder):
        got = helpers.plain(helpers.train_stack)
        assert patrickstar.stats().spilled_bytes > 0
    helpers.assert_same(got.records, expected.records, str(folder))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["missing", "missing/deeper", "with spaces and 'quotes'"])
def test_a_missing_folder_is_created(name, tmp_path):
    train_and_look(tmp_path / name)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = helpers.plain(helpers.train_stack)
    with helpers.managed("48KiB", spill_dir="relative"):
        monkeypatch.chdir("/")
        got = helpers.plain(helpers.train_stack)
    helpers.assert_same(got.records, expected.records, "relative")
    assert list((tmp_path / "relative").iterdir()) == []


def test_runs_one_after_another_leave_no_file_and_no_descriptor(tmp_path):
    train_and_look(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        train_and_look(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


TRAIN_UNTIL_TOLD = """
    import sys, helpers, patrickstar
    expected = helpers.plain(helpers.train_stack).records
    with helpers.managed("48KiB", spill_dir=sys.argv[1]):
        print("ready", flush=True)
        got = helpers.plain(helpers.train_stack).records
        print("trained", flush=True)
        sys.stdin.readline()
        again = helpers.plain(helpers.train_stack).records
        assert patrickstar.stats().spilled_bytes > 0
    helpers.assert_same(got, expected, "first")
    helpers.assert_same(again, expected, "second")
"""


def test_two_runs_in_one_folder_and_one_that_is_killed(tmp_path):
    processes = [helpers.start_script(TRAIN_UNTIL_TOLD, tmp_path) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert process.stdout.readline() == "trained\n"
        killed, survivor = processes
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(60) == -signal.SIGKILL
        _, errors = survivor.communicate("go on\n", timeout=120)
        assert survivor.returncode == 0, errors
        assert list(tmp_path.iterdir()) == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    train_and_look(tmp_path)


def test_a_read_only_folder_is_refused_by_path(tmp_path):
    with (
        disks.read_only(tmp_path) as folder,
        pytest.raises(patrickstar.IoError, match=f"spill_dir={folder} cannot be written"),
    ):
        patrickstar.init(host_memory="1MiB", spill_dir=folder)
    with (
        disks.read_only(tmp_path) as folder,
        pytest.raises(patrickstar.IoError, match=f"cannot create spill_dir={folder}/inner"),
    ):
        patrickstar.init(host_memory="1MiB", spill_dir=folder / "inner")
    train_and_look(tmp_path)  # a refusal leaves nothing behind


@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_file_is_refused_by_path(inner, tmp_path):
    path = tmp_path / "file"
    path.write_text("content")
    with pytest.raises(patrickstar.InvalidArgument, match=f"spill_dir={path / inner} is or lies"):
        patrickstar.init(host_memory="1MiB", spill_dir=path / inner)
    assert path.read_text() == "content"


def test_memory_is_refused(tmp_path):
    memory = Path("/dev/shm")
    if not (memory.is_dir() and is_memory_backed(memory)):
        pytest.skip("needs a tmpfs at /dev/shm")
    with pytest.raises(patrickstar.InvalidArgument, match=r"spill_dir=/dev/shm is kept in memory"):
        patrickstar.init(host_memory="1MiB", spill_dir=memory)


def train_growing(recorder: helpers.Recorder, before_step_three: list[object]) -> None:
    """Four steps; from the third on a second, larger part of the model takes part."""
    model = nn.ModuleDict({"first": helpers.Stack(4), "second": helpers.Stack(4, 64)})
    optimizer = helpers.adamw(model)
    step = 0
    while step < 4:
        if step == 2 and before_step_three:
            before_step_three.pop(0)()  # type: ignore[operator]
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        try:
            hidden = model["first"](x)
            if step >= 2:
                hidden = model["second"](torch.cat([hidden, hidden], -1))
            loss = hidden.pow(2).mean()
            loss.backward()
            optimizer.step()
        except patrickstar.Error as error:
            recorder.failures.append(error)  # type: ignore[attr-defined]
            optimizer.zero_grad()
            continue
        recorder.step(f"step {step}", loss, model, optimizer)
        optimizer.zero_grad()
        step += 1
    recorder.note("end", model)


def fill(disk: Path) -> Path:
    """Leaves no block of a disk free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(b"\1" * size)
            except OSError:
                continue
    os.sync()
    return filler


def test_a_disk_that_is_full_at_step_three_and_then_has_room(tmp_path):
    expected = helpers.plain(lambda recorder: train_growing(recorder, []))
    with disks.small_disk(tmp_path, "16M") as disk:
        with helpers.managed("64KiB", spill_dir=disk):
            recorder = helpers.Recorder()
            failures: list[patrickstar.Error] = []
            recorder.failures = failures  # type: ignore[attr-defined]
            fillers: list[Path] = []

            def make_room() -> None:
                fillers.pop().unlink()
                os.sync()

            torch.manual_seed(helpers.SEED)
            train_growing(recorder, [lambda: fillers.append(fill(disk)), make_room])
            helpers.assert_same(recorder.records, expected.records, "after the disk had room")
        assert len(failures) == 1
        assert isinstance(failures[0], patrickstar.IoError)
        assert str(disk) in str(failures[0])
        assert re.search(r"bytes\) needed, .* free", str(failures[0])), failures[0]
        assert list(disk.iterdir()) == []


def test_a_disk_too_small_for_the_model_is_told_when_it_is_adopted(tmp_path):
    with disks.small_disk(tmp_path, "8M") as disk:
        with helpers.managed("6MiB", spill_dir=disk, disk_space="1GiB"):
            with pytest.raises(patrickstar.IoError) as caught:
                patrickstar.manage(helpers.Stack(8, 1024))  # 32 MiB in all
            assert f"{disk}: No space left on device, 4.0 MiB" in str(caught.value)
            del caught
            helpers.plain(helpers.train_stack)  # what fits goes on
        assert list(disk.iterdir()) == []


def test_the_files_of_this_process_may_not_grow(tmp_path):
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = helpers.run_script(
        """
        import sys, helpers, patrickstar, torch
        with helpers.managed("64KiB", spill_dir=sys.argv[1]):
            try:
                patrickstar.manage([torch.ones(64, 64) for _ in range(1024)])
            except patrickstar.IoError as error:
                print(error)
            helpers.plain(helpers.train_stack)
        """,
        tmp_path,
        before=limit_files,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_disk_space_is_a_hard_bound(tmp_path):
    with helpers.managed("64KiB", spill_dir=tmp_path, disk_space="128KiB"):
        tensors = [torch.full((32, 32), float(index)) for index in range(64)]
        with pytest.raises(patrickstar.OutOfMemory, match="disk_space"):
            for tensor in tensors:
                patrickstar.manage(tensor)
        assert patrickstar.stats().disk_used_bytes <= 128 << 10
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((32, 32), float(index)))


def test_a_kill_in_the_middle_of_training_leaves_nothing(tmp_path):
    process = helpers.start_script(
        """
        import sys, helpers
        with helpers.managed("48KiB", spill_dir=sys.argv[1]):
            helpers.plain(lambda r: helpers.train_stack(r, num_steps=1))
            print("training", flush=True)
            while True:
                helpers.plain(helpers.train_stack)
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
