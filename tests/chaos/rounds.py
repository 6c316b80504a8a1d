"""An engine is killed or frozen in a phase of a push while another one serves: the learner goes on, and the engine
comes back.
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.auditor import judge
from tests.chaos.parts import PATIENCE_S, Part, Parts, parts, thaw
from tests.chaos.test_instants import new_steps
from tests.unhurried import UNHURRIED
from tests.waits import until
from tidemill.bus.errors import BusUnavailable
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow

SETTINGS = ("learner.steps=1000000", "learner.checkpoint_every=20", "bus.lease_s=5", "up.drain_s=60", UNHURRIED)
HOWS = ("KILL", "STOP")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One engine's failure."""

    phase: str
    """Phase of a push (see `dying`)."""
    how: str
    """KILL | STOP of the engine; KILL-SERVER | STOP-SERVER of the server it has started, the engine itself left alone.
    """
    may_end: bool = False
    """True when a thawed engine may also end by itself, with code 1; the test then starts it again, like its
    supervisor.
    """


def play(
    tmp_path: Path,
    rounds: Sequence[Round],
    *,
    deadline_s: float,
    victims: Sequence[str] = (),
    settings: Sequence[str] = (),
    others: Sequence[str] = ("engine",),
) -> str:
    """Play one round after the other on one run, then check the accounting; return the learner's log.

    ``victims``: settings of the engines that fail; ``settings``: of all processes; ``others``: names of engines that
    live all the time.
    """
    with parts(tmp_path, *SETTINGS, f"weights.phase_deadline_s={deadline_s}", *settings) as run:
        return asyncio.run(_all(run, rounds, victims, others))


async def _all(run: Parts, rounds: Sequence[Round], victims: Sequence[str], others: Sequence[str]) -> str:
    await run.begin("actor")
    engines = [run.start("engine", name=name) for name in others]
    learner = run.start("learner")
    async with run.bus() as bus:
        await new_steps(bus, 2)
        for engine in engines:
            await serving(bus, engine, 1, "before the first round")
        since = len(learner.log)
        for number, one in enumerate(rounds):
            await _round(run, bus, f"engine-{number}", one, victims)
        head = await _head(bus)
        for engine in engines:
            await serving(bus, engine, head, "after the last round")
        rows = await LiveView(bus).refresh()
        assert sum(row.load.get("requests_aborted_by_pushes", 0) for row, _ in rows) == 0
    learner.process.send_signal(signal.SIGTERM)
    assert await learner.code() == 0, learner.log[-3000:]
    _spared(learner.log[since:], others)
    verdict = await judge(run.url, "smoke", run.root / "checkpoints", {})
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    return learner.log


def _spared(log: str, others: Sequence[str]) -> None:
    """Check that every push has reached all of the others, and some pushes a victim as well."""
    evicted = re.findall(r"evicted engine=.*", log)
    assert not [line for line in evicted if line.split()[1].partition("=")[2] in others], evicted
    reached = [int(count) for count in re.findall(r"pushed version=.* engines=(\d+)", log)]
    silent = re.findall(rf"left engine=(?:{'|'.join(map(re.escape, others))}) reason=no longer live", log)
    # On a busy machine one of them may have stood still for so long that a push did not wait for it.
    assert sum(count < len(others) for count in reached) <= min(1, len(silent)) and max(reached) > len(others), (
        reached,
        silent,
    )
    assert "push failed" not in log, log[-3000:]


async def _round(run: Parts, bus: Bus, name: str, one: Round, victims: Sequence[str]) -> None:
    victim = run.start("engine", *victims, name=name, instant=one.phase, how=one.how)
    mark = run.directory / f"{name}.died"
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: mark.exists() or victim.process.returncode is not None)
        assert mark.exists(), f"{one}: {victim.log[-3000:]}"
    await new_steps(bus, 3)
    if one.how.startswith("STOP"):
        thaw(await victim.frozen(below=one.how == "STOP-SERVER"))
    else:
        assert await victim.code() == (-signal.SIGKILL if one.how == "KILL" else 1), f"{one}: {victim.log[-3000:]}"
        victim = run.start("engine", *victims, name=name)
    head = await _head(bus)
    try:
        await _back(bus, victim, head, str(one))
    except AssertionError:
        if not one.may_end or victim.process.returncode != 1:
            raise
        victim = run.start("engine", *victims, name=name)
        await _back(bus, victim, head, f"{one}, started again")
    victim.kill()


async def _back(bus: Bus, engine: Part, version: int, what: str) -> None:
    """Wait until it serves this version, and then one that was pushed while it did."""
    row = await serving(bus, engine, version, what)
    await serving(bus, engine, max(row.version, await _head(bus)) + 1, f"{what}, back")


async def _head(bus: Bus) -> int:
    return int((await bus.rows("weights").get("head") or ({}, 0))[0]["version"])


async def serving(bus: Bus, engine: Part, version: int, what: str) -> LiveRow:
    """Wait until it serves this version or a newer one."""
    view = LiveView(bus)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while engine.process.returncode is None:
                with contextlib.suppress(BusUnavailable):
                    for row in await view.alive("engine"):
                        if (
                            row.id == engine.name
                            and row.pid == engine.process.pid
                            and row.phase == "serving"
                            and row.version >= version
                        ):
                            return row
                await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {engine.name} does not serve version {version}:\n{engine.log[-3000:]}")
