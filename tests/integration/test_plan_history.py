"""The beginning of PLAN is removed behind a summary: its size stays flat, and the audit balances as before."""

from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import issue, make_sample, make_task
from tests.unit.test_bus_episodes import ints, make_plan
from tidemill.bus.client import pull
from tidemill.bus.errors import Refused, UnreadableRow
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_dead
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Dead, Done, Plan, PlanRecord, Settle
from tidemill.bus.wire.rows import HistoryRow
from tidemill.launch.cli.status import read_status
from tidemill.launch.run.audit import RunAccounting, audit
from tidemill.launch.run.checkpoint_cursor import CheckpointCursor
from tidemill.learner.feed.history import (
    LEAST_VERSIONS,
    MAX_READINGS,
    compact,
    forget_letters,
    read_history,
    read_with_summary,
)
from tidemill.weightstore.store.registry import VersionRegistry

KEPT = 100
AT_ONCE = {"full_bytes": 1, "letters_bytes": 1}
EVERY = 20
"""Steps between two checkpoints; a task of every second one is given up."""
METRICS = {"train/skipped_minibatches": 1.0} | {f"train/metric_{number}": 1.0 / 3 for number in range(40)}


class SyntheticRun:
    """A learner that takes a step for each sample, without weights; the oldest kept checkpoint is the one before."""

    give_up = False

    def __init__(self, bus: Bus) -> None:
        self.bus, self.registry = bus, VersionRegistry(bus)
        self.step = self.seq = self.dropped = self.task = self.plan_seq = 0
        self.created = ""
        self.plan_bytes: list[int] = []
        self.oldest: JsonObject | None = None

    async def begin(self) -> None:
        await self.bus.tasks.fence(1)
        await self.bus.plans.fence(1)
        await self.registry.fence(1)
        self.created = (await self.bus.samples.states())[0].created

    async def take(self, steps: int) -> None:
        for _ in range(steps):
            await self._take_step()
            if self.step % EVERY == 0:
                await self._give_up()
                await self._checkpoint()

    async def audited(self) -> RunAccounting:
        cursor = CheckpointCursor(self.seq, frozenset(), self.step, created=self.created)
        return (await audit(self.bus, cursor))[0]

    def plan(self, seq: int) -> Plan:
        columns = {"tasks": ints(self.task, dtype=np.int64), "seqs": ints(seq, dtype=np.int64), "version_steps": {}}
        one = {"group_sizes": ints(1), "ranks": ints(0), "micro_batches": ints(0), "data_parallel": 1}
        return make_plan(step=self.step, **columns, **one)

    async def _sample(self) -> None:
        self.task = await self.bus.tasks.issue(make_task(self.bus.run, epoch=1, group_size=1))
        self.seq = await self.bus.samples.publish(make_sample(self.bus.run, task=self.task, group_size=1, length=0))

    async def _take_step(self) -> None:
        await self._sample()
        self.step += 1
        self.plan_seq = await self.bus.plans.append(self.plan(self.seq))
        await self.registry.publish(await self.registry.reserve(self.step, 1))
        await self.bus.plans.append(Done(epoch=1, step=self.step, metrics=METRICS))

    async def take_short_group(self) -> None:
        """Train one of two samples of a task that is dead; the other comes later."""
        self.task = await self.bus.tasks.issue(make_task(self.bus.run, epoch=1, group_size=2))
        shape = {"task": self.task, "group_size": 2, "length": 0, "tokens": ints(5, 6, 7)}
        samples = [make_sample(self.bus.run, index=index, **shape) for index in range(2)]
        self.seq = await self.bus.samples.publish(samples[1])
        await self.bus.dead.store(make_dead(self.task))
        self.step += 1
        self.plan_seq = await self.bus.plans.append(self.plan(self.seq))
        await self.registry.publish(await self.registry.reserve(self.step, 1))
        self.seq = await self.bus.samples.publish(samples[0])

    async def _give_up(self) -> None:
        await self._sample()
        numbers = {"tasks": np.array([self.task]), "seqs": np.array([self.seq])}
        await self.bus.plans.append(Settle(epoch=1, reason="stale", step=self.step, **numbers))
        self.dropped += 1
        await self._take_step()

    async def _checkpoint(self) -> None:
        """Trim as the learner does, to the checkpoint before, without a window of samples."""
        if self.oldest is not None:
            await self.bus.samples.trim(self.oldest["samples"]["floor"] + 1)
            await self.bus.tasks.trim(self.oldest["tasks"]["floor"] + 1)
            await compact(self.bus, self.oldest, give_up=self.give_up)
        self.oldest = {
            "step": self.step,
            "plan_seq": self.plan_seq,
            "samples": {"created": self.created, "floor": self.seq, "settled": []},
            "tasks": {"floor": self.task, "settled": []},
        }
        self.plan_bytes.append((await self.bus.plans.state()).bytes)


