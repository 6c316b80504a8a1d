"""An actor as a process of its own, for tests that kill it; ``tests.actor_kit.actor_process`` forks it."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from tests.waits import poll
from tidemill.actors.actor.process import run_actor
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.membership import section
from tidemill.actors.scoring import run_scorer
from tidemill.bus.config import BusConfig
from tidemill.launch.run.process import run
from tidemill.rewards.group import GroupRequest
from tidemill.rewards.port import RewardRequest

_calls = itertools.count(1)


async def answers_twice(request: RewardRequest) -> float:
    """Return 1.0 twice, and hang from the third call on: a larger group stays half done."""
    if next(_calls) > 2:
        await asyncio.Event().wait()
    return 1.0


def opened(request: RewardRequest, *, gate: str) -> float:
    """Return 0.5 once the file ``gate`` exists."""
    poll(Path(gate).exists)
    return 0.5


def ranked(request: GroupRequest, *, step: float = 1.0) -> list[float]:
    """Return the place of each sample in its group, times ``step``."""
    return [place * step for place, _ in enumerate(request.samples)]


def main(told: dict[str, Any]) -> int:
    """Run the actor until it is drained; ``told`` has url, run, id, drain_s, actor, bus (the last two may be None)."""
    config = None if told["actor"] is None else section(told, "actor", ActorConfig)
    bus_config = None if told["bus"] is None else BusConfig(**told["bus"])
    return run(
        lambda draining: run_actor(told["url"], told["run"], config, bus_config, draining, told["id"]),
        drain_s=told["drain_s"],
    )


def scorer(told: dict[str, Any]) -> int:
    """Run a scorer until it is drained; ``told`` as for ``main``."""
    config = None if told["actor"] is None else section(told, "actor", ActorConfig)
    bus_config = None if told["bus"] is None else BusConfig(**told["bus"])
    return run(
        lambda draining: run_scorer(told["url"], told["run"], config, bus_config, draining, told["id"]),
        drain_s=told["drain_s"],
    )
