"""`tidemill tail`, `show`, `stats` and `replay` on a real nats-server, with samples of which every number is known."""

import argparse
import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from tests import data_kit
from tests.actor_kit import model_dir
from tests.bus_fixtures import BusOpener
from tests.bus_kit import take
from tests.refusals import refusal
from tidemill.actors.text.text import Text
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import ConfigMismatch
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect, find_run
from tidemill.bus.streams.readers import History
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Done, Plan, Sample, Settle, Status, Task
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.replay import replay_file, replay_run
from tidemill.launch.cli.show import Vocabulary, shade, shaded, show_sample, tokens_of
from tidemill.launch.cli.tail import show_tail, tail
from tidemill.launch.samples.filters import Filter, filter_of
from tidemill.launch.samples.recording import Recording
from tidemill.launch.samples.search import DIFFERENCE, SampleSearch, history_of
from tidemill.weightstore.store.registry import VersionRegistry


def arguments(*words: str) -> argparse.Namespace:
    return cli.command_parser().parse_args([*words])


class Scene:
    """A run in four acts: versions 0 (step 0), 1 (step 1) and 2 (step 3); three tasks of two samples each, made when
    each came.

    #1, #2  task 2: version 0, reward 0 and 1, by w1
    #3, #4  task 3: version 1, reward 0 and 1, by w.2, truncated
    #5, #6  task 4: versions 0 to 2, reward 0 and 1, by w1: lag 3 when they came
    """

    def __init__(self, bus: Bus) -> None:
        self.bus, self.registry = bus, VersionRegistry(bus)
        self.tasks: list[Task] = []
        self.samples: list[Sample] = []
        self.url = bus.nc.connected_url.geturl()

    async def begin(self) -> "Scene":
        await self.bus.tasks.fence(1)
        await self.bus.plans.fence(1)
        await self.registry.publish_initial("", 1)
        return self

    async def play(self) -> "Scene":
        await self.begin()
        await self.act(((0, 3),), actor="w1", engine="http://e1:1")
        await self.version(1)
        await self.act(((1, 4),), actor="w.2", engine="http://e2:1", status=Status.TRUNCATED)
        await self.version(3)
        await self.act(((0, 2), (2, 3)), actor="w1", engine="http://e1:1", response="tide and mill")
        return self

    async def version(self, step: int) -> None:
        await self.registry.publish(await self.registry.reserve(step, 1))

    async def act(self, spans: tuple[tuple[int, int], ...], **changes: Any) -> None:
        task = replace(data_kit.task(len(self.tasks) + 1), run=self.bus.run)
        task = replace(task, id=await self.bus.tasks.issue(task))
        self.tasks.append(task)
        for index in (0, 1):
            await self.publish(data_kit.sample(task, index, spans, **changes))

    async def publish(self, sample: Sample) -> int:
        self.samples.append(sample)
        return await self.bus.samples.publish(sample)

    async def found(self, *words: str) -> list[int]:
        """Return the sequences that ``tidemill tail`` shows with these arguments."""
        args = arguments("tail", *words)
        return [found.line.seq async for found in tail(SampleSearch(self.bus, filter_of(args)), args)]

    def plan(self, seqs: list[int], task: Task, **changes: Any) -> Plan:
        count = len(seqs)
        values: dict[str, Any] = {
            "epoch": 1,
            "step": 4,
            "tasks": np.array([task.id], np.int64),
            "seqs": np.array(seqs, np.int64),
            "group_sizes": np.array([count], np.int32),
            "ranks": np.arange(count, dtype=np.int32),
            "micro_batches": np.arange(count, dtype=np.int32) + 5,
            "version_steps": {0: 0, 2: 3},
            "oldest_step": 1,
            "data_parallel": 2,
            "num_micro_batches": 8,
            "config_digest": "",
            "chain": "",
        }
        return Plan(**(values | changes))


FILTERS = {
    "--reward <0.5": [1, 3, 5, 7],
    "--lag >=1": [5, 6],
    "--lag 0": [1, 2, 3, 4],
    "--tokens 4..5": [3, 4, 5, 6],
    "--status truncated": [3, 4],
    "--status truncated --status completed": [1, 2, 3, 4, 5, 6, 7],
    "--kind eval": [7],
    "--task 3": [3, 4],
    "--task 3.1": [4],
    "--actor w.2": [3, 4],
    "--engine http://e1:1 --reward 1": [2, 6],
    "--text and.mill": [5, 6],
    "--text prompt --reward 1": [2, 4, 6],
    "--text prompt.2": [3, 4],
    "--last 2 --reward 0": [5, 7],
    "--last 0": [],
    "--since #3 --last 1 --reward 0..": [7],
    "--since #3 --reward 0": [3, 5, 7],
    "--since 1h --task 2": [1, 2],
    "--since 2001-01-01T00:00 --task 2": [1, 2],
    "--since 2999-01-01": [],
    "--since-version 1 --kind train": [3, 4, 5, 6],
    "--since-version 3": [],
}


