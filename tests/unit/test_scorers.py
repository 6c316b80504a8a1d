"""An actor's calls of scorers: which one is asked, and every answer that is none."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.refusals import refusal
from tests.waits import until
from tests.web_server import web_server
from tidemill.actors import scoring
from tidemill.actors.actor import sample_scoring
from tidemill.actors.actor.sample_scoring import MAX_LOST, RemoteScoring, ScorerClient, ScorerPool
from tidemill.actors.engines import server_pool
from tidemill.actors.engines.server_discovery import ServerStatus
from tidemill.actors.scoring import RewardServer, serving
from tidemill.bus.http.access import RunAccess
from tidemill.bus.keys import Keys, RunKeys
from tidemill.bus.wire.messages import Status
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import load

KEYS = RunKeys.fixed(Keys.of("admin"))
REQUEST = RewardRequest(prompt="p", response="4", label="4", status=Status.COMPLETED)


class Known:
    """Scorers at given URLs; a test changes ``statuses``."""

    def __init__(self, *urls: str) -> None:
        self.statuses = [
            ServerStatus(url=url, id=f"s{place}", serving=True, version=-1) for place, url in enumerate(urls)
        ]

    async def discover(self) -> list[ServerStatus]:
        return list(self.statuses)

    def watch(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def close(self) -> None:
        pass


@asynccontextmanager
async def remote_scoring(known: Known) -> AsyncIterator[RemoteScoring]:
    pool = ScorerPool(known, lambda url: ScorerClient(url, KEYS), quarantine_s=(0.01, 0.02), in_turn=True)
    running = asyncio.create_task(pool.run())
    try:
        yield RemoteScoring(pool)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def answering(*answers: Any) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve the answers in turn, the last one for ever: (status, body), or None = the connection is closed. Yields URL
    and requests.
    """
    left, asked = list(answers), []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.read())
        given = left.pop(0) if len(left) > 1 else left[0]
        if given is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return web.Response(status=given[0], body=given[1])

    app = web.Application()
    app.router.add_post("/{any:.*}", answer)
    async with web_server(app) as url:
        yield url, asked


RIGHT = (200, b'{"reward": 1.0}')


@pytest.mark.parametrize(
    "first",
    [
        *[(status, b"x") for status in (301, 401, 403, 404, 429, 500, 502, 503)],
        *[
            (200, body)
            for body in (b"", b"{", b"[]", b"3", b"{}", b'{"failed": 3}', b"[" * 100_000, b"\xff", b" " * (5 << 20))
        ],
        None,
    ],
    ids=repr,
)
async def test_an_answer_that_is_none_is_asked_for_again(first: Any) -> None:
    async with answering(first, RIGHT) as (url, asked), remote_scoring(Known(url)) as remote:
        assert await remote.score(REQUEST) == 1.0
    assert len(asked) == 2
    assert json.loads(asked[0])["response"] == "4"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b"no prompt"), "refused by the scorer at http.*status 400: b'no prompt'"),
        ((413, b"too large"), "status 413"),
        ((200, b'{"failed": "KeyError"}'), "KeyError"),
        ((200, b'{"reward": 1e39}'), r"want .*got 1e\+39"),
        ((200, b'{"reward": NaN}'), "want .*got nan"),
        ((200, b'{"reward": "x"}'), "want a number, got 'x'"),
        ((200, b'{"reward": {"a": null}}'), "want a number, got None"),
        ((200, b'{"reward": {"\\ud800": 1.0}}'), "want names of printable characters, got '.ud800'"),
        (
            (200, json.dumps({"reward": {str(place): 1.0 for place in range(300)}}).encode()),
            "want at most 256 named numbers, got 300",
        ),
    ],
)
async def test_a_refusal_or_a_reward_that_no_sample_may_have_fails_it_at_once(
    answer: tuple[int, bytes], words: str
) -> None:
    async with answering(answer) as (url, asked), remote_scoring(Known(url)) as remote:
        with pytest.raises(RewardFailed, match=words):
            await remote.score(REQUEST)
    assert len(asked) == 1


