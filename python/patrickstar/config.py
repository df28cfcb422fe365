# SPDX-License-Identifier: Apache-2.0
"""Config: every setting of ``patrickstar.init``, resolved once.

The sources are the arguments, the environment and a settings file. This is the home of each
setting's default, its checks and its spelling in the environment. What a setting needs to know
about the machine (memory, disk) comes from ``patrickstar.report``.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from patrickstar.errors import InvalidArgument, IoError, Unsupported
from patrickstar.report.disk import free_space, ready_folder, reason
from patrickstar.report.memory import available_memory
from patrickstar.report.units import format_bytes, parse_size

_logger = logging.getLogger("patrickstar")

# The arguments of init() that a settings file may hold, with their defaults. An argument equal to
# its default counts as left out.
DEFAULTS: Mapping[str, Any] = {
    "device": None,
    "device_memory": None,
    "host_memory": None,
    "spill_dir": None,
    "disk_space": None,
    "mixed_precision": None,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": None,
    "chunk_size": None,
    "optimizer": "auto",
    "log": None,
}
_ENVIRONMENT_PREFIX = "PATRICKSTAR_"
_STRESS_WORDS = ("evict", "poison", "delay")

_SMALLEST_DEFAULT_CHUNK = 64 << 10  # a few times the 4 KiB blocks of direct disk I/O
_LARGEST_DEFAULT_CHUNK = 16 << 20  # disks reach their full bandwidth below this
_CHUNKS_PER_BUDGET = 32  # enough that one op's chunks are a small part of the budget


@dataclass(frozen=True)
class Config:
    """The settings of one ``patrickstar.init()``, checked and complete.

    Attributes:
        device: Where the model computes: "cpu".
        device_memory: Bytes of chunk payloads allowed on the accelerator; None without one.
        host_memory: Bytes of chunk payloads allowed in host memory.
        host_memory_measured: True when ``host_memory`` was not set, so that it is a first figure to
            be revised at step boundaries.
        spill_dir: The folder of the spill file, which exists; None when nothing may be spilled.
        disk_space: Bytes allowed in the spill file; 0 when nothing may be spilled.
        mixed_precision: "bf16" or "fp16"; None for the script's own precision.
        gradient_accumulation_steps: Calls of ``step()`` for one that steps.
        gradient_clipping: The global norm that the engine clips to; None when it does not clip.
        chunk_size: Bytes of a parameter chunk in fp32.
        optimizer: How steps are run: "auto", "native" or "fused".
        log: The file that gets one record a step; None for no log.
        stress: Which of "evict", "poison" and "delay" are forced, from ``PATRICKSTAR_STRESS``.
        asked: The settings as they were given: sizes not yet looked up, fractions as fractions.
    """

    device: str
    device_memory: int | None
    host_memory: int
    host_memory_measured: bool
    spill_dir: Path | None
    disk_space: int
    mixed_precision: str | None
    gradient_accumulation_steps: int
    gradient_clipping: float | None
    chunk_size: int
    optimizer: str
    log: Path | None
    stress: frozenset[str]
    asked: Mapping[str, Any] = field(compare=False, repr=False)


def resolve(config: object = None, **arguments: Any) -> Config:
    """Settles every setting of ``init()``.

    An argument wins over the environment, that over ``config``, that over the default. Creates the
    spill folder, for it must exist before its free space can be known.

    Args:
        config: The settings as a mapping, or a path to a ``.json`` or ``.toml`` file of them.
        **arguments: The other arguments of ``init()``, described there; any may be left out.

    Raises:
        InvalidArgument: A value cannot be used or a key is unknown; the message names it.
        Unsupported: A setting that is not built yet.
        IoError: The settings file cannot be read, or the spill folder cannot be written.
    """
    if os.environ.get("WORLD_SIZE", "1").strip() not in ("", "1"):
        raise Unsupported(
            f"cannot start with WORLD_SIZE={os.environ['WORLD_SIZE']}: training in many processes "
            "is not built yet; start one process, without torchrun"
        )
    settings = _merge(arguments, config)

    resolved_device = _device(settings["device"])
    _check_device_memory(settings["device_memory"])
    _check_training(settings)
    host = settings["host_memory"]
    host_bytes = (
        available_memory() // 2
        if host is None
        else parse_size(host, "host_memory", available_memory)
    )
    folder, disk_bytes = _disk(settings["spill_dir"], settings["disk_space"])
    return Config(
        device=resolved_device,
        device_memory=None,
        host_memory=host_bytes,
        host_memory_measured=host is None,
        spill_dir=folder,
        disk_space=disk_bytes,
        mixed_precision=settings["mixed_precision"],
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        gradient_clipping=settings["gradient_clipping"],
        chunk_size=_chunk_size(settings["chunk_size"], host_bytes),
        optimizer=settings["optimizer"],
        log=None if settings["log"] is None else _path(settings["log"], "log"),
        stress=_stress(),
        asked=settings,
    )


def default_chunk_size(host_memory: int) -> int:
    """The bytes of a parameter chunk for a budget.

    A 32nd of the budget in steps of 64 KiB, at least 64 KiB and at most 16 MiB: small enough that
    the chunks of one op are a small part of the budget, large enough for the disk's bandwidth.
    """
    step = _SMALLEST_DEFAULT_CHUNK
    share = host_memory // _CHUNKS_PER_BUDGET // step * step
    return min(max(share, _SMALLEST_DEFAULT_CHUNK), _LARGEST_DEFAULT_CHUNK)


def _merge(arguments: Mapping[str, Any], config: object) -> dict[str, Any]:
    """Lays the sources of the settings over each other, the strongest last."""
    environment = _environment()
    source = environment.pop("config", None) if config is None else config
    from_file = _settings_file(source)
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None and value != DEFAULTS[name]
    }
    return {**DEFAULTS, **from_file, **environment, **given}


# Variables that are no settings: for tests, and for choosing among kernels of one result.
_READ_ELSEWHERE = ("stress", "isa")


def _environment() -> dict[str, Any]:
    """The settings in ``PATRICKSTAR_<NAME>`` variables; an empty variable counts as unset."""
    settings: dict[str, Any] = {}
    for variable, text in os.environ.items():
        name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(_ENVIRONMENT_PREFIX) or not text or name in _READ_ELSEWHERE:
            continue
        if name not in (*DEFAULTS, "config"):
            known = [
                _ENVIRONMENT_PREFIX + known.upper()
                for known in (*DEFAULTS, "config", *_READ_ELSEWHERE)
            ]
            raise InvalidArgument(
                f"unknown environment variable {variable}; {_nearest(variable, known)}"
            )
        settings[name] = _NUMBERS[name](text, variable) if name in _NUMBERS else text
    return settings


def _environment_number(kind: type[int] | type[float]) -> Callable[[str, str], int | float]:
    def parse(text: str, variable: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise InvalidArgument(
                f"{variable}={text} is not a number; set it to one, for example {variable}=1"
            ) from None

    return parse


# The settings whose text in the environment is a plain number. (Sizes are parsed from text anyway.)
_NUMBERS = {
    "gradient_accumulation_steps": _environment_number(int),
    "gradient_clipping": _environment_number(float),
}


def _settings_file(source: object) -> dict[str, Any]:
    """The settings of ``config=``, a mapping or a file, with every key checked."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        settings, where = dict(source), "config"
    else:
        path = _path(source, "config")
        settings, where = _read_settings(path), str(path)
    for key in settings:
        if key not in DEFAULTS:
            raise InvalidArgument(
                f"unknown setting {key!r} in {where}; {_nearest(str(key), DEFAULTS)}"
            )
    return {key: value for key, value in settings.items() if value is not None}


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        settings = _parse_toml(path, text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise IoError(
            f"cannot read the settings file config={path}: {reason(error)}; pass a readable JSON "
            "or TOML file",
            error.errno,
        ) from error
    except ValueError as error:  # json's, tomllib's and a text that is not UTF-8
        raise InvalidArgument(
            f"cannot read the settings file config={path}: {error}; write it as a .json or .toml "
            "file"
        ) from error
    if not isinstance(settings, dict):
        raise InvalidArgument(
            f"cannot use the settings file config={path}: expected an object of settings, got a "
            f'{type(settings).__name__}; write it as {{"host_memory": "6GiB"}}'
        )
    return settings


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise Unsupported(
            f"cannot read the settings file config={path}: TOML needs Python 3.11; write it as JSON"
        )
    import tomllib

    return tomllib.loads(text)


def _nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for a misspelt name."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"


def _device(device: object) -> str:
    if device is None:
        if torch.accelerator.is_available():
            warnings.warn(
                "an accelerator is present, but patrickstar does not use accelerators yet: the "
                'model trains on the CPU; pass device="cpu" to silence this',
                stacklevel=4,
            )
        return "cpu"
    try:
        kind = torch.device(device).type  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f'device={device!r} is not a device; pass device="cpu"') from error
    if kind != "cpu":
        raise Unsupported(f'device={str(device)!r} is not supported yet; pass device="cpu"')
    return "cpu"