def make_dead(task: int) -> Dead:
    return Dead(task=task, reason="r", attempts=3, actor="a", prompt="p")


@pytest.mark.parametrize("steps", [500, pytest.param(4000, marks=pytest.mark.slow)])
async def test_plan_and_versions_stay_flat_and_the_audit_balances(open_bus: BusOpener, steps: int) -> None:
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        await run.take(steps)
        bytes_of_step = run.plan_bytes[0] / EVERY
        assert max(run.plan_bytes) < (2 * KEPT + 5 * EVERY) * bytes_of_step < run.step * bytes_of_step
        versions = [key for key in await bus.rows("weights").keys() if key.startswith("v.")]
        assert len(versions) < 4 * KEPT
        accounting = await run.audited()
        assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
        assert (accounting.trained, accounting.dropped) == (run.step, {"stale": run.dropped})
        assert accounting.published == run.step + run.dropped == run.seq and accounting.balance()
        status = await read_status(bus)
        counts = {name: status["tasks"][name] for name in ("issued", "settled", "open", "given_up")}
        assert counts == {"issued": run.seq, "settled": run.seq, "open": 0, "given_up": {"stale": run.dropped}}
        assert (status["samples"]["trained"], status["samples"]["dropped"]) == (run.step, {"stale": run.dropped})
        assert (status["step"], status["planned"], status["minibatches_skipped"]) == (run.step,) * 3
        await bus.js.publish(subjects.row(bus.run, "run", subjects.HISTORY_KEY), b"{")
        status = await read_status(bus)
        assert status["step"] == run.step and "run" in status["unreadable"]


async def test_a_sample_of_a_removed_record_that_is_trained_again_is_counted(open_bus: BusOpener) -> None:
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        await run.take(400)
        removed = (await read_history(bus)).removed
        assert removed is not None and removed.floors[0] > 100
        run.step, run.task = run.step + 1, run.task + 1
        await bus.plans.append(run.plan(removed.floors[0] - 50))
        assert (await run.audited()).trained_twice == 1


async def test_an_audit_counts_nothing_twice_when_the_learner_is_killed_before_plan_is_trimmed(
    open_bus: BusOpener,
) -> None:
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        name = subjects.stream(bus.run, subjects.PLAN)
        config = (await bus.jet.call(f"STREAM.INFO.{name}"))["config"]
        await bus.jet.call(f"STREAM.UPDATE.{name}", {**config, "deny_purge": True})
        with pytest.raises(Refused, match="purge"):
            await run.take(400)
        removed = (await read_history(bus)).removed
        assert removed is not None and (await bus.plans.state()).first_seq < removed.seq
        accounting = await run.audited()
        assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
        assert (accounting.trained, accounting.published) == (run.step, run.seq) and accounting.balance()


async def test_an_audit_knows_short_groups_whose_dead_letters_are_removed(open_bus: BusOpener) -> None:
    """Their samples that came late are duplicates. The counts outlive a removal of records, and a kill in between."""
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        for _ in range(2):
            await run.take_short_group()
        before = await run.audited()
        assert (before.duplicates, before.lost, before.trained_twice) == (2, 0, 0) and before.balance()
        first, second = await bus.dead.letters()
        await forget_letters(bus, second + 1, **AT_ONCE)
        assert await bus.dead.letters() == [second]
        history = await read_history(bus)
        assert (history.letters, history.letters_to) == (1, first)
        await bus.dead.store(make_dead(first))  # as if the learner had been killed before it removed them
        await forget_letters(bus, second, **AT_ONCE)
        assert await bus.dead.letters() == [second]
        assert await read_history(bus) == history
        assert await run.audited() == before
        await run.take(400)
        assert (await read_history(bus)).removed is not None
        assert ((await read_history(bus)).letters, (await read_history(bus)).letters_to) == (1, first)


