"""Engine selection for a request, and the handling of engines that fail."""

import asyncio
import re
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.engine_scene import Scene, running_engines
from tests.refusals import refusal
from tests.waits import turn, until
from tidemill.actors.engines.server_pool import EnginePool, NoServer
from tidemill.actors.errors import (
    BadRequest,
    EngineError,
    EngineFailed,
    EngineGone,
    EngineUnavailable,
    VersionUnavailable,
)
from tidemill.bus.errors import BusUnavailable

GONE = EngineGone("e", "connection reset")


async def chosen(engines: EnginePool, **wanted: object) -> str:
    async with engines.acquire(timeout_s=60, **wanted) as (id, _):  # type: ignore[arg-type]
        return id


async def fail(engines: EnginePool, error: EngineError) -> str:
    """Send a request that fails. Returns the id of its engine."""
    id = ""
    with pytest.raises(type(error)):
        async with engines.acquire(timeout_s=60) as (id, _):
            raise error
    return id


async def test_requests_spread_to_where_least_is_in_flight() -> None:
    scene = Scene({"a": (), "b": (), "c": ()})
    async with running_engines(scene) as engines, AsyncExitStack() as requests:
        ids = [(await requests.enter_async_context(engines.acquire(timeout_s=60)))[0] for _ in range(6)]
        assert Counter(ids) == {"a": 2, "b": 2, "c": 2}


async def test_engines_that_do_not_serve_or_are_too_old_are_passed_over() -> None:
    scene = Scene({"a": (), "b": (), "c": ()})
    async with running_engines(scene) as engines:
        scene.view["a"] = replace(scene.view["a"], serving=False, remark="stale")
        scene.view["b"] = replace(scene.view["b"], version=2)
        with refusal(NoServer, server=re.compile(r"version 9 .*a: stale, b: version 2, c: version 3")):
            async with engines.acquire(min_version=9, timeout_s=0.3):
                pass
        assert [await chosen(engines, min_version=3) for _ in range(3)] == ["c", "c", "c"]


async def test_the_engine_to_avoid_is_taken_when_there_is_no_other() -> None:
    scene = Scene({"a": (), "b": ()})
    async with running_engines(scene) as engines:
        assert await chosen(engines, avoid="a") == "b"
        assert await chosen(engines, avoid="b") == "a"
    async with running_engines(Scene({"a": ()})) as engines:
        assert await chosen(engines, avoid="a") == "a"


@pytest.mark.parametrize("error", [GONE, EngineUnavailable("e", "503"), EngineFailed("e", "500")])
async def test_an_engine_that_fails_is_quarantined_and_returns(error: EngineError) -> None:
    async with running_engines(Scene({"a": (), "b": ()}), quarantine_s=(60, 60)) as engines:
        assert await fail(engines, error) == "a"
        assert [await chosen(engines) for _ in range(3)] == ["b", "b", "b"]
    async with running_engines(Scene({"a": (), "b": ()}), quarantine_s=(0.5, 1.0)) as engines:
        assert await fail(engines, error) == "a"

        async def returned() -> bool:
            return await chosen(engines) == "a"

        await until(returned)


@pytest.mark.parametrize("error", [VersionUnavailable("e", "not yet"), BadRequest("too long")])
async def test_errors_outside_the_engine_cause_no_quarantine(error: EngineError) -> None:
    async with running_engines(Scene({"a": (), "b": ()}), quarantine_s=(60, 60)) as engines:
        assert await fail(engines, error) == "a"
        assert await chosen(engines) == "a"


async def test_quarantines_grow_to_a_bound() -> None:
    async with running_engines(Scene({"a": ()}), quarantine_s=(0.02, 0.05)) as engines:
        for least_s in (0.02, 0.04, 0.05, 0.05):
            begin = time.monotonic()
            await fail(engines, GONE)
            await _back(engines)
            assert time.monotonic() - begin >= least_s


