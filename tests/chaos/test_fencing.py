"""Two learners on one run: the newer continues, the older ends with the reason, and writes nothing after the fence."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.auditor import judge
from tests.chaos.parts import PATIENCE_S, Parts, parts, thaw
from tests.unhurried import UNHURRIED
from tests.whole.running import records, until_step, up
from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.fenced import epoch_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Plan
from tidemill.learner.feed.restart import CHECKPOINT_KEY

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=5",
    "learner.weights_digest=true",
    "bus.lease_s=5",
    UNHURRIED,
)


def test_a_learner_that_was_replaced_writes_nothing_and_ends_with_the_reason(tmp_path: Path) -> None:
    """The learner is replaced while it works; and while it is frozen, with a checkpoint committed and the older ones
    not removed yet.
    """
    asyncio.run(asyncio.wait_for(_replaced(tmp_path), 3 * PATIENCE_S))


async def _replaced(tmp_path: Path) -> None:
    with parts(tmp_path, *SETTINGS) as run:
        await run.begin("engine", "actor")
        first = run.start("learner", name="first")
        async with run.bus() as bus:
            await until_step(bus, 8)
            second = run.start("learner", name="second", instant="committed", how="STOP")
            assert await first.code() == Fenced.exit_code, first.log[-3000:]
            assert (
                "epoch 1 is fenced off by epoch 2: another learner has taken over this run"
                in first.log.splitlines()[-1]
            )

            frozen = await second.frozen()
            third = run.start("learner", name="third")
            await _done_by(bus, 3)
            before = await _left_by(bus, run, 2)
            thaw(frozen)
            assert await second.code() == Fenced.exit_code, second.log[-3000:]
            assert "epoch 2 is fenced off by epoch 3" in second.log, second.log[-3000:]
            assert "checkpoint removed" not in second.log
            after = await _left_by(bus, run, 2)
            assert {
                place: (before.get(place), value) for place, value in after.items() if before.get(place) != value
            } == {}
            third.process.send_signal(signal.SIGTERM)
            assert await third.code() == 0, third.log[-3000:]

            for stream, fence in (
                (subjects.PLAN, subjects.plan(bus.run, "fence")),
                (subjects.TASKS, subjects.task(bus.run, "fence")),
            ):
                assert await _epochs_fall(bus, subjects.stream(bus.run, stream), fence) == []
            plans, _ = await records(bus)
            assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
            head, row = await bus.rows("weights").get("head"), await bus.rows("run").get("checkpoint")
            assert head is not None and (head[0]["epoch"], head[0]["fence"]) == (3, 3)
            assert row is not None and row[0]["epoch"] == 3
        verdict = await judge(run.url, bus.run, run.root / "checkpoints", {})
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict


@pytest.mark.slow
def test_up_ends_when_a_stranger_has_taken_its_learner_s_place(tmp_path: Path) -> None:
    """A restart would fence the other learner, which its supervisor would restart, and so on."""
    asyncio.run(asyncio.wait_for(_up_and_a_stranger(tmp_path), 3 * PATIENCE_S))


async def _up_and_a_stranger(tmp_path: Path) -> None:
    with up(tmp_path, *SETTINGS) as run, parts(tmp_path, *SETTINGS) as beside:
        async with run.bus() as bus:
            await until_step(bus, 3)
        beside.url = (run.directory / "bus.url").read_text().strip()
        beside.start("learner", name="stranger")
        assert await asyncio.to_thread(run.wait) == 1
        assert "learner ended with code 76 and is not started again" in run.log, run.log[-3000:]
        assert "another learner has taken over this run" in run.log, run.log[-3000:]


async def _done_by(bus: Bus, epoch: int) -> None:
    """Wait until the learner of this epoch completes a new step, and has committed a checkpoint of its own."""
    newest = 0
    async with asyncio.timeout(PATIENCE_S):
        async for _, record in bus.plans.follow():
            if isinstance(record, Plan) and record.epoch < epoch:
                newest = max(newest, record.step)
            if isinstance(record, Done) and record.epoch == epoch and record.step > newest:
                break
        async for row in bus.rows("run").watch(CHECKPOINT_KEY):
            if row is not None and row[0]["epoch"] == epoch:
                return


async def _left_by(bus: Bus, run: Parts, epoch: int) -> dict[str, dict[str, Any]]:
    """Return the rows and checkpoints of this epoch, outside of the fenced streams.

    A version in transfer may yet be marked as failed, and be given its ``after``, which any process may set, once.
    """
    found: dict[str, dict[str, Any]] = {
        path.name: {} for path in (run.root / "checkpoints").glob(f"step-*-epoch-{epoch}*")
    }
    for bucket in ("weights", "run"):
        for key, (value, _) in (await bus.rows(bucket).all()).items():
            if value.get("epoch") == epoch:
                in_transfer = value.get("state") in ("pushing", "failed")
                found[f"{bucket}.{key}"] = {**value, "state": "", "after": 0} if in_transfer else value
    return found


async def _epochs_fall(bus: Bus, stream: str, fence: str) -> list[tuple[int, int]]:
    """Return messages after a fence of a newer epoch: (sequence, epoch), void or not."""
    fallen, newest, seq = [], 0, 0
    while message := await bus.jet.next(stream, seq + 1):
        seq, epoch = message.seq, epoch_of(message.headers)
        newest = max(newest, epoch) if message.subject == fence else newest
        if epoch < newest:
            fallen.append((seq, epoch))
    assert newest == 3, f"{stream}: want the fences of three learners, the newest is {newest}"
    return fallen
