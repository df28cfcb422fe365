# SPDX-License-Identifier: Apache-2.0
"""Which tests run, and which skips are accepted.

Tests marked ``full`` run with ``--all`` only. A skip is printed with its reason;
in CI, one that skips.txt does not list fails the run.
"""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
import skip_policy

# Tests interrupt processes that they start. A shell that runs the suite in the background has it
# ignore interrupts, and they would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

_SKIPPED: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked full too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the whole suite, not of the sample")
    config.stash[_SKIPPED] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    deselected = [item for item in items if item.get_closest_marker("full")]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        collector.config.stash[_SKIPPED].append(report.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure is reported as skipped too; it did run.
    if report.skipped and not hasattr(report, "wasxfail"):
        item.config.stash[_SKIPPED].append(report.nodeid)
    return report


def _surprises(config: pytest.Config) -> list[str]:
    skipped: list[str] = config.stash[_SKIPPED]
    return skip_policy.unlisted(skipped, skip_policy.read_allowed())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _surprises(session.config) and skip_policy.is_enforced():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in _surprises(terminalreporter.config):
        terminalreporter.write_line(f"skipped but not listed in skips.txt: {name}")
