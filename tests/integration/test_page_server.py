"""`tidemill dashboard` on a real nats-server: answers to viewers, over restarts of the bus, and of hostile samples."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bus_fixtures import BusOpener
from tests.page_kit import HOSTILE, SHOWN, Run, page_of, routes_of
from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tidemill.bus.errors import StreamReplaced
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Done, Evaluated, Status
from tidemill.bus.wire.trained_values import TrainedStep
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.tail import tail
from tidemill.launch.page import compared as page_compared
from tidemill.launch.page import feed, samples
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.texts import MAX_CHARACTERS
from tidemill.launch.run.audit import audit
from tidemill.launch.samples.filters import filter_of
from tidemill.launch.samples.search import SampleSearch


@pytest.fixture(autouse=True)
def _searches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search take its time: on a busy machine it would answer with a part of the samples, as it says."""
    monkeypatch.setattr(samples, "SEARCH_S", LIMIT_S)


async def test_answers_and_events_join_without_a_gap_or_a_point_twice(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """Over a restart of the bus under the open page, which says that the bus is away."""
    async with open_bus() as bus:
        run = await Run(bus).begin()
        for step in range(1, 4):
            await run.done(step, data__reward_mean=step / 10)
        async with page_of(bus) as page, asyncio.timeout(LIMIT_S):
            events = page.events()
            first = await anext(events)
            snapshot = await page.get("series", names="data/reward_mean")
            points = dict(snapshot["series"]["data/reward_mean"])
            assert points == {1: 0.1, 2: 0.2, 3: 0.3}
            at, seen, killed, silent, writing = snapshot["at"], list(points), False, False, None
            await run.done(4, data__reward_mean=0.4)
            async for event in events:
                assert event["boot"] == first["boot"]
                if event["at"] <= at:
                    continue  # its changes are in the snapshot
                assert event["from"] == at, "a gap"
                at = event["at"]
                seen += event.get("points", {"steps": []})["steps"]
                silent = silent or event["run"]["bus"]["silent_s"] > 3
                if 4 in seen and not killed:
                    killed = True
                    await asyncio.to_thread(nats_server.kill)
                if silent and writing is None:
                    assert event["run"]["bus"]["words"]
                    await asyncio.to_thread(nats_server.start)
                    writing = asyncio.create_task(run.done(5, data__reward_mean=0.5))
                if 5 in seen:
                    break
            assert seen == [1, 2, 3, 4, 5]
            assert writing is not None
            await writing
            await events.aclose()  # type: ignore[attr-defined]
            again = await page.get("series")
            assert dict(again["series"]["data/reward_mean"]) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}


