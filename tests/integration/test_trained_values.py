"""Values of trained tokens from the loss of real Megatron to the stream TRAINED of a real nats-server."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithm_settings import algorithm_of
from tests.bus_fixtures import BusOpener
from tests.bus_kit import Proxy, make_episode
from tests.debug_kit import VOCAB
from tests.integration.megatron_ranks import OPTIMIZER
from tests.learner_steps import make_batches, make_samples, with_long_prompts
from tests.refusals import refusal
from tests.waits import until
from tidemill.bus.errors import WireError
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.trained_values import TrainedStep, encode_trained
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.debug.collector import Collector
from tidemill.learner.debug.train_file import read_train
from tidemill.learner.feed import trained_records
from tidemill.learner.feed.trained_records import MOST_WAITING, TrainedRecords
from tidemill.learner.layout import parallel
from tidemill.learner.settings.config import RecordConfig
from tidemill.learner.trainer.trainer import NO_RECORD, Trainer

ALL = RecordConfig(trained=1.0)


@pytest.fixture
def trainer(here: parallel.Parallel, model_dir: Path) -> Any:
    def build(*, record: RecordConfig = ALL, collector: Collector | None = None, **algorithm: Any) -> Trainer:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=400)
        return Trainer(policy, optimizer, algorithm_of(**algorithm), max_lag=2, collector=collector, record=record)

    return build


def columns_by_sequence(step: TrainedStep) -> dict[int, dict[str, Any]]:
    """Return the values of each sequence of the step, in the order of its tokens."""
    owners = np.unique(step.owners_R)
    sequences_M = np.arange(max(owners) + 1, dtype=np.int32)
    named = step.named(sequences_M, np.zeros(len(sequences_M), np.int32), np.stack([sequences_M] * 3, 1).astype(int))
    return {
        values.seq: {
            name: getattr(values, name) for name in ("places", "log_probs", "entropies", "advantages", "weights")
        }
        for values in named.by_sample()
    }


def test_the_values_are_those_that_the_loss_saw(trainer: Any, here: parallel.Parallel, tmp_path: Path) -> None:
    """The collector of ``debug.save_train`` copies the same step by itself, whole responses at a time."""
    samples = make_samples(vocab=VOCAB)
    batch = make_batches(samples, max_tokens=60, minibatches=2)[0]
    recorder = trainer(correction="decoupled", collector=Collector(str(tmp_path / "t_{step}_{rank}.safetensors"), here))
    recorder.train(batch)
    dump = read_train(tmp_path / "t_3_0.safetensors")
    values = columns_by_sequence(recorder.values)
    assert sorted(values) == list(range(len(samples)))
    columns = {
        "log_probs": "current_log_probs",
        "entropies": "current_entropy",
        "advantages": "advantages",
        "weights": "tis_importance_weights",
    }
    for step in dump.steps:
        data = step.debug_data
        for place, sequence in enumerate(data["sequence_ids"].tolist()):
            prompt = len(samples[sequence].tokens) - samples[sequence].response_length
            assert values[sequence]["places"].tolist() == list(range(prompt, len(samples[sequence].tokens)))
            for ours, theirs in columns.items():
                np.testing.assert_array_equal(values[sequence][ours], data[theirs][place], err_msg=ours)


def test_recording_changes_no_metric_and_no_weight_and_shared_prompts_keep_their_places(trainer: Any) -> None:
    samples = with_long_prompts(make_samples(vocab=VOCAB), vocab=VOCAB)
    batch = make_batches(samples, max_tokens=400)[0]
    plain, recorder = trainer(record=NO_RECORD), trainer()
    metrics = [
        {name: value for name, value in one.train(batch).items() if "second" not in name} for one in (plain, recorder)
    ]
    assert metrics[0] == metrics[1] and metrics[0]["train/shared_tokens"] > 0
    assert plain.policy.digest() == recorder.policy.digest() and plain.values is None
    before = trainer(record=NO_RECORD)
    of_rows = before.log_probs(batch)
    want: dict[int, list[float]] = {}
    for row, values_T in zip(batch.micro_batches, of_rows, strict=True):
        for sequence in np.unique(row.sequence_T[row.sequence_T >= 0]).tolist():
            here_T = torch.from_numpy((row.sequence_T == sequence) & row.loss_mask_T)
            want[sequence] = values_T[here_T].tolist()
    for sequence, values in columns_by_sequence(recorder.values).items():
        prompt = len(samples[sequence].tokens) - samples[sequence].response_length
        assert values["places"].tolist() == list(range(prompt, len(samples[sequence].tokens)))
        np.testing.assert_allclose(values["log_probs"], want[sequence], atol=1e-5)


def test_a_token_outside_of_the_bounds_has_weight_0(trainer: Any) -> None:
    batch = make_batches(make_samples(vocab=VOCAB), max_tokens=60)[0]
    weight = {"low": 0.9, "high": 1.1, "action": "mask", "level": "token"}
    # With an entropy bonus no sample is without gradient, and left out.
    recorder = trainer(correction="icepop", weight=weight, entropy={"coef": 0.01})
    metrics = recorder.train(batch)
    weights = np.concatenate([values["weights"] for values in columns_by_sequence(recorder.values).values()])
    outside = metrics["offpolicy/tis_clipped_high"] + metrics["offpolicy/tis_clipped_low"]
    assert len(weights) == metrics["train/tokens"] and outside > 0.1
    assert (weights == 0).mean() == pytest.approx(outside)


def message(step: int, rank: int = 0, tokens: int = 4, epoch: int = 1) -> TrainedStep:
    values = np.arange(tokens, dtype=np.float32)
    one = np.zeros(1, np.int32)
    return TrainedStep(
        epoch=epoch,
        step=step,
        rank=rank,
        seqs=np.array([100 * step + rank]),
        tasks=np.array([step]),
        indexes=np.array([rank]),
        owners_R=one,
        places_R=one,
        lengths_R=np.array([tokens], np.int32),
        log_probs=-values,
        entropies=values,
        advantages=np.array([epoch], np.float32),
        weights=values,
    )


async def test_a_step_is_read_back_from_all_ranks_and_the_newest_start_counts(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        for written in (message(3), message(3, rank=1), message(4), message(3, epoch=2)):
            await bus.trained.store(written)
        found = await bus.trained.of_step(3)
        assert [(values.seq, values.epoch, values.rank) for values in found] == [(300, 2, 0), (301, 1, 1)]
        assert found[0].advantages.tolist() == [2.0] * 4
        one = await bus.trained.of_sample(3, 301, 1)
        assert one is not None and one.log_probs.tolist() == [0, -1, -2, -3]
        assert await bus.trained.of_sample(3, 301, 0) is await bus.trained.of_sample(3, 999, 1) is None
        assert await bus.trained.of_step(5) == []


async def test_beyond_its_bound_the_stream_loses_the_oldest_steps(open_bus: BusOpener) -> None:
    async with open_bus(trained_max_bytes=20_000) as bus:
        for step in range(1, 11):
            await bus.trained.store(message(step, tokens=400))
        assert await bus.trained.of_step(1) == [] and len(await bus.trained.of_step(10)) == 1
        state = await bus.jet.state(subjects.stream(bus.run, subjects.TRAINED))
        assert state.bytes <= 20_000 and state.messages >= 3


async def test_what_is_stored_there_by_others_is_passed_over(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.js.publish(subjects.trained(bus.run, 3, 0), b"\x81\xa1x\x01")
        assert await bus.trained.of_step(3) == []
        assert bus.jet.refusals.counts[subjects.TRAINED] == 1


async def test_a_run_of_an_older_release_has_none(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await bus.jet.call(f"STREAM.DELETE.{subjects.stream(bus.run, subjects.TRAINED)}")
        assert await bus.trained.of_step(3) == []


class Planned:
    """A plan of one sample of two sequences, as much as the records read of it."""

    def __init__(self, step: int) -> None:
        self.step, self.seqs = step, np.array([901])


def of_rank(step: int, **changes: Any) -> bytes:
    written = message(step, **changes)
    none = np.zeros(0, np.int64)
    return encode_trained(
        TrainedStep(
            **{name: getattr(written, name) for name in written.__slots__}
            | {"seqs": none, "tasks": none, "indexes": none, "places_R": np.array([4], np.int32)}
        )
    )


def records_of(bus: Bus, *steps: int, data_parallel: int = 1) -> TrainedRecords:
    records = TrainedRecords(bus, epoch=6, data_parallel=data_parallel, on=True)
    for step in steps:
        records.planned(Planned(step), [make_episode()])  # type: ignore[arg-type]
    return records


async def test_the_feeder_names_samples_and_drops_what_is_wrong(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        records = records_of(bus, 3)
        for rank, data in ((0, b"no message"), (0, of_rank(2)), (1, of_rank(3)), (0, of_rank(3))):
            records.put(rank, data)
        storing = asyncio.create_task(records.run())
        await until(lambda: bus.trained.of_step(3))
        storing.cancel()
        values = (await bus.trained.of_step(3))[0]
        assert (values.seq, values.epoch, values.places.tolist()) == (901, 6, [0, 1, 2, 3])
        assert records.metrics == {"data/trained_dropped": 3.0}


async def test_a_bus_that_does_not_answer_costs_a_bounded_queue_and_no_wait(open_bus: BusOpener) -> None:
    """Steps go on while one message waits for its answer: beyond the queue's bound the oldest is dropped."""
    async with (
        open_bus() as bus,
        Proxy(bus.connected_url) as proxy,
        connect(proxy.url, bus.run, bus.config, name="feeder") as behind,
    ):
        records = records_of(behind, 1)
        await behind.trained.store(message(9))
        proxy.deaf = True
        storing = asyncio.create_task(records.run())
        records.put(0, of_rank(1))
        await until(lambda: proxy.swallowed)
        for _ in range(3 * MOST_WAITING):
            records.put(0, of_rank(1))
        assert len(records.waiting) == MOST_WAITING and records.dropped >= 2 * MOST_WAITING
        storing.cancel()


