"""Users of a real server: each role can do its work and nothing else, and a refused client gets an error."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.bus_kit import make_sample, make_task, take
from tests.refusals import refusal
from tests.waits import LIMIT_S, until, until_gone
from tidemill.bus import exit_codes
from tidemill.bus.client.addresses import parse
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, Denied, Forbidden, PasswordReplaced, ServerFailed
from tidemill.bus.keys import ADMIN_KEY, API_KEY, Keys, admin_keys, api_keys, make_keys
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.server.auth import CREDENTIALS_VARIABLE, credentials_file, make_users, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.streams.bus import Bus, connect, find_run, raise_epoch, runs_on
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import DeadLetterDecision, Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.find_run import find_run as find_run_in
from tidemill.launch.cli.inputs import process_id
from tidemill.launch.cli.main import main
from tidemill.launch.cli.runs import read_runs
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.run import desired
from tidemill.launch.run.access import BUS_URL_FILE
from tidemill.launch.run.bus_process import renew_users
from tidemill.launch.run.directory import RequestRefused
from tidemill.launch.settings.config_loader import load

ROOT = Path(__file__).resolve().parents[2]
RUN = "r"
CONFIG = BusConfig(auth=True, auth_users=2, auth_shadows=("x",), lease_s=600.0, max_attempts=1, max_payload_bytes=8192)
AT_ONCE_S = 14.0
"""Seconds, below the waits of a bus that does not answer (15 s and without end)."""

As = Callable[..., AbstractAsyncContextManager[Bus]]


@pytest.fixture
def auth_dir(tmp_path: Path) -> Path:
    return tmp_path / "auth"


@pytest.fixture
def guarded(tmp_path: Path, auth_dir: Path) -> Iterator[EmbeddedBus]:
    servers = EmbeddedBus(tmp_path / "bus", RUN, CONFIG, auth_dir)
    servers.start()
    yield servers
    servers.stop()


def line_of(url: str, directory: Path, user: str) -> str:
    name, password = read_credentials(credentials_file(directory, user))
    return dataclasses.replace(parse(url), user=name, password=password).line()


@pytest.fixture
def as_user(guarded: EmbeddedBus, auth_dir: Path) -> As:
    """Return a function for ``async with as_user("actor-0") as bus``. The learner's creates the layout."""

    @asynccontextmanager
    async def opened(user: str) -> AsyncIterator[Bus]:
        async with connect(line_of(guarded.url, auth_dir, user), RUN, CONFIG, name=user, wait_s=60) as bus:
            if user == "learner":
                await bus.create_layout()
            yield bus

    return opened


def row(role: str, id: str) -> LiveRow:
    return LiveRow(role=role, id=id, host="h", pid=1, phase="working")


