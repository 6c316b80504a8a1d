"""A seeded storm of kill -9 over a whole run; afterwards an independent auditor finds nothing lost and nothing trained
twice.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.auditor import Verdict, judge
from tests.chaos.storm import CHILD, READER, VICTIMS, Storm, standing_bus
from tests.whole.running import ROOT
from tidemill.bus.streams.bus import connect
from tidemill.learner.feed.restart import CHECKPOINT_KEY

SHORT, SHARDED, LONG = 14, 30, 200


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Nothing is trimmed, so that all of it can be trained again: an undisturbed learner ends every step in the same
    bits.
    """
    storm = Storm(tmp_path, seed=_seed(pytestconfig, 1), kills=SHORT, settings=("bus.history_samples=1000000",))
    disturbed = weather(storm)
    again = asyncio.run(_trained_again(storm, tmp_path / "run", steps=disturbed.steps))
    assert not again.wrong, (storm.seed, again)
    assert again.steps_taken_again == disturbed.steps_taken_again + disturbed.steps_done > 0, (storm.seed, again)


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every kind of process is hit."""
    storm = Storm(tmp_path, seed=_seed(pytestconfig, 2), kills=LONG)
    verdict = weather(storm)
    assert set(VICTIMS) <= set(storm.killed), storm.killed
    assert verdict.steps_taken_again > 0, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "unlogged", "seed", "kills"),
    [("replay", "continue", 3, LONG), ("replay", "fail", 6, LONG), ("resume", "fail", 5, LONG)],
    ids=["replay-3", "replay-fail-6", "resume-5"],
)
def test_a_storm_over_episodes(
    tmp_path: Path, pytestconfig: pytest.Config, again: str, unlogged: str, seed: int, kills: int
) -> None:
    """No environment gets two answers for one turn, but with ``unlogged: continue`` in episodes that their actors name.

    So no turn that is stored is generated again, be the program run again from its start or from its last state.
    """
    told = tmp_path / "told"
    told.mkdir()
    at = {"directory": str(told)}
    game = {
        "environment": "tests.rollout_programs:Board",
        "environment_options": at,
        "protocol": "text",
        "max_turns": 3,
    }
    programs = {
        "replay": {"use": "agent:tests.rollout_programs:Tells", "options": at},
        "resume": {"use": "multi_turn", "options": game},
    }
    rollout = {**programs[again], "processes": 2, "again": again, "unlogged": unlogged}
    settings = (f"rollouts={json.dumps({'told': rollout})}", "data.rollout=told")
    storm = Storm(
        tmp_path,
        seed=_seed(pytestconfig, seed),
        kills=kills,
        settings=settings,
        victims={**VICTIMS, CHILD: 6},
        freezes=0.25,
    )
    weather(storm)
    assert {*VICTIMS, CHILD} <= set(storm.killed), storm.killed
    logs = "".join(file.read_text(errors="replace") for file in (tmp_path / "run" / "logs").glob("actor*"))
    exempt = set(
        re.findall(
            r"(?:without a log|log of an episode not read) task=(\d+) index=(\d+)\b(?! record=(?:end|failed))", logs
        )
    )
    if unlogged == "fail":  # then no environment is exempt
        assert not exempt, (storm.seed, exempt)
    two = Counter[tuple[str, str]]()
    for file in told.iterdir():
        task, index = file.name.split(".")
        answers: dict[str, set[str]] = {}
        for line in file.read_text().splitlines():
            turn, _, answer = line.partition(" ")
            answers.setdefault(turn, set()).add(answer)
        two[task, index] += sum(len(each) > 1 for each in answers.values())
    goes_on = len(re.findall("episode goes on", logs))
    ends = len(re.findall(r"episode ends: its log is needed", logs))
    print(f"{len(two)} episodes, {goes_on} went on, {ends} ended and {len(exempt)} went on without a log")
    print(f"{sum(map(bool, two.values()))} told two answers")
    assert goes_on > storm.killed["actor"], "the next actor reads what was stored"
    assert not {key for key, count in two.items() if count} - exempt, (storm.seed, two)


@pytest.mark.slow
def test_a_storm_over_scorers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Scorers are killed and frozen more often than anything else, and no sample fails for it."""
    settings = ("actor.scorers.enabled=true", "up.scorers=2")
    victims = {**VICTIMS, "scorer": 20}
    storm = Storm(
        tmp_path, seed=_seed(pytestconfig, 4), kills=LONG // 2, settings=settings, victims=victims, freezes=0.25
    )
    weather(storm)
    assert storm.killed["scorer"] and storm.frozen["scorer"], (storm.killed, storm.frozen)
    logs = "".join(file.read_text(errors="replace") for file in (tmp_path / "run" / "logs").glob("actor*"))
    assert "reward failed" not in logs


@pytest.mark.slow
def test_a_storm_over_shards(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """SAMPLES has two shards, and their readers are killed and frozen, too."""
    storm = Storm(
        tmp_path,
        seed=_seed(pytestconfig, 8),
        kills=SHARDED,
        settings=("bus.sample_shards=2",),
        victims={"feeder": 3, READER: 4, "nats-server": 3, "actor": 4, "up": 1},
        freezes=0.25,
    )
    verdict = weather(storm)
    assert {"feeder", READER, "nats-server", "actor"} <= set(storm.killed), storm.killed
    assert verdict.trimmed, verdict
    assert {seq % 2 for seq in storm.witnessed} == {0, 1}


def weather(storm: Storm) -> Verdict:
    print(f"seed {storm.seed} (--storm-seed {storm.seed})")
    run = storm.rage()
    verdict = asyncio.run(_judge(storm, run.directory))
    print(f"killed {dict(storm.killed)}; frozen {dict(storm.frozen)}; {storm.starts} starts of up")
    print(f"{len(storm.witnessed)} samples witnessed\n{verdict}")
    assert not verdict.lost, (storm.seed, verdict)
    assert not verdict.twice, (storm.seed, verdict)
    assert not verdict.wrong, (storm.seed, verdict)
    assert not verdict.steps_without_digest, (storm.seed, verdict)
    assert verdict.steps >= storm.kills // 8, (storm.seed, verdict)
    return verdict


async def _judge(storm: Storm, directory: Path) -> Verdict:
    async with standing_bus(directory) as url:
        return await judge(url, "smoke", directory / "checkpoints", storm.witnessed)


async def _trained_again(storm: Storm, directory: Path, *, steps: int) -> Verdict:
    """Check that an undisturbed learner without a checkpoint executes every recorded step; return the verdict."""
    async with standing_bus(directory) as url:
        (directory / "checkpoints").rename(directory / "checkpoints of the storm")
        async with connect(url, "smoke", name="storm") as bus:
            await bus.rows("run").delete(CHECKPOINT_KEY)
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "learner",
            "--config",
            str(directory / "config.yaml"),
            "--bus",
            url,
        ]
        command += ["--set", f"learner.steps={steps}", "--set", "learner.checkpoint_every=1000000"]
        learner = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, words = await asyncio.wait_for(learner.communicate(), 300)
        finally:
            if learner.returncode is None:
                learner.kill()
                await learner.wait()
        assert learner.returncode == 0, words.decode()[-3000:]
        return await judge(url, "smoke", directory / "checkpoints", storm.witnessed)


def _seed(config: pytest.Config, default: int) -> int:
    chosen = config.getoption("--storm-seed")
    return default if chosen is None else int(chosen)
