"""Tests that take ``kind`` run on the built-in engine, and with ``--sglang-python`` on a real SGLang server as well."""

from pathlib import Path

import pytest

from tests.engine_kinds import Builtin, Kind, Sglang
from tests.sglang_servers import SglangServers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        names = ["builtin", *(["sglang"] if metafunc.config.getoption("--sglang-python") else [])]
        metafunc.parametrize("kind", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, dtype: str, first_model: Path, sglang_servers: SglangServers) -> Kind:
    """Return an engine kind. ``dtype`` and ``first_model`` are fixtures of the requesting module."""
    if request.param == "builtin":
        return Builtin(dtype)
    python = str(request.config.getoption("--sglang-python"))
    return Sglang(python, sglang_servers.url(dtype, first_model), dtype, sglang_servers.slowed)
