"""Commands that an engine obeys: those with the run's admin key, of a learner of this run. Built-in engine and SGLang's
proxy.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine_serving import commands_of
from tests.refusals import refusal
from tests.router_kit import faulty
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.errors import EngineUnavailable
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.sglang.arguments import release_of
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.keys import Keys, RunKeys

KEYS = Keys.of("s3cret")
FENCING = ("/abort_request", "/weights_checksums")
"""Requests with the form of a command: an epoch in them would fence older learners."""
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("authority") / "model", max_position_embeddings=64)


class Asked:
    """An engine that is called with one key or none."""

    def __init__(self, engine: Any, session: aiohttp.ClientSession) -> None:
        self.engine, self._session = engine, session
        self.url = engine.url.replace("0.0.0.0", "127.0.0.1")

    async def ask(self, path: str, body: Any = None, key: str = "", method: str = "POST") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def asked(engine: Any) -> AsyncIterator[Asked]:
    await asyncio.to_thread(engine.load)
    try:
        await engine.start()
        engine.phase = "serving"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Asked(engine, session)
    finally:
        await engine.close()


@asynccontextmanager
async def builtin(model_dir: Path, authority: Authority, **config: Any) -> AsyncIterator[Asked]:
    async with asked(BuiltinEngine(model_dir, EngineConfig(**config), authority=authority)) as engine:
        yield engine


@asynccontextmanager
async def proxy(model_dir: Path, authority: Authority, **config: Any) -> AsyncIterator[Asked]:
    async with faulty() as server:
        server.does = "generate"
        settings = EngineConfig(kind="sglang", sglang=SglangConfig(url=server.url), **config)
        async with asked(
            SglangEngine(model_dir, settings, release=release_of("e", "0.5.23"), authority=authority)
        ) as engine:
            yield engine


Place = Callable[..., AbstractAsyncContextManager[Asked]]
PLACES = pytest.mark.parametrize("place", [builtin, proxy], ids=["builtin", "proxy"])


@PLACES
@pytest.mark.parametrize("key", ["", "wrong", KEYS.api, "\xff"], ids=["none", "wrong", "api", "odd"])
async def test_no_command_is_obeyed_without_the_admin_key(place: Place, key: str, model_dir: Path) -> None:
    async with place(model_dir, Authority(RunKeys.fixed(KEYS))) as engine:
        commands = [(path, {"epoch": 10**30}) for path in commands_of(engine.engine)]
        for path, body in [
            *commands,
            ("/abort_request", {"abort_all": True}),
            *((path, {"rid": "x", "epoch": 1}) for path in FENCING),
        ]:
            status, answer = await engine.ask(path, body, key)
            assert (status, f"{path}: want the run's admin key" in answer) == (401, True), (path, answer)
        assert (await engine.ask("/generate", BODY))[0] == 200, "requests of this machine want none"
        assert (await engine.ask("/abort_request", {"rid": "x"}))[0] == 200
        assert engine.engine.epoch == 0
        assert (await engine.ask("/pause_generation", {"mode": "in_place", "epoch": 1}, KEYS.admin))[0] == 200
        assert (await engine.ask("/continue_generation", {"epoch": 1}, KEYS.admin))[0] == 200


@PLACES
async def test_an_epoch_that_no_learner_has_shuts_nobody_out(place: Place, model_dir: Path) -> None:
    newest, reads = [3], list[int]()

    async def read() -> int:
        reads.append(newest[0])
        return newest[0]

    async with place(model_dir, Authority(RunKeys.fixed(KEYS), read)) as engine:

        async def goes_on(epoch: Any) -> tuple[int, str]:
            return await engine.ask("/continue_generation", {"epoch": epoch}, KEYS.admin)

        assert (await goes_on(3))[0] == 200
        for odd, want in (
            (1e30, "want an integer"),
            (True, "want an integer"),
            (-1, "want an integer >= 0"),
            (4, "at most 3"),
        ):
            status, answer = await goes_on(odd)
            assert (status, f"epoch: want {want}" in answer or want in answer) == (400, True), answer
        status, answer = await engine.ask("/weights_checksums", {"of": "served", "epoch": 10**30}, KEYS.admin)
        assert (status, "epoch: want at most 3" in answer) == (400, True), "nor by what is no command"
        assert engine.engine.epoch == 3
        newest[0] = 5
        assert (await goes_on(5))[0] == 200, "a learner that has come since"
        assert (await goes_on(4))[0] == 409
        before = len(reads)
        assert (await goes_on(5))[0] == 200
        assert len(reads) == before, "what is known is not read again"


@PLACES
async def test_while_the_bus_is_away_nothing_is_believed_that_it_has_not_said(place: Place, model_dir: Path) -> None:
    async def away() -> Any:
        raise BusUnavailable("nats://b", "gone")

    async with place(model_dir, Authority(RunKeys(away), away)) as engine:
        status, answer = await engine.ask("/continue_generation", {}, KEYS.admin)
        assert (status, "the keys of the run are not known" in answer) == (503, True), answer
    async with place(model_dir, Authority(RunKeys.fixed(KEYS), away)) as engine:
        status, answer = await engine.ask("/continue_generation", {"epoch": 1}, KEYS.admin)
        assert (status, "epoch 1 cannot be confirmed" in answer) == (503, True), answer


@PLACES
async def test_a_key_that_is_made_later_or_anew_is_found(
    place: Place, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.bus.keys._AGAIN_S", 0.0)
    keys = [Keys()]

    async def read() -> Keys:
        return keys[0]

    async with place(model_dir, Authority(RunKeys(read))) as engine:
        status, answer = await engine.ask("/continue_generation", {}, KEYS.admin)
        assert (status, "the run has none yet" in answer) == (503, True), answer
        for keys[0] in (KEYS, Keys.of("another")):
            assert (await engine.ask("/continue_generation", {}, keys[0].admin))[0] == 200
        assert (await engine.ask("/continue_generation", {}, KEYS.admin))[0] == 401


@PLACES
async def test_beyond_this_machine_every_request_wants_a_key(place: Place, model_dir: Path) -> None:
    async with place(model_dir, Authority(RunKeys.fixed(KEYS)), host="0.0.0.0") as engine:
        assert (await engine.ask("/health", method="GET"))[0] == 200
        for path in ("/model_info", "/server_info", "/v1/models", "/snapshots/v0-0/x", "/nowhere"):
            status, answer = await engine.ask(path, method="GET")
            assert (status, "want the run's api key" in answer) == (401, True), path
        for path in ("/generate", "/v1/completions", "/abort_request", "/weights_checker"):
            assert (await engine.ask(path, BODY))[0] == 401, path
        for key in (KEYS.api, KEYS.admin):
            assert (await engine.ask("/generate", BODY, key))[0] == 200
        assert (await engine.ask("/pause_generation", {}, KEYS.api))[0] == 401
        await _client_presents_it(engine)
    async with place(model_dir, Authority(RunKeys.fixed(KEYS)), host="0.0.0.0", insecure=True) as engine:
        assert (await engine.ask("/generate", BODY))[0] == 200
        assert (await engine.ask("/pause_generation", {}))[0] == 401
    with refusal(ValueError, place="engine.host"):
        async with place(model_dir, Authority(), host="0.0.0.0"):
            pass


async def _client_presents_it(engine: Asked) -> None:
    for keys in (Keys(api=KEYS.api), Keys(api="old")):
        client = HttpEngine(engine.url, keys=RunKeys.fixed(keys))
        try:
            if keys.api == KEYS.api:
                await client.abort("x")
            else:
                with refusal(
                    EngineUnavailable, place="/abort_request", got="another one"
                ):  # not an error of the request
                    await client.abort("x")
        finally:
            await client.close()
