"""Tests that take ``kind`` run on the built-in engine, and with ``--sglang-python`` on a real SGLang server as well.

The contract of engines runs on both model runners of the built-in engine.
"""

from pathlib import Path

import pytest

from tests import engine_serving
from tests.engine_kinds import Builtin, Kind, Sglang
from tests.sglang_servers import SglangServers

ON_BOTH_RUNNERS = {"test_engine_updates", "test_engine_push", "test_engine_scores", "test_engine_memory"}
"""Modules whose tests serve a built-in engine by ``serving``, for each of its model runners."""
OF_EVERY_KIND = {"test_engine_both", "test_engine_both_http", "test_engine_bfloat16"}
"""Modules whose tests take ``kind``, with the runner over transformers as a kind."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if "kind" in metafunc.fixturenames:
        names = ["builtin", *(["transformers"] if module in OF_EVERY_KIND else [])]
        names += ["sglang"] if metafunc.config.getoption("--sglang-python") else []
        metafunc.parametrize("kind", names, indirect=True, scope="module")
    if module in ON_BOTH_RUNNERS:
        metafunc.parametrize("runner", ["auto", "transformers"], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave mixtures on the runner over transformers to ``make test-all``: test_transformers_runner pushes to some."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if (params.get("runner"), params.get("family")) == ("transformers", "qwen3_moe"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``serving`` start engines with the model runner of the test."""
    monkeypatch.setitem(engine_serving.DEFAULTS, "runner", getattr(request, "param", "auto"))


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, dtype: str, first_model: Path, sglang_servers: SglangServers) -> Kind:
    """Return an engine kind. ``dtype`` and ``first_model`` are fixtures of the requesting module."""
    if request.param != "sglang":
        return Builtin(dtype, "transformers" if request.param == "transformers" else "auto")
    python = str(request.config.getoption("--sglang-python"))
    return Sglang(python, sglang_servers.url(dtype, first_model), dtype, sglang_servers.slowed)
