"""A learner of two machines with a disk each, of which each is cut off for 10 s and for 60 s. Printed (-s): the times
to the next step.
"""

import asyncio
import sys

import pytest

from tests.net.lab import why_not
from tests.net.learner_nodes import RESTART_S, healed, latest, ranks_held, run, until
from tests.net.site import NODES, Site
from tests.net.test_run import CUT_S, LONG_CUT_S, next_steps, report
from tidemill.bus.wire.rows import State

__all__ = ["healed", "run"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


async def test_two_machines_are_one_learner(run: Site) -> None:
    async with run.bus() as bus:
        attempt = await until(bus, State.RUNNING)
        assert attempt.master.startswith(f"{run.lab['node'].address}:")
        await next_steps(run, bus, 4)
        checkpoint, _ = await latest(bus)
        assert await ranks_held(run, bus, checkpoint) == [{0, 1}, {0, 1}]


@pytest.mark.parametrize("name", NODES)
async def test_a_node_cut_off_for_10_s_is_ridden_out(healed: Site, name: str) -> None:
    before, after = await _cut(healed, name, CUT_S, within_s=60.0)
    assert after == before, "nothing was started again"


@pytest.mark.parametrize("name", NODES)
async def test_a_node_cut_off_for_60_s(healed: Site, name: str) -> None:
    """After 30 s the other node ends the attempt; the next one forms when both are there."""
    before, after = await _cut(healed, name, LONG_CUT_S)
    print(f"{name} cut for {LONG_CUT_S:g} s: {after - before} new attempts", file=sys.stderr)


async def _cut(run: Site, name: str, seconds: float, within_s: float = RESTART_S) -> tuple[int, int]:
    """Cut a node off, and wait for the next step; return the epochs before and afterwards."""
    async with run.bus() as bus:
        before = await until(bus, State.RUNNING)
        run.lab[name].cut()
        await asyncio.sleep(seconds)
        run.lab[name].heal()
        report(f"{name} cut for {seconds:g} s", await next_steps(run, bus, within_s=within_s))
        return before.epoch, (await until(bus, State.RUNNING)).epoch


async def test_the_books_of_two_nodes_are_right(run: Site) -> None:
    codes = await asyncio.to_thread(run.end_all_but_bus)
    assert set(codes.values()) == {0}, (codes, run.logs())
    await run.audited()