def _check_device_memory(device_memory: object) -> None:
    if device_memory is None:
        return
    if not torch.accelerator.is_available():
        raise InvalidArgument(
            f"device_memory={device_memory!r} bounds the memory of an accelerator, and there is "
            "none; leave it out, or bound the host's with host_memory"
        )
    raise Unsupported(f"device_memory={device_memory!r} is not supported yet; leave it out")


def _check_training(settings: Mapping[str, Any]) -> None:
    """Refuses settings of training with a wrong value."""
    precision = settings["mixed_precision"]
    if precision not in (None, "bf16", "fp16"):
        raise InvalidArgument(f'mixed_precision={precision!r}: expected None, "bf16" or "fp16"')
    steps = settings["gradient_accumulation_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(
            f"gradient_accumulation_steps={steps!r}: expected a whole number of at least 1"
        )
    clipping = settings["gradient_clipping"]
    if clipping is not None and not _is_positive(clipping):
        raise InvalidArgument(
            f"gradient_clipping={clipping!r}: expected None or a norm above 0, for example 1.0"
        )
    optimizer = settings["optimizer"]
    if optimizer not in ("auto", "native", "fused"):
        raise InvalidArgument(f'optimizer={optimizer!r}: expected "auto", "native" or "fused"')


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _chunk_size(value: object, host_memory: int) -> int:
    if value is None:
        return default_chunk_size(host_memory)
    size = parse_size(value, "chunk_size", lambda: host_memory)
    if size > host_memory:
        raise InvalidArgument(
            f"chunk_size={value!r} is {format_bytes(size)}, more than the host_memory of "
            f"{format_bytes(host_memory)} that must hold several chunks; lower chunk_size or "
            "raise host_memory"
        )
    return size


