"""Skipped tests, a plugin of pytest: of two kinds, tests that do not apply here, and tests that lack something, which
fails under CI.

A test that lacks something (a program, root, a package) calls ``pytest.skip``. Under CI (the variable ``CI``) its skip
is a failure, and everywhere a run fails in which every test was skipped: it has tested nothing.
"""

import os
import re
from collections.abc import Generator
from typing import NoReturn

import pytest

_INAPPLICABLE = "does not apply: "
_NO_INDEX = re.compile(r"Retrying \(|Could not fetch URL|Temporary failure in name resolution|ProxyError")


def inapplicable(reason: str) -> NoReturn:
    """Skip the test, under CI too: an option or a device decides, and nothing that could be installed."""
    pytest.skip(_INAPPLICABLE + reason)


def skip_without_index(stderr: str) -> None:
    """Skip the test, under CI too, if pip has written that it cannot reach the package index."""
    if _NO_INDEX.search(stderr):
        inapplicable(f"the package index cannot be reached: {stderr.strip().splitlines()[-1]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_missing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_missing(report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which every test was skipped; pytest's summary has the reasons. Of xdist only the controller has a
    reporter.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.stats.get("skipped"):
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed")):
        reporter.write_line("every test was skipped (reasons below): nothing was tested", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _fail_if_missing(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(_INAPPLICABLE):
        report.outcome, report.longrepr = "failed", f"skipped, which is an error under CI: {reason}"