async def store_dead(bus: Bus, kind: str, *odd: object, times: int = 1) -> None:
    """Store messages as a foreign actor may, on subjects that end with these tokens."""
    for number in range(times):
        for text in odd:
            headers = {subjects.MESSAGE_ID: f"{kind}.{text}.{number}"}
            await bus.jet.outbox.store(subjects.dead(bus.run, kind, str(text)), encode_dead(make_dead(7)), headers)


async def left_in(bus: Bus, name: str) -> dict[str, int]:
    return await bus.jet.subjects(subjects.stream(bus.run, name), ">")


async def test_subjects_that_name_no_task_are_removed_and_no_letter_with_them(open_bus: BusOpener) -> None:
    """``007`` is no dead letter of task 7, ``*`` not of all, and there is no task 11."""
    async with open_bus() as bus:
        await issue(bus, 10)
        for task in (7, 8, 10):
            await bus.dead.store(make_dead(task))
        odd = ("007", "08", "x", "*")
        await store_dead(bus, "task", *odd, ">", times=2)  # no reader of letters gets ``>``
        assert await bus.dead.letters() == [7, 8, 10]
        assert [dead.task async for _, dead in bus.dead.scan()] == [7, 8, 10]
        assert bus.refusals.counts["DEAD"] == 2 * len(odd)
        await store_dead(bus, "task", 11, 2**62)
        await store_dead(bus, "report", "*", 10, 11)
        for index in ("0", "*"):
            for task in ("5", "x", "*"):
                headers = {subjects.MESSAGE_ID: f"partial.{task}.{index}"}
                await bus.jet.outbox.store(subjects.partial(bus.run, task, index), b"", headers)
        assert await bus.dead.trim_letters(8) and await bus.dead.trim_reports(8)
        await bus.partials.trim(1)
        names = [("report", 10), ("task", 8), ("task", 10)]
        assert await left_in(bus, "DEAD") == {subjects.dead(bus.run, *name): 1 for name in names}
        assert sorted(await left_in(bus, "PARTIALS")) == [subjects.partial(bus.run, 5, index) for index in ("*", 0)]


@pytest.mark.parametrize("forged", [("x", "y", "z", "0x"), ("11", "12", "13", "14"), ("*",) * 4, ("1", "x", "*", "99")])
async def test_a_call_removes_so_many_subjects_and_the_next_one_goes_on(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch, forged: tuple[str, ...]
) -> None:
    monkeypatch.setattr(pull, "MAX_REMOVALS", 3)
    async with open_bus() as bus:
        await issue(bus, 10)
        await bus.dead.store(make_dead(10))
        for number, text in enumerate(forged):
            headers = {subjects.MESSAGE_ID: str(number)}
            await bus.jet.outbox.store(subjects.dead(bus.run, "task", text), b"", headers)
        assert not await bus.dead.trim_letters(2)
        assert sum((await left_in(bus, "DEAD")).values()) == 2
        assert await bus.dead.trim_letters(2)
        assert await bus.dead.letters() == [10] and len(await left_in(bus, "DEAD")) == 1