async def test_a_step_that_is_taken_again_replaces_its_point(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        await run.done(1, train__loss=1.0, train__entropy=2.0)
        async with page_of(bus) as page:
            await page.until("run", lambda answer: answer["step"] == 1)
            await run.done(1, train__loss=3.0)
            answer = await page.until("series", lambda answer: answer["series"]["train/loss"] == [[1, 3.0]])
            assert answer["series"]["train/entropy"] == [], "the first execution had it, the one that counts has not"


async def test_a_slow_viewer_loses_the_oldest_events_and_sees_it(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus() as bus:
        await Run(bus).begin()
        async with page_of(bus) as page:
            with page.server.feed.viewer() as queue:
                for _ in range(feed.QUEUE + 3):
                    page.server.feed.flush()
                ids = [int(re.match(rb"id: (\d+)", queue.get_nowait() or b"")[1]) for _ in range(feed.QUEUE)]  # type: ignore[index]
            assert queue.empty()
            assert ids == list(range(ids[0], ids[0] + feed.QUEUE)), "the newest ones, in order"
            assert ids[-1] == page.server.feed.at


async def test_an_event_has_the_queue_when_it_changed(open_bus: BusOpener) -> None:
    async with open_bus() as bus, asyncio.timeout(LIMIT_S):
        run = await Run(bus).begin()
        async with page_of(bus) as page:
            events = page.events()
            assert "rights" not in (await anext(events))["run"], "an event is for viewers and operators"
            await run.task()
            queues = [event["queue"] async for event in _until_queued(events) if "queue" in event]
            assert queues[-1] == (await page.get("fleet"))["queue"]
            await events.aclose()  # type: ignore[attr-defined]


async def _until_queued(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        yield event
        if event.get("queue", {}).get("waiting") == 1:
            return


async def test_hostile_samples_are_text_with_visible_escapes_and_cut(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        task = await run.task(prompt=[{"role": "user\u202e", "content": HOSTILE}])
        long = "\u202e" + "abcdefgh" * 1_300_000
        seq = await run.sample(task, 0, response=long, label="</script>\x1b[2J", actor="w1", metadata={"k": "\x9b"})
        parts = {"task": 1, "broken": subjects.sample(bus.run, "train", 0, "w1")}
        await bus.js.publish(parts["broken"], b"\xc1\xff", headers={"Nats-Msg-Id": "1.1.broken"})
        async with page_of(bus) as page:
            await page.until("samples", lambda answer: len(answer["rows"]) == 2)
            sample = await page.get("sample", seq=seq)
            raw = (await page.request("GET", f"/api/sample?seq={seq}")).body.decode()
            assert not re.search("[\u202e\u2028\u200b\x00-\x08\x0b-\x1f\x7f-\x9f]", raw.replace("\n", ""))
            assert sample["messages"][0]["text"].startswith(SHOWN)
            assert sample["messages"][0]["role"] == r"user\u202e"
            assert (sample["label"], r"\u009b" in sample["metadata"]) == (r"</script>\x1b[2J", True)
            text, left = sample["response"]["text"], sample["response"]["cut"]
            assert (text[:7], left) == (r"\u202ea", len(long) - MAX_CHARACTERS)
            pieces = [long[:MAX_CHARACTERS]]
            while left:
                start = len(long) - left
                more = await page.get("text", seq=seq, field="response", **{"from": start})
                pieces, left = [*pieces, more["text"]], more["cut"]
            assert "".join(pieces) == long
            broken = await page.get("sample", seq=sample["seq"] + 1)
            assert broken["error"].startswith("broken") and broken["tokens"] is None
            assert (await page.request("GET", f"/api/tokens?seq={sample['seq'] + 1}")).status == 400
            answers = [await page.request("GET", f"/api/{path}") for path in ("samples?texts=1", "group?task=1")]
            assert all(answer.headers["Content-Type"] == "application/json" for answer in answers)


def arguments(*words: str) -> Any:
    return cli.command_parser(("tail",)).parse_args(["tail", "--last", "100", *words])


FILTERS = ("reward=<0.5", "reward=1", "tokens=4..5", "status=truncated status=completed", "kind=eval", "task=2.1")
FILTERS += ("actor=w1 reward=>=1", "lag=>=1", "lag=0", "engine=e2", "")


async def test_a_filter_finds_what_tail_finds(open_bus: BusOpener) -> None:
    """From the held headers, and, where they are not held, from the stream."""
    async with open_bus() as bus:
        run = await Run(bus).begin()
        for number in range(4):
            task = await run.task()
            for index in (0, 1):
                status = Status.TRUNCATED if number == 1 else Status.COMPLETED
                engine = f"e{1 + number % 2}"
                spans = ((0, 2 + number),)
                await run.sample(task, index, spans=spans, status=status, engine=engine, actor=f"w{number % 2}")
            await run.registry.publish(await run.registry.reserve(number + 1, 1))
        found = {}
        for line in FILTERS:
            args = arguments(*[f"--{word}" for word in line.split()])
            matches = [match.line.seq async for match in tail(SampleSearch(bus, filter_of(args)), args)]
            found[line] = matches[::-1]
        assert len({str(seqs) for seqs in found.values()}) > 6
        for held in (1 << 10, 3):
            async with page_of(bus, held=held) as page:
                await page.until("run", lambda answer: page.reader.held.last_seq == 8)
                answers = {line: await page.get("samples", filter=line) for line in FILTERS}
                assert {line: [row["seq"] for row in answer["rows"]] for line, answer in answers.items()} == found
                paged = await page.get("samples", n=3)
                rows = [row["seq"] for row in paged["rows"]]
                while paged["next"]:
                    paged = await page.get("samples", n=3, before=paged["next"])
                    rows += [row["seq"] for row in paged["rows"]]
                assert rows == list(range(8, 0, -1))
                for unread in (6, 8):  # as while the headers of an old run are still read
                    page.reader.held.seq[unread % held] = 0
                    assert [row["seq"] for row in (await page.get("samples"))["rows"]] == rows
                text = await page.get("samples", filter='text="PROMPT 2"')
                assert [row["seq"] for row in text["rows"]] == [4, 3]
                for bad in ("reward=x", "nonsense=1", "task=a", 'text="', "reward"):
                    answer = await page.request("GET", "/api/samples", params={"filter": bad})
                    assert (answer.status, "filter" in answer.json["error"]) == (400, True), bad


async def test_flow_has_the_numbers_of_the_audit(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        first, second, third = [await run.task() for _ in range(3)]
        trained = [await run.sample(first, index) for index in (0, 1)]
        await run.sample(first, 1, attempt="b")
        dropped = [await run.sample(second, index) for index in (0, 1)]
        await run.sample(third, 0)
        await run.settle(second.id, dropped, "stale")
        await run.plan({first.id: trained})
        await run.done(1, data__reward_mean=0.5)
        accounting, _ = await audit(bus)
        async with page_of(bus, ended=True) as page:
            flow = await page.until("flow", lambda answer: answer["audit"]["state"] == "checked")
            await page.reader.headers_read.wait()
            counts = {row["fate"]: row["samples"] for row in flow["ledger"]}
            assert (flow["audit"]["lost"], flow["audit"]["twice"], flow["balance"]["ok"]) == (0, 0, True)
            assert counts["trained"] == accounting.trained == 2
            assert counts["dropped: stale"] == accounting.dropped["stale"] == 2
            assert (counts["duplicate"], counts["buffered"], counts["dropped: failed"]) == (1, 1, 0)
            assert flow["published"] == accounting.published == 6
            rows = {row["seq"]: row["fate"] for row in (await page.get("samples"))["rows"]}
            assert [rows[seq] for seq in (*trained, *dropped)] == ["trained"] * 2 + ["dropped: stale"] * 2
            assert [row["seq"] for row in (await page.get("samples", filter="fate=stale"))["rows"]] == dropped[::-1]
            await run.plan({first.id: trained})
            assert (await page.get("sample", seq=trained[0]))["fate"]["step"] == 1
        async with page_of(bus, ended=True) as page:
            flow = await page.until("flow", lambda answer: answer["audit"]["state"] == "checked")
            assert flow["audit"]["twice"] == 2 and flow["audit"]["problems"]


async def test_overview_batch_groups_and_prompts(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        wrong, mixed = await run.task(), await run.task()
        seqs = {wrong.id: [await run.sample(wrong, index, reward=0.0) for index in (0, 1)]}
        seqs[mixed.id] = [await run.sample(mixed, index) for index in (0, 1)]
        await run.plan(seqs)
        await bus.rows("run").put("config", {"learner": {"steps": 10}, "up": {"gpu_hour_price": 2.0}})
        metrics = {
            "offpolicy__k3": 9.0,
            "alarm__errors": 1.0,
            "train__tokens": 1000.0,
            "train__wait_seconds": 3.0,
            "train__step_seconds": 1.0,
        }
        for step in range(1, 5):
            push_s = 5.0 if step == 1 else 0.0
            values = {"data__reward_mean": step / 4, "offpolicy__lag_mean": 0.0, "push__wait_seconds": push_s}
            await run.done(step, **values, **metrics)
        scores = {"mean": 0.5, "mean_low": 0.4, "mean_high": 0.6}
        await bus.plans.append(Evaluated(epoch=1, version=1, step=1, dataset="held_out", metrics=scores))
        async with page_of(bus) as page:
            overview = await page.until("overview", lambda answer: answer["steps"] == 10 and answer["evaluations"])
            await page.reader.headers_read.wait()
            assert [alarm["id"] for alarm in overview["alarms"] if alarm["metric"]] == ["k3"]
            alarm = overview["alarms"][0]
            assert (alarm["since_step"], alarm["level"], bool(alarm["cure"])) == (1, "error", True)
            assert overview["limit"]["words"].startswith("generation")
            assert overview["waits"][0]["seconds"] == 3.0
            assert overview["evaluations"][0]["low"] == 0.4
            assert overview["left_s"] is not None
            prompts = await page.get("prompts")
            assert [row["task"] for row in prompts["wrong"]] == [wrong.id] and not prompts["right"]
            assert (prompts["groups"], prompts["zero_gradient"]) == (2, 1)
            batch = await page.get("batch", step=1)
            (row,) = batch["ranks"][0]["micro_batches"]
            assert [piece["seq"] for piece in row["rows"][0]["pieces"]] == [1, 2, 3, 4]
            assert [piece["shared"] for piece in row["rows"][0]["pieces"]] == [False, True, False, True]
            assert row["tokens"] == 4 * 6
            assert [fact["status"] for fact in batch["facts"] if fact["name"] == "time"] == ["warn"]
            assert batch["pace_words"] == "slow: waiting for a push took 5 s, in the median step 0 s"
            assert {"name": "trainable tokens", "unit": "", "value": 1000.0, "usual": 1000.0} in batch["pace"]
            assert (await page.get("metrics"))["metrics"], "each is described"
            group = await page.get("group", task=mixed.id)
            assert [member["reward"] for member in group["members"]] == [0.0, 1.0]
            histogram = await page.get("histogram")
            assert [histogram["bins"][at]["count"] for at in (0, -1)] == [3, 1]
            assert (await page.get("find", step=2))["seq"] == 5, "behind all samples"
            assert (await page.get("find", time="1h"))["seq"] == 1
            hard = await run.task()
            for index, reward in enumerate((0.25, 0.5)):
                await run.sample(hard, index, reward=reward)
            prompts = await page.until("prompts", lambda answer: len(answer["wrong"]) > 1)
            assert [(row["task"], row["reward"]) for row in prompts["wrong"]] == [(wrong.id, 0.0), (hard.id, 0.5)]


async def test_a_sample_has_the_recorded_values_of_its_trained_tokens(open_bus: BusOpener) -> None:
    """Null where a token was not trained; empty columns where nothing was recorded."""
    async with open_bus() as bus:
        run = await Run(bus).begin()
        task = await run.task()
        seqs = [await run.sample(task, index, spans=((0, 4),)) for index in (0, 1)]
        await run.plan({task.id: seqs})
        await run.done(1, train__loss=0.5)
        whole = {"seqs": np.array([seqs[0]]), "tasks": np.array([task.id]), "indexes": np.array([0])}
        runs = {"owners_R": np.array([0]), "places_R": np.array([1]), "lengths_R": np.array([2])}
        values = {"log_probs": [-0.5, -1.5], "entropies": [0.25, 0.5], "advantages": [2.0, 2.0], "weights": [1.0, 0.0]}
        arrays = {name: np.array(column, np.float32) for name, column in values.items()}
        integers = {name: column.astype(np.int32) for name, column in runs.items()}
        await bus.trained.store(TrainedStep(epoch=1, step=1, rank=0, **whole, **integers, **arrays))
        of_other_rank = whole | {"seqs": np.array([seqs[1]]), "indexes": np.array([1])}
        await bus.trained.store(TrainedStep(epoch=1, step=1, rank=1, **of_other_rank, **integers, **arrays))
        async with page_of(bus) as page:
            await page.until("run", lambda answer: answer["step"] == 1)
            reads = await bus.nc.subscribe(f"$JS.API.STREAM.MSG.GET.{subjects.stream(bus.run, subjects.TRAINED)}")
            tokens = (await page.get("sample", seq=seqs[0]))["tokens"]
            assert reads.pending_msgs == 1
            await page.get("sample", seq=seqs[1])
            assert reads.pending_msgs == 2, "without recorded values, too"
            assert tokens["train_logprob"] == [None, -0.5, -1.5, None]
            assert tokens["entropy"] == [None, 0.25, 0.5, None]
            assert tokens["advantage"] == [None, 2.0, 2.0, None] and tokens["weight"] == [None, 1.0, 0.0, None]
            part = await page.get("tokens", seq=seqs[0], n=2, **{"from": 2})
            assert (part["train_logprob"], part["total"], len(part["text"])) == ([-1.5, None], 4, 2)
            assert (await page.get("tokens", seq=seqs[1]))["train_logprob"] == []
            (loss,) = (await page.get("metrics"))["metrics"]
            assert loss["meaning"] and loss["source"]


async def test_without_viewers_no_headers_are_read_and_none_is_missing_afterwards(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "UNWATCHED_S", 0.0)
    async with open_bus() as bus, asyncio.timeout(LIMIT_S):
        run = await Run(bus).begin()
        task = await run.task()
        async with page_of(bus) as page:
            await page.until("run", lambda answer: not answer["loading"])
            await until(lambda: not page.reader.watched.is_set())
            for number in range(20):
                await run.sample(task, number % 2, attempt=f"a{number}")
            await until(lambda: page.reader.samples is not None and page.reader.samples.last_seq == 20)
            assert page.reader.held.last_seq <= 1, "one header ends the reading"
            assert (await page.get("histogram"))["count"] <= 1
            assert (await page.until("histogram", lambda answer: answer["count"] == 20))["undefined"] == 0
            assert [row["seq"] for row in (await page.get("samples"))["rows"]] == list(range(20, 0, -1))


async def test_a_page_ends_when_another_run_takes_the_name(open_bus: BusOpener) -> None:
    """Its numbers would be of two runs."""
    async with open_bus() as bus, asyncio.timeout(LIMIT_S):
        await (await Run(bus).begin()).done(1, train__loss=1.0)
        reader = RunReader(bus)
        reading = asyncio.create_task(reader._look_for_ever())  # readers of a stream that is gone end by themselves
        await reader.looked.wait()
        assert await bus.js.delete_stream(subjects.stream(bus.run, subjects.SAMPLES))
        await bus.create_layout()
        with refusal(StreamReplaced, stream=f"samples of {bus.run}"):
            await reading


async def test_other_runs_are_drawn_over_this_one(
    open_bus: BusOpener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same bus, and the directories of ended ones, whose files may hold anything."""
    lines = ['{"step": 1, "epoch": 1, "train/loss": 3.0, "text": "x", "list": [1]}', "{cut", '{"step": "x"}', "[]"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "train/loss": 1.0}']))
    with refusal(ValueError, place="--compare", got=str(tmp_path)):
        ComparedRuns("", "r", [tmp_path])
    async with open_bus(run="another") as other, open_bus() as bus:
        another = await Run(other).begin()
        await another.done(1, train__loss=7.0)
        await (await Run(bus).begin()).done(1, train__loss=5.0)
        async with page_of(bus, compared=[tmp_path / "old"]) as page:
            await page.until("run", lambda answer: answer["step"] == 1)
            runs = (await page.get("runs"))["runs"]
            assert {run["name"]: run["from"] for run in runs} == {bus.run: "bus", "another": "bus", "old": "directory"}
            monkeypatch.setattr(page_compared, "KEPT_S", float("inf"))
            for name, points in ((bus.run, [[1, 5.0]]), ("another", [[1, 7.0]])):
                assert (await page.get("series", run=name))["series"]["train/loss"] == points
            old = (await page.get("series", run="old"))["series"]
            assert old == {"train/loss": [[1, 3.0], [2, None], [3, None], [4, 1.0]]}
            assert (await page.request("GET", "/api/series?run=no-such-run")).status == 400
            await another.done(2, train__loss=8.0)
            assert (await page.get("series", run="another"))["series"]["train/loss"] == [[1, 7.0]], "kept for seconds"
            monkeypatch.setattr(page_compared, "KEPT_S", 0.0)
            again = await page.get("series", run="another")
            assert again["series"]["train/loss"] == [[1, 7.0], [2, 8.0]]
            monkeypatch.setattr(page_compared, "READ_S", 0.0)
            late = await page.request("GET", "/api/series?run=another")
            assert (late.status, "in time" in late.json["error"]) == (503, True)


async def test_the_curves_of_a_shadow_are_drawn_over_those_of_its_run(open_bus: BusOpener) -> None:
    async with open_bus() as bus, open_bus(run=f"{bus.run}-cispo", layout=False) as shadow:
        await shadow.create_layout(shadow=True)
        await (await Run(bus).begin()).done(1, train__loss=5.0)
        await shadow.plans.fence(1)
        await shadow.plans.append(Done(epoch=1, step=1, metrics={"train/loss": 7.0}))
        async with page_of(bus) as page:
            await page.until("run", lambda answer: answer["step"] == 1)
            assert [run["name"] for run in (await page.get("runs"))["runs"]] == [bus.run, shadow.run]
            for name, points in ((bus.run, [[1, 5.0]]), (shadow.run, [[1, 7.0]])):
                assert (await page.get("series", run=name))["series"]["train/loss"] == points


async def test_broken_utf8_and_odd_queries_never_get_a_500(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        run = await Run(bus).begin()
        task = await run.task()
        seq = await run.sample(task, 0)
        sample = await bus.samples.fetch(seq)
        data = encode_sample(replace(sample, response="abcd", attempt="u")).replace(b"abcd", b"\xff\xfe\xfd\xfc")
        subject = subjects.sample(bus.run, "train", 0, "w1")
        await bus.js.publish(subject, data, headers={"Nats-Msg-Id": "1.1.u", "Tm-Sample": "reward=nan versions=x-y"})
        names = ("seq", "from", "to", "n", "before", "step", "task", "filter", "run", "time", "last", "names")
        odd = ("-1", "9" * 400, "NaN", "%00", "\u0663", "1e3", "x" * 5000)
        async with page_of(bus) as page:
            await page.until("samples", lambda answer: len(answer["rows"]) == 2)
            routes = [route for route in routes_of(page) if "/api/" in route]
            for route in routes:
                for value in odd:
                    for name in names:
                        answer = await page.request("GET", route.split()[1], params={name: value})
                        assert answer.status < 500, (route, name, value, answer.body)
                        json.loads(answer.body)