def _path(value: object, name: str) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InvalidArgument(f"{name}={value!r}: expected a path")
    return Path(os.fspath(value)).expanduser()


def _stress() -> frozenset[str]:
    """The words of ``PATRICKSTAR_STRESS``, separated by commas."""
    text = os.environ.get("PATRICKSTAR_STRESS", "")
    words = {word.strip() for word in text.split(",") if word.strip()}
    for word in sorted(words):
        if word not in _STRESS_WORDS:
            raise InvalidArgument(
                f"PATRICKSTAR_STRESS={text}: unknown word {word!r}; expected any of "
                f"{', '.join(_STRESS_WORDS)}, separated by commas"
            )
    return frozenset(words)


def _disk(spill_dir: object, disk_space: object) -> tuple[Path | None, int]:
    """The spill folder, made ready, and the bytes allowed in it."""
    if disk_space in (0, "0") and not isinstance(disk_space, (bool, float)):
        return None, 0
    folder = (
        _default_spill_dir() if spill_dir is None else ready_folder(_path(spill_dir, "spill_dir"))
    )
    if folder is None:
        if disk_space is not None:
            raise InvalidArgument(
                f"disk_space={disk_space!r} was asked for, but none of "
                f"{', '.join(map(str, _spill_candidates()))} is a writable folder on a disk; pass "
                "spill_dir"
            )
        warnings.warn(
            f"none of {', '.join(map(str, _spill_candidates()))} is a writable folder on a disk: "
            "nothing can be spilled; pass spill_dir",
            stacklevel=4,
        )
        return None, 0
    size = parse_size(
        0.9 if disk_space is None else disk_space, "disk_space", lambda: free_space(folder)
    )
    if spill_dir is None:
        _logger.info("spilling to %s, at most %s", folder, format_bytes(size))
    return folder, size


def _spill_candidates() -> list[Path]:
    """The folders that the spill file may go to by default, best first."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return [
        Path(cache).expanduser() / "patrickstar",
        Path("/var/tmp/patrickstar-" + str(os.getuid())),
    ]


def _default_spill_dir() -> Path | None:
    for folder in _spill_candidates():
        try:
            return ready_folder(folder)
        except (InvalidArgument, IoError):
            continue
    return None
