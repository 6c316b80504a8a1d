"""kill -9 of every kind of process once in the middle of a run: `up` starts it again, and every guarantee still
holds.
"""

import contextlib
from collections import Counter
from pathlib import Path

from tests.chaos.storm import drained_and_judged
from tests.chaos.test_instants import new_steps
from tests.whole.running import kill, live, until_step, up
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.streams.bus import Bus
from tidemill.launch.run.audit import audit

VICTIMS = ("actor", "engine", "scorer", "learner", "bus")
BETWEEN = 10
"""Steps that are completed after each kill."""
ABORTED = "requests_aborted_by_pushes"


async def test_every_kind_of_process_is_killed_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """There is one run; many more steps must be completed after each kill before the next. Steps taken again end in the
    same bits.

    It has no end of its own, which might come before the last kill.
    """
    settings = ("learner.steps=1000000", "learner.checkpoint_every=20", "learner.weights_digest=true", "bus.lease_s=3")
    with up(tmp_path, *settings, "actor.scorers.enabled=true", "up.scorers=1") as run:
        async with run.bus() as bus:
            aborted = Counter[str]()
            await until_step(bus, 4)
            for victim in VICTIMS:
                row = await live(bus, victim)
                aborted[victim] = int(row.load.get(ABORTED, 0))
                kill(row.pid)
                await _further_steps(bus)
            aborted["next engine"] = int((await live(bus, "engine")).load[ABORTED])
            accounting, _ = await audit(bus)
        verdict = await drained_and_judged(run)
    assert accounting.balance() and not (accounting.lost or accounting.trained_twice or accounting.problems), accounting
    assert accounting.max_lag_trained <= 2 and not aborted.total(), (accounting, aborted)
    assert verdict.steps_done >= len(VICTIMS) * BETWEEN and verdict.steps_without_digest == 0, verdict
    assert verdict.steps_taken_again > 0, (
        "the learner was killed between checkpoints, so at least one step was taken twice"
    )


async def _further_steps(bus: Bus) -> None:
    """Wait for steps behind those that are recorded now; waits while the bus is away."""
    while True:
        with contextlib.suppress(BusUnavailable):
            return await new_steps(bus, BETWEEN)
