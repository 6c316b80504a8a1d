"""A live run refuses a bus without its store and a program that the bus names, outlives requests without end, and skips
infinite losses.
"""

import asyncio
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats

from tests.actor_kit import row_until
from tests.chaos.overflowing import OVERFLOWING
from tests.chaos.storm import drained_and_judged
from tests.chaos.test_instants import new_steps
from tests.launched import tidemill
from tests.unhurried import UNHURRIED
from tests.whole.running import assert_books_balance, kill, live, records, steps_done, until_step, up
from tidemill.launch.run.summary import SKIPPED
from tidemill.learner.checkpoints import disk
from tidemill.learner.feed.restart import CHECKPOINT_KEY
from tidemill.weightstore.store.registry import WANT

LIMIT_S = 300.0
SLOW = 100
"""Connections that begin a request and never end it."""
PROGRAM = "/tmp/x"


def _with_a_program(row: dict[str, Any] | None) -> dict[str, Any]:
    assert row is not None
    return row | {
        "engine": row["engine"] | {"kind": "sglang", "sglang": row["engine"].get("sglang", {}) | {"python": PROGRAM}}
    }


async def test_a_run_whose_bus_lost_its_store_is_refused_and_its_model_goes_on_as_another(tmp_path: Path) -> None:
    settings = ("learner.steps=1000000", "learner.checkpoint_every=2", UNHURRIED)
    with up(tmp_path, *settings) as run:
        async with run.bus() as bus:
            await row_until(bus.rows("run"), CHECKPOINT_KEY, lambda row: bool(row["step"] >= 2))
        run.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(run.wait)
    shutil.rmtree(run.directory / "bus")
    with up(tmp_path, *settings, flags=("--resume",)) as again:
        assert await asyncio.to_thread(again.wait) == 78, again.log[-4000:]
    newest = disk.listed(run.directory / "checkpoints")[0].path
    assert f"--from-checkpoint {newest}" in again.log, again.log[-4000:]
    other = tmp_path / "other"
    other.mkdir()
    with up(other, "learner.steps=3", flags=("--from-checkpoint", str(newest))) as new:
        assert await asyncio.to_thread(new.wait) == 0, new.log[-4000:]
    assert new.summary["steps"] == 3
    assert_books_balance(new.summary, max_lag=2)


async def test_a_live_run_beside_a_program_on_the_bus_and_requests_that_never_end(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    held = ("actor.reward=tests.unhurried:held", f"actor.reward_options.until={enough}")
    with ExitStack() as stack, up(tmp_path, "learner.steps=12", "bus.lease_s=3", *held) as run:
        async with run.bus() as bus:
            await until_step(bus, 1)
            engine = await live(bus, "engine")
            address = urlsplit(engine.address)
            slow = [await asyncio.open_connection(address.hostname, address.port) for _ in range(SLOW)]
            for _, writer in slow:
                stack.callback(writer.close)
                writer.write(b"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Le")
            await bus.rows("run").change("config", _with_a_program)
            url = await run.bus_url()
            joining = tidemill("engine", "--bus", url, "--run", run.run, output=tmp_path / "joining.log")
            assert await asyncio.to_thread(joining.wait, LIMIT_S) == 78
            assert (
                f"engine.sglang.python={PROGRAM} names a program; not accepted"
                in (tmp_path / "joining.log").read_text()
            )
            kill(engine.pid)  # the next one has the program of its own machine's settings
        enough.touch()
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert run.summary["steps"] == 12 and run.summary["restarts"], run.summary
    assert_books_balance(run.summary, max_lag=2)


async def test_a_live_run_skips_what_is_not_finite_also_when_it_is_taken_again_beside_junk_in_a_row(
    tmp_path: Path,
) -> None:
    """The learner is killed before the first checkpoint, so that the next one takes steps of both kinds again."""
    settings = ("learner.checkpoint_every=1000", "learner.weights_digest=true", "bus.lease_s=3", UNHURRIED, OVERFLOWING)
    with up(tmp_path, "learner.steps=1000000", *settings) as run:
        async with run.bus() as bus:
            kinds = set[bool]()
            async for done in steps_done(bus):
                kinds.add(done.metrics[SKIPPED] > 0)
                if len(kinds) == 2:
                    break
            client = await nats.connect(await run.bus_url())
            await client.jetstream().publish(f"$KV.TM_{run.run}_weights.{WANT}", b"\xff junk")
            await client.close()
            kill((await live(bus, "learner")).pid)
            await new_steps(bus, 2)  # behind all that were recorded before the kill
            _, outcomes = await records(bus)
        verdict = await drained_and_judged(run)
    skipped: dict[int, list[bool]] = {}
    for outcome in outcomes:
        skipped.setdefault(outcome.step, []).append(outcome.metrics[SKIPPED] > 0)
    again = [found for found in skipped.values() if len(found) > 1]
    assert all(len(set(found)) == 1 for found in again), skipped
    assert {found[0] for found in again} == {True, False}, skipped
    assert verdict.steps_taken_again > 0 and verdict.steps_without_digest == 0, verdict