async def test_only_letters_that_are_many_are_thinned_and_each_time_by_half(open_bus: BusOpener) -> None:
    """Whatever else is in DEAD costs no letter, and a second checkpoint without a step between them none either."""
    async with open_bus() as bus:
        await issue(bus, 10)
        for task in range(2, 10):
            await bus.dead.store(Dead(task=task, reason="x" * 1000, attempts=3, actor="a", prompt="p"))
        stored = await bus.dead.size_bytes()
        assert abs(await bus.dead.letters_bytes() - stored) < 0.05 * stored
        await store_dead(bus, "report", 10, times=200)
        assert await bus.dead.size_bytes() > 2 * stored
        for _ in range(2):
            await forget_letters(bus, 11, full_bytes=2 * stored, letters_bytes=2 * stored)
        assert await bus.dead.letters() == [*range(2, 10)]
        for _ in range(2):
            await forget_letters(bus, 11, full_bytes=2 * stored, letters_bytes=stored * 3 // 4)
        assert await bus.dead.letters() == [*range(6, 10)]
        history = await read_history(bus)
        assert (history.letters, history.letters_to) == (4, 5)


async def test_letters_removed_during_an_audit_are_known_to_it(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        await run.take_short_group()
        before = await run.audited()
        assert (before.duplicates, before.lost) == (1, 0)
        scan, calls = bus.plans.scan, list[int]()

        async def scan_behind_removal(start: int = 1) -> AsyncIterator[tuple[int, PlanRecord]]:
            calls.append(start)
            async for message in scan(start):
                yield message
            if len(calls) == 1:
                await forget_letters(bus, run.task + 1, **AT_ONCE)

        monkeypatch.setattr(bus.plans, "scan", scan_behind_removal)
        assert await run.audited() == before and len(calls) == 2
        assert await bus.dead.letters() == []


async def test_a_reading_that_is_always_too_slow_ends_with_a_warning(
    open_bus: BusOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus() as bus:
        await issue(bus, 2 * MAX_READINGS)
        readings = list[int]()

        async def read(history: HistoryRow) -> int:
            readings.append(history.letters)
            await bus.dead.store(make_dead(len(readings) + 1))
            await forget_letters(bus, 2 * MAX_READINGS, **AT_ONCE)
            return history.letters

        assert await read_with_summary(bus, read) == MAX_READINGS - 1 == readings[-1]
        assert "records were removed during each of 5 readings" in caplog.text


async def test_records_that_are_removed_while_they_are_read_are_read_again(open_bus: BusOpener) -> None:
    """Between the summary and the log a learner may remove records that are in neither."""
    async with open_bus(history_steps=KEPT) as bus:
        run, readings = SyntheticRun(bus), list[int]()
        await run.begin()

        async def trained(history: HistoryRow) -> int:
            if not readings:
                await run.take(400)
            start = 1 if history.removed is None else history.removed.seq + 1
            samples = [len(record.seqs) async for _, record in bus.plans.scan(start) if isinstance(record, Plan)]
            readings.append(history.trained + sum(samples))
            return readings[-1]

        assert await read_with_summary(bus, trained) == run.step
        assert readings[0] < run.step and len(readings) == 2


async def test_a_log_that_is_almost_full_is_removed_to_the_oldest_checkpoint(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = SyntheticRun(bus)
        await run.begin()
        await run.take(6 * EVERY)
        assert (await read_history(bus)).removed is None
        run.give_up = True
        await run.take(2 * EVERY)
        removed = (await read_history(bus)).removed
        assert removed is not None and run.step - removed.step < 4 * EVERY
        assert run.oldest is not None
        await bus.samples.trim(run.oldest["samples"]["floor"] + 1)
        await bus.tasks.trim(run.oldest["tasks"]["floor"] + 1)
        for _ in range(3):  # the oldest checkpoint may be the same for a while
            await compact(bus, run.oldest, give_up=True)
        first = min([record.step async for _, record in bus.plans.scan() if isinstance(record, Plan)])
        assert removed.step < first <= run.oldest["step"], "a restart from a checkpoint reads its plan"
        versions = [key for key in await bus.rows("weights").keys() if key.startswith("v.")]
        assert len(versions) > LEAST_VERSIONS, "open tasks may name them"
        accounting = await run.audited()
        assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
        assert accounting.trained == run.step and accounting.balance()


async def test_a_summary_that_cannot_be_read_is_neither_forgotten_nor_replaced(
    open_bus: BusOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus(history_steps=KEPT) as bus:
        run = SyntheticRun(bus)
        await run.begin()
        await run.take(200)
        row = await bus.rows("run").get(subjects.HISTORY_KEY)
        subject = subjects.row(bus.run, "run", subjects.HISTORY_KEY)
        await bus.jet.outbox.store(subject, b"not a row", {subjects.MESSAGE_ID: "x"})
        await run.take(2 * EVERY)
        assert "records of PLAN not removed" in caplog.text
        with pytest.raises(UnreadableRow, match=r"run\.history"):
            await run.audited()
        assert row is not None
        await bus.rows("run").put(subjects.HISTORY_KEY, row[0])
        await run.take(KEPT)
        accounting = await run.audited()
        assert (accounting.lost, accounting.trained) == (0, run.step) and accounting.balance()
