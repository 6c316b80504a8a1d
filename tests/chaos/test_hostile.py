"""A run beside a foreign actor that misbehaves in every way its user allows: it ends by itself, and its accounting
balances.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import psutil
import pytest

from tests.chaos.auditor import BY_TASK, CHANCE, Verdict, judge
from tests.chaos.hostile import DEFECTS, EVAL, Hostile
from tests.chaos.storm import VICTIMS, Storm, address_of
from tests.waits import until
from tests.whole.running import Up, assert_books_balance, until_step, up
from tidemill.bus.config import BusConfig
from tidemill.bus.server.auth import LEARNER, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.streams.bus import Bus, connect

RUN, USER = "smoke", "actor-7"
SETTINGS = ("bus.auth=true", "bus.lease_s=3", "learner.checkpoint_every=10", "learner.weights_digest=true")
STEPS = 24
KILLS, STORM_S = 80, 600.0
ROOM_BYTES = 500_000_000
"""Bytes by which a process may grow beside the foreign actor: its manifests name gigabytes."""
GROWN_UP_S = 15.0
"""Age of a process from which on its growth is measured in the storm: it has imported its modules and loaded its model
by then.
"""


async def test_a_foreign_actor_that_misbehaves_cannot_end_a_run(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--storm-seed") or 1
    print(f"seed {seed} (--storm-seed {seed})")
    hostile, enough = Hostile(tmp_path / "run", RUN, USER, seed), tmp_path / "enough"
    held = ("actor.reward=tests.unhurried:held", f"actor.reward_options.until={enough}")
    with up(tmp_path, *SETTINGS, *held, f"learner.steps={STEPS}", "bus.history_samples=1000000") as run:
        async with _bus(run) as bus:
            await until_step(bus, 1)
            grown = Counter[str]()
            rogue, meter = (
                asyncio.create_task(hostile.rage()),
                asyncio.create_task(_measure(lambda: _children_of(run), grown)),
            )
            try:
                await until(lambda: run.process.returncode is not None or _has_sent_enough(hostile), every_s=0.1)
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
    assert not [line for line in run.log.splitlines() if "started again" in line or "ended with code" in line], run.log[
        -4000:
    ]
    assert max(grown.values()) < ROOM_BYTES, (seed, grown)
    assert _has_sent_enough(hostile), hostile.sent
    _assert_refusals_counted(run, verdict, hostile)


def _assert_refusals_counted(run: Up, verdict: Verdict, hostile: Hostile) -> None:
    """Assert that the run has counted each stored sample with a defect as invalid, by its field and its actor.

    What kind it was knows the auditor, by the intent of the foreign actor; one that only its task shows to be wrong may
    be a duplicate.
    """
    invalid, kinds = run.summary["samples_invalid"], verdict.refused_by
    print(f"invalid {invalid}: {run.summary['samples_invalid_by_field']}")
    print(f"refused {verdict.refused}: {dict(kinds)}\n{dict(hostile.answers)}")
    certain = sum(count for kind, count in kinds.items() if kind not in (*CHANCE, *BY_TASK))
    assert 0 < certain <= invalid <= verdict.refused + hostile.sent[f"sample: {EVAL}"], (certain, invalid, kinds)
    assert run.summary["samples_invalid_by_actor"] == {USER: invalid}, run.summary
    assert sum(run.summary["samples_invalid_by_field"].values()) == invalid, run.summary
    # 503 is the answer of an engine that has no weights, or no keys of the run, yet.
    assert all(status[-3] in "234" or status.endswith("503") for status in hostile.answers), hostile.answers
    assert any(status.startswith("admin 4") for status in hostile.answers), hostile.answers


def _has_sent_enough(hostile: Hostile) -> bool:
    """Return whether most defects were sent, and requests and messages of every other kind."""
    defects = sum(hostile.sent[f"sample: {kind}"] > 0 for kind in DEFECTS)
    return defects > len(DEFECTS) // 2 and min(hostile.sent["http"], hostile.sent["frames"]) >= 20


@pytest.mark.slow
def test_a_storm_of_kills_beside_a_foreign_actor_that_misbehaves(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The storm lasts ten minutes (or ``--storm-s``); afterwards the run continues and ends by itself."""
    seed = pytestconfig.getoption("--storm-seed") or 3
    lasts_s = pytestconfig.getoption("--storm-s") or STORM_S
    print(f"seed {seed} (--storm-seed {seed})")
    settings = ("bus.auth=true", "bus.history_samples=1000000")
    storm = Storm(
        tmp_path, seed=seed, kills=round(KILLS * lasts_s / STORM_S), lasts_s=lasts_s, settings=settings, auth=True
    )
    hostile = Hostile(tmp_path / "run", RUN, USER, seed)
    grown = Counter[str]()
    run = asyncio.run(_beside(hostile, storm, grown))
    verdict = asyncio.run(_judged(run, hostile, storm.witnessed))
    print(f"killed {dict(storm.killed)}; {storm.starts} starts of up\n{dict(hostile.sent)}\n{dict(grown)}\n{verdict}")
    assert not (verdict.lost or verdict.twice or verdict.wrong), (seed, verdict)
    assert_books_balance(run.summary, max_lag=2)
    assert set(VICTIMS) <= set(storm.killed) or lasts_s < STORM_S, storm.killed
    assert 0 < max(grown.values()) < ROOM_BYTES, (seed, grown)
    _assert_refusals_counted(run, verdict, hostile)


async def _beside(hostile: Hostile, storm: Storm, grown: Counter[str]) -> Up:
    rogue = asyncio.create_task(hostile.rage())
    meter = asyncio.create_task(_measure(lambda: _processes_of(hostile.directory), grown, aged_s=GROWN_UP_S))
    try:
        await storm.blow()
        return await storm.finish(30)
    finally:
        await _end(rogue, meter)


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel until they end: ``wait_for`` of Python 3.11, which the client library uses, can lose a cancellation
    (CPython issue 86296).
    """
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


async def _measure(processes: Callable[[], list[psutil.Process]], grown: Counter[str], *, aged_s: float = 0.0) -> None:
    """Record the largest growth of each process of the run, in bytes, by its command, from an age of ``aged_s`` on."""
    first: dict[tuple[int, float], int] = {}
    while True:
        for process in await asyncio.to_thread(processes):
            with contextlib.suppress(psutil.Error):
                words, size, began_s = process.cmdline(), process.memory_info().rss, process.create_time()
                if time.time() - began_s < aged_s:
                    continue
                name = words[words.index("tidemill") + 1] if "tidemill" in words else process.name()
                grown[name] = max(grown[name], size - first.setdefault((process.pid, began_s), size))
        await asyncio.sleep(0.5)


def _children_of(run: Up) -> list[psutil.Process]:
    return psutil.Process(run.process.pid).children(recursive=True)


def _processes_of(directory: Path) -> list[psutil.Process]:
    """Return the processes that have this run directory in their command."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(str(directory) in word for word in process.info["cmdline"] or ())]


async def _judged(run: Up, hostile: Hostile, witnessed: Mapping[int, str] | None = None) -> Verdict:
    server = EmbeddedBus(run.directory / "bus", RUN, BusConfig(auth=True), run.directory / "auth")
    url = await asyncio.to_thread(server.start)
    try:
        user, password = read_credentials(run.directory / f"auth/{LEARNER}.env")
        address = url.replace("nats://", f"nats://{user}:{password}@")
        return await judge(address, RUN, run.directory / "checkpoints", dict(witnessed or {}), hostile.kinds)
    finally:
        await asyncio.to_thread(server.stop)
