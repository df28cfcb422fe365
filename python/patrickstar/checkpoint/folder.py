# SPDX-License-Identifier: Apache-2.0
"""The folder of a checkpoint: its index, the files that it names, and what killed saves left.

New files get names of their own, and the index is replaced last, in one step: whatever fails
before that leaves the previous checkpoint whole. Savers and loaders hold a shared lock on the
folder; who can have it alone removes the files that the index does not name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from patrickstar.checkpoint.tree import Damaged, of_type
from patrickstar.errors import CorruptData, InvalidArgument, IoError
from patrickstar.report.units import format_bytes
from patrickstar.tensor_file import TensorFile, TensorWriter

_INDEX = "index.json"
_FORMATS = "patrickstar checkpoint "  # and a number
_FORMAT = _FORMATS + "2"
_FILE = re.compile(r"(model|optimizer|objects)-[0-9a-f]{12}\.safetensors")
_NEW_INDEX = re.compile(r"index\.json\.[0-9a-f]{12}")
_DICTS = ("files", "model", "objects")


@contextlib.contextmanager
def told_of(folder: Path) -> Iterator[None]:
    """Names the folder's index where something in it is found damaged."""
    try:
        yield
    except Damaged as error:
        raise CorruptData(
            f"cannot read {folder / _INDEX}: {error.key} {error}; use another checkpoint"
        ) from error


def write_checkpoint(
    folder: Path, index: dict[str, Any], writers: Mapping[str, TensorWriter]
) -> None:
    """Makes a checkpoint the folder's.

    Args:
        folder: Created if missing.
        index: All but format, files and checksum.
        writers: The files by part.

    Raises:
        CorruptData: The folder has an index of something else.
        InvalidArgument: The index cannot be written as JSON.
        IoError: The folder or a file cannot be written; the previous checkpoint is whole.
    """
    num_bytes = len(_as_json(index)) + sum(writer.num_bytes for writer in writers.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IoError(
            f"cannot create the folder {folder} of a checkpoint: {_reason(error)}; name a folder "
            "that can be written",
            error.errno,
        ) from error
    with _locked(folder):
        old = _named_files(folder)  # what is there is replaced only if it is a checkpoint
        generation = uuid.uuid4().hex[:12]
        names = {part: f"{part}-{generation}.safetensors" for part in writers}
        written: list[Path] = []
        free_bytes = _free_bytes(folder)
        try:
            _write_files(folder, generation, index, writers, names, written)
        except BaseException as error:
            _remove_unnamed(folder, [path.name for path in written])
            if isinstance(error, OSError) and not isinstance(error, IoError):
                raise _not_written(error, written[-1], num_bytes, free_bytes) from error
            raise
    _clean(folder, old)


def _write_files(
    folder: Path,
    generation: str,
    index: dict[str, Any],
    writers: Mapping[str, TensorWriter],
    names: Mapping[str, str],
    written: list[Path],
) -> None:
    files = {}
    for part, writer in writers.items():
        checksums: dict[str, int] = {}
        written.append(folder / names[part])
        with _synced(written[-1]) as file:
            writer.write(file, checksums)
        files[part] = {
            "name": names[part],
            "header_crc32": writer.header_checksum,
            "crc32": checksums,
        }
    whole = {"format": _FORMAT, "files": files, **index}
    whole["crc32"] = zlib.crc32(_as_json(whole))
    written.append(folder / f"{_INDEX}.{generation}")
    with _synced(written[-1]) as file:
        file.write(_as_json(whole))
    written[-1].replace(folder / _INDEX)
    _sync_folder(folder)


def _not_written(error: OSError, path: Path, num_bytes: int, free_bytes: int) -> IoError:
    return IoError(
        f"cannot write {path}: {_reason(error)}; the checkpoint needs {format_bytes(num_bytes)}, "
        f"{format_bytes(free_bytes)} were free; free space or name another folder, the previous "
        "checkpoint is whole",
        error.errno,
    )


def _as_json(index: dict[str, Any]) -> bytes:
    try:
        return json.dumps(index).encode()
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> InvalidArgument:
    return InvalidArgument(
        "cannot save a checkpoint: a value in it contains itself or is nested too deeply; save "
        "flat lists and dicts"
    )


@contextlib.contextmanager
def nesting_is_bounded() -> Iterator[None]:
    """Refuses values without an end while they are turned into JSON."""
    try:
        yield
    except RecursionError:
        raise _too_deep() from None


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path, operation: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Locks a folder against the removal of files.

    Raises:
        OSError: The lock cannot be had at once, when ``operation`` says so.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, operation)
        except OSError:
            if operation & fcntl.LOCK_NB:
                raise
            # A file system without locks: nobody can have one alone there.
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that got the descriptor
    finally:
        os.close(descriptor)