async def test_every_role_can_do_its_work(as_user: As, caplog: pytest.LogCaptureFixture) -> None:
    """A whole small run is refused nothing."""
    async with (
        as_user("learner") as learner,
        as_user("actor-0") as actor,
        as_user("engine-1") as engine,
        as_user("scorer-0") as scorer,
        as_user("host-0") as host,
        as_user("router") as router,
        as_user("viewer") as viewer,
        asyncio.timeout(LIMIT_S),
    ):
        await learner.tasks.fence(1)
        await learner.plans.fence(1)
        await learner.rows("weights").put("head", {"version": 0, "step": 0, "epoch": 1})
        await learner.rows("wanted").put("pool", {"actors": 1})
        ids = [await learner.tasks.issue(make_task(RUN, offset=offset)) for offset in range(2)]
        await learner.plans.append(Done(epoch=1, step=1, metrics={}))
        async with (
            HeartbeatPublisher(actor, row("actor", "actor-0")),
            HeartbeatPublisher(engine, row("engine", "engine-1")),
            HeartbeatPublisher(scorer, row("scorer", "scorer-0")),
            HeartbeatPublisher(host, row("host", "host-0")),
            HeartbeatPublisher(router, row("router", "router")),
        ):
            async with (
                LiveView(actor).on_change("engine", lambda: None),
                LiveView(actor).on_change("scorer", lambda: None),
                LiveView(router).on_change("engine", lambda: None),
            ):

                async def all_seen() -> bool:
                    return len(await LiveView(router).alive()) >= 5

                await until(all_seen)  # other roles have no event
            watching = engine.rows("weights").watch("head")
            assert await take(watching, 1) == [({"version": 0, "step": 0, "epoch": 1}, 1)]
            await watching.aclose()  # type: ignore[attr-defined]
            await engine.rows("weights").put("want", {"version": 0})
            assert (await host.rows("wanted").get("pool")) is not None

            good, bad = await actor.tasks.lease(60), await actor.tasks.lease(60)
            assert good is not None and bad is not None
            await actor.samples.publish(make_sample(RUN, task=good.task.id, actor="actor-0"))
            await actor.samples.publish(make_sample(RUN, task=good.task.id, index=1, length=3000, actor="actor-0"))
            assert await good.ack()
            assert await bad.fail("no engine", actor="actor-0")
            await _publish(actor, subjects.dead(RUN, "report", "*"))
        assert await LiveView(viewer).refresh() == [], "their rows are gone"

        read = learner.samples.read(None)
        assert [type(received.sample).__name__ for received in await take(read, 2)] == ["Sample", "Sample"]
        await read.aclose()  # type: ignore[attr-defined]
        assert len([sample async for sample in viewer.samples.tail(last=10, follow=False)]) == 2
        assert [task.id async for task in viewer.tasks.scan()] == ids
        assert len([record async for record in viewer.plans.scan()]) == 2
        assert [dead.task async for _, dead in viewer.dead.scan()] == [bad.task.id]
        assert await viewer.tasks.backlog() == (0, 0)
        assert await learner.dead.trim_reports(1)
        reports = subjects.dead(RUN, "report", "*")
        assert reports not in await learner.jet.subjects(subjects.stream(RUN, subjects.DEAD), reports)
        await learner.samples.trim(2)
        await learner.tasks.raise_floor(ids[-1])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def _publish(bus: Bus, subject: str) -> object:
    return await bus.jet.outbox.store(subject, b"{}", {"Nats-Msg-Id": "x"})


def _api(verb: str) -> Callable[[Bus], Awaitable[object]]:
    return lambda bus: bus.jet.call(verb, {"seq": 2})


FORBIDDEN: dict[str, tuple[str, Callable[[Bus], Awaitable[object]]]] = {
    "a sample under another's name": ("actor-0", lambda bus: bus.samples.publish(make_sample(RUN, actor="actor-1"))),
    "another's row": ("actor-0", lambda bus: bus.rows("live").put("actor.actor-1", {})),
    "an engine's row": ("actor-0", lambda bus: bus.rows("live").put("engine.actor-0", {})),
    "a task": ("actor-0", lambda bus: _publish(bus, "tm.r.task.train")),
    "a plan": ("actor-0", lambda bus: _publish(bus, "tm.r.plan.plan")),
    "the epoch": ("actor-0", lambda bus: bus.rows("run").put("epoch", {"epoch": 9})),
    "the weights": ("engine-0", lambda bus: bus.rows("weights").put("head", {"version": 9})),
    "a purge": ("actor-0", lambda bus: bus.jet.purge("TM_r_SAMPLES", 2)),
    "a read of all samples": ("actor-0", _api("STREAM.MSG.GET.TM_r_SAMPLES")),
    "a scorer's row": ("actor-0", lambda bus: bus.rows("live").put("scorer.actor-0", {})),
    "a lease by a scorer": ("scorer-0", lambda bus: bus.tasks.lease(60)),
    "a sample of a scorer": ("scorer-0", lambda bus: bus.samples.publish(make_sample(RUN, actor="scorer-0"))),
    "a lease": ("engine-0", lambda bus: bus.tasks.lease(60)),
    "a row of a role that it has not": ("router", lambda bus: bus.rows("live").put("engine.router", {})),
    "a task for it": ("router", lambda bus: bus.tasks.lease(60)),
    "a subject that no process reads": ("actor-0", lambda bus: _publish(bus, "tm.r.do.actor.actor-1")),
    "a look at everybody's tasks": ("viewer", lambda bus: bus.tasks.lease(60)),
    "a sample": ("viewer", lambda bus: bus.samples.publish(make_sample(RUN))),
    "a row": ("viewer", lambda bus: bus.rows("wanted").put("pool", {})),
    "a row's end": ("viewer", lambda bus: bus.rows("run").delete("epoch")),
    "the end of a stream": ("viewer", _api("STREAM.DELETE.TM_r_SAMPLES")),
    "another queue": ("viewer", _api("CONSUMER.CREATE.TM_r_TASKS.rollout")),
    "the end of a queue": ("viewer", _api("CONSUMER.INFO.TM_r_SAMPLES.x")),
    "a sample of a shadow": ("shadow-x", lambda bus: bus.samples.publish(make_sample(RUN, actor="shadow-x"))),
    "a lease of a shadow": ("shadow-x", lambda bus: bus.tasks.lease(60)),
    "a plan of a shadow": ("shadow-x", lambda bus: _publish(bus, "tm.r.plan.plan")),
    "a row of a shadow": ("shadow-x", lambda bus: bus.rows("weights").put("head", {"version": 9})),
    "a purge by a shadow": ("shadow-x", _api("STREAM.PURGE.TM_r_SAMPLES")),
    "another queue of a shadow": ("shadow-x", _api("CONSUMER.CREATE.TM_r_TASKS.rollout")),
    "a stream of a shadow": ("shadow-x", _api("STREAM.CREATE.TM_r-x_PLAN")),
    "a source of a shadow": ("shadow-x", _api("STREAM.UPDATE.TM_r-x_PLAN")),
    "keys of a shadow": ("shadow-x", _api("STREAM.MSG.GET.KV_TM_r_keys")),
    "another run's stream": ("learner", _api("STREAM.CREATE.TM_other_TASKS")),
}


