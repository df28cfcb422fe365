# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` (gloo, two processes) on managed tensors, and DDP around a managed model.

Both processes run every case of ``collective_cases.py`` once; here each case has its test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import collective_cases
import helpers
import pytest

TIMEOUT_S = 240

SAMPLE = {
    "all_reduce_of_gradients",
    "many_at_once",
    "broadcasts",
    "lists_of_managed_tensors_beside_plain_ones",
    "lists_in_inference_mode",
    "send_and_receive",
    "a_receive_holds_until_it_is_waited_for",
    "what_does_not_fit_is_an_error_that_names_it",
    "ddp",
}

Report = dict[str, str]


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Report]]:
    own = (item for item in request.session.items if item.path == request.path)
    names = [item.callspec.params["name"] for item in own]
    folder = tmp_path_factory.mktemp("collectives")
    files = [folder / f"rank{rank}.json" for rank in range(collective_cases.WORLD_SIZE)]
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, collective_cases.__file__),
                *(str(rank), str(folder / "meet"), str(file)),
                *names,
            ],
            env=helpers.script_environment(None),
            stderr=(folder / f"rank{rank}.log").open("w"),
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in ranks:
            process.wait(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        log = (folder / f"rank{rank}.log").read_text()
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{log}"
    yield [_read(file) for file in files]


def _read(file: Path) -> Report:
    report: Report = json.loads(file.read_text())
    return report


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full)
        for name in collective_cases.CASES
    ],
)
def test_collective(reports, name):
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank} did not get as far"
        assert not report[name], f"rank {rank}:\n{report[name]}"
