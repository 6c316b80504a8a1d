"""Processor time of the tests, a plugin of pytest: the seconds of the whole run and the twenty costliest tests, printed
at its end.

Processor time decides what a test costs on a slow machine; wall time on shared cores says little. A test's time is that
of its worker and of the processes that the worker has waited for. What a fixture of a module costs is counted with the
module's first and last test.
"""

import resource
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SHOWN = 20


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cost(), "tidemill-cost")


class Cost:
    """Processor seconds of this process' tests and, in the controller of several workers, of all."""

    def __init__(self) -> None:
        self._tests = Counter[str]()
        self._workers_s = 0.0
        self._counted_s = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = spent_s()
        report.cpu_s, self._counted_s = now_s - self._counted_s, now_s  # type: ignore[attr-defined]  # sent with the report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += getattr(report, "cpu_s", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_s"] = spent_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add a worker of xdist that has ended. A killed one sends nothing."""
        self._workers_s += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = spent_s() + self._workers_s
        terminalreporter.section(f"{total_s:.0f} processor seconds; the costliest {SHOWN} tests")
        for nodeid, seconds in self._tests.most_common(SHOWN):
            if seconds > 0.1:
                terminalreporter.write_line(f"{seconds:7.1f} s  {nodeid}")


def spent_s() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