@pytest.mark.parametrize(
    "user", ["learner", "actor-0", "engine-0", "scorer-0", "host-0", "router", "viewer", "operator"]
)
async def test_every_role_gets_the_reason_for_which_nothing_is_stored(as_user: As, user: str) -> None:
    async with as_user("learner") as keeper, as_user(user) as bus:
        for reason in ("no room", "no room still"):
            async with keeper.reporting_full(lambda reason=reason: reason), asyncio.timeout(AT_ONCE_S):  # type: ignore[misc]
                # The subscription of another connection is no event here.
                assert await until(bus.full) == reason
            async with asyncio.timeout(AT_ONCE_S):
                await until_gone(bus.full)


@pytest.mark.parametrize("what", FORBIDDEN)
async def test_requests_outside_a_role_are_refused_at_once_by_name(as_user: As, what: str) -> None:
    user, act = FORBIDDEN[what]
    async with as_user("learner") as learner, as_user(user) as bus:
        before = {name: (await learner.jet.state(f"TM_r_{name}")).last_seq for name in ("TASKS", "SAMPLES", "PLAN")}
        for _ in range(2):  # also the second time, which the client itself refuses
            with refusal(Forbidden, verb="publish", user=user):
                async with asyncio.timeout(AT_ONCE_S):
                    await act(bus)
        assert {name: (await learner.jet.state(f"TM_r_{name}")).last_seq for name in before} == before
        assert bus.connected


async def test_only_roles_that_send_or_receive_commands_read_the_admin_key(as_user: As) -> None:
    async with as_user("learner") as learner:
        made = await make_keys(learner)
        assert await make_keys(learner) == made == await admin_keys(learner).known(), "once in a run"
        for user in ("engine-0", "router"):
            async with as_user(user) as bus:
                assert await admin_keys(bus).known() == made
        for user in ("actor-0", "host-0", "viewer", "operator"):
            async with as_user(user) as bus:
                assert await api_keys(bus).known() == Keys(api=made.api)
                with refusal(Forbidden, subject=re.compile("KV_TM_r_keys$")):
                    await admin_keys(bus).known()
        for user in ("actor-0", "engine-0", "router", "operator"):
            async with as_user(user) as bus:
                for bucket, key in (("run", API_KEY), ("keys", ADMIN_KEY)):
                    with pytest.raises(Forbidden):
                        await bus.rows(bucket).put(key, {"key": "mine"})


