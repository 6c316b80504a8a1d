"""The audit detects defects: streams with faults made on purpose, on a real nats-server."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nats.aio.msg import Msg

from tests import data_kit
from tests.actor_kit import row_until
from tests.bus_fixtures import BusOpener
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import codec
from tidemill.bus.wire.messages import Dead, Plan, Sample, Settle, Status, Task
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.status import read_status
from tidemill.launch.run.audit import RunAccounting, audit
from tidemill.launch.run.checkpoint_cursor import CheckpointCursor
from tidemill.launch.run.summary import (
    Observed,
    audit_shown,
    broken_promises,
    lines_of_removed,
    seconds_of_steps,
    summarize,
)
from tidemill.launch.run.watch import RunWatch
from tidemill.launch.samples.search import as_map

EPOCH = 1


class Run:
    """A run written by hand: two tasks of two samples each."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tasks: list[Task] = []

    async def begin(self, num_tasks: int = 2) -> None:
        await self.bus.tasks.fence(EPOCH)
        await self.bus.plans.fence(EPOCH)
        for number in range(num_tasks):
            task = replace(data_kit.task(number + 1), run=self.bus.run, epoch=EPOCH)
            self.tasks.append(replace(task, id=await self.bus.tasks.issue(task)))

    async def sample(self, task: int, index: int, **changes: object) -> int:
        return await self.bus.samples.publish(data_kit.sample(self.tasks[task], index, **changes))  # type: ignore[arg-type]

    async def plan(
        self,
        step: int,
        tasks: list[int],
        seqs: list[int],
        *,
        steps: dict[int, int],
        oldest: int | None = None,
        size: int = 2,
    ) -> None:
        plan = Plan(
            epoch=EPOCH,
            step=step,
            tasks=np.array([self.tasks[one].id for one in tasks], np.int64),
            seqs=np.array(seqs, np.int64),
            group_sizes=np.array([size] * len(tasks), np.int32),
            ranks=np.zeros(len(seqs), np.int32),
            micro_batches=np.zeros(len(seqs), np.int32),
            version_steps=steps,
            oldest_step=oldest,
            data_parallel=1,
            num_micro_batches=1,
            config_digest="",
            chain="",
        )
        await self.bus.plans.append(plan)

    async def settle(self, task: int, seqs: list[int], reason: str) -> None:
        tasks = np.array([self.tasks[task].id], np.int64)
        await self.bus.plans.append(
            Settle(epoch=EPOCH, reason=reason, tasks=tasks, seqs=np.array(seqs, np.int64), step=1)
        )


