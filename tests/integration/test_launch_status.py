"""`tidemill status` and `tidemill tail` as a user calls them, against a run made by hand on a real nats-server."""

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from tests import data_kit
from tests.bus_fixtures import BusOpener
from tests.launched import ROOT, run_tidemill
from tidemill.bus.liveness import HeartbeatPublisher, release
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Plan, Settle, Status
from tidemill.bus.wire.rows import LiveRow
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.cli.find_run import find_run
from tidemill.launch.cli.status import print_status, read_status, unserved
from tidemill.launch.run.access import AUTH_DIR, BUS_URL_FILE
from tidemill.launch.run.up import CONFIG_FILE


async def tidemill(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(run_tidemill, *arguments)
    return done.returncode, done.out, done.errors


METRICS = {"data/reward_mean": 0.25, "train/skipped_minibatches": 2.0, "debug/report_look": 3.0}


async def make_run(bus: Bus) -> None:
    """Make three tasks of two samples: one trained in step 1, one given up, one waiting."""
    await bus.tasks.fence(1)
    await bus.plans.fence(1)
    tasks = []
    for number in range(3):
        task = replace(data_kit.task(number + 1), run=bus.run)
        tasks.append(replace(task, id=await bus.tasks.issue(task)))
    seqs = [await bus.samples.publish(data_kit.sample(task, index)) for task in tasks for index in (0, 1)]
    await bus.plans.append(
        Plan(
            epoch=1,
            step=1,
            tasks=np.array([tasks[0].id], np.int64),
            seqs=np.array(seqs[:2], np.int64),
            group_sizes=np.array([2], np.int32),
            ranks=np.zeros(2, np.int32),
            micro_batches=np.zeros(2, np.int32),
            version_steps={0: 0},
            oldest_step=None,
            data_parallel=1,
            num_micro_batches=1,
            config_digest="",
            chain="",
        )
    )
    for epoch in (1, 1):  # trained again after a restart
        await bus.plans.append(Done(epoch=epoch, step=1, metrics=METRICS))
    await bus.plans.append(
        Settle(
            epoch=1, reason="stale", tasks=np.array([tasks[1].id], np.int64), seqs=np.array(seqs[2:4], np.int64), step=2
        )
    )


async def test_status_shows_where_every_sample_is(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await make_run(bus)
        where = ("--bus", bus.nc.connected_url.geturl(), "--run", bus.run)
        (code, text, errors), (_, line, _) = await asyncio.gather(
            tidemill("status", *where), tidemill("status", *where, "--jsonl")
        )
        await bus.tasks.trim(await bus.tasks.last_id())
        trimmed = await read_status(bus)
    assert code == 0, errors
    for wanted in (
        "step 1",
        "reward 0.250",
        "3 issued: 2 settled, 1 open",
        "2 trained, dropped: 2 stale",
        "sequences 1 to 6",
    ):
        assert wanted in text, text
    assert "skipped 2 minibatches" in text, "counted once, though the step was taken twice"
    assert "report  step 1 3 x LOOK; the lines are in the learner's log" in text
    assert trimmed["tasks"]["issued"] == 3, "settled tasks that are gone from the stream count"
    status = json.loads(line)
    counts = {"issued": 3, "settled": 2, "open": 1, "waiting": 3, "leased": 0, "last_id": 0}
    assert status["tasks"] | {"last_id": 0} == counts | {"given_up": {"stale": 1}, "unserved": {}}
    assert (status["samples"]["trained"], status["samples"]["dropped"], status["samples"]["buffered"]) == (
        2,
        {"stale": 2},
        None,
    )


async def test_status_has_the_time_to_the_end_at_the_pace_of_this_start(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await make_run(bus)
        for epoch, steps in ((1, (1, 2, 3)), (2, (4, 5))):
            await bus.plans.fence(epoch)
            for step in steps:
                await bus.plans.append(Done(epoch=epoch, step=step, metrics=METRICS))
        await bus.rows("run").put("config", {"learner": {"steps": 7}})
        assert (await read_status(bus))["left_s"] is None, "two steps of this start are no pace"
        await bus.plans.append(Done(epoch=2, step=6, metrics=METRICS))
        status = await read_status(bus)
        stream = subjects.stream(bus.run, subjects.PLAN)
        last = (await bus.jet.state(stream)).last_seq
        began_s, ended_s = [(await bus.jet.message(stream, seq)).stored_s for seq in (last - 2, last)]
        assert status["steps"] == 7 and status["left_s"] == pytest.approx((ended_s - began_s) / 2)
        shown = Console(file=io.StringIO(), width=160, color_system=None)
        print_status(shown, status | {"left_s": 61.5})
        assert "step 6 of 7 done, 0:01:01 left" in shown.file.getvalue()  # type: ignore[attr-defined]


async def test_failures_are_counted_and_named_with_the_reason(open_bus: BusOpener) -> None:
    """FAILED samples are in no record, so a dead task, which has none, counts as one failure itself."""
    reason = "reward 'r:raises': ValueError('no judge')"
    row = LiveRow(
        role="actor", id="a-0", host="h", pid=1, phase="working", trouble=f"2 of 2 samples failed, the last: {reason}"
    )
    feeder = LiveRow(
        role="feeder", id="feeder", host="h", pid=2, phase="working", load={"failed": 2.0, "buffered": 0.0}
    )
    shown = Console(file=io.StringIO(), width=160, color_system=None)
    async with open_bus() as bus, HeartbeatPublisher(bus, row, 0.2), HeartbeatPublisher(bus, feeder, 0.2):
        await make_run(bus)
        dead = replace(data_kit.task(4), run=bus.run)
        dead = replace(dead, id=await bus.tasks.issue(dead))
        for index in (0, 1):
            sample = replace(data_kit.sample(dead, index), status=Status.FAILED, reward=0.0, metadata={"error": reason})
            await bus.samples.publish(sample)
        await bus.plans.append(
            Settle(epoch=1, reason="dead", tasks=np.array([dead.id], np.int64), seqs=np.zeros(0, np.int64), step=2)
        )
        where = ("--bus", bus.nc.connected_url.geturl(), "--run", bus.run)
        _, tail, _ = await tidemill("tail", *where, "--last", "1")
        status = await read_status(
            bus
        )  # here, where the rows are written, too: one of them may be seen as silent by another process
        print_status(shown, status)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    for wanted in (
        "4 issued: 3 settled, 1 open",
        "; given up: 1 dead, 1 stale",
        "dropped: 2 stale, 2 failed",
        f"trouble a-0: {row.trouble}",
    ):
        assert wanted in " ".join(text.split()), text
    assert reason in tail, "not only that it failed"
    assert status["tasks"]["given_up"] == {"dead": 1, "stale": 1}


async def test_status_names_the_releases_of_processes_while_they_differ(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        old = LiveRow(role="engine", id="e", host="h", pid=1, phase="serving")
        async with HeartbeatPublisher(bus, replace(old, role="actor", id="a")) as heartbeat:
            await heartbeat.stored()
            shown = io.StringIO()
            print_status(Console(file=shown, width=200), await read_status(bus))
            assert "releases differ" not in shown.getvalue()
            async with HeartbeatPublisher(bus, old) as older:
                older.update(release="0.0.1")
                await older.stored()
                print_status(Console(file=shown, width=200), await read_status(bus))
        assert f"{release()}: actor a; 0.0.1: engine e" in shown.getvalue()


async def test_status_shows_the_room_for_keys_and_values_of_engines_that_report_it(open_bus: BusOpener) -> None:
    row = LiveRow(role="engine", id="e", host="h", pid=1, phase="serving")
    load = {"kv_blocks_used": 32.0, "kv_blocks_free": 96.0, "preemptions": 3.0}
    async with open_bus() as bus:
        for reported, wanted in (({}, ""), (load, "25 % of 2,048 tokens, 3 preempted")):
            shown = io.StringIO()
            async with HeartbeatPublisher(bus, replace(row, load=reported)) as heartbeat:
                await heartbeat.stored()
                print_status(Console(file=shown, width=200), await read_status(bus))
            assert wanted in shown.getvalue() and ("keys and values" in shown.getvalue()) is bool(wanted)


async def test_status_names_rollouts_that_no_actor_serves(open_bus: BusOpener) -> None:
    """An actor with a row that does not tell is taken for one that serves all of them."""
    async with open_bus(rollouts=("calc", "walk")) as bus:
        await bus.tasks.fence(1)
        for rollout in ("calc", "walk", "walk"):
            await bus.tasks.issue(replace(data_kit.task(0), run=bus.run, rollout=rollout, budget=Budget(turns=1)))
        serves = LiveRow(role="actor", id="a", host="h", pid=1, phase="working", rollouts=("single_turn", "calc"))
        for row, want in ((serves, {"walk": 2}), (replace(serves, rollouts=()), {})):
            async with HeartbeatPublisher(bus, row) as heartbeat:
                await heartbeat.stored()
                status = await read_status(bus)
            assert status["tasks"]["unserved"] == want
        out = io.StringIO()
        status["tasks"]["unserved"] = {"walk": 2}
        print_status(Console(file=out, width=200), status)
        assert "2 tasks of rollout walk wait, and no actor serves it; start an actor that does: " in out.getvalue()
        assert unserved({"": 3}, []) == {}, "the run has ended"
        assert unserved({"": 3}, [replace(serves, role="feeder")]) == {"single_turn": 3}


async def test_status_shows_invalid_samples_and_refused_actors(open_bus: BusOpener) -> None:
    load = {
        "buffered": 3,
        "invalid": 744.0,
        "invalid/rollout_log_probs": 740.0,
        "invalid/version": 4.0,
        "invalid_of/[b]wire-bad": 744.0,
    }
    row = LiveRow(role="feeder", id="feeder", host="h", pid=1, phase="waiting", load={**load, "refused/wire-bad": 1.0})
    shown = Console(file=io.StringIO(), width=160, color_system=None)
    async with open_bus() as bus, HeartbeatPublisher(bus, row, 0.1):
        status = await read_status(bus)
        print_status(shown, status)
    samples = status["samples"]
    assert (samples["invalid"], samples["invalid_by_field"]) == (744, {"rollout_log_probs": 740, "version": 4})
    assert samples["refused"] == ["wire-bad"]
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "3 buffered, 744 invalid (rollout_log_probs 740, version 4; by actor [b]wire-bad 744)" in text, text
    assert "actor wire-bad sends only invalid samples and is refused" in text, text


async def test_status_names_engines_that_are_not_reached_at_their_address(open_bus: BusOpener) -> None:
    def engine(id: str, nonce: str) -> LiveRow:
        address = f"http://10.0.0.7:{30000 + len(id)}"
        return LiveRow(
            role="engine",
            id=id,
            host="h",
            pid=1,
            phase="serving",
            version=3,
            address=address,
            nonce=nonce,
            trouble="its own words",
        )

    rows = [engine("reached", "aa"), engine("far", "bb"), engine("new", "cc"), engine("older-release", "")]
    learner = LiveRow(
        role="learner",
        id="learner",
        host="l",
        pid=2,
        phase="working",
        reached={"aa": "", "bb": "no route", "gone": "x"},
    )
    router = LiveRow(
        role="router", id="r", host="r", pid=3, phase="serving", reached={"bb": "another process answers there"}
    )
    shown = Console(file=io.StringIO(), width=400, color_system=None)
    async with open_bus() as bus, contextlib.AsyncExitStack() as stack:
        for row in (*rows, learner, router):
            await stack.enter_async_context(HeartbeatPublisher(bus, row, 0.2))
        status = await read_status(bus)
        print_status(shown, status)
    seen = {
        row["id"]: (row["verified"], len(row["unreachable"])) for row in status["processes"] if row["role"] == "engine"
    }
    assert seen == {"reached": (True, 0), "far": (False, 2), "new": (False, 0), "older-release": (False, 0)}
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    errors = "unreachable from learner learner: no route; unreachable from router r: another process answers there"
    assert f"engine far at http://10.0.0.7:30003 is {errors}; cure: engine: --advertise ADDRESS" in text, text
    assert text.count("its own words") == 3, "the line above has its trouble"
    assert text.count("a learner or router to reach it at http://10.0.0.7:30003") == 1, "that of new"


async def test_tail_shows_the_newest_samples_and_follows(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await make_run(bus)
        where = ("--bus", bus.nc.connected_url.geturl(), "--run", bus.run)
        (code, text, errors), (_, lines, _) = await asyncio.gather(
            tidemill("tail", *where, "--last", "2"), tidemill("tail", *where, "--last", "3", "--jsonl")
        )
        assert code == 0, errors
        assert [word for word in text.split() if word.startswith("#")] == ["#5", "#6"]
        assert "│ prompt 3\n" in text and "┃ xxx\n" in text
        assert [json.loads(line)["seq"] for line in lines.splitlines()] == [4, 5, 6]
        follower = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidemill", "tail", *where, "--last", "1", "--follow", "--jsonl"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert follower.stdout is not None
        assert json.loads(await follower.stdout.readline())["seq"] == 6
        await bus.samples.publish(replace(data_kit.sample(data_kit.task(9), 0, attempt="new"), run=bus.run))
        assert json.loads(await follower.stdout.readline())["attempt"] == "new"
        follower.terminate()
        await follower.communicate()


async def test_a_bus_that_does_not_answer_is_reported_in_one_line() -> None:
    code, out, errors = await tidemill("status", "--bus", "nats://127.0.0.1:1", "--run", "r")
    assert (code, out) == (2, "")
    assert len(errors.splitlines()) == 1
    assert "nats://127.0.0.1:1" in errors


async def test_a_run_that_up_did_not_start_is_found_by_the_address_in_its_directory(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with open_bus() as bus:
        (tmp_path / BUS_URL_FILE).write_text(nats_server.url)
        assert await asyncio.to_thread(find_run, str(tmp_path), "", "") == (nats_server.url, bus.run)


def test_users_of_a_bus_in_a_directory_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its password comes from the environment: nobody but the owner may look into the directory."""
    monkeypatch.setenv("TIDEMILL_BUS_USER", "viewer")
    monkeypatch.setenv("TIDEMILL_BUS_PASSWORD", "pass")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # the directories of tests are private
        root = Path(directory)
        root.chmod(0o755)
        (root / BUS_URL_FILE).write_text("nats://h:1")
        (root / AUTH_DIR).mkdir(mode=0o700)
        assert find_run(directory, "", "r") == ("nats://viewer:pass@h:1", "r")
        (root / AUTH_DIR).chmod(0)
        user = os.geteuid()
        if not user:
            os.seteuid(65534)
        try:
            assert find_run(directory, "", "r") == ("nats://viewer:pass@h:1", "r")
        finally:
            os.seteuid(user)


def test_a_run_is_found_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump({"run": "r", "bus": {"url": ""}}))
    with pytest.raises(ValueError, match=r"no bus is running here.*--resume"):
        find_run(str(tmp_path), "", "")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the run is over, see .*summary\.json"):
        find_run(str(tmp_path), "", "")
    (tmp_path / BUS_URL_FILE).write_text("nats://here:1")
    assert find_run(str(tmp_path), "", "") == ("nats://here:1", "r")
    assert find_run(str(tmp_path), "nats://there:2", "other") == ("nats://there:2", "other")
    (tmp_path / CONFIG_FILE).write_text(yaml.safe_dump({"run": "r", "bus": {"url": "nats://outside:3"}}))
    assert find_run(str(tmp_path), "", "") == ("nats://outside:3", "r")
