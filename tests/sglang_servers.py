"""SGLang servers that tests share, one at a time in a process; xdist runs the files of tests on such a server in one
worker.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.engine_kinds import sglang_server

ON_SHARED = (
    "test_sglang_engine.py",
    "test_sglang_handles.py",
    "test_sglang_openai.py",
    "test_sglang_proxy.py",
    "test_sglang_pushes.py",
    "test_sglang_teacher.py",
    "test_engine_both.py",
    "test_engine_both_http.py",
    "test_engine_joined.py",
)
"""Files of tests on a server of the same dtype and model shape: each further worker would start another server."""


class SglangServers:
    """The server of tests with the same dtype and model shape."""

    def __init__(self, python: str, logs: Path) -> None:
        self._python, self._logs = python, logs
        self._open, self._key, self._url = ExitStack(), ("", ""), ""
        self.slowed = logs / "slowed"
        """The servers decode slowly while there is this file."""

    def url(self, dtype: str, first_model: Path) -> str:
        """Return the URL of a server; it is started unless the one that runs is of this kind."""
        key = (dtype, (first_model / "config.json").read_text())
        if key != self._key:
            self.close()
            log = self._logs / f"sglang-{dtype}.log"
            self._url = self._open.enter_context(
                sglang_server(self._python, first_model, log, dtype=dtype, slowed=self.slowed)
            )
            self._key = key
        return self._url

    def close(self) -> None:
        self._open.close()
        self._key = ("", "")


@pytest.fixture(scope="session")
def sglang_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServers]:
    servers = SglangServers(str(request.config.getoption("--sglang-python")), tmp_path_factory.mktemp("log"))
    yield servers
    servers.close()


class OneWorker(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types that mypy sees
    """Scheduler of xdist that gives all of ``ON_SHARED`` to one worker, and each other file to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "shared server" if Path(file).name in ON_SHARED else file


@pytest.hookimpl(optionalhook=True)  # -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWorker | None:
    return OneWorker(config, log) if config.getoption("--sglang-python") else None
