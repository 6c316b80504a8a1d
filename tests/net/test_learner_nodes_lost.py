"""A learner of two machines with a disk each: each vanishes and returns, once with an empty disk, and they lose their
way to each other.

Printed (-s): the times to the next step.
"""

import asyncio
import sys
import time

import pytest

from tests.net.lab import why_not
from tests.net.learner_nodes import healed, latest, ranks_held, run, until, until_node
from tests.net.site import NODES, Site
from tests.net.test_run import BESIDE_OTHERS, next_steps, report
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import State

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
__all__ = ["healed", "run"]
APART_S = 120.0 if BESIDE_OTHERS else 60.0


@pytest.mark.parametrize("name", ["node", pytest.param("node1", marks=pytest.mark.slow)])
async def test_a_node_that_vanishes_is_waited_for_and_all_start_again(healed: Site, name: str) -> None:
    async with healed.bus() as bus:
        await _vanishes_and_returns(healed, bus, name, loses_disk=False)


@pytest.mark.parametrize("name", ["node1", pytest.param("node", marks=pytest.mark.slow)])
async def test_a_node_that_returns_with_an_empty_disk_has_its_files_from_the_other(healed: Site, name: str) -> None:
    async with healed.bus() as bus:
        step, log = await _vanishes_and_returns(healed, bus, name, loses_disk=True)
        own = f"__{NODES.index(name)}_0.distcp"
        assert [line for line in log.splitlines() if "files fetched=" in line and own in line], (
            f"its own part was not copied:\n{log}"
        )
        checkpoint, _ = await latest(bus, after=step)
        assert await ranks_held(healed, bus, checkpoint) == [{0, 1}, {0, 1}], "it is a holder of the next one"


async def _vanishes_and_returns(run: Site, bus: Bus, name: str, *, loses_disk: bool) -> tuple[int, str]:
    """Let a node vanish until the other one has ended its ranks, and return; the step that its rank began with, and its
    log since.
    """
    node = NODES.index(name)
    before = await until(bus, State.RUNNING)
    _, step = await latest(bus)
    logged, begin = len(run.started[name].log), time.monotonic()
    run.lab[name].vanish()
    ended = await until_node(bus, 1 - node, lambda row: f"node {node} ({name}) is silent" in row.reason)
    print(f"{name} vanished: noticed after {time.monotonic() - begin:.1f} s: {ended.reason}", file=sys.stderr)
    if loses_disk:
        run.replace_disk(name)
    run.lab[name].boot()
    run.start(name)
    begin = time.monotonic()
    now = await until(bus, State.RUNNING, after=before.epoch)
    seconds = time.monotonic() - begin + await next_steps(run, bus)
    report(f"{name} returned{' with an empty disk' * loses_disk}", seconds)
    log = run.started[name].log[logged:]
    begins = f"begins rank={node} epoch={now.epoch} step="
    assert begins in log, log
    begun_with = int(log.partition(begins)[2].split()[0])
    assert begun_with >= step > 0, log
    return begun_with, log


async def test_a_node_that_reaches_the_bus_and_not_its_peer_ends_the_attempt_with_both_names(healed: Site) -> None:
    async with healed.bus() as bus:
        before, begin = await until(bus, State.RUNNING), time.monotonic()
        nodes = [healed.lab[name] for name in NODES]
        nodes[0].drop_from(nodes[1])
        nodes[1].drop_from(nodes[0])
        ended = await until(bus, State.ENDING, State.FORMING, within_s=APART_S)
        print(f"nodes apart: ended after {time.monotonic() - begin:.1f} s: {ended.reason}", file=sys.stderr)
        named = (await until_node(bus, 0, lambda row: "to reach" in row.waits_for)).waits_for
        for rank, machine in enumerate(nodes):
            assert f"node {rank} ({machine.name}, {machine.address})" in named, named
        for node in nodes:
            node.receive_all()
        begin = time.monotonic()
        await until(bus, State.RUNNING, after=before.epoch)
        report("nodes together again", time.monotonic() - begin + await next_steps(healed, bus))


async def test_the_books_after_losses_are_right(run: Site) -> None:
    codes = await asyncio.to_thread(run.end_all_but_bus)
    assert set(codes.values()) == {0}, (codes, run.logs())
    await run.audited()