async def test_a_request_that_ends_every_scorer_is_given_up() -> None:
    async with answering(None) as (url, asked), remote_scoring(Known(url)) as remote:
        with refusal(
            RewardFailed, reward="scorers", outside=True, reason=re.compile(rf"^{MAX_LOST} .*: scorer http://")
        ):
            await remote.score(REQUEST)
    assert len(asked) == MAX_LOST


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", "http://127.0.0.1:abc", "ftp://127.0.0.1", "http://u:p@127.0.0.1:9", "nothing"]
)
async def test_a_scorer_that_is_not_there_is_not_counted_as_lost(address: str) -> None:
    async with answering(RIGHT) as (url, asked):
        known = Known(address)
        async with remote_scoring(known) as remote:
            waiting = asyncio.create_task(remote.score(REQUEST))
            pool = remote.pool
            await until(
                lambda: max((entry.failures for entry in pool.entries.values()), default=0) > MAX_LOST, every_s=0.005
            )
            assert not waiting.done()
            known.statuses = Known(url).statuses
            assert await waiting == 1.0
    assert len(asked) == 1


async def test_a_long_call_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer writes blanks; a server that writes nothing counts as lost, and so does one that is silent behind its
    headers.
    """
    monkeypatch.setattr(scoring, "ALIVE_S", 0.02)
    monkeypatch.setattr(sample_scoring, "SILENT_S", 1.2)
    gate, calls, tries = asyncio.Event(), 0, 0

    async def slow(request: RewardRequest) -> float:
        nonlocal calls
        calls += 1
        await gate.wait()
        return 1.0

    async with serving(RewardServer("slow", slow), "127.0.0.1", 0) as url, remote_scoring(Known(url)) as remote:
        while calls != 1 and tries < 10:  # a process that stood still for so long has written nothing either
            gate.clear()
            calls, tries = 0, tries + 1
            waiting = asyncio.create_task(remote.score(REQUEST))
            await asyncio.sleep(1.5)
            gate.set()
            assert await waiting == 1.0
    assert calls == 1


async def test_a_server_that_never_answers_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_scoring, "SILENT_S", 0.05)
    never = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/score", silent)
    async with web_server(app, handler_cancellation=True) as url, remote_scoring(Known(url)) as remote:
        with refusal(RewardFailed, reward="scorers", outside=True, reason=re.compile(f"^{MAX_LOST} ")):
            await remote.score(REQUEST)


async def test_the_calls_of_a_process_that_is_no_more_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process at its address ends them at once; a row that is gone ends them after a while, and not when it
    comes back.
    """
    monkeypatch.setattr(server_pool, "POLL_S", 0.01)
    monkeypatch.setattr(server_pool, "GONE_S", 600.0)
    gate, begun = asyncio.Event(), 0

    async def slow(request: RewardRequest) -> float:
        nonlocal begun
        begun += 1
        await gate.wait()
        return 1.0

    async def calls(number: int) -> None:
        await until(lambda: begun >= number, every_s=0.005)

    async with serving(RewardServer("slow", slow), "127.0.0.1", 0) as url:
        known = Known(url)
        async with remote_scoring(known) as remote:
            status = known.statuses[0]
            known.statuses = [replace(status, process="h s0 1")]
            waiting = asyncio.create_task(remote.score(REQUEST))
            await calls(1)
            known.statuses = [replace(status, process="h s0 2")]
            await calls(2)
            (entry,) = remote.pool.entries.values()

            async def missing(is_missing: bool) -> None:
                known.statuses = [] if is_missing else [replace(status, process="h s0 2")]
                await until(lambda: (entry.missing_since_s is not None) == is_missing, every_s=0.005)

            await missing(True)
            await missing(False)
            monkeypatch.setattr(server_pool, "GONE_S", 0.5)
            await asyncio.sleep(1.0)
            assert begun == 2, "it came back in time"
            await missing(True)
            await until(entry.gone.is_set, every_s=0.005)
            known.statuses = [replace(status, process="h s0 2")]
            await calls(3)
            gate.set()
            assert await waiting == 1.0
    assert begun == 3