async def test_all_ranks_of_a_step_send_at_once(open_bus: BusOpener) -> None:
    ranks = 3 * MOST_WAITING
    async with open_bus() as bus:
        records = records_of(bus, 3, data_parallel=ranks)
        for rank in range(ranks):
            records.put(rank, of_rank(3, rank=rank))
        storing = asyncio.create_task(records.run())
        await until(lambda: bus.jet.last(bus.trained._stream, subjects.trained(bus.run, 3, ranks - 1)))
        storing.cancel()
        assert records.dropped == 0 and len(await bus.trained.of_step(3)) == ranks


async def test_messages_that_wait_are_bounded_in_bytes(open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bus() as bus:
        records, message = records_of(bus, 1, data_parallel=1000), of_rank(1)
        monkeypatch.setattr(trained_records, "MOST_BYTES", 4 * len(message))
        for _ in range(10):
            records.put(0, message)
        assert (len(records.waiting), records.dropped) == (4, 6)
        storing = asyncio.create_task(records.run())
        await until(lambda: not records.waiting)
        records.put(0, message)
        assert records.dropped == 6, "what was stored no longer counts"
        storing.cancel()


async def test_a_stream_without_room_is_a_drop_with_its_reason(
    open_bus: BusOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus() as bus:
        records, stream = records_of(bus, 1), subjects.stream(bus.run, subjects.TRAINED)
        config = (await bus.jet.call(f"STREAM.INFO.{stream}"))["config"]
        await bus.jet.call(f"STREAM.UPDATE.{stream}", {**config, "discard": "new", "max_bytes": 64})
        storing = asyncio.create_task(records.run())
        records.put(0, of_rank(1))
        records.put(0, of_rank(1))
        await until(lambda: records.dropped == 2)
        assert "maximum bytes exceeded" in caplog.text and not storing.done()
        storing.cancel()


async def test_a_message_larger_than_the_server_takes_names_the_setting(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        with refusal(WireError, field="learner.record.step_bytes"):
            await bus.trained.store(message(1, tokens=1_000_000))
