# SPDX-License-Identifier: Apache-2.0
"""The run log and the counters it is written from."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings

import pytest
from patrickstar.errors import InvalidArgument, IoError
from patrickstar.report import RunLog, Stats
from patrickstar.report.units import format_bytes

RECORD = {
    "step": 1,
    "time_s": 0.25,
    "loss": None,
    "memory": {
        "host": {"resident": 10, "peak": 20, "budget": 30},
        "disk": {"used": 40},
    },
    "traffic": {"fetched_bytes": 1, "evicted_bytes": 2, "spilled_bytes": 3, "read_bytes": 4},
    "stall_s": 0.5,
    "scale": None,
    "skipped": False,
}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_there_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write(RECORD)
        assert read(path) == [RECORD]
        log.write({**RECORD, "step": 2})
        assert [record["step"] for record in read(path)] == [1, 2]


def test_an_old_file_is_appended_to(tmp_path):
    path = tmp_path / "run.jsonl"
    for step in (1, 2):
        with RunLog(path) as log:
            log.write({**RECORD, "step": step})
    assert [record["step"] for record in read(path)] == [1, 2]


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLog(path) as log:
        log.write({**RECORD, "loss": float("nan"), "traffic": {"read_bytes": float("inf")}})
    assert "NaN" not in path.read_text()
    (record,) = read(path)
    assert record["loss"] is None
    assert record["traffic"] == {"read_bytes": None}


@pytest.mark.parametrize("change", [{"los": 1.0}, {"loss": ...}])
def test_a_wrong_set_of_fields_is_refused(tmp_path, change):
    record = {**RECORD, **change}
    record = {name: value for name, value in record.items() if value is not ...}
    with (
        RunLog(tmp_path / "run.jsonl") as log,
        pytest.raises(InvalidArgument, match="step, time_s"),
    ):
        log.write(record)


def test_a_folder_and_a_missing_folder_are_refused_by_name(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "run.jsonl"):
        with pytest.raises(InvalidArgument, match=str(path)):
            RunLog(path)


def test_what_the_system_refuses_to_open_is_an_io_error(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(IoError, match=str(loop)) as caught:
        RunLog(loop)
    assert caught.value.errno is not None


def test_a_full_disk_warns_once_and_training_goes_on():
    with RunLog("/dev/full") as log:
        with pytest.warns(UserWarning, match="/dev/full: no space left on device"):
            log.write(RECORD)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.write(RECORD)


def test_a_record_cut_short_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "run.jsonl"
    # A file size limit cuts the second record in the middle, as a disk that fills up does.
    program = f"""
import resource, signal, warnings
from patrickstar.report import RunLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
warnings.simplefilter("ignore")
record = {RECORD!r}
with RunLog({str(path)!r}) as log:
    log.write(record)
    size = {str(path)!r} and __import__("os").path.getsize({str(path)!r})
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, hard))
    log.write(record)
    log.write(record)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.write({{**record, "step": 4}})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first) == RECORD
    assert json.dumps(RECORD).startswith(cut)
    assert json.loads(last)["step"] == 4


def counters():
    return {field.name: index for index, field in enumerate(dataclasses.fields(Stats), start=1)}


def test_stats_take_every_counter_by_name():
    stats = Stats.from_mapping(counters())
    assert dataclasses.asdict(stats) == counters()
    assert isinstance(stats.stall_seconds, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 2


def test_stats_name_missing_and_unknown_counters():
    wrong = counters()
    del wrong["num_evictions"]
    wrong["num_evicted"] = 1
    with pytest.raises(InvalidArgument, match="missing: num_evictions; unknown: num_evicted"):
        Stats.from_mapping(wrong)


def test_stats_print_binary_units():
    stats = Stats.from_mapping({**counters(), "host_peak_bytes": 3 << 29, "read_bytes": 5 << 20})
    table = str(stats)
    assert "1.5 GiB peak" in table
    assert "5.0 MiB read" in table
    assert len(table.splitlines()) < 12


# The same table is in core/patrickstar/base/text_test.cc: C++ must write the same.
@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (256 << 20, "256.0 MiB"),
        (-(3 << 30), "-3.0 GiB"),
        (5000 << 50, "5000.0 PiB"),
    ],
)
def test_bytes_as_text(num_bytes, text):
    assert format_bytes(num_bytes) == text