async def test_a_shadow_reads_the_run_and_writes_a_run_of_its_own(
    as_user: As, guarded: EmbeddedBus, auth_dir: Path
) -> None:
    line = line_of(guarded.url, auth_dir, "shadow-x")
    async with as_user("learner") as learner, connect(line, f"{RUN}-x", CONFIG, name="shadow-x") as own:
        await own.create_layout(shadow=True)
        await learner.tasks.fence(1)
        task = await learner.tasks.issue(make_task(RUN, epoch=1))
        await learner.plans.fence(1)
        await learner.plans.append(Done(epoch=1, step=1, metrics={}))
        async with connect(line, RUN, CONFIG, name="shadow-x") as run:
            assert [record.step async for _, record in run.plans.scan() if isinstance(record, Done)] == [1]
            assert (await run.tasks.fetch(task)).id == task
            async with as_user("actor-0") as actor:
                seq = await actor.samples.publish(make_sample(RUN, task=task, actor="actor-0"))
            assert (await run.samples.fetch(seq)).task == task
        epoch = await raise_epoch(own)
        await own.plans.fence(epoch)
        await own.plans.append(Done(epoch=epoch, step=1, metrics={"loss": 1.0}))
        async with HeartbeatPublisher(own, row("learner", "learner")) as beating:
            await beating.stored()
        assert [record.step async for _, record in own.plans.scan() if isinstance(record, Done)] == [1]
        assert await runs_on(learner.jet.connection) == [RUN], "no actor takes it for a run"
        for user in ("viewer", "operator"):
            compared = ComparedRuns(line_of(guarded.url, auth_dir, user), RUN)
            assert [other["name"] for other in (await compared.as_map(1))["runs"]] == [RUN, f"{RUN}-x"]
            curves = await compared.columns(f"{RUN}-x")
            assert curves is not None and curves.names == ["loss"]


