"""Keys that a router requires and those that it presents: its clients never need those of the engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tests.router_kit import Door, faulty, routing
from tests.tiny_models import write_tiny_model
from tests.waits import until
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.keys import Keys, RunKeys

KEYS = Keys.of("s3cret")
RUN = RunKeys.fixed(KEYS)
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("router") / "model", max_position_embeddings=64)


@asynccontextmanager
async def far_engine(model_dir: Path) -> AsyncIterator[str]:
    """Start an engine that other machines reach: every request needs a key."""
    engine = BuiltinEngine(model_dir, EngineConfig(host="0.0.0.0", advertise="127.0.0.1"), authority=Authority(RUN))
    await asyncio.to_thread(engine.load)
    try:
        url = await engine.start()
        engine.phase = "serving"
        yield url
    finally:
        await engine.close()


async def test_the_router_presents_the_runs_key_to_engines(model_dir: Path) -> None:
    async with far_engine(model_dir) as url, routing(url, keys=RUN) as door:
        for headers in ({}, bearer("sk-whatever-the-client-has")):
            assert (await door.post("/generate", BODY, headers=headers))[0] == 200
        assert (await door.post("/abort_request", {"rid": "x"}))[0] == 200


async def test_a_router_without_keys_forwards_the_clients_key(model_dir: Path) -> None:
    async with far_engine(model_dir) as url, routing(url) as door:
        assert (await door.post("/generate", BODY))[0] == 401
        assert (await door.post("/generate", BODY, headers=bearer(KEYS.api)))[0] == 200


async def test_workers_are_changed_and_aborted_with_the_admin_key_only() -> None:
    async with faulty() as engine, routing(engine.url, keys=RUN) as door:
        commands: list[tuple[str, Any]] = [
            ("/add_worker", {"url": "http://evil:1"}),
            ("/remove_worker", {"url": engine.url}),
        ]
        for path, body in [*commands, ("/abort_request", {"abort_all": True})]:
            for headers in ({}, bearer(KEYS.api)):
                assert (await door.post(path, body, headers=headers))[0] == 401, path
        assert _workers(await door.get("/list_workers")) == [engine.url]
        assert (await door.post("/remove_worker", {"url": engine.url}, headers=bearer(KEYS.admin)))[0] == 200
        assert _workers(await door.get("/list_workers")) == []


def _workers(listed: tuple[int, Any]) -> list[str]:
    return list(listed[1]["urls"])


async def test_clients_on_other_machines_need_a_key() -> None:
    async with faulty() as engine:
        async with routing(engine.url, keys=RUN, host="0.0.0.0", advertise="127.0.0.1", wait=False) as door:
            await _until_healthy(door)
            assert (await door.post("/generate", BODY))[0] == 401
            assert (await door.get("/list_workers"))[0] == 401
            assert (await door.post("/generate", BODY, headers=bearer(KEYS.api)))[0] == 200
        with refusal(ValueError, place="router.host"):
            async with routing(engine.url, host="0.0.0.0", insecure=False):
                pass
        async with routing(engine.url, host="0.0.0.0", advertise="127.0.0.1", insecure=True) as door:
            assert (await door.post("/generate", BODY))[0] == 200


async def _until_healthy(door: Door) -> None:
    async def healthy() -> bool:
        return (await door.get("/health"))[0] == 200

    await until(healthy)
