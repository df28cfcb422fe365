# SPDX-License-Identifier: Apache-2.0
"""Settings of init(): where they come from, how sizes are written, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from patrickstar import config
from patrickstar.config import default_chunk_size, resolve
from patrickstar.errors import InvalidArgument, IoError, Unsupported
from patrickstar.report.disk import free_space, is_memory_backed
from patrickstar.report.memory import available_memory
from patrickstar.report.units import parse_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith("PATRICKSTAR_") or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def memory_folder():
    folder = Path("/dev/shm")
    if not (folder.is_dir() and is_memory_backed(folder)):
        pytest.skip("needs a tmpfs at /dev/shm")
    return folder


# Sizes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096),
        (1, 1),
        (numpy.int64(4096), 4096),
        ("4096", 4096),
        ("6GiB", 6 * GIB),
        ("512 MiB", 512 * MIB),
        (" 2 kib ", 2 * KIB),
        ("1.5GB", 1_500_000_000),
        ("100kB", 100_000),
        ("7B", 7),
        ("0.5GiB", GIB // 2),
        (".5", 500),
        ("1.0", 1000),
        (0.25, 250),
        (1.0, 1000),
    ],
)
def test_sizes_are_read_as_people_write_them(value, expected):
    assert parse_size(value, "host_memory", lambda: 1000) == expected


@pytest.mark.parametrize(
    "value",
    [
        0, -1, True, False, None, 1.5, 0.0, -0.5, float("nan"), float("inf"), 1e-9, 1 << 63, [1],
        "", "12 parsecs", "-5GiB", "GiB", "0", "0GiB", "1.5", "0.0", "6G", "1e9", "6 GiB!", "nan",
        "99999999TiB", "9" * 5000, "0.001B",
    ],
)  # fmt: skip
def test_a_wrong_size_names_the_argument_the_value_and_a_good_one(value):
    with pytest.raises(InvalidArgument) as caught:
        parse_size(value, "host_memory", lambda: 1000)
    message = str(caught.value)
    assert message.startswith(f"host_memory={value!r}")
    assert '"6GiB"' in message


def test_a_fraction_is_asked_for_only_when_needed():
    def whole():
        raise AssertionError("not a fraction")

    assert parse_size("1GiB", "host_memory", whole) == GIB


def test_the_default_chunk_grows_with_the_budget_between_two_bounds():
    assert default_chunk_size(KIB) == 64 * KIB
    assert default_chunk_size(96 * MIB) == 3 * MIB
    assert default_chunk_size(96 * MIB + 32 * 64 * KIB - 1) == 3 * MIB
    assert default_chunk_size(96 * MIB + 32 * 64 * KIB) == 3 * MIB + 64 * KIB
    assert default_chunk_size(100 * GIB) == 16 * MIB


# Defaults and sources


def test_every_default():
    settings = resolve()
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "patrickstar"
    assert settings == config.Config(
        device="cpu",
        device_memory=None,
        host_memory=settings.host_memory,
        host_memory_measured=True,
        spill_dir=folder.resolve(),
        disk_space=settings.disk_space,
        mixed_precision=None,
        gradient_accumulation_steps=1,
        gradient_clipping=None,
        chunk_size=default_chunk_size(settings.host_memory),
        optimizer="auto",
        log=None,
        stress=frozenset(),
        asked=config.DEFAULTS,
    )
    assert settings.asked == config.DEFAULTS
    assert 0.4 < settings.host_memory / available_memory() < 0.6
    assert 0.8 < settings.disk_space / free_space(folder) < 0.95
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.device = "cuda"


def test_budgets_are_taken_as_given(tmp_path):
    settings = resolve(
        host_memory="64MiB", chunk_size=0.25, spill_dir=tmp_path / "a" / "b", disk_space="1GiB"
    )
    assert (settings.host_memory, settings.host_memory_measured) == (64 * MIB, False)
    assert settings.chunk_size == 16 * MIB
    assert settings.disk_space == GIB
    assert settings.spill_dir.is_dir()


def test_fractions_are_of_available_memory_and_free_space(tmp_path):
    settings = resolve(host_memory=0.25, spill_dir=tmp_path, disk_space=0.5)
    assert 0.2 < settings.host_memory / available_memory() < 0.3
    assert 0.4 < settings.disk_space / free_space(tmp_path) < 0.6


def test_an_argument_wins_over_the_environment_and_that_over_config(monkeypatch):
    from_config = {"host_memory": "16MiB", "chunk_size": "1MiB", "optimizer": "native"}
    monkeypatch.setenv("PATRICKSTAR_HOST_MEMORY", "32MiB")
    monkeypatch.setenv("PATRICKSTAR_CHUNK_SIZE", "2MiB")
    settings = resolve(host_memory="64MiB", config=from_config)
    assert settings.host_memory == 64 * MIB
    assert settings.chunk_size == 2 * MIB
    assert settings.optimizer == "native"
    assert settings.asked == {
        **config.DEFAULTS,
        "host_memory": "64MiB",
        "chunk_size": "2MiB",
        "optimizer": "native",
    }


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_HOST_MEMORY", "")
    monkeypatch.setenv("PATRICKSTAR_STRESS", "")
    assert resolve().host_memory_measured


@pytest.mark.parametrize("through", ["argument", "environment"])
@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_settings_file(monkeypatch, tmp_path, suffix, through):
    if suffix == ".toml" and sys.version_info < (3, 11):
        pytest.skip("TOML needs Python 3.11")
    path = tmp_path / f"settings{suffix}"
    path.write_text(
        'host_memory = "48MiB"\nlog = "run.jsonl"'
        if suffix == ".toml"
        else '{"host_memory": "48MiB", "log": "run.jsonl", "chunk_size": null}'
    )
    if through == "environment":
        monkeypatch.setenv("PATRICKSTAR_CONFIG", str(path))
    settings = resolve(config=path if through == "argument" else None)
    assert settings.host_memory == 48 * MIB
    assert settings.log == Path("run.jsonl")


def test_unknown_keys_name_the_nearest_valid_one(monkeypatch, tmp_path):
    with pytest.raises(
        InvalidArgument, match=r"'host_memroy' in config; did you mean host_memory\?"
    ):
        resolve(config={"host_memroy": 1})
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"qq": 1}))
    with pytest.raises(InvalidArgument, match=rf"'qq' in {path}; expected one of device, "):
        resolve(config=path)
    monkeypatch.setenv("PATRICKSTAR_CHUNKSIZE", "1MiB")
    with pytest.raises(
        InvalidArgument, match=r"PATRICKSTAR_CHUNKSIZE; did you mean PATRICKSTAR_CHUNK_SIZE\?"
    ):
        resolve()


def test_a_settings_file_may_not_name_another():
    with pytest.raises(InvalidArgument, match="unknown setting 'config'"):
        resolve(config={"config": "other.json"})


def test_unreadable_settings_files(tmp_path):
    with pytest.raises(IoError, match=r"missing.json: no such file"):
        resolve(config=tmp_path / "missing.json")
    for name, text in (("bad.json", "{"), ("bad.toml", "=")):
        (tmp_path / name).write_text(text)
        with pytest.raises((InvalidArgument, Unsupported), match=name):
            resolve(config=tmp_path / name)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match="list"):
        resolve(config=tmp_path / "list.json")
    with pytest.raises(InvalidArgument, match="config=5"):
        resolve(config=5)


# What is refused


def test_sizes_of_init_are_named():
    for name in ("host_memory", "chunk_size", "disk_space"):
        with pytest.raises(InvalidArgument, match=f"{name}='12 parsecs'"):
            resolve(**{name: "12 parsecs"})


def test_a_chunk_larger_than_the_budget():
    with pytest.raises(InvalidArgument, match=r"is 2.0 MiB, more than the host_memory of 1.0 MiB"):
        resolve(host_memory=MIB, chunk_size="2MiB")


def test_device(monkeypatch):
    assert resolve(device=torch.device("cpu")).device == "cpu"
    with pytest.raises(Unsupported, match="device='cuda:1'"):
        resolve(device="cuda:1")
    with pytest.raises(InvalidArgument, match="device='gpuu'"):
        resolve(device="gpuu")
    with pytest.raises(InvalidArgument, match=r"device_memory='4GiB'.* there is none"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        resolve(device_memory="4GiB")


def test_an_accelerator_that_is_not_used_yet_gets_a_warning(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.warns(UserWarning, match="CPU") as caught:
        assert resolve().device == "cpu"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(device="cpu")
    with pytest.raises(Unsupported, match="device_memory"):
        resolve(device="cpu", device_memory="4GiB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixed_precision", "bf16"),
        ("mixed_precision", "fp16"),
        ("gradient_accumulation_steps", 2),
        ("gradient_clipping", 1.0),
        ("optimizer", "fused"),
        ("optimizer", "native"),
    ],
)
def test_settings_of_training_are_taken_from_every_source(monkeypatch, name, value):
    assert getattr(resolve(**{name: value}), name) == value
    assert getattr(resolve(config={name: value}), name) == value
    monkeypatch.setenv(f"PATRICKSTAR_{name.upper()}", str(value))
    assert getattr(resolve(), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mixed_precision", "bf17"),
        ("gradient_accumulation_steps", 0),
        ("gradient_accumulation_steps", 1.5),
        ("gradient_accumulation_steps", "2"),
        ("gradient_clipping", -1.0),
        ("gradient_clipping", float("nan")),
        ("gradient_clipping", True),
        ("optimizer", "nativ"),
        ("log", ""),
        ("log", 3),
        ("spill_dir", 3),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(InvalidArgument, match=re.escape(f"{name}={value!r}")):
        resolve(**{name: value})


def test_a_number_in_the_environment_must_be_one(monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_GRADIENT_ACCUMULATION_STEPS", "two")
    with pytest.raises(InvalidArgument, match="PATRICKSTAR_GRADIENT_ACCUMULATION_STEPS=two"):
        resolve()


def test_many_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    resolve()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Unsupported, match="WORLD_SIZE=2"):
        resolve()


def test_stress(monkeypatch):
    monkeypatch.setenv("PATRICKSTAR_STRESS", "evict, delay")
    assert resolve().stress == {"evict", "delay"}
    monkeypatch.setenv("PATRICKSTAR_STRESS", "evict,poisn")
    with pytest.raises(
        InvalidArgument, match=r"unknown word 'poisn'; expected any of evict, poison"
    ):
        resolve()


# The spill folder


def test_the_spill_folder_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATRICKSTAR_SPILL_DIR", str(tmp_path / "spill"))
    assert resolve().spill_dir == tmp_path / "spill"


def test_a_spill_folder_that_is_a_file_or_lies_under_one(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(InvalidArgument, match=f"spill_dir={path} is or lies under a file"):
            resolve(spill_dir=path)


def test_a_spill_folder_in_memory_is_refused(memory_folder):
    with pytest.raises(InvalidArgument, match=r"spill_dir=/dev/shm is kept in memory \(tmpfs\)"):
        resolve(spill_dir=memory_folder)


def test_a_spill_folder_that_cannot_be_made():
    with pytest.raises(IoError, match="cannot create spill_dir=/proc/patrickstar"):
        resolve(spill_dir="/proc/patrickstar")


def test_a_cache_folder_in_memory_is_passed_over(monkeypatch, memory_folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(memory_folder))
    assert resolve().spill_dir == Path(f"/var/tmp/patrickstar-{os.getuid()}")
    (memory_folder / "patrickstar").rmdir()


def test_the_default_folder_is_told_once(caplog):
    with caplog.at_level("INFO", logger="patrickstar"):
        folder = resolve().spill_dir
    (record,) = caplog.records
    assert str(folder) in record.getMessage()


def test_without_any_folder_nothing_is_spilled(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(config, "_spill_candidates", lambda: [file])
    with pytest.warns(UserWarning, match="nothing can be spilled"):
        settings = resolve()
    assert (settings.spill_dir, settings.disk_space) == (None, 0)
    with pytest.raises(InvalidArgument, match="disk_space='1GiB' was asked for"):
        resolve(disk_space="1GiB")


def test_no_disk_space_means_no_folder(tmp_path):
    settings = resolve(spill_dir=tmp_path / "spill", disk_space=0)
    assert (settings.spill_dir, settings.disk_space) == (None, 0)
    assert not (tmp_path / "spill").exists()