async def _back(engines: EnginePool) -> None:
    """Wait until the only engine may be selected again, without counting a success for it."""
    with pytest.raises(BadRequest):
        async with engines.acquire(timeout_s=60):
            raise BadRequest("so that it is no success")


async def test_a_success_resets_the_length_of_the_quarantine() -> None:
    """Otherwise the last of them would be one of 0.01 * 2 ** 15 s, more than the test has."""
    async with running_engines(Scene({"a": ()}), quarantine_s=(0.01, 600.0)) as engines:
        for _ in range(16):
            await fail(engines, GONE)
            assert await chosen(engines) == "a"


async def test_one_death_counts_once_however_many_requests_it_fails() -> None:
    async with running_engines(Scene({"a": ()}), quarantine_s=(0.05, 60.0)) as engines:

        async def request() -> None:
            async with engines.acquire(timeout_s=60):
                await turn()
                raise GONE

        results = await asyncio.gather(*(request() for _ in range(20)), return_exceptions=True)
        assert [type(result) for result in results] == [EngineGone] * 20
        assert await chosen(engines) == "a"


async def test_an_engine_that_serves_again_leaves_quarantine_at_once() -> None:
    scene = Scene({"a": ()})
    async with running_engines(scene, quarantine_s=(60.0, 60.0)) as engines:
        await fail(engines, GONE)
        serving = scene.view["a"]
        waiting = asyncio.create_task(chosen(engines))
        scene.view["a"] = replace(serving, serving=False)
        await scene.seen()
        scene.view["a"] = serving
        assert await waiting == "a"


async def test_a_waiting_request_is_described_and_woken_by_a_new_engine() -> None:
    scene = Scene({})
    async with running_engines(scene) as engines:
        assert engines.waits_for() == ""
        waiting = asyncio.create_task(chosen(engines, min_version=3))
        await scene.seen()
        said = r"an engine that serves version 3 or newer \(none known\), for \d+ s \(1 samples wait\)"
        assert re.fullmatch(said, engines.waits_for()), engines.waits_for()
        scene.view = Scene({"a": ()}).view
        assert await waiting == "a"
        assert engines.waits_for() == ""


async def test_giving_up_ends_all_waits_now_and_later() -> None:
    scene = Scene({})
    async with running_engines(scene) as engines:
        waiting = asyncio.create_task(chosen(engines))
        await scene.seen()
        engines.give_up()
        for wait in (waiting, chosen(engines)):
            with refusal(NoServer, server=re.compile(r"version 0\b")):
                await wait
        scene.view = Scene({"a": ()}).view
        await scene.seen()
        assert await chosen(engines) == "a", "who finds one at once gets it"


async def test_a_cancelled_wait_is_forgotten() -> None:
    scene = Scene({})
    async with running_engines(scene) as engines:
        waiting = asyncio.create_task(chosen(engines))
        await scene.seen()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engines.waits_for() == ""


async def test_an_engine_that_disappears_is_closed_after_its_last_request() -> None:
    scene = Scene({"a": (), "b": ()})
    async with running_engines(scene) as engines:
        async with engines.acquire(timeout_s=60) as (id, _):
            assert id == "a"
            waiting = asyncio.create_task(chosen(engines, min_version=9))  # so that discovery polls often
            scene.view = {}
            await scene.seen()
            assert (scene.clients["a"].closed, scene.clients["b"].closed) == (False, True)
        await scene.seen()
        assert scene.clients["a"].closed
        engines.give_up()
        with pytest.raises(NoServer):
            await waiting


async def test_all_clients_are_closed_at_the_end() -> None:
    scene = Scene({"a": (), "b": ()})
    async with running_engines(scene):
        pass
    assert all(client.closed for client in scene.clients.values())


async def test_the_last_known_states_hold_while_the_bus_is_away() -> None:
    scene = Scene({"a": ()})
    async with running_engines(scene) as engines:
        scene.blind = BusUnavailable("live", "away")
        scene.view = {}
        assert await chosen(engines) == "a"
