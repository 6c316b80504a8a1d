"""Samples of several sequences on a real bus: issued, published, planned, made into batches and settled exactly once,
over a restart.
"""

import numpy as np

from tests.bus_fixtures import BusOpener
from tests.bus_kit import take
from tests.data_kit import rules, sample, task
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.codec import check_sample, encode_task
from tidemill.bus.wire.messages import Cursor, Done, Plan, Sample, SequenceSize, Task, Turns
from tidemill.bus.wire.task_settings import Budget
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import index_of


def episode(of: Task, index: int, sequences: int, *, attempt: str = "a", filler: int = 0) -> Sample:
    """Return an episode of one turn of two tokens in each sequence, with contexts that grow by ``filler`` tokens."""
    contexts = [
        np.concatenate([of.prompt_tokens, np.full(filler, 9, np.int32), np.full(number, 8, np.int32)])
        for number in range(sequences)
    ]
    turns = [np.array([10 * of.id + index, 20 + number], np.int32) for number in range(sequences)]
    made = sample(
        of,
        index,
        attempt=attempt,
        tokens=np.concatenate([part for pair in zip(contexts, turns, strict=True) for part in pair]).astype(np.int32),
        response_length=2 * sequences,
        rollout_log_probs=np.full(2 * sequences, -0.5, np.float32),
        loss_mask=np.ones(2 * sequences, np.uint8),
        spans=[(0, 2)] * sequences,
        sequences=tuple(SequenceSize(len(context) + 2, 2) for context in contexts),
        turns=Turns(at=np.arange(0, 2 * sequences, 2, dtype=np.int32), tokens=np.full(sequences, 2, np.int32)),
        rollout="calc",
    )
    check_sample(made)
    return made


async def read(bus: Bus, rule: DataRules, count: int) -> tuple[DataSource, dict[int, Sample]]:
    """Return a DataSource that has read the tasks and the first ``count`` samples of the stream, and those samples by
    sequence.
    """
    source = DataSource(rule, epoch=1)
    source.version(0, 0)
    source.published(0, 0)
    async for one in bus.tasks.scan():
        source.issued(one, 0.0)
    found: dict[int, Sample] = {}
    reading = bus.samples.read(Cursor(created=(await bus.samples.info()).created, floor=0))
    for received in await take(reading, count):
        if isinstance(received.sample, Sample):
            source.add(index_of(received.seq, received.sample, received.actor), 0.0)
            found[received.seq] = received.sample
        else:
            source.refuse(received.seq, received.sample, received.actor)
    await reading.aclose()  # type: ignore[attr-defined]
    return source, found


def trained(batches: tuple[StepBatch, ...]) -> list[int]:
    """Return the ids of all trainable tokens, sorted."""
    return sorted(int(id) for batch in batches for row in batch.micro_batches for id in row.targets_T[row.loss_mask_T])


async def test_episodes_are_trained_and_settled_once(open_bus: BusOpener) -> None:
    """One sample is in parts, one is a duplicate, one contradicts its task; the second learner reads all of it again
    from the log.
    """
    async with open_bus() as bus:
        rule = rules(run=bus.run, groups_per_step=2, data_parallel=2, max_tokens_per_micro_batch=16)
        await bus.tasks.fence(1)
        await bus.plans.fence(1)
        asked = [task(0, run=bus.run, rollout="calc", budget=Budget(tokens=64, total_tokens=400_000)) for _ in range(2)]
        tasks = [await bus.tasks.fetch(await bus.tasks.issue(one)) for one in asked]
        published = [
            episode(tasks[0], 0, 1),
            episode(tasks[0], 1, 3),
            episode(tasks[0], 1, 2, attempt="late"),
            episode(tasks[1], 0, 2, filler=150_000),
            episode(tasks[1], 1, 3, filler=150_000, attempt="long"),
            episode(tasks[1], 1, 2),
        ]
        for one in published:
            await bus.samples.publish(one)
        source, samples = await read(bus, rule, len(published))
        plan = source.plan(0.0)
        assert isinstance(plan, Plan)
        assert plan.rows is not None and plan.rows.tolist() == [1, 3, 2, 2]
        place = await bus.plans.append(plan)
        batches = build_batches(plan, [samples[int(seq)] for seq in plan.seqs], token_limits=source.token_limits(plan))
        wanted = [id for one in (published[0], published[1], published[3], published[5]) for id in _sampled(one)]
        assert trained(batches) == sorted(wanted)
        assert {batch.num_tokens for batch in batches} == {len(wanted)}
        source.apply(plan, place)
        await bus.plans.append(Done(epoch=1, step=1, metrics={}))
        accounting = source.accounting()
        assert (accounting.published, accounting.trained, accounting.duplicate, accounting.invalid) == (
            6,
            4,
            1,
            {"length": 1},
        )
        assert accounting.buffered == 0

        again, samples = await read(bus, rule, len(published))
        (recorded,) = [(seq, record) async for seq, record in bus.plans.scan() if isinstance(record, Plan)]
        assert again.lacks(recorded[1]) == []
        limits = again.token_limits(recorded[1])
        again.apply(recorded[1], recorded[0])
        repeated = build_batches(recorded[1], [samples[int(seq)] for seq in recorded[1].seqs], token_limits=limits)
        assert [batch.max_new_tokens for batch in repeated] == [64, 64]
        for batch, other in zip(batches, repeated, strict=True):
            for row, same in zip(batch.micro_batches, other.micro_batches, strict=True):
                for name in ("tokens_T", "sample_T", "sequence_T", "turn_T", "lag_T", "rollout_log_probs_T"):
                    assert getattr(row, name).tobytes() == getattr(same, name).tobytes(), name
        assert (again.chain, again.cursor(), again.accounting()) == (source.chain, source.cursor(), source.accounting())


def _sampled(one: Sample) -> list[int]:
    ids: list[int] = []
    end = 0
    for length, response in one.sequences:
        end += length
        ids += one.tokens[end - response : end].tolist()
    return ids


async def test_a_task_on_the_subject_of_another_rollout_is_passed_over(open_bus: BusOpener) -> None:
    """An actor that leases it would answer it in another way than its task asks for."""
    async with open_bus() as bus:
        await bus.tasks.fence(1)
        sound = await bus.tasks.issue(task(0, run=bus.run, rollout="calc"))
        data = encode_task(task(0, run=bus.run, rollout="calc"))
        for subject in ("train", "train-other", "eval-calc"):
            await bus.js.publish(f"tm.{bus.run}.task.{subject}", data, headers={"Tm-Epoch": "1"})
        assert [one.id async for one in bus.tasks.scan()] == [sound]
        assert "kind, rollout: want that of the subject" in str(bus.refusals)
