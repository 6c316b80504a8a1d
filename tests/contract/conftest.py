"""Tests that take ``kind`` run on the built-in engine, and with ``--sglang-python`` on a real SGLang server as well."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine_kinds import Builtin, Kind, Sglang, sglang_server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        names = ["builtin", *(["sglang"] if metafunc.config.getoption("--sglang-python") else [])]
        metafunc.parametrize("kind", names, indirect=True, scope="module")


class SglangServers:
    """The SGLang server of the modules that test with the same dtype and model shape; one at a time."""

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
            self._url = self._open.enter_context(sglang_server(self._python, first_model, log, dtype=dtype, slowed=self.slowed))
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


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, dtype: str, first_model: Path, sglang_servers: SglangServers) -> Kind:
    """Return an engine kind. ``dtype`` and ``first_model`` are fixtures of the requesting module."""
    if request.param == "builtin":
        return Builtin(dtype)
    python = str(request.config.getoption("--sglang-python"))
    return Sglang(python, sglang_servers.url(dtype, first_model), dtype, sglang_servers.slowed)
