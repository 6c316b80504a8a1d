"""A learner of two nodes, each a machine with a stage of a pipeline, which it pushes itself.

The second one is cut off, vanishes and returns, and loses its way to its peer alone.

They share the directory of the run. Printed (-s): the times to the next step.
"""

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest

from bus.streams.bus import Bus
from learner.nodes.node_rows import ATTEMPT_KEY, Attempt, State, attempt_of, node_of
from tests.net.lab import TRAP, why_not
from tests.net.site import NO_END, Site, site
from tests.net.test_run import next_steps, report
from tests.whole.running import SMOKE

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
MACHINES = ("bus", "node", "node1", "gpu", "act0")
SETTINGS = (
    f"learner.steps={NO_END}",
    "prepare.layers=2",
    "learner.pipeline_parallel=2",
    "learner.checkpoint_every=3",
    "bus.lease_s=10",
)
APART_S = 90.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("nodes"), SMOKE, *SETTINGS, machines=MACHINES, hosts=TRAP) as made:
        made.start()
        yield made


async def until(bus: Bus, *states: State, after: int = 0, within_s: float = 200.0) -> Attempt:
    """Wait for an attempt in one of these states, of an epoch behind ``after``."""
    async with asyncio.timeout(within_s):
        async for row in bus.rows("run").watch(ATTEMPT_KEY, 0.2):
            if row is not None and (attempt := attempt_of(row[0])).epoch > after and attempt.state in states:
                return attempt
    raise AssertionError("the row is watched for ever")


async def waits_of_the_leader(bus: Bus, words: str) -> str:
    """Wait until the leader waits for something with these words in it, and return the whole."""
    async with asyncio.timeout(60.0):
        async for row in bus.rows("run").watch("node.0", 0.2):
            if row is not None and words in (text := node_of("node.0", row[0]).waits_for):
                return text
    raise AssertionError("the row is watched for ever")


async def test_two_machines_are_one_learner(run: Site) -> None:
    async with run.bus() as bus:
        attempt = await until(bus, State.RUNNING)
        assert attempt.master.startswith(f"{run.lab['node'].address}:")
        await next_steps(run, bus, 4)


async def test_a_node_cut_off_for_10_s_is_ridden_out(run: Site) -> None:
    async with run.bus() as bus:
        before = await until(bus, State.RUNNING)
        run.lab["node1"].cut()
        await asyncio.sleep(10.0)
        run.lab["node1"].heal()
        report("second node cut for 10 s", await next_steps(run, bus, within_s=60.0))
        assert (await until(bus, State.RUNNING)).epoch == before.epoch, "nothing was started again"


async def test_a_node_that_vanishes_is_waited_for_and_all_start_again(run: Site) -> None:
    async with run.bus() as bus:
        before, begin = await until(bus, State.RUNNING), time.monotonic()
        run.lab["node1"].vanish()
        ended = await until(bus, State.ENDING, State.FORMING)
        print(f"second node vanished: noticed after {time.monotonic() - begin:.1f} s: {ended.reason}", file=sys.stderr)
        assert "node 1 (node1)" in ended.reason
        run.lab["node1"].boot()
        run.start("node1")
        begin = time.monotonic()
        await until(bus, State.RUNNING, after=before.epoch)
        report("second node returned", time.monotonic() - begin + await next_steps(run, bus))


@pytest.mark.slow
async def test_a_node_that_reaches_the_bus_and_not_its_peer_ends_the_attempt_with_both_names(run: Site) -> None:
    async with run.bus() as bus:
        before, begin = await until(bus, State.RUNNING), time.monotonic()
        nodes = run.lab["node"], run.lab["node1"]
        nodes[0].drop_from(nodes[1])
        nodes[1].drop_from(nodes[0])
        try:
            ended = await until(bus, State.ENDING, State.FORMING, within_s=APART_S)
            named = await waits_of_the_leader(bus, "to reach")
            for rank, machine in enumerate(nodes):
                assert f"node {rank} ({machine.name}, {machine.address})" in named, named
        finally:
            for node in nodes:
                node.receive_all()
        print(f"nodes apart: ended after {time.monotonic() - begin:.1f} s: {ended.reason}", file=sys.stderr)
        begin = time.monotonic()
        await until(bus, State.RUNNING, after=before.epoch)
        report("nodes together again", time.monotonic() - begin + await next_steps(run, bus))


async def test_the_books_of_two_nodes_are_right(run: Site) -> None:
    codes = await asyncio.to_thread(run.end_all_but_bus)
    assert set(codes.values()) == {0}, (codes, run.logs())
    await run.audited()
