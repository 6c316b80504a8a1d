"""The row of the end of a run: written by a feeder on a real nats-server, and waited for by processes of a run."""

import asyncio
import dataclasses
import signal
from pathlib import Path

import pytest

from tests.bus_fixtures import BusOpener
from tests.integration.test_feeder import OpenWorld, finish, open_world
from tests.launched import tidemill
from tests.waits import LIMIT_S, until
from tests.whole.running import SMOKE
from tidemill.actors.engines.membership import CONFIG_KEY
from tidemill.bus.errors import BusUnavailable, Fenced
from tidemill.bus.liveness import LiveView, processes
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, raise_epoch
from tidemill.bus.wire.rows import EndRow, LiveRow, Outcome
from tidemill.bus.wire.subjects import END_KEY
from tidemill.launch.cli.main import main
from tidemill.launch.run.run_end import LearnerEnd, end_of, new_end, wait_ended
from tidemill.launch.settings.config_loader import load, to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.errors import ConfigRefused, LearnerError
from tidemill.learner.feed.feeder import row_publisher
from tidemill.learner.feed.outcomes import record_end, remove_end

__all__ = ["open_world"]
FAILED = EndRow(outcome=Outcome.FAILED, code=78, reason="learner.steps: want > 0", step=0, time_s=0.0)
DONE = dataclasses.replace(FAILED, outcome=Outcome.DONE, code=0, reason="learner.steps", step=2)


def config_of(bus: Bus) -> RunConfig:
    return load([SMOKE], [f"run={bus.run}"], {}).config


async def put(bus: Bus, row: EndRow) -> None:
    await bus.rows("run").put(END_KEY, dataclasses.asdict(row))


async def test_a_feeder_records_the_end_and_a_start_without_steps_left_records_it_again(open_world: OpenWorld) -> None:
    """Killed between the last checkpoint and the row, a learner leaves the checkpoint alone."""
    async with open_world() as world, world.actors():
        waiting = asyncio.create_task(wait_ended(world.bus))
        await finish(world)
        end = await waiting
        assert (end.outcome, end.code, end.reason, end.step) == (Outcome.DONE, 0, "learner.steps", world.learner.steps)
        await world.bus.rows("run").delete(END_KEY)
        await finish(world)
        again = await end_of(world.bus)
        assert again is not None
        assert (again.step, again.epoch) == (end.step, end.epoch + 1)


async def test_a_start_with_steps_left_removes_the_row_and_a_drained_one_records_none(open_world: OpenWorld) -> None:
    async with open_world() as world, world.actors():
        await put(world.bus, FAILED)
        draining = asyncio.Event()
        async with world.feeder(draining=draining) as (url, feeding):
            await world.train(url, stop=lambda did, at: (did, at) == ("checkpoint", 2))
            draining.set()
            await feeding
        assert await end_of(world.bus) is None


