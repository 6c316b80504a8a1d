"""An actor with a rollout: its tasks, its children, its drain, and programs that fail, on a real queue, engine and
child processes.
"""

import asyncio
import os
import select
import signal
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.actor_kit import (
    all_samples,
    complete,
    engine,
    issue,
    model_dir,
    prompt_tokens,
    row_until,
    samples_until,
    settled,
    take_over,
)
from tests.bus_fixtures import BusOpener
from tests.refusals import refusal
from tests.waits import until
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig, GatewayConfig
from tidemill.actors.errors import BadRow
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms
from tidemill.bus.liveness import LiveView
from tidemill.bus.section import Sections, read
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams import episode_turns
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.limits import children_of
from tidemill.bus.wire.messages import Kind, Status
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.cli.status import unserved


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    """Make the model here, where it blocks no event loop."""
    model_dir()
    prompt_tokens()


def programs(**rollouts: Any) -> RolloutPrograms:
    return RolloutPrograms(rollouts=read(Sections[RolloutConfig], rollouts, "rollouts"), model=str(model_dir()))


TRIES = {"use": "agent:tests.rollout_programs:Tries"}
SCRIPT = {"use": "agent:tests.rollout_programs:Script", "processes": 1}


async def test_tasks_of_a_rollout_are_made_by_its_program_and_others_as_before(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(rollouts=("tries",)) as bus, engine(bus):
        epoch = await take_over(bus)
        (plain,) = await issue(bus, epoch)
        (episodes,) = await issue(bus, epoch, rollout="tries", budget=Budget(turns=8))
        (held,) = await issue(bus, epoch, kind=Kind.EVAL, rollout="tries", budget=Budget(turns=8))
        draining = asyncio.Event()
        work = asyncio.create_task(
            run_actor(
                nats_server.url,
                bus.run,
                ActorConfig(reward="digits"),
                bus.config,
                draining,
                "a",
                rollouts=programs(tries=TRIES),
            )
        )
        found = await samples_until(bus, complete([plain, episodes, held]))
        await settled(bus)
        draining.set()
        await work
        assert Counter((sample.task, sample.index) for sample in found) == {
            (t, i): 1 for t in (plain, episodes, held) for i in range(4)
        }
        for sample in found:
            assert len(sample.sizes) == (1 if sample.task == plain else 2)
            assert sample.rollout == ("" if sample.task == plain else "tries")
            assert sample.kind is (Kind.EVAL if sample.task == held else Kind.TRAIN)
        assert children_of({os.getpid()}) == set() or all(
            "child_program" not in command(pid) for pid in children_of({os.getpid()})
        )


async def test_a_reward_sees_what_the_model_sampled_apart_from_what_it_was_told(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(rollouts=("script",)) as bus, engine(bus):
        (task,) = await issue(
            bus,
            await take_over(bus),
            rollout="script",
            metadata={"do": "observes"},
            group_size=1,
            budget=Budget(turns=2),
        )
        draining = asyncio.Event()
        config = ActorConfig(reward="tests.child_rewards:of_episode")
        work = asyncio.create_task(
            run_actor(nats_server.url, bus.run, config, bus.config, draining, "a", rollouts=programs(script=SCRIPT))
        )
        for sample in await samples_until(bus, complete([task], 1)):
            assert isinstance(sample.reward, dict) and len(sample.sizes) == 1, sample
            sampled = int(sample.loss_mask.sum())
            assert sampled < sample.response_length
            assert sample.reward == {
                "score": 1.0,
                "all": sample.response_length,
                "sampled": sampled,
                "turns": 2,
                "messages": 2,
            }
        await settled(bus)
        draining.set()
        await work


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_a_drain_hands_back_a_task_whose_program_waits_in_a_tool(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It neither waits for the program nor for the lease; another actor makes the samples."""
    async with open_bus(rollouts=("script",), lease_s=600) as bus, engine(bus):
        changes = {"rollout": "script", "metadata": {"do": "waits", "file": str(tmp_path / "up")}, "group_size": 2}
        await issue(bus, await take_over(bus), **changes)
        draining = asyncio.Event()
        config = ActorConfig(reward="digits", drain_finish_s=0.0)
        work = asyncio.create_task(
            run_actor(nats_server.url, bus.run, config, bus.config, draining, "a", rollouts=programs(script=SCRIPT))
        )
        await until(lambda: (tmp_path / "up").exists())
        draining.set()
        await work
        again = await bus.tasks.lease(30, rollout="script")
        assert again is not None and again.deliveries >= 2, (
            "the draining actor may have been given it again, and handed it back at once"
        )
        assert await all_samples(bus) == []


@pytest.mark.parametrize(
    ("rollout", "made", "redone"),
    [({}, 0, 2), ({"again": "replay"}, 0, 0), ({"drain_s": 60.0}, 2, 0)],
    ids=["restart", "replay", "time of its own"],
)
async def test_a_drain_gives_episodes_the_time_of_their_rollout(
    open_bus: BusOpener,
    nats_server: EmbeddedServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rollout: dict[str, Any],
    made: int,
    redone: int,
) -> None:
    """After it they are handed back, and the turns so far that are not stored are generated again."""
    caplog.set_level("INFO")
    monkeypatch.setattr(episode_turns, "STORE_S", 60.0)  # without a log the turns of "replay" would be lost, too
    async with open_bus(rollouts=("script",)) as bus, engine(bus):
        file, goes_on = tmp_path / "up", tmp_path / "on"
        metadata = {"do": "asks", "file": str(file), "goes_on": str(goes_on)}
        await issue(
            bus, await take_over(bus), rollout="script", metadata=metadata, group_size=2, budget=Budget(turns=4)
        )
        draining, config = asyncio.Event(), ActorConfig(reward="digits", drain_finish_s=0.0)
        rollouts = programs(script=SCRIPT | rollout)
        work = asyncio.create_task(
            run_actor(nats_server.url, bus.run, config, bus.config, draining, "a", rollouts=rollouts)
        )
        await until(lambda: sum((tmp_path / f"up.{index}").exists() for index in range(2)) >= 2)
        draining.set()
        if made:
            await row_until(bus.rows("live"), "actor.a", lambda row: row["phase"] == "draining")
            goes_on.touch()
        await work
        assert len(await all_samples(bus)) == made
        assert [record.args[2] for record in caplog.records if "turns_redone" in record.msg] == [1] * redone  # type: ignore[index]


async def test_a_child_that_is_killed_fails_its_episodes_and_the_task_is_tried_again(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with open_bus(rollouts=("script",), max_attempts=2) as bus, engine(bus):
        changes = {"rollout": "script", "metadata": {"do": "waits", "file": str(tmp_path / "up")}, "group_size": 2}
        (task,) = await issue(bus, await take_over(bus), **changes)
        draining = asyncio.Event()
        work = asyncio.create_task(
            run_actor(
                nats_server.url,
                bus.run,
                ActorConfig(reward="digits"),
                bus.config,
                draining,
                "a",
                rollouts=programs(script=SCRIPT),
            )
        )
        while (
            dead := await bus.dead.of(task)
        ) is None:  # twice, or more often if a child is killed before its second episode begins
            if not (tmp_path / "up").exists():
                await asyncio.sleep(0.01)
                continue
            (child,) = [pid for pid in children_of({os.getpid()}) if "child_program" in command(pid)]
            ended = select.poll()
            ended.register(handle := os.pidfd_open(child), select.POLLIN)
            os.kill(child, signal.SIGKILL)
            ended.poll()
            os.close(handle)
            (tmp_path / "up").unlink()  # by now its other episode makes it no more, and the next child has not begun
        assert "SIGKILL" in dead.reason
        found = await all_samples(bus)
        assert {sample.status for sample in found} == {Status.FAILED} and "SIGKILL" in str(found[0].metadata["error"])
        row = await row_until(bus.rows("live"), "actor.a", lambda row: row["load"].get("failures", 0) >= 4)
        assert "SIGKILL" in row["trouble"]
        draining.set()
        await work


async def test_an_actor_that_is_superseded_says_nothing_of_the_task(
    open_bus: BusOpener,
    nats_server: EmbeddedServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ack or nak by it would be one for the lease of the other actor. The task is delivered again when the lease has
    run out.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr(episode_turns, "STORE_S", 60.0)  # without a log it would not learn of the other one
    async with open_bus(rollouts=("script",), lease_s=2) as bus, engine(bus):
        file, goes_on = tmp_path / "up", tmp_path / "on"
        metadata = {"do": "asks", "file": str(file), "goes_on": str(goes_on)}
        (task,) = await issue(
            bus, await take_over(bus), rollout="script", metadata=metadata, group_size=1, budget=Budget(turns=4)
        )
        draining = asyncio.Event()
        rollouts = programs(script=SCRIPT | {"again": "replay"})
        work = asyncio.create_task(
            run_actor(
                nats_server.url, bus.run, ActorConfig(reward="digits"), bus.config, draining, "a", rollouts=rollouts
            )
        )
        await until(file.exists)
        await bus.turns.take(task, 0, "other", first=False)
        goes_on.touch()
        (sample,) = await samples_until(bus, complete([task], 1))
        await settled(bus)
        draining.set()
        await work
        assert f"task left to another actor task={task}" in caplog.text
        assert (
            (sample.status, sample.reward) == (Status.COMPLETED, 1.0)
            and sample.turns is not None
            and len(sample.turns.at) == 2
        )
        assert await bus.dead.of(task) is None and "task failed" not in caplog.text
        records = [str(record.kind) for record in (await bus.turns.take(task, 0, "reader", first=False))[0]]
        # Neighbours as one: a lease that runs out while the machine is busy is one more take.
        assert [kind for kind, _ in groupby(records)] == ["take", "turn", "take", "turn", "end"] and records.count(
            "take"
        ) >= 3


async def test_an_actor_whose_program_cannot_be_loaded_ends_with_the_reason(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    async with open_bus(rollouts=("a",)) as bus:
        for use, reason in (
            ("agent:tests.nowhere:f", "tests.nowhere"),
            ("agent:tests.rollout_programs:Refuses", "no licence"),
        ):
            with pytest.raises(BadRow, match=reason):
                await run_actor(
                    nats_server.url,
                    bus.run,
                    ActorConfig(reward="digits"),
                    bus.config,
                    asyncio.Event(),
                    "a",
                    rollouts=programs(a={"use": use}),
                )
        wrong = RolloutPrograms(rollouts=programs(a=TRIES).rollouts, model="/nowhere")
        with refusal(BadRow, place="model.path"):
            await run_actor(
                nats_server.url, bus.run, ActorConfig(reward="digits"), bus.config, asyncio.Event(), "a", rollouts=wrong
            )
        config = ActorConfig(reward="digits", gateway=GatewayConfig(renderer="no-such"))
        with refusal(BadRow, place="actor.gateway.renderer", got="'no-such'"):
            await run_actor(
                nats_server.url, bus.run, config, bus.config, asyncio.Event(), "a", rollouts=programs(a=TRIES)
            )


async def test_an_actor_serves_the_rollouts_that_it_names_alone(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    """It loads no other program: one that cannot be loaded ends only the actors that serve it."""
    async with open_bus(rollouts=("broken", "tries")) as bus, engine(bus):
        epoch = await take_over(bus)
        (plain,) = await issue(bus, epoch)
        (episodes,) = await issue(bus, epoch, rollout="tries", budget=Budget(turns=8))
        (others,) = await issue(bus, epoch, rollout="broken", budget=Budget(turns=8))
        both = programs(tries=TRIES, broken={"use": "agent:tests.nowhere:f"})
        draining = asyncio.Event()

        def actor(id: str, *names: str) -> asyncio.Task[None]:
            config = ActorConfig(reward="digits", rollouts=names)
            return asyncio.create_task(
                run_actor(nats_server.url, bus.run, config, bus.config, draining, id, rollouts=both)
            )

        work = actor("a", "tries")
        await first_of(
            row_until(bus.rows("live"), "actor.a", lambda row: bool(row["load"].get("tasks_done"))),
            asyncio.shield(work),
        )
        (row,) = await LiveView(bus).alive("actor")
        assert row.rollouts == ("tries",)
        assert await bus.tasks.waiting() == {"": 1, "broken": 1}, "left to other actors"
        assert unserved(await bus.tasks.waiting(), [row]) == {"broken": 1, "single_turn": 1}
        plainly = actor("b", "single_turn")
        await samples_until(bus, complete([plain, episodes]))
        second = await row_until(bus.rows("live"), "actor.b", lambda row: bool(row["load"].get("tasks_done")))
        assert second["rollouts"] == ["single_turn"]
        assert await bus.tasks.waiting() == {"broken": 1}
        with pytest.raises(BadRow, match=r"tests\.nowhere"):
            await actor("c", "tries", "broken")
        with refusal(BadRow, place="actor.rollouts", got="'trys', did you mean 'tries'?"):
            await actor("d", "trys")
        draining.set()
        await asyncio.gather(work, plainly)
        assert {sample.task for sample in await all_samples(bus)} == {plain, episodes} and others not in (
            plain,
            episodes,
        )


async def test_a_config_on_the_bus_names_the_rollouts(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    async with open_bus(rollouts=("tries",)) as bus, engine(bus):
        row = {
            "actor": {"reward": "digits"},
            "bus": {"rollouts": ["tries"]},
            "rollouts": {"tries": TRIES},
            "model": {"path": str(model_dir())},
        }
        await bus.rows("run").put("config", row)
        (task,) = await issue(bus, await take_over(bus), rollout="tries")
        draining = asyncio.Event()
        allowed = ("rollouts.*=*",)
        work = asyncio.create_task(run_actor(nats_server.url, bus.run, None, None, draining, "a", allowed=allowed))
        await samples_until(bus, complete([task]))
        await settled(bus)
        draining.set()
        await work