async def test_the_accounting_of_a_sound_run_balances(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(3)
        first = [await run.sample(0, 0, spans=((0, 2), (1, 1))), await run.sample(0, 1)]
        await run.sample(0, 1, attempt="b")
        await run.sample(0, 0, attempt="c", status=Status.FAILED)
        dropped = [await run.sample(1, 0), await run.sample(1, 1)]
        await run.sample(2, 0)
        await run.settle(1, dropped, "stale")
        await run.plan(2, [0], first, steps={0: 0, 1: 1}, oldest=0)
        accounting, _ = await audit(bus)
        status = await read_status(bus)
    assert accounting.balance(), accounting
    assert (accounting.published, accounting.trained, accounting.lost, accounting.trained_twice) == (7, 2, 0, 0)
    assert accounting.dropped == {"stale": 2, "failed": 1}
    assert (accounting.duplicates, accounting.buffered, accounting.multi_version) == (1, 1, 1)
    assert (accounting.tasks_issued, accounting.tasks_open) == (3, 1)
    assert accounting.lag_tokens == {1: 2 + 3, 0: 1}
    assert accounting.max_lag_trained == 1
    assert accounting.problems == []
    assert status["planned"] == 2
    assert status["samples"]["last_seq"] == 7


async def test_masked_tokens_have_no_lag(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        seqs = [await run.sample(0, index, spans=((0, 2), (3, 1))) for index in (0, 1)]
        await run.plan(4, [0], seqs, steps={0: 0, 3: 3}, oldest=2)
        accounting, _ = await audit(bus)
        await run.plan(5, [0], seqs, steps={0: 0, 3: 3}, oldest=None)
        twice, _ = await audit(bus)
    assert accounting.lag_tokens == {0: 2}
    assert twice.trained_twice == 2
    assert twice.max_lag_trained == 4


async def test_the_same_place_trained_twice_is_seen(open_bus: BusOpener) -> None:
    """Two different samples of one (task, index), in two plans."""
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        first = [await run.sample(0, index) for index in (0, 1)]
        again = [await run.sample(0, index, attempt="b") for index in (0, 1)]
        await run.plan(1, [0], first, steps={0: 0})
        await run.plan(2, [0], again, steps={0: 0})
        accounting, _ = await audit(bus)
    assert accounting.trained_twice == 2
    assert any("both trained" in problem for problem in accounting.problems)


async def test_trained_and_given_up_is_seen(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        seqs = [await run.sample(0, index) for index in (0, 1)]
        await run.plan(1, [0], seqs, steps={0: 0})
        await run.settle(0, seqs, "stale")
        accounting, _ = await audit(bus)
    assert accounting.trained_twice == 2


async def test_a_sample_behind_the_cursor_without_a_record_is_lost(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(2)
        trained = [await run.sample(0, index) for index in (0, 1)]
        forgotten = await run.sample(1, 0)
        waiting = await run.sample(1, 1)
        await run.plan(1, [0], trained, steps={0: 0})
        accounting, _ = await audit(bus, CheckpointCursor(forgotten, frozenset()))
        above, _ = await audit(bus, CheckpointCursor(0, frozenset({*trained, waiting})))
    assert (accounting.lost, accounting.buffered) == (1, 1)
    assert accounting.balance()
    assert (above.lost, above.buffered) == (1, 1)
    assert any(f"sample {waiting} " in problem for problem in above.problems)


async def test_a_hole_in_the_stream_is_seen(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(2)
        seqs = [await run.sample(task, index) for task in (0, 1) for index in (0, 1)]
        await run.plan(1, [0, 1], seqs, steps={0: 0})
        assert await bus.js.delete_msg(f"TM_{bus.run}_SAMPLES", seqs[1])
        accounting, _ = await audit(bus)
    assert accounting.lost == 2, "gone from the stream, and named by a plan"
    assert any("gone from the middle" in problem for problem in accounting.problems)


async def test_a_sample_that_its_group_was_trained_without_is_lost(open_bus: BusOpener) -> None:
    """In a plan of half a group, the other half was published, is no duplicate of anything, and will never be
    trained.
    """
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        seqs = [await run.sample(0, index) for index in (0, 1)]
        await run.plan(1, [0], seqs[:1], steps={0: 0}, size=1)
        accounting, _ = await audit(bus)
    assert (accounting.trained, accounting.lost, accounting.duplicates) == (1, 1, 0)
    assert accounting.balance()
    assert any("left out" in problem for problem in accounting.problems)


async def test_a_dead_task_may_be_trained_with_the_samples_it_had(open_bus: BusOpener) -> None:
    """The plan of the step has a group with a gap; a sample that was read later is a duplicate."""
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        first = await run.sample(0, 1)
        await bus.dead.store(Dead(task=run.tasks[0].id, reason="it fails", attempts=3, actor="a", prompt=""))
        await run.plan(1, [0], [first], steps={0: 0}, size=1)
        await run.sample(0, 0)
        accounting, _ = await audit(bus)
    assert (accounting.trained, accounting.lost, accounting.duplicates, accounting.problems) == (1, 0, 1, [])
    assert accounting.balance()


async def test_late_samples_of_a_task_given_up_have_its_drop_reason(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        early = await run.sample(0, 0)
        await run.settle(0, [early], "dead")
        late = await run.sample(0, 1)
        accounting, _ = await audit(bus, CheckpointCursor(late, frozenset()))
    assert accounting.dropped == {"dead": 2}
    assert (accounting.lost, accounting.balance()) == (0, True)


async def test_untrainable_samples_are_invalid_and_not_lost(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        await run.sample(0, 0, rollout_log_probs=np.array([0.5, -1, -1], np.float32))
        await run.sample(0, 0, attempt="b", spans=((77, 3),))
        await run.sample(0, 0, attempt="c", group_size=9)
        run.tasks.append(replace(run.tasks[0], id=4000))
        await run.sample(1, 0)
        await run.sample(0, 0, attempt="d", spans=((5, 3),), actor="seer")
        for status in Status:
            await run.sample(0, 0, attempt=f"e{status}", actor="liar", status=status, response_length=10**9)
            await run.sample(1, 0, attempt=f"f{status}", actor="liar", status=status)
        last = await run.sample(0, 1, tokens=np.array([1, 2, 3, 900, 5, 6], np.int32))
        accounting, _ = await audit(
            bus, CheckpointCursor(last, frozenset()), versions={0: 0, 5: 5}, after={5: (last,)}, vocab_size=100
        )
    assert (accounting.invalid, accounting.lost, accounting.balance()) == (12, 0, True)
    assert accounting.invalid_by_field == {
        "rollout_log_probs": 1,
        "version": 2,
        "group_size": 1,
        "task": 4,
        "tokens": 1,
        "response_length": 3,
    }
    assert accounting.invalid_by_actor == {"_": 5, "seer": 1, "liar": 6}
    assert accounting.dropped == {"failed": 2, "aborted": 2}
    assert (accounting.tokens_generated, accounting.tokens_trained, accounting.aborted) == (0, 0, 0), (
        "they name any number of tokens"
    )


async def test_every_trimmed_sequence_is_accounted_for(open_bus: BusOpener) -> None:
    """The oldest samples are gone from the stream: PLAN contains them, and the cursor is past them. Otherwise they are
    lost.
    """
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(3)
        trained = [await run.sample(0, index) for index in (0, 1)]
        again = await run.sample(0, 1, attempt="b")
        dropped = [await run.sample(1, index) for index in (0, 1)]
        kept = [await run.sample(2, index) for index in (0, 1)]
        await run.plan(3, [0], trained, steps={0: 1})
        await run.settle(1, dropped, "stale")
        await run.plan(4, [2], kept, steps={0: 3})
        await bus.samples.trim(kept[0])
        accounting, _ = await audit(bus, CheckpointCursor(kept[1], frozenset(), 4))
        forgotten, _ = await audit(bus, CheckpointCursor(again - 1, frozenset(), 0))
        nothing, _ = await audit(bus, None)
        await run.plan(5, [0], trained, steps={0: 1})
        twice, _ = await audit(bus, CheckpointCursor(kept[1], frozenset(), 4))
    assert (
        accounting.trimmed,
        accounting.published,
        accounting.trained,
        accounting.lost,
        accounting.trained_twice,
    ) == (5, 6, 4, 0, 0)
    assert accounting.dropped == {"stale": 2}
    assert accounting.max_lag_trained == 1
    assert (accounting.balance(), accounting.problems) == (True, [])
    assert forgotten.lost == nothing.lost == 1
    assert twice.trained_twice == 2


async def test_invalid_samples_that_were_trimmed_are_those_that_the_learner_counted(open_bus: BusOpener) -> None:
    """Three were invalid before the checkpoint, of which one is still in the stream; a fourth came after it."""
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        for beyond in (7, 8):
            await run.sample(0, beyond)
        trained = [await run.sample(0, index) for index in (0, 1)]
        third = await run.sample(0, 9)
        await run.sample(0, 10)
        await run.plan(1, [0], trained, steps={0: 0})
        cursor = CheckpointCursor(third, frozenset(), 1, {"index": 3})
        whole, _ = await audit(bus, cursor)
        (actor,) = whole.invalid_by_actor
        await bus.samples.trim(trained[0])
        accounting, _ = await audit(bus, replace(cursor, invalid_by_actor={actor: 3}))
    for one in (whole, accounting):
        assert (one.published, one.invalid, one.invalid_by_field, one.balance()) == (6, 4, {"index": 4}, True), one
        assert one.invalid_by_actor == {actor: 4}, one
    assert accounting.trimmed == 2 and accounting.lost == 0


async def test_a_trained_sample_that_the_cursor_would_give_again_is_seen(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        seqs = [await run.sample(0, index) for index in (0, 1)]
        await run.plan(1, [0], seqs, steps={0: 0})
        accounting, _ = await audit(bus, CheckpointCursor(seqs[0], frozenset(), 1))
        later, _ = await audit(bus, CheckpointCursor(0, frozenset(), 0))
    assert accounting.trained_twice == 1
    assert later.trained_twice == 0, "a plan behind the checkpoint is not in the model yet"


async def test_a_plan_that_contradicts_stream_or_registry_is_reported(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin(1)
        seqs = [await run.sample(0, index, spans=((3, 3),)) for index in (0, 1)]
        await run.plan(5, [0], seqs[::-1], steps={3: 4})
        accounting, _ = await audit(bus, versions={3: 2})
    assert any("the registry has 2" in problem for problem in accounting.problems)
    assert sum("its plan lists it as" in problem for problem in accounting.problems) == 2


def observed(**changes: Any) -> Observed:
    values: dict[str, Any] = {
        "seconds": 1,
        "seconds_to_reward": None,
        "loads": {},
        "aborted_by_pushes": 0,
    }
    return Observed(**({**values, "restarts": {}} | changes))


def result(accounting: RunAccounting, rewards: list[float]) -> dict[str, object]:
    lines = [{"step": place + 1, "data/reward_mean": reward} for place, reward in enumerate(rewards)]
    return summarize(accounting, lines, [], observed(loads={"engine.0": {}}), run="r", max_lag=1)


@pytest.mark.parametrize(
    ("accounting", "rewards", "complaint"),
    [
        (RunAccounting(lost=1), [1.0], "samples_lost"),
        (RunAccounting(trained_twice=1), [1.0], "samples_trained_twice"),
        (RunAccounting(max_lag_trained=2), [1.0], "max_lag_trained"),
        (RunAccounting(published=1), [1.0], "balance"),
        (RunAccounting(problems=["step 3 was planned twice"]), [1.0], "step 3 was planned twice"),
        (RunAccounting(), [1.0] * 20 + [0.2] * 10, "reward_last"),
        (RunAccounting(), [], "reward_last"),
    ],
)
def test_broken_promises_are_named(accounting: RunAccounting, rewards: list[float], complaint: str) -> None:
    (broken,) = broken_promises(result(accounting, rewards), require_reward=0.9)
    assert complaint in broken


def test_skipped_minibatches_are_counted_and_break_no_promise() -> None:
    lines = [
        {"step": 1, "data/reward_mean": 1.0},
        *({"step": step, "train/skipped_minibatches": 2.0} for step in (2, 3)),
    ]
    summary = summarize(RunAccounting(), lines, [], observed(), run="r", max_lag=1)
    assert (summary["minibatches_skipped"], summary["reward_last"]) == (4, 1.0)
    assert broken_promises(summary, require_reward=0.9) == []


def test_the_reward_counts_at_the_end_and_not_at_its_peak() -> None:
    assert broken_promises(result(RunAccounting(), [0.1] * 20 + [0.95] * 10), require_reward=0.9) == []


def test_requests_that_a_push_aborted_break_a_promise() -> None:
    loads = {"actor.0": {"waiting_share": 0.5}, "feeder.feeder": {"bad_rows": 25.0}}
    summary = summarize(RunAccounting(), [], [], observed(loads=loads, aborted_by_pushes=1), run="r", max_lag=1)
    assert summary["requests_aborted_by_pushes"] == 1
    assert summary["actor_wait_share"] == 0.5
    assert summary["bad_rows"] == 25
    assert any("aborted" in text for text in broken_promises(summary, require_reward=-1))


@pytest.mark.parametrize("number", [-1.0, 1e13, 1e308, -1e308])
def test_rows_of_liars_do_not_enter_the_summary(number: float) -> None:
    names = ("waiting_share", "tokens_generated", "tokens_trained", "bad_rows", "requests_aborted_by_pushes")
    liar = dict.fromkeys(names, number)
    watch = RunWatch(None, steps=1)  # type: ignore[arg-type]  # rows alone
    row = LiveRow(role="engine", id="0", host="h", pid=1, phase="serving", load=liar)
    watch.note_rows(
        [(replace(row, role=role, id=id), 0.0) for role, id in (("actor", "a"), ("engine", "e"), ("feeder", "feeder"))]
    )
    loads = watch.loads | {"actor.1": {"waiting_share": 0.5}}
    aborted = int(sum(watch.aborted_by_pushes.values()))
    summary = summarize(RunAccounting(), [], [], observed(loads=loads, aborted_by_pushes=aborted), run="r", max_lag=1)
    assert watch.rate_generated == 0.0
    assert (summary["actor_wait_share"], summary["bad_rows"], summary["requests_aborted_by_pushes"]) == (0.5, 0, 0)
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (0, 0)


def test_means_over_pushes_count_each_push_once() -> None:
    def line(step: int, version: int, seconds: float, stall: float) -> dict[str, float]:
        return {"step": step, "push/version": version, "push/seconds": seconds, "push/stall_seconds_max": stall}

    lines = [line(1, 1, 2, 0.2), line(2, 1, 2, 0.2), line(3, 3, 4, 0.6), {"step": 4}]
    summary = summarize(RunAccounting(), lines, [], observed(), run="r", max_lag=1)
    assert summary["push_seconds_mean"] == 3
    assert summary["stall_seconds_mean"] == pytest.approx(0.4)


def test_steps_are_counted_to_the_last_one_where_the_log_begins_later(tmp_path: Path) -> None:
    lines = [{"step": step, "data/reward_mean": step / 240} for step in range(119, 241)]
    accounting = RunAccounting(removed_steps=118)
    summary = summarize(accounting, lines, [], None, run="r", max_lag=1)
    assert (summary["steps"], summary["reward_first"]) == (240, None), "the first reward is in no line"
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "data/reward_mean": 0.1}\n{"step": 2}\n{"step": 2, "a": 1}\n{"step": 119}\n[]\n{"st')
    earlier = lines_of_removed(file, 118)
    assert earlier == [{"step": 1, "data/reward_mean": 0.1}, {"step": 2, "a": 1}]
    summary = summarize(accounting, [*earlier, *lines], [], None, run="r", max_lag=1)
    assert (summary["steps"], summary["reward_first"]) == (240, 0.1)
    assert lines_of_removed(file, 0) == [], "of another run"


def test_times_of_an_earlier_start_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert seconds_of_steps(file) == {}
    file.write_text(
        '{"step": 1, "seconds": 2.5}\n{"step": 2, "seconds": 3.5}\n{"step": 2, "seconds": 9}\n{"step": 3, "sec'
    )
    assert seconds_of_steps(file) == {1: 2.5, 2: 3.5}


def test_a_sample_survives_json() -> None:
    made: Sample = data_kit.sample(data_kit.task(3), 1, spans=((4, 2), (5, 1)))
    shown = as_map(9, made)
    assert shown["spans"] == [[4, 2], [5, 1]]
    assert len(shown["rollout_log_probs"]) == shown["response_length"] == 3


async def test_manifests_that_name_many_sequences_cost_the_audit_nothing(open_bus: BusOpener) -> None:
    """29 of them, 2,999 sequences each, once made the accounting of a run take five minutes: 87,000 messages were
    fetched.
    """
    async with open_bus() as bus:
        run = Run(bus)
        await run.begin()
        first = [await run.sample(0, 0), await run.sample(0, 1)]
        for number in range(29):
            manifest = codec.describe(b"x" * 1000, range(1, 3000))
            headers = {"Nats-Msg-Id": f"1.0.hostile-{number}", "Tm-Parts": "2999"}
            await bus.js.publish(f"tm.{bus.run}.sample.train.0.x.parts", manifest, headers=headers)
        await run.plan(1, [0], first, steps={0: 0})
        fetched: list[object] = []

        async def note(message: Msg) -> None:
            if b"next_by_subj" not in message.data:
                fetched.append(message.data)

        sub = await bus.nc.subscribe(f"$JS.API.STREAM.MSG.GET.TM_{bus.run}_SAMPLES", cb=note)
        seen: list[tuple[int, int]] = []
        accounting, _ = await audit(bus, progress=lambda done, total: seen.append((done, total)))
        await sub.unsubscribe()
        assert fetched == []
        assert (accounting.published, accounting.trained, accounting.invalid, accounting.balance()) == (31, 2, 29, True)
        assert seen == [(done, 31) for done in range(1, 32)]


async def test_the_progress_of_the_audit_is_shown(open_bus: BusOpener) -> None:
    said: list[str] = []
    async with open_bus() as bus:
        async with audit_shown(bus, said.append, report_every_s=0, show_every_s=0) as note:
            note(34_000, 86_402)
            row = await row_until(bus.rows("live"), "up.up", lambda row: "SAMPLES" in row["waits_for"])
            assert (row["phase"], row["waits_for"]) == ("auditing", "34,000 of 86,402 messages of SAMPLES read")
        assert said == ["auditing: 34,000 of 86,402 messages of SAMPLES read"]
        assert await bus.rows("live").get("up.up") is None
