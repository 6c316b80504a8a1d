"""A bus of three servers: leaders killed under load, and the answers of a replicated stream to repeated appends."""

import asyncio
import dataclasses
import errno
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tests.bench.failover import cluster_under_load, fail_over, leader, report
from tests.bus_kit import Proxy, make_sample, make_task, take
from tests.feeder_kit import World
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import parse
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import Denied, Fenced
from tidemill.bus.server.auth import credentials_file, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done
from tidemill.launch.run.audit import audit
from tidemill.launch.run.checkpoint_cursor import read_cursor
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig

RUN = "r"


@pytest.mark.parametrize(
    "stream", ["SAMPLES", pytest.param("TASKS", marks=pytest.mark.slow), pytest.param("PLAN", marks=pytest.mark.slow)]
)
async def test_nothing_is_lost_or_doubled_when_a_leader_is_killed(
    tmp_path: Path, stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The killed server comes back and has all messages; the load's block ends with a check of its accounting
    (``check_books``).
    """
    async with cluster_under_load(tmp_path) as (servers, load, activities):
        before = len(load.published)
        pauses = await fail_over(servers, load, activities.buses["feeder"], stream)
        with capsys.disabled():
            print(f"\n{report(stream, pauses)}")
        assert len(load.published) > before
        assert not servers.ended()
    assert set(load.published) <= set(load.read)


def done(step: int, epoch: int = 1) -> Done:
    return Done(epoch=epoch, step=step, metrics={})


def test_ports_of_routes_are_reserved_until_the_bus_stops(tmp_path: Path) -> None:
    """Each server needs the ports of all before the others listen."""
    servers = EmbeddedBus(tmp_path / "bus", RUN, BusConfig(cluster=3))
    ports = [port.number for port in servers.routes]
    assert len(set(ports)) == 3
    for number in ports:
        with socket.socket() as stranger, refusal(OSError, errno=errno.EADDRINUSE):
            stranger.bind(("127.0.0.1", number))
    servers.stop()
    for number in ports:
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", number))


async def test_an_append_whose_answer_was_lost_is_recognised_on_a_replicated_stream(tmp_path: Path) -> None:
    """A single server answers the second try with "wrong last sequence", a replicated stream with "duplicate" (or, once
    the id is forgotten, like the single one): either way it is stored once, and a newer learner is still detected.
    Tasks that a replaced learner issues many at once are refused, and those of the newer one stored.
    """
    servers, config = (
        EmbeddedBus(tmp_path / "bus", RUN, BusConfig(cluster=3)),
        BusConfig(cluster=3, duplicate_window_s=0.1),
    )
    url = await asyncio.to_thread(servers.start)
    try:
        async with connect(url, RUN, config, name="looker") as looker, Proxy(url.split(",")[0]) as proxy:
            await looker.jet.retry_for_ever(looker.create_layout)
            info = await looker.jet.call(f"STREAM.INFO.TM_{RUN}_PLAN")
            assert info["config"]["num_replicas"] == 3
            async with connect(proxy.url, RUN, config, name="learner") as bus:
                await bus.plans.fence(1)
                await bus.plans.append(done(1))
                proxy.deaf = True
                appending = asyncio.create_task(bus.plans.append(done(2)))
                following = looker.plans.follow(3)
                assert (await take(following, 1, timeout_s=60))[0][0] == 3
                await following.aclose()  # type: ignore[attr-defined]
                await proxy.cut()
                proxy.deaf = False
                assert await appending == 3
                assert await bus.plans.append(done(3)) == 4
                await looker.plans.fence(2)
                with pytest.raises(Fenced):
                    await bus.plans.append(done(4))
                await bus.tasks.fence(1)
                await looker.tasks.fence(2)
                async with asyncio.timeout(LIMIT_S):
                    with pytest.raises(Fenced):
                        await bus.tasks.issue_all([make_task(RUN, epoch=1, offset=offset) for offset in range(4)])
                    assert await looker.tasks.issue(make_task(RUN, epoch=2)) == 3
            assert [record.step async for _, record in looker.plans.scan() if isinstance(record, Done)] == [1, 2, 3]
    finally:
        servers.stop()


@pytest.mark.slow
async def test_a_run_goes_on_when_the_leader_of_its_samples_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three servers, SAMPLES in two shards with reader processes, the leader of one of them killed in the middle."""
    config = BusConfig(cluster=3, sample_shards=2, lease_s=30.0)
    servers, loop = EmbeddedBus(tmp_path / "bus", RUN, config), asyncio.get_running_loop()
    url = await asyncio.to_thread(servers.start)
    (tmp_path / "checkpoints").mkdir()
    learner = LearnerConfig(
        steps=12, groups_per_step=2, group_size=2, checkpoint_every=2, max_tokens_per_micro_batch=16
    )
    done_s: list[float] = []
    try:
        async with connect(url, RUN, config, name="test", wait_s=60) as bus:
            await bus.jet.retry_for_ever(bus.create_layout)
            staleness, root = StalenessConfig(max_lag=1), tmp_path / "checkpoints"
            world = World(url=url, run=RUN, bus=bus, root=root, learner=learner, staleness=staleness, config=config)

            def kill(did: str, step: int) -> bool:
                if did == "done":
                    done_s.append(time.monotonic())
                if (did, step) == ("done", 5):
                    name = subjects.stream(RUN, f"{subjects.SAMPLES}-0of2")
                    victim = asyncio.run_coroutine_threadsafe(leader(servers, bus, name), loop).result()
                    victim.kill()
                return False

            async with world.actors(), world.feeder() as (feeder_url, feeding):
                await world.train(feeder_url, stop=kill)
                await feeding
            assert len(servers.ended()) == 1, "it was killed, and the run went on without it"
            with capsys.disabled():
                longest, median = max(gaps := np.diff(done_s)), float(np.median(gaps))
                print(f"\nleader of a shard killed: {longest:.1f} s between two steps, else {median:.2f} s")
            accounting, _ = await audit(bus, read_cursor(root))
            assert (accounting.lost, accounting.trained_twice, accounting.problems) == (0, 0, [])
            assert accounting.trained == 12 * 2 * 2
    finally:
        servers.stop()


async def test_a_cluster_has_users_too_and_outlives_the_first_server_of_its_address(tmp_path: Path) -> None:
    config = BusConfig(cluster=3, auth=True, auth_users=1)
    servers = EmbeddedBus(tmp_path / "模型 $x", RUN, config, tmp_path / "auth")
    url = await asyncio.to_thread(servers.start)
    user, password = read_credentials(credentials_file(tmp_path / "auth", "learner"))
    line = dataclasses.replace(parse(url), user=user, password=password)
    try:
        async with connect(line.line(), RUN, config, name="early") as bus:
            await bus.jet.retry_for_ever(bus.create_layout)
        await asyncio.to_thread(servers.servers[0].kill)
        assert len(servers.ended()) == 1
        async with connect(line.line(), RUN, config, name="late") as bus:
            assert await bus.samples.publish(make_sample(RUN)) == 1
        with pytest.raises(Denied):
            async with connect(dataclasses.replace(line, password="wrong").line(), RUN, config, name="stranger"):
                pass
    finally:
        servers.stop()
