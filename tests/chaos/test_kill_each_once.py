"""kill -9 of every kind of process once in the middle of a run: `up` starts it again, and every guarantee still holds."""

import asyncio
from pathlib import Path

from tests.whole.running import Up, assert_books_balance, kill, live, records, until_step, up

VICTIMS = ("actor", "engine", "learner", "bus")
STEPS = 160


async def test_every_kind_of_process_is_killed_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """There is one run; many more steps must be completed after each kill before the next."""
    settings = (f"learner.steps={STEPS}", "learner.checkpoint_every=20", "learner.weights_digest=true", "bus.lease_s=3")
    with up(tmp_path, *settings) as run:
        async with run.bus() as bus:
            for place, victim in enumerate(VICTIMS):
                await until_step(bus, 8 + place * STEPS // 5)
                kill((await live(bus, victim)).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
        assert_books_balance(run.summary, max_lag=2)
        assert run.summary["steps"] == STEPS
    await _steps_taken_again_are_the_same_bits(tmp_path, run)


async def _steps_taken_again_are_the_same_bits(tmp_path: Path, run: Up) -> None:
    """Check that steps re-executed from the recorded plans by the restarted learner ended in bit-identical weights."""
    from bus.config import BusConfig
    from bus.server.embedded import EmbeddedServer
    from bus.streams.bus import connect

    server = EmbeddedServer(run.directory / "bus", BusConfig())
    url = await asyncio.to_thread(server.start)
    try:
        async with connect(url, run.run, name="test") as bus:
            plans, outcomes = await records(bus)
    finally:
        await asyncio.to_thread(server.stop)
    assert [plan.step for plan in plans] == list(range(1, STEPS + 1)), "every step is planned exactly once"
    by_step: dict[int, set[str | None]] = {}
    times: dict[int, int] = {}
    for done in outcomes:
        by_step.setdefault(done.step, set()).add(done.weights_digest)
        times[done.step] = times.get(done.step, 0) + 1
    assert all(len(digests) == 1 and None not in digests for digests in by_step.values()), by_step
    assert max(times.values()) > 1, "the learner was killed between checkpoints, so at least one step was taken twice"