async def test_a_shadow_without_changes_of_its_own_rows_reports_no_error(
    as_user: As, guarded: EmbeddedBus, auth_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No user subscribes to subjects that it writes; whoever waits for a change of a row reads the row, too."""
    caplog.set_level(logging.INFO)
    line = line_of(guarded.url, auth_dir, "shadow-x")
    async with as_user("learner"), connect(line, f"{RUN}-x", CONFIG, name="shadow-x") as own:
        async with own.rows("run").on_change("config", lambda: None):
            await until(lambda: "may not subscribe here" in caplog.text)
    assert {record.levelno for record in caplog.records if "may not" in record.message} == {logging.INFO}


async def test_other_refused_subscriptions_to_rows_are_warnings(as_user: As, caplog: pytest.LogCaptureFixture) -> None:
    """Also of a shadow, for the rows of its run. One that is repeated, as after each new connection, is logged once."""
    caplog.set_level(logging.INFO)
    async with as_user("learner"), as_user("scorer-0") as scorer, as_user("shadow-x") as shadow:
        for bus in (scorer, shadow):
            rows = bus.rows("weights")
            async with rows.on_change("head", lambda: None), rows.on_change("head", lambda: None):
                await until(lambda bus=bus: f"user {bus.jet.connection.user} may not subscribe" in caplog.text)  # type: ignore[misc]
                await bus.jet.connection.nc.flush()
    refused = [record.levelno for record in caplog.records if "may not" in record.message]
    assert refused == [logging.WARNING] * 2


async def test_a_refused_publish_is_not_tried_again(as_user: As) -> None:
    tries: list[str] = []
    async with as_user("learner"), as_user("actor-0") as bus:
        with pytest.raises(Forbidden):
            await bus.jet.outbox.store(
                "tm.r.plan.plan", b"", {"Nats-Msg-Id": "x"}, on_retry=lambda why, full: tries.append(why)
            )
    assert not tries


async def test_no_user_can_subscribe_to_anothers_answers(as_user: As, caplog: pytest.LogCaptureFixture) -> None:
    async with as_user("learner") as learner, as_user("actor-0") as spy:
        received: list[object] = []

        async def hear(message: object) -> None:
            received.append(message)

        for subject in ("_INBOX_learner.>", "_INBOX.>", ">", "tm.r.>", "$JS.ACK.>"):
            await spy.nc.subscribe(subject, cb=hear)
        await spy.nc.flush()
        await learner.tasks.fence(1)
        await learner.tasks.issue(make_task(RUN))
        await learner.jet.state("TM_r_TASKS")
        await spy.nc.flush()
        assert not received
        assert len([record for record in caplog.records if "may not subscribe here" in record.message]) == 5


async def test_a_viewer_sees_the_runs_of_its_bus(as_user: As, guarded: EmbeddedBus, auth_dir: Path) -> None:
    line = line_of(guarded.url, auth_dir, "shadow-x")
    async with as_user("learner"), connect(line, f"{RUN}-x", CONFIG, name="shadow-x") as own:
        await own.create_layout(shadow=True)
        run, shadow = await read_runs(line_of(guarded.url, auth_dir, "viewer"), wait_s=60)
    assert (run.name, run.state, run.has_tasks) == (RUN, "no learner yet", True)
    assert (shadow.name, shadow.has_tasks) == (f"{RUN}-x", False)


@pytest.mark.parametrize("user", ["viewer", "actor-0"])
async def test_an_answer_goes_only_to_its_requester(as_user: As, user: str) -> None:
    """The server itself writes the answer to a request: as the reply subject, a row of the run would be overwritten."""
    async with as_user("learner") as learner, as_user(user) as bus, learner.reporting_full(lambda: '{"epoch": 9}'):
        revision = await learner.rows("run").put("epoch", {"epoch": 1})
        streams = {name: (await learner.jet.state(f"TM_r_{name}")).last_seq for name in ("TASKS", "PLAN")}
        await until(lambda: bus.full())  # the subscription of another connection is no event here
        for place in ("$KV.TM_r_run.epoch", "tm.r.task.train", "tm.r.plan.plan"):
            await bus.nc.publish("$JS.API.STREAM.MSG.GET.KV_TM_r_run", b'{"seq":1}', reply=place)
            await bus.nc.publish("tm.r.sample.train.1.actor-0", b"", reply=place)
            await bus.nc.publish("tm.r.full", b"", reply=place)
        assert await bus.full(), "answered after those messages"
        assert await bus.rows("run").get("epoch")  # requested and answered after those messages
        assert await learner.rows("run").get("epoch") == ({"epoch": 1}, revision)
        assert {name: (await learner.jet.state(f"TM_r_{name}")).last_seq for name in streams} == streams


HEADERS = (
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-TTL": "1s"},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "$KV.TM_r_weights.head"},
    {"Nats-Incr": "1"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
)
"""Publisher headers that make the server do more than store the message."""


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("engine-0", "$KV.TM_r_weights.want"),
        ("engine-0", "$KV.TM_r_live.engine.engine-0"),
        ("actor-0", "$KV.TM_r_live.actor.actor-0"),
        ("operator", "$KV.TM_r_wanted.pool"),
        ("operator", "$KV.TM_r_run.cursor.mine"),
        ("actor-0", "tm.r.sample.train.1.actor-0"),
        ("actor-0", "tm.r.partial.1.1"),
        ("actor-0", "tm.r.dead.report.1"),
    ],
)
async def test_headers_of_a_message_affect_no_other_message(as_user: As, user: str, subject: str) -> None:
    """A rollup on one's own row would empty the bucket: the registry of versions, or every live row."""
    async with as_user("learner") as learner, as_user(user) as bus:
        streams = [
            "KV_TM_r_weights",
            "KV_TM_r_live",
            "KV_TM_r_wanted",
            "KV_TM_r_run",
            "TM_r_SAMPLES",
            "TM_r_PARTIALS",
            "TM_r_DEAD",
        ]
        for bucket in subjects.BUCKETS:
            await learner.rows(bucket).put("another.s", {"version": 571})
        await bus.nc.request(subject, b"{}", timeout=60)
        before = [await learner.jet.state(stream) for stream in streams]
        for headers in HEADERS:
            answer = json.loads((await bus.nc.request(subject, b"{}", headers=headers, timeout=60)).data)
            assert "error" in answer, f"{headers} was taken"
        assert [await learner.jet.state(stream) for stream in streams] == before


async def test_a_run_made_without_users_is_not_restarted_with_users(tmp_path: Path, auth_dir: Path) -> None:
    plain = EmbeddedBus(tmp_path / "bus", RUN, BusConfig())
    async with connect(await asyncio.to_thread(plain.start), RUN, name="a", wait_s=60) as bus:
        await bus.create_layout()
    plain.stop()
    with refusal(ServerFailed, reason=re.compile(r"/bus/store .*\bbus\.auth: false")):
        EmbeddedBus(tmp_path / "bus", RUN, CONFIG, auth_dir).start()


@pytest.mark.parametrize(
    ("user", "password", "reason"), [("actor-0", "wrong", "wrong name or password"), ("", "", "no user given")]
)
async def test_a_wrong_login_is_refused_at_once(guarded: EmbeddedBus, user: str, password: str, reason: str) -> None:
    line = dataclasses.replace(parse(guarded.url), user=user, password=password).line()
    with refusal(Denied, reason=reason, cure=re.compile("^TIDEMILL_BUS_CREDENTIALS=")) as denied:
        async with asyncio.timeout(AT_ONCE_S), connect(line, RUN, name="actor-0", wait_s=60):
            pass
    assert "wrong@" not in str(denied.value) and ":wrong" not in str(denied.value)


async def test_passwords_are_in_their_files_alone(
    tmp_path: Path, auth_dir: Path, as_user: As, guarded: EmbeddedBus
) -> None:
    passwords = {
        user: read_credentials(credentials_file(auth_dir, user))[1]
        for user in ("learner", "viewer", "actor-0", "host-1")
    }
    assert len(set(passwords.values())) == 4
    async with (
        as_user("learner") as learner,
        as_user("actor-0") as actor,
        HeartbeatPublisher(actor, row("actor", "actor-0")),
    ):
        await learner.rows("run").put("config", dataclasses.asdict(CONFIG))
    check_files(tmp_path, auth_dir, passwords)


def check_files(root: Path, auth_dir: Path, passwords: dict[str, str]) -> None:
    for path in [path for path in root.rglob("*") if path.is_file()]:
        found = [user for user, password in passwords.items() if password.encode() in path.read_bytes()]
        assert found == ([path.stem] if path.suffix == ".env" and path.stem in passwords else []), path
    for path in [*auth_dir.iterdir(), root / "bus" / "nats-server.conf"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_users_keep_their_passwords_over_restarts_and_may_become_more(
    tmp_path: Path, auth_dir: Path, as_user: As, guarded: EmbeddedBus
) -> None:
    again = EmbeddedBus(tmp_path / "bus", RUN, dataclasses.replace(CONFIG, auth_users=3), auth_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(
            again.stop
        )  # behind the connections: one that reconnects while it is closed may leave a task of the library
        async with as_user("learner") as learner, as_user("actor-0") as actor:
            await actor.samples.publish(make_sample(RUN, actor="actor-0"))
            guarded.stop()
            assert again.start() == guarded.url
            async with asyncio.timeout(LIMIT_S), as_user("actor-2") as new:
                assert await actor.samples.publish(make_sample(RUN, index=1, actor="actor-0")) == 2
                assert await new.samples.publish(make_sample(RUN, index=2, actor="actor-2")) == 3
                assert (await learner.samples.info()).messages == 3


async def test_an_actor_finds_its_run(guarded: EmbeddedBus, auth_dir: Path, as_user: As) -> None:
    async with as_user("learner"):
        assert await find_run(line_of(guarded.url, auth_dir, "actor-1"), name="actor-1", wait_s=60) == RUN


async def test_a_directory_without_settings_gives_a_viewer_its_password(
    guarded: EmbeddedBus, auth_dir: Path, as_user: As, tmp_path: Path
) -> None:
    """`tidemill bus --auth` writes users and its address there, and no configuration."""
    (tmp_path / BUS_URL_FILE).write_text(guarded.url)
    async with as_user("learner"):
        line, run = await asyncio.to_thread(find_run_in, str(tmp_path), "", "")
    assert (line, run) == (line_of(guarded.url, auth_dir, "viewer"), RUN)


@pytest.mark.parametrize(("name", "other"), [("actor-1", "actor-b"), ("router", "door")])
def test_a_process_has_the_name_of_its_user(
    name: str, other: str, auth_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_users(auth_dir, RUN, CONFIG)
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(credentials_file(auth_dir, name)))
    assert process_id(Namespace(id="")) == process_id(Namespace(id=name)) == name
    with pytest.raises(ValueError, match=f"--id: want {name}, the user of the bus.*got {other}"):
        process_id(Namespace(id=other))
    (tmp_path / "mine.env").write_text("TIDEMILL_BUS_USER=me\nTIDEMILL_BUS_PASSWORD=x\n")
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(tmp_path / "mine.env"))
    assert process_id(Namespace(id=other)) == other, "a server of one's own may have any users"


@pytest.mark.parametrize(
    ("words", "message"), [((), "--users: want a directory"), (("--name", "a"), "--name: want host-0")]
)
def test_a_host_with_a_user_needs_those_of_its_processes(
    words: Sequence[str],
    message: str,
    auth_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_users(auth_dir, RUN, CONFIG)
    monkeypatch.setenv(CREDENTIALS_VARIABLE, str(credentials_file(auth_dir, "host-0")))
    assert main(["host", "--bus", "nats://127.0.0.1:1", *words, "actors=1"]) == 2
    assert message in capsys.readouterr().err


def test_permissions_name_streams_that_there_are(tmp_path: Path) -> None:
    """Permissions that name a renamed stream would lock every role out."""
    lines = "\n".join(make_users(tmp_path / "auth", RUN, CONFIG))
    for name in (subjects.TASKS, subjects.SAMPLES, subjects.PLAN, subjects.DEAD):
        assert f"$JS.API.STREAM.INFO.{subjects.stream(RUN, name)}" in lines
    deletions = re.findall(r"STREAM\.MSG\.DELETE\.(\w+)", lines)
    assert deletions and set(deletions) <= {subjects.stream(RUN, name) for name in ("PARTIALS", "TURNS", "DEAD")}
    assert json.loads((tmp_path / "auth" / "users.json").read_text())["viewer"] in lines


# ---- TLS


async def test_a_user_gets_a_new_password_while_the_others_stay_connected(
    guarded: EmbeddedBus, auth_dir: Path, as_user: As, tmp_path: Path
) -> None:
    config = load([], [f"directory={tmp_path}", f"run={RUN}", "bus.auth=true", "bus.auth_users=2"]).config
    before = line_of(guarded.url, auth_dir, "actor-0")
    async with as_user("learner") as learner, as_user("actor-1") as other, as_user("actor-0") as renewed:
        outages = [bus.nc.stats["reconnects"] for bus in (learner, other)]
        await asyncio.to_thread(renew_users, config, guarded, ["actor-0"])
        await until(lambda: not renewed.connected)
        await other.samples.publish(make_sample(RUN, actor="actor-1"))
        assert [bus.nc.stats["reconnects"] for bus in (learner, other)] == outages
        with refusal(PasswordReplaced, where=re.compile(r"^actor-0 at .* as actor-0$")) as denied:
            await renewed.tasks.lease(60)
        assert exit_codes.of(denied.value) not in exit_codes.FINAL, "started again, it reads the new password"
    assert line_of(guarded.url, auth_dir, "actor-0") != before
    with pytest.raises(BusError):
        async with connect(before, RUN, CONFIG, name="actor-0", wait_s=1):
            pass
    async with as_user("actor-0") as again:
        await again.samples.publish(make_sample(RUN, actor="actor-0", task=2))
    for name, reason in (("learner", "read its password at their start"), ("actor-9", "there is none")):
        with pytest.raises(RequestRefused, match=f"{name}: .*{reason}"):
            renew_users(config, guarded, [name])


def openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make ca.pem, and server.pem with server.key that it signed for 127.0.0.1; stranger.pem has signed nothing."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    directory = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "stranger"):
        openssl(
            directory, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"
        )
    openssl(directory, "req", *key[:-2], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=bus")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    _sign(directory)
    return directory


def _sign(directory: Path) -> None:
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl(directory, "x509", "-req", "-in", "server.csr", "-out", "server.pem", *signed)


def _serial(directory: Path) -> int:
    """Return the serial number of the certificate in a file."""
    words = ("openssl", "x509", "-noout", "-serial", "-in", str(directory / "server.pem"))
    return int(subprocess.check_output(words, text=True, timeout=LIMIT_S).strip().partition("=")[2], 16)


def _shown(url: str, directory: Path) -> int:
    """Return the serial number of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.load_cert_chain(str(directory / "server.pem"), str(directory / "server.key"))
    host, port = url.removeprefix("tls://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain:
        plain.recv(4096)  # NATS sends its INFO before the handshake
        with context.wrap_socket(plain, server_hostname=host) as guarded:
            certificate = guarded.getpeercert()
            assert certificate is not None
            return int(str(certificate["serialNumber"]), 16)


@pytest.mark.parametrize("verify", [False, True], ids=["server", "both"])
async def test_tls(tmp_path: Path, certificates: Path, verify: bool) -> None:
    """Clients that trust the signer connect, others get a clear error at once; without TLS none connects."""
    odd = tmp_path / 'é $x "y" \\'
    shutil.copytree(certificates, odd)
    files = {"tls_cert": str(odd / "server.pem"), "tls_key": str(odd / "server.key"), "tls_ca": str(odd / "ca.pem")}
    servers = EmbeddedBus(tmp_path / "bus", RUN, BusConfig(tls_verify=verify, **files))  # type: ignore[arg-type]
    url = servers.start()
    try:
        assert url.startswith("tls://")
        trusting = dataclasses.replace(parse(url), ca=files["tls_ca"])
        client = dataclasses.replace(trusting, cert=files["tls_cert"], key=files["tls_key"]) if verify else trusting
        async with connect(client.line(), RUN, name="a", wait_s=60) as bus:
            await bus.create_layout()
            assert await bus.samples.publish(make_sample(RUN)) == 1
        assert _shown(url, odd) == _serial(odd)
        _sign(odd)
        await asyncio.to_thread(servers.reload)
        assert _shown(url, odd) == _serial(odd), "a certificate that was renewed is read again"
        for line in (url, f"{url}?ca={certificates / 'stranger.pem'}"):
            with refusal(Denied, cure=re.compile(r"\bbus\.tls_ca\b")):
                async with asyncio.timeout(AT_ONCE_S), connect(line, RUN, name="a", wait_s=60):
                    pass
        with pytest.raises(BusError):
            async with connect(url.replace("tls://", "nats://"), RUN, name="a", wait_s=1):
                pass
        if verify:
            with pytest.raises(BusError):
                async with connect(trusting.line(), RUN, name="a", wait_s=1):
                    pass
    finally:
        servers.stop()


async def test_an_operator_sets_desired_numbers_and_decides_dead_letters_and_a_viewer_may_not(as_user: As) -> None:
    async with as_user("learner") as learner, as_user("operator") as operator, as_user("viewer") as viewer:
        assert await desired.change(operator, desired.ALL, {"actor": 3}) == ({}, {"actor": 3})
        assert (await desired.read(viewer)).rows[desired.ALL][0] == {"actor": 3}
        assert await operator.dead.decide(DeadLetterDecision(task=7, word="drop"))
        assert not await learner.dead.decide(DeadLetterDecision(task=7, word="requeue"))
        with refusal(Forbidden, verb="publish", user="viewer"):
            await desired.change(viewer, desired.ALL, {"actor": 4})
        with refusal(Forbidden, verb="publish", user="viewer"):
            await viewer.dead.decide(DeadLetterDecision(task=8, word="drop"))
        with refusal(Forbidden, verb="publish", user="operator"):
            await operator.rows("run").put("config", {})


async def test_the_learner_receives_the_acks_of_an_actor_and_another_actor_does_not(as_user: As) -> None:
    received: asyncio.Queue[int] = asyncio.Queue()
    others: asyncio.Queue[int] = asyncio.Queue()
    async with as_user("learner") as learner, as_user("actor-0") as actor, as_user("actor-1") as other:
        await learner.tasks.fence(1)
        id = await learner.tasks.issue(make_task(RUN))
        async with learner.tasks.acks(received.put_nowait), other.tasks.acks(others.put_nowait):
            await learner.nc.flush()  # the server knows the subscriptions now
            await other.nc.flush()
            lease = await actor.tasks.lease(60)
            assert lease is not None and await lease.ack()
            assert await received.get() == id
            assert others.empty()


async def test_a_host_gives_each_process_a_user_of_its_own_and_has_no_more_of_them_than_users(
    as_user: As, guarded: EmbeddedBus, auth_dir: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "host",
        "--bus",
        guarded.url,
        "--run",
        RUN,
        "--dir",
        str(tmp_path / "host"),
    ]
    environment = {**os.environ, "TIDEMILL_BUS_CREDENTIALS": str(credentials_file(auth_dir, "host-1"))}
    async with as_user("learner") as learner:
        await learner.rows("run").put("config", {"actor": {"reward": "digits"}})
        words = ("--users", str(auth_dir), "actors=1")
        host = await asyncio.create_subprocess_exec(*command, *words, cwd=ROOT, env=environment)
        try:
            view = LiveView(learner)

            async def run(*names: str) -> bool:
                return [actor.id for actor in await view.alive("actor")] == list(names)

            async def waiting() -> list[LiveRow]:
                return [row for row in await view.alive("host") if row.waits_for]

            await until(lambda: run("actor-0"))  # its own number, which it may not write
            await desired.change(learner, desired.host_key("host-1"), {"actor": 5})
            await until(lambda: run("actor-0", "actor-1"))
            [row] = await until(waiting)
            assert (row.id, row.waits_for) == ("host-1", "5 actors wanted, credentials for 2 of them here")
        finally:
            host.terminate()
            assert await host.wait() == 0
