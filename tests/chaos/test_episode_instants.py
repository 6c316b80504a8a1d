"""Actors, and the processes of their programs, are killed or frozen at each instant of an episode: another actor goes
on from its log.
"""

import asyncio
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.auditor import judge
from tests.chaos.dying import EPISODE
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts, thaw
from tests.chaos.test_instants import new_steps
from tests.unhurried import UNHURRIED
from tests.waits import until

SETTINGS = (
    "learner.steps=1000000",
    "learner.checkpoint_every=20",
    "bus.lease_s=3",
    "bus.history_samples=1000000",
    "actor.max_samples_in_flight=8",
    "actor.drain_finish_s=0",
    "data.rollout=told",
    UNHURRIED,
)
TURNS = 3
UNDER_WAY = ("taken", "unstored", "stored", "acted")
"""Instants at which the program runs, or is about to."""
KEPT = {"taken": 0, "unstored": 1, "stored": 2, "acted": 2, "unscored": 3, "scored": 3}
"""Least number of stored turns that the next actor finds, by instant. More are there if the actor had the task from
another one.

Not for a stored sample: its task may be settled, and is not begun again.
"""
TOLD = {
    "untaken": 0,
    "taken": 0,
    "unstored": 1,
    "stored": 1,
    "acted": 2,
    "unscored": 3,
    "scored": 3,
    "published": 3,
    "ended": 3,
}
"""Least number of turns that the environment has received, by instant."""


@dataclass(frozen=True)
class Blow:
    """A signal to an actor at an instant."""

    instant: str
    how: str
    """KILL, STOP: to the actor and all processes below it; KILL-SERVER: to those alone; TERM: to the actor, which
    drains.
    """


@pytest.mark.parametrize("again", [pytest.param("replay", marks=pytest.mark.slow), "resume"])
def test_a_killed_a_frozen_and_a_leaving_actor(tmp_path: Path, again: str) -> None:
    blows = [Blow("unscored", "KILL"), Blow("stored", "STOP"), Blow("acted", "KILL-SERVER"), Blow("unstored", "TERM")]
    asyncio.run(_played(tmp_path, again, blows))


@pytest.mark.slow
@pytest.mark.parametrize("again", ["replay", "resume"])
def test_every_instant_of_an_episode(tmp_path: Path, again: str) -> None:
    asyncio.run(
        _played(
            tmp_path,
            again,
            [Blow(instant, how) for how in ("KILL", "STOP", "KILL-SERVER", "TERM") for instant in EPISODE],
        )
    )


async def _played(tmp_path: Path, again: str, blows: list[Blow]) -> None:
    told = tmp_path / "told"
    told.mkdir()
    at = {"directory": str(told)}
    game = {
        "environment": "tests.rollout_programs:Board",
        "environment_options": at,
        "protocol": "text",
        "max_turns": TURNS,
    }
    programs = {
        "replay": {"use": "agent:tests.rollout_programs:Tells", "options": {**at, "scores": False}},
        "resume": {"use": "multi_turn", "options": game},
    }
    rollout = {**programs[again], "processes": 1, "again": again, "unlogged": "fail"}
    with parts(tmp_path, *SETTINGS, f"rollouts={json.dumps({'told': rollout})}") as run:
        await run.begin("engine")
        learner = run.start("learner")
        survivor = run.start("actor", name="survivor")
        async with run.bus() as bus:
            await new_steps(bus, 1)
            for number, blow in enumerate(blows):
                await _struck(run, blow, f"actor-{number}", survivor, told)
                await new_steps(bus, 1)
                run.started[-1].kill()
            await new_steps(bus, 2)
        learner.process.send_signal(signal.SIGTERM)
        assert await learner.code() == 0, learner.log[-3000:]
        verdict = await judge(run.url, "smoke", run.root / "checkpoints", {})
        assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
        logs = "".join(part.log for part in run.started if part.role == "actor")
    unlogged = re.findall(r"without a log task=\d+ index=\d+ record=(\w+)", logs)
    assert set(unlogged) <= {"end", "failed"}, "those are not needed, and may be stored too late"
    assert "its log is needed" not in logs
    assert not {
        file.name: lines for file in told.iterdir() if len(set(lines := _told(file))) > len({turn for turn, _ in lines})
    }


async def _struck(run: Parts, blow: Blow, name: str, survivor: Part, told: Path) -> None:
    """Start an actor, strike it at its instant, and wait until the sample is made."""
    so_far = len(survivor.log)
    victim = run.start("actor", name=name, instant=blow.instant, how=blow.how)
    mark = run.directory / f"{name}.died"
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: mark.exists() or victim.process.returncode is not None)
        assert mark.exists(), f"{blow}: {victim.log[-3000:]}"
    sample = mark.read_text()
    frozen = await victim.frozen() if blow.how == "STOP" else []
    if blow.how == "KILL":
        assert await victim.code() == -signal.SIGKILL, f"{blow}: {victim.log[-3000:]}"
    if frozen or blow.how == "KILL":
        assert len(_told(told / sample)) >= TOLD[blow.instant], (blow, sample)
    task, index = sample.split(".")
    if blow.instant in (KEPT if blow.how in ("KILL", "STOP") else UNDER_WAY) and (blow.instant, blow.how) != (
        "taken",
        "KILL-SERVER",
    ):
        goes_on = re.compile(rf"episode goes on task={task} index={index} again=\w+ turns=(\d+) behind=(\d+)")
        # A victim that had the task from another actor has logged the line itself, before the blow.
        # Only new lines of the survivor count: it may have gone on with the same episode after an earlier blow.
        await _logged(goes_on, blow, survivor, *(() if blow.how in ("KILL", "STOP") else (victim,)), after=so_far)
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: {turn for turn, _ in _told(told / sample)} == {str(turn) for turn in range(TURNS)})
    if blow.instant in KEPT and blow.how in ("KILL", "STOP"):
        found = goes_on.search(survivor.log[so_far:])
        assert found is not None and sum(map(int, found.groups())) >= KEPT[blow.instant], (blow, found)
    if frozen:
        thaw(frozen)
        # At the other instants it has no record to store, but takes the episode itself, or has its sample, which counts
        # once.
        if blow.instant in UNDER_WAY:
            await _logged(re.compile(rf"task left to another actor task={task}\b"), blow, victim)
    if blow.how == "TERM":
        assert await victim.code() == 0, f"{blow}: {victim.log[-3000:]}"


async def _logged(line: re.Pattern[str], blow: Blow, *by: Part, after: int = 0) -> None:
    """Wait until one of the actors has logged a line; the first one of them behind ``after`` characters of its log."""
    async with asyncio.timeout(PATIENCE_S):

        def logged() -> bool:
            return any(line.search(part.log[0 if number else after :]) for number, part in enumerate(by))

        await until(lambda: logged() or all(part.process.returncode is not None for part in by))
        assert logged(), (blow, line.pattern, [part.log[-3000:] for part in by])


def _told(file: Path) -> list[tuple[str, str]]:
    """Return the answers that an environment has received, in order: (turn, answer)."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(turn, answer) for turn, _, answer in (line.partition(" ") for line in lines)]