async def test_more_calls_than_places_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward in threads fails beyond its limit; the calls of many actors come together in a scorer."""
    most = 0
    monkeypatch.setattr(scoring, "MAX_RUNNING", 3)
    running = 0

    async def counted(request: RewardRequest) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    async with serving(RewardServer("counted", counted), "127.0.0.1", 0) as url, remote_scoring(Known(url)) as remote:
        assert await asyncio.gather(*(remote.score(REQUEST) for _ in range(20))) == [1.0] * 20
    assert most == 3


async def test_groups_are_checked_too() -> None:
    group = GroupRequest(samples=(REQUEST, REQUEST), rewards=(0.0, 1.0))
    answers = (200, b'{"rewards": [1.0]}'), (200, b'{"rewards": [1.0, {"score": 2.0}]}')
    async with answering(*answers) as (url, asked), remote_scoring(Known(url)) as remote:
        with refusal(RewardFailed, reward="scorers", got="1"):
            await remote.group_score(group)
        assert await remote.group_score(group) == [1.0, {"score": 2.0}]
    sent = json.loads(asked[0])
    assert (len(sent["samples"]), sent["rewards"]) == (2, [0.0, 1.0])


async def test_the_least_busy_scorer_is_asked() -> None:
    gate = asyncio.Event()

    async def slow(request: RewardRequest) -> float:
        await gate.wait()
        return 1.0

    servers = [RewardServer("slow", slow) for _ in range(3)]
    async with (
        serving(servers[0], "127.0.0.1", 0) as a,
        serving(servers[1], "127.0.0.1", 0) as b,
        serving(servers[2], "127.0.0.1", 0) as c,
    ):
        async with remote_scoring(Known(a, b, c)) as remote:
            calls = [asyncio.create_task(remote.score(REQUEST)) for _ in range(9)]
            await until(lambda: sum(server.running for server in servers) >= 9, every_s=0.005)
            assert [server.running for server in servers] == [3, 3, 3]
            gate.set()
            assert await asyncio.gather(*calls) == [1.0] * 9


async def test_a_value_that_json_lacks_fails_the_sample() -> None:
    async with remote_scoring(Known("http://127.0.0.1:9")) as remote:
        with refusal(RewardFailed, reward="scorers", outside=False, reason=re.compile("JSON")):
            await remote.score(RewardRequest(prompt="p", response="r", label={1, 2}, status=Status.COMPLETED))


async def test_a_scorer_that_others_reach_wants_the_key_of_the_run() -> None:
    """A listener on all addresses answers those alone that present it; the client of the actors does."""
    guarded = RewardServer("exact", load("exact"), access=RunAccess(KEYS))
    async with serving(guarded, "0.0.0.0", 0, advertise="127.0.0.1") as url, ClientSession() as session:
        async with session.post(f"{url}/score", json={"prompt": "p", "response": "4", "label": "4"}) as response:
            assert response.status == 401
        async with remote_scoring(Known(url)) as remote:
            assert await remote.score(REQUEST) == 1.0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/score_group", {"samples": []}, 400),
        ("/score_group", {"samples": {}}, 400),
        ("/score_group", [], 400),
        ("/score_group", {"samples": [{"prompt": "p"}]}, 400),
        ("/score_group", {"samples": [{"prompt": "p", "response": "r"}], "rewards": [1.0, 2.0]}, 400),
        ("/score_group", {"samples": [{"prompt": "p", "response": "r"}], "rewards": ["x"]}, 400),
        ("/score_group", {"samples": [{"prompt": "p", "response": "r"}], "rewards": [1e39]}, 400),
        ("/score_group", {"samples": [{"prompt": "p", "response": "r"}]}, 200),
        ("/score", {"prompt": "p", "response": "r"}, 404),
    ],
)
async def test_requests_for_groups_are_checked(path: str, body: Any, status: int) -> None:
    async def ranked(request: GroupRequest) -> list[float | dict[str, float]]:
        return [0.0 for _ in request.samples]

    async with serving(RewardServer("ranked", None, ranked), "127.0.0.1", 0) as url, ClientSession() as session:
        async with session.post(f"{url}{path}", json=body) as response:
            assert response.status == status
            found = await response.json()
    assert found == {"rewards": [0.0]} if status == 200 else found["failed"]
