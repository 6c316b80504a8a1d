"""A run beside a foreign actor that misbehaves in every way its user allows: it ends by itself, and its accounting balances."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from bus.config import BusConfig
from bus.server.auth import LEARNER, read_credentials
from bus.server.cluster import EmbeddedBus
from bus.streams.bus import Bus, connect
from tests.chaos.auditor import Verdict, judge
from tests.chaos.hostile import DEFECTS, Hostile
from tests.chaos.storm import VICTIMS, Storm, address_of
from tests.whole.running import Up, assert_books_balance, until_step, up

RUN, USER = "smoke", "actor-7"
SETTINGS = ("bus.auth=true", "bus.lease_s=3", "learner.checkpoint_every=10", "learner.weights_digest=true")
STEPS = 24
KILLS, STORM_S = 80, 600.0
ROOM_BYTES = 500_000_000
"""Bytes by which a process may grow beside the foreign actor: its manifests name gigabytes."""


async def test_a_foreign_actor_that_misbehaves_cannot_end_a_run(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--storm-seed") or 1
    print(f"seed {seed} (--storm-seed {seed})")
    hostile, enough = Hostile(tmp_path / "run", RUN, USER, seed), tmp_path / "enough"
    held = ("actor.reward=tests.unhurried:held", f"actor.reward_options.until={enough}")
    with up(tmp_path, *SETTINGS, *held, f"learner.steps={STEPS}", "bus.history_samples=1000000") as run:
        async with _bus(run) as bus:
            await until_step(bus, 1)
            grown = Counter[str]()
            rogue, meter = asyncio.create_task(hostile.rage()), asyncio.create_task(_measure(run, grown))
            try:
                while run.process.returncode is None and not _has_sent_enough(hostile):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                enough.touch()
                assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
            finally:
                await _end(rogue, meter)
    print(dict(hostile.sent), dict(grown))
    verdict = await _judged(run, hostile)
    print(verdict)
    assert not (verdict.lost or verdict.twice or verdict.wrong), (seed, verdict)
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["steps"] == STEPS
    assert not [line for line in run.log.splitlines() if "started again" in line or "ended with code" in line], run.log[-4000:]
    assert max(grown.values()) < ROOM_BYTES, (seed, grown)
    assert _has_sent_enough(hostile), hostile.sent
    assert verdict.refused > 0, verdict
    assert run.summary["samples_invalid_by_actor"] == {USER: run.summary["samples_invalid"]}, run.summary
    print(run.summary["samples_invalid_by_field"])


def _has_sent_enough(hostile: Hostile) -> bool:
    """Return whether most defects were sent, and requests and messages of every other kind."""
    defects = sum(hostile.sent[f"sample: {kind}"] > 0 for kind in DEFECTS)
    return defects > len(DEFECTS) // 2 and min(hostile.sent["http"], hostile.sent["frames"]) >= 20


@pytest.mark.slow
def test_a_storm_of_kills_beside_a_foreign_actor_that_misbehaves(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The storm lasts ten minutes; afterwards the run continues and ends by itself."""
    seed = pytestconfig.getoption("--storm-seed") or 3
    print(f"seed {seed} (--storm-seed {seed})")
    storm = Storm(tmp_path, seed=seed, kills=KILLS, lasts_s=STORM_S, settings=("bus.auth=true",), auth=True)
    hostile = Hostile(tmp_path / "run", RUN, USER, seed)
    run = asyncio.run(_beside(hostile, storm))
    verdict = asyncio.run(_judged(run, hostile, storm.witnessed))
    print(f"killed {dict(storm.killed)}; {storm.starts} starts of up\n{dict(hostile.sent)}\n{verdict}")
    assert not (verdict.lost or verdict.twice or verdict.wrong), (seed, verdict)
    assert_books_balance(run.summary, max_lag=2)
    assert set(VICTIMS) <= set(storm.killed), storm.killed
    assert verdict.refused > 0 and run.summary["samples_invalid"] > 0, run.summary


async def _beside(hostile: Hostile, storm: Storm) -> Up:
    rogue = asyncio.create_task(hostile.rage())
    try:
        await storm.blow()
        return await storm.finish(30)
    finally:
        await _end(rogue)


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel until they end: ``wait_for`` of Python 3.11, which the client library uses, can lose a cancellation (CPython issue 86296)."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)


@contextlib.asynccontextmanager
async def _bus(run: Up) -> AsyncIterator[Bus]:
    """Open the run's bus as a viewer, once it is there."""
    await run.bus_url()
    async with connect(address_of(run.directory, auth=True), RUN, name="test", wait_s=60) as bus:
        yield bus


async def _measure(run: Up, grown: Counter[str]) -> None:
    """Record the largest growth of each process of the run, in bytes, by its command."""
    first: dict[int, int] = {}
    while True:
        for process in psutil.Process(run.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words, size = process.cmdline(), process.memory_info().rss
                name = words[words.index("launch") + 1] if "launch" in words else process.name()
                grown[name] = max(grown[name], size - first.setdefault(process.pid, size))
        await asyncio.sleep(0.5)


async def _judged(run: Up, hostile: Hostile, witnessed: Mapping[int, str] | None = None) -> Verdict:
    server = EmbeddedBus(run.directory / "bus", RUN, BusConfig(auth=True), run.directory / "auth")
    url = await asyncio.to_thread(server.start)
    try:
        user, password = read_credentials(run.directory / f"auth/{LEARNER}.env")
        address = url.replace("nats://", f"nats://{user}:{password}@")
        return await judge(address, RUN, run.directory / "checkpoints", dict(witnessed or {}), hostile.kinds)
    finally:
        await asyncio.to_thread(server.stop)
