# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint: damage is told, failures leave the last one, rubbish goes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import patrickstar
import pytest
import safetensors.torch
import torch
from disks import read_only, small_disk
from torch import nn


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _save(folder: Path, step: int = 1) -> None:
    patrickstar.save_checkpoint(folder, *_training(), step=step, table=torch.ones(3))


def _load(folder: Path) -> dict[str, Any]:
    return patrickstar.load_checkpoint(folder, *_training(), table=None)


@pytest.mark.parametrize("part", ["model", "optimizer", "objects"])
def test_one_wrong_bit_in_a_tensor_is_found(part: str, tmp_path: Path) -> None:
    _save(tmp_path)
    [file] = tmp_path.glob(f"{part}-*")
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        damaged = bytearray(data)
        damaged[8 + length + entry["data_offsets"][1] - 1] ^= 0x10
        file.write_bytes(damaged)
        with pytest.raises(patrickstar.CorruptData, match="checksum") as caught:
            _load(tmp_path)
        assert repr(name) in str(caught.value)
        assert file.name in str(caught.value)
    file.write_bytes(data)
    assert _load(tmp_path)["step"] == 1


def test_another_header_is_found(tmp_path: Path) -> None:
    _save(tmp_path)
    [file] = tmp_path.glob("model-*")
    data = file.read_bytes()
    for old, new in ((b'"F32"', b'"I32"'), (b"[64,64]", b"[32,128]"), (b"0.weight", b"9.weight")):
        assert old in data
        changed = data.replace(old, new)
        length = int.from_bytes(data[:8], "little") + len(changed) - len(data)
        file.write_bytes(length.to_bytes(8, "little") + changed[8:])
        with pytest.raises(patrickstar.CorruptData, match=re.escape(file.name)):
            _load(tmp_path)


def test_a_longer_tensor_than_a_piece_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patrickstar.tensor_file.PIECE_BYTES", 1000)
    _save(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr("patrickstar.tensor_file.PIECE_BYTES", 512)
    assert _load(tmp_path)["step"] == 1


def _edit(folder: Path, path: list[Any], value: Any, *, is_signed: bool = True) -> None:
    """Sets, or with ``...`` removes, what is at a path in the index."""
    file = folder / "index.json"
    index = json.loads(file.read_text())
    place = index
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    if is_signed and path != ["crc32"]:
        index.pop("crc32")
        index["crc32"] = zlib.crc32(json.dumps(index).encode())
    file.write_text(json.dumps(index))


_NAME = "model-0123456789ab.safetensors"
_DAMAGES: dict[str, tuple[list[Any], Any]] = {
    **{f"no {key}": ([key], ...) for key in ("files", "model", "objects", "random", "crc32")},
    **{
        f"{key} is {value!r}": ([key], value)
        for key in ("files", "model", "optimizer", "objects", "random", "crc32")
        for value in (None, 3, "text", [1], {"a": {}}, {"a": 1})
    },
    "files.model lacks": (["files", "model"], ...),
    "files.model": (["files", "model"], "name"),
    "files.model.name": (["files", "model", "name"], 7),
    "files.model.name elsewhere": (["files", "model", "name"], "../model.safetensors"),
    "files.model.name gone": (["files", "model", "name"], _NAME),
    "files.model.crc32": (["files", "model", "crc32"], {}),
    "files.model.crc32 text": (["files", "model", "crc32", "0.weight"], "abc"),
    "files.model.header_crc32": (["files", "model", "header_crc32"], ...),
    "files.optimizer lacks": (["optimizer"], ...),
    "model.0.weight": (["model", "0.weight"], {}),
    "model.0.weight number": (["model", "0.weight"], 5),
    "model.0.weight tensor": (["model", "0.weight", "tensor"], "nothing"),
    "model.0.weight list": (["model", "0.weight", "tensor"], ["0.weight"]),
    "model.0.weight extra": (["model", "0.weight"], {"extra": {"odd": 1}}),
    "optimizer.params": (["optimizer", "params"], {}),
    "optimizer.params.0": (["optimizer", "params", 0], "0.weight"),
    "optimizer.params.0.0": (["optimizer", "params", 0, 0], 3),
    "optimizer.loose": (["optimizer", "loose"], []),
    "optimizer.loose.x": (["optimizer", "loose"], {"x": "y"}),
    "optimizer.options": (["optimizer", "options"], []),
    "optimizer.options.0": (["optimizer", "options", 0], [1]),
    "optimizer.state": (["optimizer", "state"], [1]),
    "optimizer.state.odd": (["optimizer", "state", "odd"], {"mapping": []}),
    "optimizer.state.0.weight": (["optimizer", "state", "0.weight"], {"tuple": [1]}),
    "optimizer.state.0.weight pairs": (["optimizer", "state", "0.weight"], {"mapping": [1]}),
    "optimizer.state.0.weight keys": (["optimizer", "state", "0.weight"], {"mapping": [[{}, 1]]}),
    "optimizer.others": (["optimizer", "others"], 1),
    "objects.step": (["objects", "step"], 1),
    "objects.step.kind": (["objects", "step"], {"odd": 1}),
    "objects.step bytes": (["objects", "step"], {"value": {"bytes": "YQ?="}}),
    "objects.step bytes list": (["objects", "step"], {"value": {"bytes": []}}),
    "objects.step integer": (["objects", "step"], {"value": {"integer": "xyz"}}),
    "objects.step module": (["objects", "step"], {"module": 3}),
    "objects.step optimizer": (["objects", "step"], {"optimizer": {"own": 1}}),
    "objects.step state": (["objects", "step"], {"state": {"tensor": 3}}),
    "random.mapping": (["random", "mapping"], []),
}


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_damaged_index_is_told_by_file_and_key(
    damage: str, is_signed: bool, tmp_path: Path
) -> None:
    _save(tmp_path)
    path, value = _DAMAGES[damage]
    _edit(tmp_path, path, value, is_signed=is_signed)
    with pytest.raises((patrickstar.CorruptData, patrickstar.InvalidArgument)) as caught:
        _load(tmp_path)
    message = str(caught.value)
    names_file = "index.json" in message or ".safetensors" in message
    assert names_file or isinstance(caught.value, patrickstar.InvalidArgument)
    # What has the right form is found by its checksum, or by not being what is loaded.
    names_key = [part for part in path if isinstance(part, str) and part in message]
    assert names_key or "checksum" in message, message


def test_every_number_of_an_index_is_covered_by_its_checksum(tmp_path: Path) -> None:
    _save(tmp_path)
    _edit(tmp_path, ["objects", "step", "value"], 2, is_signed=False)
    with pytest.raises(patrickstar.CorruptData, match=r"index\.json: expected checksum"):
        _load(tmp_path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100000, b'{"format": 1}']
)
def test_an_index_that_is_no_index_is_told(text: bytes, tmp_path: Path) -> None:
    _save(tmp_path)
    (tmp_path / "index.json").write_bytes(text)
    with pytest.raises(patrickstar.CorruptData, match=r"index\.json"):
        _load(tmp_path)