async def test_every_filter_and_every_beginning(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        await scene.publish(
            data_kit.sample(replace(data_kit.eval_task(99), run=bus.run, prompt="?"), 0, (), actor="w1", response="")
        )
        await scene.registry.set_snapshot(1, "somewhere")  # its row is younger now than its samples
        assert {words: await scene.found(*words.split()) for words in FILTERS} == FILTERS
        third = await History(bus.jet).payload(3)
        stamp = datetime.fromtimestamp(third.stored_s - 1e-5).isoformat()
        assert await scene.found("--since", stamp, "--kind", "train") == [3, 4, 5, 6]
        with refusal(ValueError, place="--since"):
            await scene.found("--since", "yesterday")


async def test_headers_of_another_program_are_not_needed(open_bus: BusOpener) -> None:
    """Only the message id is needed: everything that the headers lack is in the payload."""
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        sample = replace(scene.samples[1], attempt="other", reward={"form": 0.25, "score": 0.5})
        headers = {subjects.MESSAGE_ID: sample.message_id}
        subject = subjects.sample(bus.run, "train", 0, "w1")
        await bus.samples.publish_bytes(encode_sample(sample), subject, headers, task=sample.task)
        assert await scene.found("--reward", "0.5") == [7]
        assert await scene.found("--reward", "0.6") == []
        assert await scene.found("--task", "2", "--tokens", "3") == [1, 2, 7]


async def test_a_sample_under_an_id_of_another_form_is_replayed(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        subject = subjects.sample(bus.run, "train", 0, "w1")
        await bus.js.publish(subject, encode_sample(scene.samples[1]), headers={subjects.MESSAGE_ID: "of-theirs"})
        assert await replay_run(bus, arguments("replay", "--to-bus", scene.url, "--to-run", "copy", "--last", "1")) == 0
        async with connect(scene.url, "copy", name="copy") as other:
            (copied,) = [stored async for stored in History(other.jet).payloads(1, 99)]
        assert copied.headers[subjects.MESSAGE_ID] == "of-theirs"


async def test_following_shows_the_new_samples_that_match(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        args = arguments("tail", "--last", "1", "--reward", "1", "--lag", "..3", "--follow")
        following = tail(SampleSearch(bus, filter_of(args)), args)
        assert [found.line.seq for found in await take(following, 1)] == [6]
        await scene.act(((2, 1),))
        await scene.version(9)
        await scene.act(((2, 1),))  # lag 6
        await scene.act(((3, 1),))
        assert [(found.line.seq, found.line.lag) for found in await take(following, 2)] == [(8, 0), (12, 0)]
        await following.aclose()  # type: ignore[attr-defined]


async def test_a_search_is_bounded_and_reports_it(open_bus: BusOpener, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        assert await scene.found("--actor", "w.2", "--search", "3") == [4]
    assert "1 of 10 found among the newest 3 messages" in capsys.readouterr().err


async def test_a_search_backwards_misses_nothing(open_bus: BusOpener) -> None:
    """The search reads one stretch of the stream after the other: at first 256 messages, then more."""
    async with open_bus() as bus:
        scene = await Scene(bus).begin()
        task = replace(data_kit.task(1, group_size=900), run=bus.run)
        await asyncio.gather(
            *[bus.samples.publish(data_kit.sample(task, index, actor=f"w{index % 10}")) for index in range(900)]
        )
        newest, last_seq, looked = await SampleSearch(bus, Filter(actor="w0")).newest(90, limit=10_000)
        assert (len({found.line.seq for found in newest}), last_seq, looked) == (90, 900, looked)
        assert [found.line.seq for found in newest] == sorted(found.line.seq for found in newest)
        assert looked > 256 + 512, "three stretches"
        assert len(await scene.found("--last", "3", "--reward", "5..6")) == 2


async def test_samples_in_parts_and_broken_ones(
    open_bus: BusOpener, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The newest message is a part: the search does not wait for it to become a sample."""
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        big = replace(scene.samples[0], attempt="big", metadata={"much": "x" * 9_000_000})
        seq = await scene.publish(big)
        await bus.js.publish(subjects.sample(bus.run, "train", 0, "w1"), b"\xc1", headers={"Nats-Msg-Id": "1.0.broken"})
        await bus.js.publish(
            subjects.part(bus.run, "train", 1), b"half a sample", headers={"Nats-Msg-Id": "1.0.dead.chunk/0"}
        )
        assert seq == 9, "behind its two parts"
        assert await scene.found("--last", "2") == [9, 10]
        assert await scene.found("--since", "#11") == []
        assert await scene.found("--task", "2", "--last", "1") == [9]
        await show_tail(bus, arguments("tail", "--raw", "--since", "#5"))
    data, payloads = capsysbinary.readouterr().out, []
    while data:
        size = int.from_bytes(data[:4], "little")
        payloads.append(data[4 : 4 + size])
        data = data[4 + size :]
    assert payloads == [encode_sample(sample) for sample in (*scene.samples[4:6], big)] + [b"\xc1"]
    assert msgpack.unpackb(payloads[2])["attempt"] == "big"


async def printed(
    capsys: pytest.CaptureFixture[str], command: Callable[..., Awaitable[int]], bus: Bus, *words: str
) -> str:
    capsys.readouterr()
    assert await command(bus, arguments(*words)) == 0
    return capsys.readouterr().out


async def test_show_prints_tokens_versions_and_outcome(open_bus: BusOpener, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        probabilities = [1.0, 0.5, 0.25, 0.05, 0.001]
        mask = np.array([1, 1, 1, 1, 1], np.uint8)
        sample = replace(
            scene.samples[4],
            attempt="known",
            rollout_log_probs=np.log(np.array(probabilities, np.float32)),
            loss_mask=mask,
            label="7",
        )
        seq = await scene.publish(sample)
        await bus.plans.append(scene.plan([seq, 6], scene.tasks[2]))
        text = await printed(capsys, show_sample, bus, "show", f"#{seq}", "--table")
        assert f"#{seq} " in text and "v0-2 lag 3" in text and "label     7" in text
        assert (
            "trained in step 4 on rank 0, micro-batch 5, lag 0 to 3, 2 tokens masked as too old; the step is "
            "not done yet"
        ) in text
        assert "⟨v0⟩" in text and "⟨v2⟩" in text and "v0: 2 tokens, v2: 3 tokens" in text
        for place, (probability, version) in enumerate(zip(probabilities, (0, 0, 2, 2, 2), strict=True)):
            row = next(row.split() for row in text.splitlines() if row.split()[:1] == [str(place)])
            assert (row[3], row[5]) == (f"{probability:.4f}", f"v{version}")
        await bus.plans.append(Done(epoch=1, step=4, metrics={DIFFERENCE: 0.0125}))
        shown = json.loads(await printed(capsys, show_sample, bus, "show", f"{sample.task}.1", "--json"))
        assert (shown["seq"], shown["others"], shown["lag"]) == (6, [], 3)
        assert shown["fate"] == {
            "state": "trained",
            "step": 4,
            "rank": 1,
            "micro_batch": 6,
            "lags": [0, 3],
            "masked_tokens": 2,
            "masked_by_filter": False,
            "step_logprob_diff_abs": 0.0125,
        }
        twice = json.loads(await printed(capsys, show_sample, bus, "show", f"{sample.task}.0", "--json"))
        assert (twice["seq"], twice["others"], twice["fate"]["state"]) == (5, [seq], "duplicate")
        for name, wanted in (
            ("99", r"want one of the sequences 1 to 7"),
            ("77.0", "found none"),
            ("0", "want a sequence"),
            ("x", "want a sequence"),
        ):
            with pytest.raises(ValueError, match=wanted):
                await show_sample(bus, arguments("show", name))


def test_show_shades_each_token_and_underlines_every_second_span() -> None:
    sample = replace(
        data_kit.sample(data_kit.task(1), 0, ((3, 2), (5, 2))),
        rollout_log_probs=np.log(np.array([0.95, 0.001, 0.3, 1.0], np.float32)),
        loss_mask=np.array([1, 1, 1, 0], np.uint8),
    )
    text = shaded(tokens_of(sample, Vocabulary(None)))
    looks = [
        (text.plain[span.start : span.end], str(span.style))
        for span in text.spans
        if "⟨v" not in text.plain[span.start : span.end]
    ]
    assert looks == [("⟨15⟩", shade(0.001)), ("⟨16⟩", f"{shade(0.3)} underline"), ("⟨17⟩", "dim italic underline")]
    assert shade(0.001) != shade(0.3) != shade(0.95) == ""
    assert math.isclose(tokens_of(sample, Vocabulary(None))[2].probability, 0.3, rel_tol=1e-6)


def test_tokens_read_as_the_model_reads_them() -> None:
    text = Text.read(model_dir())
    assert text is not None
    ids = text.encode("4817.=")
    assert "".join(Vocabulary.read([Path("/nowhere"), model_dir()]).pieces(ids)) == "4817.="
    assert Vocabulary.read([Path("/nowhere")]).pieces([4, 5]) == ["⟨4⟩", "⟨5⟩"]


async def test_every_outcome_of_a_sample(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        scene = await Scene(bus).begin()
        await scene.act(((0, 3),))
        one = np.array([scene.tasks[0].id], np.int64)
        await bus.plans.append(Settle(epoch=1, reason="stale", tasks=one, seqs=np.array([1], np.int64), step=1))
        for _ in range(2):
            await scene.act(((0, 3),))
        await bus.plans.append(scene.plan([3], scene.tasks[1], step=1, version_steps={0: 0}, oldest_step=None))
        await bus.plans.append(Settle(epoch=1, reason="filtered", tasks=one + 77, seqs=one + 77, step=5))
        evaluated = data_kit.sample(replace(data_kit.eval_task(99), run=bus.run), 0)
        histories = [await history_of(bus, seq, sample) for seq, sample in enumerate(scene.samples, 1)]
        assert [history.state for history in histories] == [
            "dropped",
            "dropped",
            "trained",
            "duplicate",
            "unplanned",
            "unplanned",
        ]
        assert [history.reason for history in histories[:2]] == [
            "stale, when step 1 was planned",
            "stale: its task was given up",
        ]
        assert (histories[2].step, histories[2].lags, histories[2].masked_tokens) == (1, (0, 0), 0)
        assert (await history_of(bus, 9, evaluated)).state == "evaluation"
        invalid = replace(scene.samples[5], rollout_log_probs=np.full(3, 1, np.float32))
        assert (await history_of(bus, 6, invalid)).state == "invalid"
        await bus.tasks.trim(scene.tasks[1].id)  # the time of issue is gone: the whole log is read
        assert (await history_of(bus, 1, scene.samples[0])).state == "dropped"
        await bus.plans.trim(
            await bus.plans.append(scene.plan([99], scene.tasks[1], tasks=np.array([99], np.int64), step=5))
        )
        assert str(await history_of(bus, 3, scene.samples[2])) == "unknown: no plan before step 5 is kept"


async def test_a_recording_holds_every_byte(open_bus: BusOpener, tmp_path: Path, run_id: str) -> None:
    """Run, file, another run, another bus: payloads, headers, subjects and order are the same; parts are joined, and
    cut again.
    """
    file, part, lines = tmp_path / "all.tide", tmp_path / "part.tide", tmp_path / "lines.jsonl"
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        await scene.publish(
            replace(
                scene.samples[0], attempt="big", metadata={"much": "x" * 9_000_000}, extra={"new": [1, {"a": b"b"}]}
            )
        )
        assert await replay_run(bus, arguments("replay", "-o", str(file))) == 0
        await replay_run(bus, arguments("replay", "-o", str(lines), "--last", "2", "--reward", "1"))
        with refusal(ValueError, place="--since"):
            await replay_run(bus, arguments("replay", "-o", str(part), "--since", "soon"))
        assert not part.exists()
        with refusal(ValueError, place="--out", got=re.compile(rf"^{file}: ")):
            await replay_run(bus, arguments("replay", "-o", str(file)))
        for name in ("all.parquet", "all.csv", "all"):
            with refusal(ValueError, place="--out", got=str(tmp_path / name)):
                await replay_run(bus, arguments("replay", "-o", str(tmp_path / name)))
            assert not (tmp_path / name).exists()
        there = [stored async for stored in History(bus.jet).payloads(1, 99)]
        with refusal(ConfigMismatch, field="max_bytes"):
            await replay_run(bus, arguments("replay", "--to-run", bus.run))
        recording = Recording.open(file)
        assert list(recording) == there
        assert (recording.origin.run, recording.cut) == (bus.run, False)
        assert [(seq, recording.at(offset).data, headers) for seq, offset, _, headers in recording.index()] == [
            (stored.seq, stored.data, stored.headers) for stored in there
        ]
        recording.close()
        await replay_file(arguments("replay", "--from", str(file), "-o", str(part), "--actor", "w.2"))
        kept = Recording.open(part)
        assert list(kept) == there[2:4]
        kept.close()
        to = ("--to-bus", scene.url, "--to-run", "copy")
        await replay_file(arguments("replay", "--from", str(file), *to))
        await replay_file(
            arguments("replay", "--from", str(part), *to)
        )  # a second time: message ids prevent duplicates
        async with connect(scene.url, "copy", name="copy") as other:
            copied = [stored async for stored in History(other.jet).payloads(1, 99)]
            assert [
                encode_sample(replace(await other.samples.fetch(stored.seq), run=bus.run)) for stored in copied
            ] == [stored.data for stored in there]
            assert {(await other.samples.fetch(stored.seq)).run for stored in copied} == {"copy"}
            assert copied[2].subject == "tm.copy.sample.train.1.w_2"
            assert (await history_of(other, 1, scene.samples[0])).state == "unplanned"
            assert await find_run(scene.url, name="look", wait_s=60) == bus.run, "nobody takes it for a run to work in"
            with pytest.raises(ConfigMismatch):
                await other.create_layout()  # no learner can use it as its own
    assert [json.loads(line)["seq"] for line in lines.read_text().splitlines()] == [4, 6]
    assert [msgpack.unpackb(stored.data)["attempt"] for stored in there if isinstance(stored.data, bytes)] == [
        "a"
    ] * 6 + ["big"]
    await replayed_elsewhere(file, tmp_path, run_id, there)


async def replayed_elsewhere(file: Path, directory: Path, run: str, there: list[Any]) -> None:
    with EmbeddedServer(directory / "elsewhere", BusConfig(port=-1, max_payload_bytes=16_000_000)) as server:
        await replay_file(arguments("replay", "--from", str(file), "--to-bus", server.url))
        async with connect(server.url, run, name="there") as bus:
            found = [stored async for stored in History(bus.jet).payloads(1, 99)]
    assert [stored.data for stored in found] == [stored.data for stored in there]
    assert [stored.subject for stored in found] == [stored.subject.removesuffix(".parts") for stored in there], (
        "all fit in a message"
    )
    assert [stored.headers.pop("Tm-Replayed") for stored in found] == [f"{run}.{stored.seq}" for stored in there]
    there[-1].headers.pop("Tm-Parts")
    assert [stored.headers for stored in found] == [stored.headers for stored in there]


async def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(open_bus: BusOpener, tmp_path: Path) -> None:
    file = tmp_path / "all.tide"
    async with open_bus() as bus:
        await Scene(bus).play()
        await replay_run(bus, arguments("replay", "-o", str(file)))
    whole = Recording.open(file)
    last = whole.index()[-1][1]
    whole.close()
    file.write_bytes(file.read_bytes()[: last + 20])
    cut = Recording.open(file)
    assert [stored.seq for stored in cut] == [1, 2, 3, 4, 5]
    assert cut.cut
    with refusal(ValueError, place=re.compile(r"/all\.tide$")):
        cut.index()
    cut.close()
    file.write_bytes(b"something else entirely")
    with refusal(ValueError, place=re.compile(r"all\.tide$"), got="`int`'"):
        Recording.open(file)


async def test_reading_commands_leave_nothing_behind(open_bus: BusOpener, tmp_path: Path) -> None:
    """No durable consumer, no message and no ack is left; the consumers of the readings are gone."""
    async with open_bus() as bus:
        scene = await Scene(bus).play()
        before = [await bus.jet.state(subjects.stream(bus.run, name)) for name in ("TASKS", "SAMPLES", "PLAN", "DEAD")]
        await scene.found("--text", "mill", "--since", "1h")
        await show_sample(bus, arguments("show", "2.0"))
        await replay_run(bus, arguments("replay", "-o", str(tmp_path / "all.tide")))
        await bus.nc.flush()
        assert [
            await bus.jet.state(subjects.stream(bus.run, name)) for name in ("TASKS", "SAMPLES", "PLAN", "DEAD")
        ] == before
        consumers = await bus.jet.call(f"CONSUMER.NAMES.{subjects.stream(bus.run, subjects.SAMPLES)}")
        assert not consumers["consumers"]
