"""The router over real engines: engine selection, retries, requests that pass through, and the effects of an engine's
death.
"""

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from yarl import URL

from tests.actor_kit import at_work, engine_row
from tests.bus_fixtures import BusOpener
from tests.engine_serving import Served, serving
from tests.refusals import refusal
from tests.router_kit import Door, engine_process, faulty, routing
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.config import RouterConfig
from tidemill.actors.router.exchange import Answer, Handler, Middleware, Request
from tidemill.actors.router.forward import Sessions
from tidemill.actors.router.server import load_middleware
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.server.nats_server import EmbeddedServer

LONG = 4000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a model with room for responses that do not end within a test."""
    yield write_tiny_model(tmp_path_factory.mktemp("router") / "model", max_position_embeddings=8192)


def finished(served: Served) -> int:
    return int(served.engine.stats()["requests_finished"])


async def unfinished(engine: BuiltinEngine, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        await at_work(engine, count)


@contextmanager
def unused_url() -> Iterator[str]:
    """Yield a URL without a listener."""
    with KeptPort() as port:
        yield f"http://127.0.0.1:{port.number}"


async def test_requests_go_to_the_engine_with_the_fewest_in_flight(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(model_dir)) for _ in range(3)]
        door = await stack.enter_async_context(routing(*(each.engine.url for each in engines)))
        for each in engines:
            await each.client.pause()
        asked = [asyncio.create_task(door.generate()) for _ in range(6)]
        for each in engines:
            await unfinished(each.engine, 2)
        assert [worker["in_flight"] for worker in (await door.until(lambda _: True)).values()] == [2, 2, 2]
        await engines[1].client.resume()
        await door.until(lambda workers: [worker["in_flight"] for worker in workers.values()] == [2, 0, 2])
        asked += [asyncio.create_task(door.generate()) for _ in range(2)]
        await engines[1].until(lambda: finished(engines[1]) == 4)
        for each in (engines[0], engines[2]):
            await each.client.resume()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 8
        assert [finished(each) for each in engines] == [2, 4, 2]


async def test_a_session_stays_at_its_engine_as_long_as_that_serves(model_dir: Path) -> None:
    async with (
        serving(model_dir) as one,
        serving(model_dir) as other,
        routing(one.engine.url, other.engine.url) as door,
    ):
        for _ in range(4):
            assert (await door.generate())[0] == 200
        assert (finished(one), finished(other)) == (2, 2), "without a session: in turn"
        for _ in range(4):
            await door.generate(session="s")
        mine, its = (one, other) if finished(one) == 6 else (other, one)
        assert (finished(mine), finished(its)) == (6, 2)
        status, _ = await door.post(
            "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "session_id": "s"}
        )
        assert (status, finished(mine)) == (200, 7), "the field of the body is the same, and the engine does not see it"
        status, _ = await door.post(
            "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "session_id": None}
        )
        assert status == 200, "no session, and the engine does not see that either"
        finished_before = finished(mine)
        mine.engine.phase = "stale"
        await door.serving(its.engine.url)
        await door.generate(session="s")
        mine.engine.phase = "serving"
        await door.serving(one.engine.url, other.engine.url)
        await door.generate(session="s")
        assert finished(mine) == finished_before, "it has moved, and stays"


def test_sessions_are_forgotten_when_there_are_too_many() -> None:
    sessions = Sessions(2)
    for name in ("a", "b", "a", "c"):
        sessions.note(name, f"engine of {name}")
    assert [sessions.engine(name) for name in ("a", "b", "c", "")] == ["engine of a", "", "engine of c", ""]
    assert len(sessions) == 2


async def test_an_engine_killed_in_the_middle_breaks_its_answer_off_and_comes_back(model_dir: Path) -> None:
    async with (
        engine_process(model_dir, held_after=20) as dying,
        serving(model_dir) as other,
        routing(dying.url, other.engine.url) as door,
    ):
        body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
        other.engine.phase = "stale"
        await door.serving(dying.url)
        async with door.session.post(door.url + "/generate", json=body, headers={"X-Session-Id": "s"}) as response:
            assert b"output_ids" in await response.content.readany()
            await dying.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                assert b"[DONE]" not in await response.content.read()
        other.engine.phase = "serving"
        await door.serving(other.engine.url)
        assert [(await door.generate(session="s"))[0] for _ in range(3)] == [200] * 3
        assert finished(other) == 3
        await dying.start()
        await door.serving(dying.url, other.engine.url)
        assert [(await door.generate())[0] for _ in range(4)] == [200] * 4
        assert finished(other) == 5, "it has its share again"


async def test_a_refused_connection_is_tried_elsewhere_whatever_the_request(model_dir: Path) -> None:
    """The engine was serving at its first health check, and left afterwards."""
    async with (
        faulty() as gone,
        serving(model_dir) as well,
        routing(gone.url, well.engine.url, health_every_s=1000.0) as door,
    ):
        await gone.leave()
        answers = [await door.get("/server_info") for _ in range(3)]
        assert [status for status, _ in answers] == [200] * 3, answers


async def test_a_session_leaves_an_engine_without_its_version() -> None:
    """A missing version is no reason for a quarantine: only the refusal itself moves the session."""
    async with faulty() as old, faulty() as new, routing(old.url, new.url) as door:
        for engine in (old, new):
            engine.does = "version"
        answers = await asyncio.gather(*(door.generate(session="s") for _ in range(2)))
        assert [status for status, _ in answers] == [503, 503]
        new.does = "ok"
        assert (await door.generate(session="s"))[0] == 200
        old.asked.clear()
        old.does, new.does = "ok", "version"
        assert (await door.generate(session="s"))[0] == 200
        assert old.asked == ["ok"]
        workers = await door.until(lambda _: True)
        assert [worker["failures"] for worker in workers.values()] == [0, 0]


@pytest.mark.parametrize(
    ("does", "path", "body", "attempts", "status"),
    [
        ("break", "/generate", {"input_ids": [5]}, 1, 502),
        ("break", "/generate", {"input_ids": [5], "rid": "r"}, 3, 502),
        ("break", "/v1/embeddings", {}, 1, 502),
        ("503", "/generate", {"input_ids": [5]}, 3, 503),
        ("503", "/v1/embeddings", {}, 1, 503),
        ("503", "/v1/embeddings", {"rid": "r"}, 3, 503),
        ("500", "/generate", {"input_ids": [5], "rid": "r"}, 1, 500),
        ("hang", "/generate", {"input_ids": [5], "rid": "r"}, 1, 504),
    ],
)
async def test_only_requests_that_are_safe_to_repeat_are_repeated(
    does: str, path: str, body: dict[str, Any], attempts: int, status: int
) -> None:
    bounds = {"timeout_s": 5.0} if does == "hang" else {}
    async with faulty() as engine, routing(engine.url, retries=2, **bounds) as door:
        engine.does = does
        told, answer = await door.post(path, body)
        asked = len(engine.asked)
        assert told == status and (asked == attempts or (does == "hang" and not asked)), (
            "its time may be over before the engine has it"
        )
        assert "message" in answer["error"], answer


async def test_a_request_over_a_broken_connection_is_repeated_if_it_is_a_get_or_has_an_id() -> None:
    async with faulty() as engine, routing(engine.url, retries=1) as door:
        engine.does = "break"
        assert (await door.get("/server_info"))[0] == 502
        assert (await door.post("/v1/embeddings", {}, headers={"X-Request-Id": "r"}))[0] == 502
        assert engine.paths.count("/v1/embeddings") == 2
        assert engine.paths.count("/server_info") == 4, "aiohttp itself asks a second time, each time"


async def test_a_client_that_does_not_read_is_disconnected_and_its_engine_freed() -> None:
    """The answer is larger than all buffers on the way."""
    async with faulty() as engine, routing(engine.url, idle_s=0.3) as door:
        engine.does = "flood"
        host, port = door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in await reader.readline()
        async with asyncio.timeout(LIMIT_S):
            await engine.gone.wait()
        await door.until(lambda workers: workers[engine.url]["in_flight"] == 0)
        writer.close()


async def test_a_repeated_request_goes_to_another_engine() -> None:
    async with faulty() as bad, faulty() as good, routing(bad.url, good.url) as door:
        door.router.engines._quarantine_s = (60.0, 60.0)
        bad.does = "503"
        answers = [await door.generate() for _ in range(4)]
        assert [status for status, _ in answers] == [200] * 4
        assert len(good.asked) == 4
        assert len(bad.asked) <= 1, "in quarantine after the first"


async def test_after_the_first_byte_nothing_is_repeated() -> None:
    async with faulty() as engine, routing(engine.url) as door:
        engine.does = "half"
        async with door.session.post(door.url + "/generate", json={"rid": "r", "stream": True}) as response:
            assert await response.content.readany() == b'data: {"text": "a"}\n\n'
            engine.gone.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert engine.asked == ["half"]


async def test_silence_between_two_chunks_is_bounded() -> None:
    async with faulty() as engine, routing(engine.url, idle_s=0.3) as door:
        engine.does = "half"
        async with door.session.post(door.url + "/generate", json={}) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        engine.gone.set()


async def test_a_request_without_an_engine_waits_up_to_its_limit(model_dir: Path) -> None:
    async with routing(wait_s=0.2) as door:
        assert (await door.get("/health"))[0] == 503
        status, answer = await door.generate()
        assert status == 503
        assert re.search(r"waited \d+\.\d s for an engine", answer["error"]["message"]), answer
    async with serving(model_dir, phase="joining") as late, routing(late.engine.url, wait=False) as door:
        asked = asyncio.create_task(door.generate())
        await door.until(lambda workers: workers[late.engine.url]["remark"] == "/health: HTTP 503")
        late.engine.phase = "serving"
        assert (await asked)[0] == 200
        assert (await door.get("/health"))[0] == 200


async def test_a_silent_engine_gets_no_requests_until_it_answers_again() -> None:
    with unused_url() as unreachable:
        async with faulty() as well, routing(well.url, unreachable, wait=False, health_failures=2) as door:
            workers = await door.until(
                lambda workers: workers[well.url]["serving"] and "health checks" in workers[unreachable]["remark"]
            )
            assert not workers[unreachable]["serving"]
            well.healthy = False
            await door.serving()
            assert (await door.get("/health"))[0] == 503
            well.healthy = True
            await door.serving(well.url)
            well.silent = True
            workers = await door.until(lambda workers: not workers[well.url]["serving"])
            assert workers[well.url]["failures"] == 0, "no request was needed to find that out"
            well.silent = False
            await door.serving(well.url)


async def test_events_are_forwarded_at_once_and_a_client_that_disconnects_frees_the_engine(model_dir: Path) -> None:
    async with serving(model_dir) as served, routing(served.engine.url) as door:
        params = {"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": True}
        body = {"input_ids": [5, 6], "sampling_params": params, "stream": True, "return_logprob": True}
        whole = await served.generate([5, 6], **params)
        async with door.session.post(door.url + "/generate", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = (await response.read()).split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert json.loads(events[-3][6:])["output_ids"] == whole["output_ids"]

        gate = served.hold(after=20)
        body["sampling_params"] = {**params, "max_new_tokens": LONG}
        async with door.session.post(door.url + "/generate", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert len(json.loads(first[6:])["output_ids"]) < LONG
            await unfinished(served.engine, 1)
        await unfinished(served.engine, 0)
        assert served.engine.stats()["requests_aborted"] == 1

        waiting = asyncio.create_task(door.generate(max_new_tokens=LONG))
        await unfinished(served.engine, 1)
        waiting.cancel()
        await unfinished(served.engine, 0)
        gate.open()
        assert served.engine.stats()["requests_aborted"] == 2
        await door.until(lambda workers: workers[served.engine.url]["in_flight"] == 0)


async def test_an_abort_finds_its_request_wherever_it_is(model_dir: Path) -> None:
    async with (
        serving(model_dir) as one,
        serving(model_dir) as other,
        routing(one.engine.url, other.engine.url) as door,
    ):
        for each in (one, other):
            await each.client.pause()
        asked = [asyncio.create_task(door.generate(rid=rid)) for rid in ("a", "b")]
        for each in (one, other):
            await unfinished(each.engine, 1)
        assert await door.post("/abort_request", {"rid": "b"}) == (200, "")
        status, answer = await asked[1]
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        assert not asked[0].done()
        for each in (one, other):
            await each.client.resume()
        assert (await asked[0])[1]["meta_info"]["finish_reason"]["type"] == "length"


async def test_workers_can_be_added_and_removed(model_dir: Path) -> None:
    async with serving(model_dir) as one, serving(model_dir) as other, routing() as door:
        for path in (f"/add_worker?url={one.engine.url}/", f"/add_worker?worker_url={one.engine.url}"):
            status, answer = await door.post(path)
            assert (status, answer) == (200, {"status": "success", "worker_urls": {one.engine.url: 0}})
        assert (await door.post("/add_worker", {"url": other.engine.url}))[0] == 200
        await door.serving(one.engine.url, other.engine.url)
        assert (await door.get("/list_workers"))[1]["urls"] == [one.engine.url, other.engine.url]
        assert (await door.post("/remove_worker", {"url": one.engine.url}))[0] == 200
        await door.serving(other.engine.url)
        for _ in range(3):
            await door.generate()
        assert (finished(one), finished(other)) == (0, 3)
        for path in ("/remove_worker?url=http://nobody:1", "/add_worker?url=nobody", "/add_worker"):
            status, answer = await door.post(path)
            assert status == 400, answer


async def test_engines_are_found_on_the_bus(open_bus: BusOpener, model_dir: Path) -> None:
    async with open_bus() as bus, serving(model_dir, version=3) as one, serving(model_dir, version=7) as other:
        async with routing(other.engine.url, view=LiveView(bus, dead_after_s=60.0)) as door:
            async with HeartbeatPublisher(
                bus, engine_row(one.engine.url, id="e1", version=3), every_s=0.2
            ) as heartbeat:
                workers = await door.until(
                    lambda workers: len(workers) == 2 and all(each["serving"] for each in workers.values())
                )
                assert workers[one.engine.url]["id"] == "e1"
                assert workers[other.engine.url]["version"] == 7
                for _ in range(3):
                    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, "min_version": 5}
                    assert (await door.post("/generate", body))[0] == 200
                assert (finished(one), finished(other)) == (0, 3)
                with unused_url() as unreachable:
                    heartbeat.update(address=unreachable)
                    await door.serving(other.engine.url)
                heartbeat.update(address=one.engine.url)
                await door.serving(one.engine.url, other.engine.url)
                heartbeat.update(nonce="of another process")
                await door.serving(other.engine.url)
                heartbeat.update(nonce=one.engine.nonce)
                await door.serving(one.engine.url, other.engine.url)
                heartbeat.update(phase="stale")
                await door.serving(other.engine.url)
                heartbeat.update(phase="serving")
                await door.serving(one.engine.url, other.engine.url)
                await door.post("/remove_worker", {"url": one.engine.url})
                await door.serving(other.engine.url)
                await door.post("/add_worker", {"url": one.engine.url})
                await door.serving(one.engine.url, other.engine.url)


async def test_a_removed_engine_stays_removed_until_another_process_has_its_url(open_bus: BusOpener) -> None:
    async with (
        open_bus() as bus,
        faulty() as one,
        faulty() as other,
        routing(view=LiveView(bus, dead_after_s=60.0)) as door,
    ):
        async with HeartbeatPublisher(bus, row := engine_row(one.url, id="e1"), every_s=0.2):
            await door.serving(one.url)
            assert (await door.post("/remove_worker", {"url": one.url}))[0] == 200
        assert (await door.get("/list_workers"))[1]["workers"] == []
        await door.router.engines.refresh()  # its row is gone
        async with (
            HeartbeatPublisher(bus, row, every_s=0.2) as again,
            HeartbeatPublisher(bus, engine_row(other.url, id="e2"), every_s=0.2),
        ):
            await door.serving(other.url)
            assert (await door.get("/list_workers"))[1]["urls"] == [other.url], "its row is back, and so is it"
            again.update(pid=row.pid + 1)
            await door.serving(one.url, other.url)


async def test_while_the_bus_is_away_health_counts_and_workers_come(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus() as bus, faulty() as one, faulty() as other:
        async with routing(
            one.url, view=LiveView(bus, dead_after_s=60.0), health_every_s=0.5, health_timeout_s=2.0
        ) as door:
            os.kill(nats_server.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(1.5)  # a poll has begun that gets no answer
                one.silent, one.checks = True, 0
                await door.serving()
                assert one.checks <= 30, "as many as it has failed before a look at the bus is given up by the bus"
                status, answer = await door.post("/add_worker", {"url": other.url})
                assert (status, answer["worker_urls"]) == (200, {one.url: 0, other.url: 0})
                await door.serving(other.url)
            finally:
                os.kill(nats_server.pid, signal.SIGCONT)


async def test_a_worker_with_an_impossible_host_name_is_refused_without_effect_on_others() -> None:
    async with faulty() as one, routing(one.url) as door:
        for url in (
            "http://" + "a" * 70 + ".com",
            "http://[::1",
            "http://x:99999999",
            "http://a..b",
            "http://\x00",
            "http://a b",
            "ftp://a",
        ):
            status, answer = await door.post("/add_worker", {"url": url})
            assert (status, "want a URL" in answer["error"]["message"]) == (400, True), (url, answer)
        door.router.discovery._by_hand["http://" + "a" * 70] = None  # as a row on the bus may contain
        await door.router.engines.refresh()
        assert (await door.post("/abort_request", {"rid": "x"}))[0] == 200
        await door.serving(one.url)


async def test_commands_to_an_engine_are_not_forwarded_and_other_requests_are_unchanged() -> None:
    async with faulty() as engine, routing(engine.url, paths=("/some/where",)) as door:
        for path in (
            "/pause_generation",
            "/update_weights_from_disk",
            "/release_memory_occupation",
            "/of_a_later_release",
        ):
            assert (await door.post(path, {}))[0] == 404
        assert engine.asked == []
        headers = {"Authorization": "Bearer t", "X-Session-Id": "s", "Accept-Encoding": "gzip"}
        status, answer = await door.post("/some/where?a=1", {"b": 2}, headers=headers)
        assert (status, answer["echo"]) == (200, {"b": 2})
        assert engine.paths == ["/some/where"]
        assert answer["headers"]["Authorization"] == "Bearer t"
        assert "X-Session-Id" not in answer["headers"]
        assert answer["headers"]["Accept-Encoding"] == "identity", "compressed, events would be held back"


async def test_an_engine_gets_the_exact_path_and_no_command_hidden_in_it() -> None:
    hidden = (
        "/pause_generation%3Fx",
        "/pause_generation%23x",
        "/x/..%2Fpause_generation",
        "/x/%252e%252e/pause_generation",
        "/a%2526",
    )
    async with faulty() as engine, routing(engine.url, paths=("/{any:.*}",)) as door:
        for path in hidden:
            async with door.session.post(URL(f"{door.url}{path}?b=%26&c=%2B", encoded=True)) as response:
                assert response.status == 200
        assert engine.paths == [unquote(path) for path in hidden]
        assert set(engine.queries) == {"b=%26&c=%2B"}


async def test_middleware_changes_requests_repeats_them_and_answers_itself() -> None:
    async with (
        faulty() as engine,
        routing(engine.url, paths=("/x", "/mine"), middleware=(f"{__name__}:outer", f"{__name__}:inner")) as door,
    ):
        status, answer = await door.post("/x", {})
        assert (status, answer["echo"]) == (200, {"seen": ["outer", "inner", "outer", "inner"]}), (
            "asked twice; the second answer counts"
        )
        assert len(engine.asked) == 2
        assert await door.post("/mine", {}) == (418, {"by": "inner"})
        await door.until(lambda workers: workers[engine.url]["in_flight"] == 0)


def outer(config: RouterConfig) -> Middleware:
    async def handle(request: Request, handler: Handler) -> Answer:
        if request.path != "/x":
            return await handler(request)
        async with await handler(_signed(request, "outer")) as first:
            seen = json.loads(await first.read())["echo"]
        return await handler(_signed(request.with_body(seen), "outer"))

    return handle


def inner(config: RouterConfig) -> Middleware:
    async def handle(request: Request, handler: Handler) -> Answer:
        if request.path == "/mine":
            return Answer.of(418, {"by": "inner"})
        return await handler(_signed(request, "inner"))

    return handle


def _signed(request: Request, name: str) -> Request:
    return request.with_body({"seen": [*request.map.get("seen", ()), name]})


@pytest.mark.parametrize("path", ["nowhere:f", "tidemill.actors.router.token_history:Nothing", "json", ""])
def test_a_missing_middleware_is_refused(path: str) -> None:
    with refusal(ValueError, setting="middleware"):
        load_middleware(path, RouterConfig())


async def test_a_draining_router_finishes_its_requests_and_takes_no_more(model_dir: Path) -> None:
    async with serving(model_dir) as served, routing(served.engine.url) as door:
        await served.client.pause()
        asked = asyncio.create_task(door.generate())
        await unfinished(served.engine, 1)
        closing = asyncio.create_task(door.router.close(60.0))
        await refused(door)
        await served.client.resume()
        assert (await asked)[0] == 200
        await closing
        assert Counter({"done": finished(served)}) == Counter(done=1)


async def refused(door: Door) -> None:
    async def unhealthy() -> bool:
        return (await door.get("/health"))[0] == 503

    await until(unhealthy)
    assert (await door.generate())[0] == 503
