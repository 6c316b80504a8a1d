"""Fixtures for the tests on a real SGLang server: one server on CPU for all tests that do not end it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_kinds import Brake
from tests.sglang.server import CONTEXT
from tests.sglang_servers import SglangServers
from tests.tiny_models import tiny_model, write_tiny_model


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--sglang-python")
    if not found:
        pytest.skip("needs SGLang: make test-sglang")
    return str(found)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed, max_position_embeddings=CONTEXT) for seed in range(4)]


@pytest.fixture(scope="session")
def models() -> list[Any]:
    """Return the models of versions 0 to 3."""
    return [tiny_model(seed=seed, max_position_embeddings=CONTEXT) for seed in range(4)]


@pytest.fixture
def server(python: str, sglang_servers: SglangServers, directories: list[Path]) -> str:
    """Return the URL of the server of all tests that do not end it; which weights it has is left to them."""
    return sglang_servers.url("float32", directories[0])


@pytest.fixture
def brake(sglang_servers: SglangServers) -> Iterator[Brake]:
    """Have the server decode slowly until the brake is opened, so that a push or a pause comes before a response
    ends.
    """
    brake = Brake(sglang_servers.slowed)
    brake.put_on()
    yield brake
    brake.open()