def _clean(folder: Path, old: set[str]) -> None:
    """Removes our files that the index does not name; a failure is no failure of the save."""
    with contextlib.suppress(OSError, CorruptData):
        try:
            with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
                _remove_unnamed(folder, [name for name in names if _is_ours(name)])
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:  # no locks here: only what is surely unused
                _remove_unnamed(folder, old)


def _is_ours(name: str) -> bool:
    return bool(_FILE.fullmatch(name) or _NEW_INDEX.fullmatch(name))


def _remove_unnamed(folder: Path, names: Any) -> None:
    named = _named_files(folder)  # the index may be a new one already
    for name in names:
        if name not in named:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _named_files(folder: Path) -> set[str]:
    """The files of the checkpoint in a folder, of whatever format; none when there is no index."""
    path = folder / _INDEX
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _unreadable(path, error) from error
    files = _parse(path, text).get("files")
    entries = list(files.values()) if isinstance(files, dict) else []
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    return {name for name in names if isinstance(name, str) and _FILE.fullmatch(name)}


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        index = json.loads(text)
        is_ours = str(index["format"]).startswith(_FORMATS)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise CorruptData(
            f"cannot read {path}: it is damaged or no checkpoint's; name another folder"
        )
    return index  # type: ignore[no-any-return]


def _unreadable(path: Path, error: OSError) -> IoError:
    return IoError(
        f"cannot read {path}: {_reason(error)}; check its permissions and the disk", error.errno
    )


@contextlib.contextmanager
def open_checkpoint(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, TensorFile]]]:
    """Opens a checkpoint for reading: its index, and its files by part.

    Raises:
        InvalidArgument: There is none, or one of another version.
        CorruptData: It is damaged.
        IoError: It cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # told where the index is read
            stack.enter_context(_locked(folder))
        index = _read_index(folder)
        files = {
            part: stack.enter_context(
                TensorFile(folder / entry["name"], entry["header_crc32"], entry["crc32"])
            )
            for part, entry in index["files"].items()
        }
        yield index, files


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"cannot load a checkpoint from {folder}: there is no {_INDEX}; name a folder that "
            "patrickstar.save_checkpoint wrote"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    index = _parse(path, text)
    if index["format"] != _FORMAT:
        raise InvalidArgument(
            f"cannot read {path}: expected format {_FORMAT!r}, got {index['format']!r}; use the "
            "version of patrickstar that wrote it"
        )
    with told_of(folder):
        _check_index(index)
    expected = index.pop("crc32")
    found = zlib.crc32(_as_json(index))
    if found != expected:
        raise CorruptData(
            f"cannot read {path}: expected checksum {expected}, got {found}; use another checkpoint"
        )
    return index


def _check_index(index: dict[str, Any]) -> None:
    for key in (*_DICTS, "random", "crc32"):
        if key not in index:
            raise Damaged(key, "is missing")
    for key in _DICTS:
        of_type(index[key], dict, key)
    of_type(index["crc32"], int, "crc32")
    parts = {"model", "objects"} | ({"optimizer"} if "optimizer" in index else set())
    if index["files"].keys() != parts:
        raise Damaged("files", f"has {sorted(index['files'])}, expected {sorted(parts)}")
    for part, entry in index["files"].items():
        key = f"files.{part}"
        if of_type(entry, dict, key).keys() != {"name", "header_crc32", "crc32"}:
            raise Damaged(key, f"has the keys {sorted(entry)}")
        if not _FILE.fullmatch(of_type(entry["name"], str, f"{key}.name")):
            raise Damaged(f"{key}.name", f"is {entry['name']!r}, no name of a checkpoint's file")
        of_type(entry["header_crc32"], int, f"{key}.header_crc32")
        for name, checksum in of_type(entry["crc32"], dict, f"{key}.crc32").items():
            of_type(checksum, int, f"{key}.crc32.{name}")