def test_every_truncation_of_an_index_is_told(tmp_path: Path) -> None:
    _save(tmp_path)
    file = tmp_path / "index.json"
    text = file.read_bytes()
    for length in range(0, len(text), len(text) // 40):
        file.write_bytes(text[:length])
        with pytest.raises(patrickstar.CorruptData, match=r"index\.json"):
            _load(tmp_path)


def test_a_checkpoint_of_the_future_is_told_and_replaced(tmp_path: Path) -> None:
    _save(tmp_path)
    _edit(tmp_path, ["format"], "patrickstar checkpoint 99")
    with pytest.raises(patrickstar.InvalidArgument, match="got 'patrickstar checkpoint 99'"):
        _load(tmp_path)
    _save(tmp_path, step=5)
    assert _load(tmp_path)["step"] == 5


def test_an_index_never_makes_us_remove_a_file_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    _save(folder)
    kept = tmp_path / "model-0123456789ab.safetensors"
    kept.write_text("mine")
    _edit(folder, ["files", "model", "name"], f"../{kept.name}")
    _save(folder)
    assert kept.read_text() == "mine"


_KILLED = """
    import os, sys
    import patrickstar, torch
    from patrickstar import tensor_file
    from pathlib import Path

    place = sys.argv[2]
    if place == "index":
        Path.replace = lambda *_: os.kill(os.getpid(), 9)
    else:
        pieces = tensor_file.pieces

        def killing(tensor):
            if tensor.numel() == 7:
                os.kill(os.getpid(), 9)
            return pieces(tensor)

        tensor_file.pieces = killing
    patrickstar.save_checkpoint(sys.argv[1], torch.nn.Linear(1, 1), table=torch.ones(7))
"""


@pytest.mark.parametrize("place", ["index", "data"])
def test_what_a_killed_save_left_is_removed_by_the_next(place: str, tmp_path: Path) -> None:
    _save(tmp_path)
    before = set(_files(tmp_path))
    assert helpers.run_script(_KILLED, str(tmp_path), place).returncode == -9
    assert len(_files(tmp_path)) > len(before)
    others = ["model.safetensors", "model-0123.safetensors", "notes.txt", "index.json.old"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "objects-0123456789ab.safetensors").mkdir()
    _save(tmp_path, step=2)
    assert len(_files(tmp_path)) == len(before) + len(others)
    assert set(others) < set(_files(tmp_path))
    assert (tmp_path / "objects-0123456789ab.safetensors").is_dir()


_SLOW = """
    import sys
    import patrickstar, torch
    from patrickstar import tensor_file

    pieces = tensor_file.pieces

    def waiting(tensor):
        if tensor.numel() == 7:
            print("writing", flush=True)
            sys.stdin.readline()
        return pieces(tensor)

    tensor_file.pieces = waiting
    model = torch.nn.Linear(1, 1)
    patrickstar.save_checkpoint(sys.argv[1], model, who="slow", table=torch.ones(7))
    assert patrickstar.load_checkpoint(sys.argv[1], model, table=None)["who"] == "slow"
"""


def test_files_of_a_save_that_is_running_are_left_alone(tmp_path: Path) -> None:
    _save(tmp_path)
    num_files = len(_files(tmp_path))
    with helpers.start_script(_SLOW, str(tmp_path)) as slow:
        try:
            assert slow.stdout.readline() == "writing\n"
            _save(tmp_path, step=2)
            assert _load(tmp_path)["step"] == 2
            _, errors = slow.communicate("\n", timeout=60)
        finally:
            slow.kill()
    assert slow.returncode == 0, errors
    _save(tmp_path, step=3)
    assert len(_files(tmp_path)) == num_files
    assert _load(tmp_path)["step"] == 3


def test_a_folder_without_locks_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    _save(tmp_path)
    (tmp_path / _NAME).write_text("of whom?")
    monkeypatch.setattr(fcntl, "flock", refusing)
    before = set(_files(tmp_path))
    _save(tmp_path, step=2)
    assert _load(tmp_path)["step"] == 2
    assert len(_files(tmp_path)) == len(before)
    assert (tmp_path / _NAME).exists()


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    with small_disk(tmp_path, "2M") as disk:
        _save(disk)
        before = _files(disk)
        large = nn.Linear(1024, 1024)
        with pytest.raises(
            patrickstar.IoError,
            match=r"cannot write .*model-.*: No space left.* needs 4\.0 MiB, .* were free",
        ) as caught:
            patrickstar.save_checkpoint(disk, large)
        assert caught.value.errno == errno.ENOSPC
        assert _files(disk) == before
        assert _load(disk)["step"] == 1


def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    _save(folder)
    with read_only(folder) as point:
        with pytest.raises(patrickstar.IoError, match=r"cannot write .*: Read-only"):
            _save(point, step=2)
        with pytest.raises(patrickstar.IoError, match=r"cannot create the folder .*: Read-only"):
            _save(point / "new")
        assert _load(point)["step"] == 1


@pytest.mark.parametrize("limit", [1000, 30000])
def test_a_quota_is_told_and_leaves_the_last_checkpoint(limit: int, tmp_path: Path) -> None:
    _save(tmp_path)
    before = _files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(patrickstar.IoError, match="File too large") as caught:
            _save(tmp_path, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert _files(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "flush", "replace"])
def test_any_failing_call_is_an_error_of_ours(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path)
    before = _files(tmp_path)

    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    patches: dict[str, Callable[[], None]] = {
        "fsync": lambda: monkeypatch.setattr(os, "fsync", failing),
        "flush": lambda: monkeypatch.setattr("patrickstar.tensor_file.pieces", failing),
        "replace": lambda: monkeypatch.setattr(Path, "replace", failing),
    }
    patches[call]()
    with pytest.raises(patrickstar.IoError, match=os.strerror(number)) as caught:
        _save(tmp_path, step=2)
    monkeypatch.undo()
    assert caught.value.errno == number
    assert _files(tmp_path) == before


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(patrickstar.IoError, match="cannot create the folder"):
            _save(path)
        with pytest.raises(patrickstar.InvalidArgument, match=r"there is no index\.json"):
            _load(path)
    (tmp_path / "index.json").mkdir()
    for use in (_save, _load):
        with pytest.raises(patrickstar.IoError, match=r"cannot read .*index\.json: Is a directory"):
            use(tmp_path)


def test_plain_safetensors_reads_every_file(tmp_path: Path) -> None:
    _save(tmp_path)
    names = {file.name.split("-")[0] for file in tmp_path.glob("*.safetensors")}
    assert names == {"model", "optimizer", "objects"}
    for file in tmp_path.glob("*.safetensors"):
        assert safetensors.torch.load_file(file)
