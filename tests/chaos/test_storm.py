"""A seeded storm of kill -9 over a whole run; afterwards an independent auditor finds nothing lost and nothing trained twice."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.auditor import Verdict, judge
from tests.chaos.storm import VICTIMS, Storm, standing_bus

SHORT, LONG = 14, 200


def test_a_short_storm(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    weather(Storm(tmp_path, seed=_seed(pytestconfig, 1), kills=SHORT))


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every kind of process is hit."""
    storm = Storm(tmp_path, seed=_seed(pytestconfig, 2), kills=LONG)
    verdict = weather(storm)
    assert set(VICTIMS) <= set(storm.killed), storm.killed
    assert verdict.steps_taken_again > 0, verdict


def weather(storm: Storm) -> Verdict:
    print(f"seed {storm.seed} (--storm-seed {storm.seed})")
    run = storm.rage()
    verdict = asyncio.run(_judge(storm, run.directory))
    print(f"killed {dict(storm.killed)}; {storm.starts} starts of up; {len(storm.witnessed)} samples witnessed\n{verdict}")
    assert not verdict.lost, (storm.seed, verdict)
    assert not verdict.twice, (storm.seed, verdict)
    assert not verdict.wrong, (storm.seed, verdict)
    assert verdict.steps >= storm.kills // 8, (storm.seed, verdict)
    return verdict


async def _judge(storm: Storm, directory: Path) -> Verdict:
    async with standing_bus(directory) as url:
        return await judge(url, "smoke", directory / "checkpoints", storm.witnessed)


def _seed(config: pytest.Config, default: int) -> int:
    chosen = config.getoption("--storm-seed")
    return default if chosen is None else int(chosen)