async def test_a_learner_that_no_restart_cures_records_why(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        address = nats_server.url
        refused = ConfigRefused("learner.data_parallel", "2 until the recorded step 3 is in a checkpoint", 1)
        for leads, error in ((True, LearnerError("a rank was killed")), (False, refused)):
            with pytest.raises(LearnerError):
                async with LearnerEnd(config_of(bus), address, leads=leads).noted(asyncio.Event()):
                    raise error
            assert await end_of(bus) is None
        with pytest.raises(ExceptionGroup):
            async with LearnerEnd(config_of(bus), address, leads=True).noted(asyncio.Event()):
                raise ExceptionGroup("", [refused])
        end = await end_of(bus)
        assert end is not None
        assert (end.outcome, end.code, end.reason) == (Outcome.FAILED, 78, str(refused))
        await put(bus, DONE)
        with pytest.raises(LearnerError):
            async with LearnerEnd(config_of(bus), address, leads=True).noted(asyncio.Event()):
                raise refused
        assert await end_of(bus) == DONE, "a start with other settings does not change what was done"


async def test_the_wait_for_a_bus_does_not_bound_its_answers(nats_server: EmbeddedServer, open_bus: BusOpener) -> None:
    """The look for other learners takes longer than this wait."""
    async with open_bus() as bus:
        end = LearnerEnd(config_of(bus), nats_server.url, leads=True)
        await end.record_failure(ConfigRefused("bus.sample_shards", "1", 2), wait_s=1.5)
        assert await end_of(bus) is not None


async def test_a_learner_that_fails_beside_one_that_works_records_nothing(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    """The workers of the run would leave it. A feeder that a later start has replaced counts no more."""
    refused = ConfigRefused("bus.sample_shards", "1", 2)
    async with open_bus() as bus, row_publisher(bus, await raise_epoch(bus), phase="working") as working:
        await working.stored()
        for ends in (None, Outcome.FAILED):
            with pytest.raises(LearnerError):
                async with LearnerEnd(config_of(bus), nats_server.url, leads=True).noted(asyncio.Event()):
                    raise refused
            end = await end_of(bus)
            assert (end and end.outcome) == ends
            await raise_epoch(bus)


async def test_a_learner_that_fails_while_another_one_starts_records_nothing(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    """It starts for as long as its checks take, without a feeder; workers of the run would leave it."""
    refused = ConfigRefused("bus.sample_shards", "1", 2)
    async with open_bus() as bus:
        starting = LearnerEnd(config_of(bus), nats_server.url, leads=True)
        await asyncio.to_thread(starting.begin)
        for ends in (None, Outcome.FAILED):
            with pytest.raises(LearnerError):
                async with LearnerEnd(config_of(bus), nats_server.url, leads=True).noted(asyncio.Event()):
                    raise refused
            end = await end_of(bus)
            assert (end and end.outcome) == ends
            starting.lives()


async def test_a_learner_that_begins_while_another_one_records_its_failure_has_no_end(
    nats_server: EmbeddedServer, open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may remove the row of an earlier end before the failure is written."""
    async with open_bus() as bus:

        async def none_yet(of: Bus) -> list[LiveRow]:
            await raise_epoch(of)
            return []

        monkeypatch.setattr("tidemill.launch.run.run_end.learners", none_yet)
        with pytest.raises(LearnerError):
            async with LearnerEnd(config_of(bus), nats_server.url, leads=True).noted(asyncio.Event()):
                raise ConfigRefused("bus.sample_shards", "1", 2)
        assert await end_of(bus) is None


async def test_a_failure_is_no_end_for_workers_while_a_learner_starts(
    nats_server: EmbeddedServer, open_bus: BusOpener
) -> None:
    async with open_bus() as bus:
        starting = LearnerEnd(config_of(bus), nats_server.url, leads=True)
        await asyncio.to_thread(starting.begin)
        await put(bus, FAILED)
        waiting = asyncio.create_task(wait_ended(bus))
        await processes(bus)  # longer than the first read of the row takes
        await put(bus, DONE)
        assert await waiting == DONE
        await put(bus, FAILED)
        starting.lives()
        assert await wait_ended(bus) == FAILED


async def test_a_learner_that_was_replaced_records_no_end(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        epoch = await raise_epoch(bus)
        await raise_epoch(bus)
        with pytest.raises(Fenced):
            await record_end(bus, epoch, 3, "learner.steps")
        assert await end_of(bus) is None


@pytest.mark.parametrize(("row", "drained"), [(None, True), (FAILED, True), (DONE, False)])
async def test_a_drained_learner_knows_whether_its_run_is_done(
    nats_server: EmbeddedServer, open_bus: BusOpener, row: EndRow | None, drained: bool
) -> None:
    async with open_bus() as bus:
        if row is not None:
            await put(bus, row)
        draining = asyncio.Event()
        end = LearnerEnd(config_of(bus), nats_server.url, leads=True)
        async with end.noted(draining):
            draining.set()
        assert end.drained is drained


async def test_workers_of_a_run_that_is_resumed_wait_for_its_learner(open_bus: BusOpener) -> None:
    """They may start before it, and then see the end of the learner before."""
    async with open_bus() as bus:
        await put(bus, DONE)
        waiting = asyncio.create_task(new_end(bus, resume_s=3600.0))
        async with row_publisher(bus, await raise_epoch(bus), phase="working") as working:
            await working.stored()
            await remove_end(bus)
        again = dataclasses.replace(DONE, step=4, epoch=2)
        await put(bus, again)
        assert await waiting == again
        assert await new_end(bus, resume_s=0.2) == again, "without a learner the run has ended"


async def test_an_outage_of_the_bus_is_no_time_without_a_learner(
    open_bus: BusOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([BusUnavailable("live", "away"), [], []])

    async def looked(bus: Bus) -> list[object]:
        look = next(looks)
        await asyncio.sleep(0.3)
        if isinstance(look, BusUnavailable):
            raise look
        return look

    monkeypatch.setattr("tidemill.launch.run.run_end.processes", looked)
    async with open_bus() as bus:
        await put(bus, DONE)
        assert await new_end(bus, resume_s=0.2) == DONE
    assert next(looks, None) == [], "one look without an answer, which counts from anew, and one with it"


async def test_a_learner_that_is_refused_before_it_connects_records_why(
    nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path
) -> None:
    async with open_bus() as bus:
        settings = [f"--set={text}" for text in (f"run={bus.run}", f"directory={tmp_path}", "data.path=/none.jsonl")]
        words = ["learner", "--config", str(SMOKE), "--bus", nats_server.url, *settings]
        assert await asyncio.to_thread(main, words) == 78
        end = await end_of(bus)
        assert end is not None
        assert (end.outcome, end.code) == (Outcome.FAILED, 78) and "/none.jsonl" in end.reason


@pytest.mark.usefixtures("fork_server")
async def test_processes_of_a_run_end_with_it(nats_server: EmbeddedServer, open_bus: BusOpener, tmp_path: Path) -> None:
    """One started without ``--until-end`` stays."""
    async with open_bus() as bus:
        await bus.create_layout()
        await bus.rows("run").put(CONFIG_KEY, to_map(config_of(bus)))
        roles = {
            "actor": ["--id", "a"],
            "scorer": [],
            "router": ["--port", "0"],
            "host": ["--dir", str(tmp_path / "h")],
        }
        started = [
            tidemill(role, "--bus", nats_server.url, *words, "--until-end", output=tmp_path / f"{role}.log")
            for role, words in roles.items()
        ]
        stays = tidemill("actor", "--bus", nats_server.url, "--id", "stays", output=tmp_path / "stays.log")
        try:
            view = LiveView(bus)

            async def all_there() -> bool:
                return len(await view.alive()) == len(started) + 1

            await until(all_there)
            await put(bus, DONE)
            for process, role in zip(started, roles, strict=True):
                code = await asyncio.to_thread(process.wait, LIMIT_S)
                assert code == 0, (tmp_path / f"{role}.log").read_text()
            assert stays.returncode is None
            stays.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(stays.wait, 120) == 0
        finally:
            for process in (*started, stays):
                process.kill()
