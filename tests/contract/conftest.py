"""Tests that take ``kind`` run on the built-in engine, and with ``--sglang-python`` on a real SGLang server as well."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_kinds import Builtin, Kind, Sglang, sglang_server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        names = ["builtin", *(["sglang"] if metafunc.config.getoption("--sglang-python") else [])]
        metafunc.parametrize("kind", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, dtype: str, first_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    """Yield an engine kind. ``dtype`` and ``first_model`` are fixtures of the requesting module."""
    if request.param == "builtin":
        yield Builtin(dtype)
        return
    python = str(request.config.getoption("--sglang-python"))
    with sglang_server(python, first_model, tmp_path_factory.mktemp("log") / "sglang.log", dtype=dtype) as url:
        yield Sglang(python, url, dtype)
