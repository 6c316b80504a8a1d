"""A learner of two nodes, each a machine with a stage of a pipeline, which it pushes itself, and with a disk of its
own; and its rows.

Set are the sizes of the model and a checkpoint every three steps, so that each start has one; all else is a default.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.net.lab import TRAP
from tests.net.site import NO_END, NODES, Site, site
from tests.whole.running import SMOKE
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import Attempt, NodeRow, State
from tidemill.bus.wire.subjects import NODE_KEY
from tidemill.learner.checkpoints.disk import CHECKPOINT_KEY
from tidemill.learner.checkpoints.node_copies import holders
from tidemill.learner.nodes.rows import ATTEMPT_KEY, attempt_of, node_of

MACHINES = ("bus", "node", "node1", "gpu", "act0")
SIZES = ("prepare.model.num_hidden_layers=2", "learner.pipeline_parallel=2")
RESTART_S = 200.0


@contextlib.contextmanager
def two_nodes(directory: Path) -> Iterator[Site]:
    """Start all machines of a run that the test ends."""
    settings = (f"learner.steps={NO_END}", *SIZES, "learner.checkpoint_every=3")
    with site(directory, SMOKE, *settings, machines=MACHINES, hosts=TRAP) as made:
        made.start()
        yield made


@contextlib.contextmanager
def healing(run: Site) -> Iterator[Site]:
    """At the exit the links of the nodes are up and undisturbed."""
    try:
        yield run
    finally:
        for name in NODES:
            run.lab[name].heal()
            run.lab[name].receive_all()


async def until(bus: Bus, *states: State, after: int = 0, within_s: float = RESTART_S) -> Attempt:
    """Wait for an attempt in one of these states, of an epoch behind ``after``."""
    async with asyncio.timeout(within_s):
        async for row in bus.rows("run").watch(ATTEMPT_KEY, 0.2):
            if row is not None and (attempt := attempt_of(row[0])).epoch > after and attempt.state in states:
                return attempt
    raise AssertionError("the row is watched for ever")


async def until_node(bus: Bus, node: int, what: Callable[[NodeRow], bool], within_s: float = 60.0) -> NodeRow:
    """Wait for a row of a node's agent with a property."""
    async with asyncio.timeout(within_s):
        async for row in bus.rows("run").watch(f"{NODE_KEY}.{node}", 0.2):
            if row is not None and what(found := node_of(f"{NODE_KEY}.{node}", row[0])):
                return found
    raise AssertionError("the row is watched for ever")


async def latest(bus: Bus, after: int = -1) -> tuple[str, int]:
    """Wait until a checkpoint of a step behind ``after`` is the latest: each of its files is on both nodes. Return its
    name and step.
    """
    async with asyncio.timeout(RESTART_S):
        async for row in bus.rows("run").watch(CHECKPOINT_KEY, 0.2):
            if row is not None and row[0]["step"] > after:
                return Path(row[0]["directory"]).name, int(row[0]["step"])
    raise AssertionError("the row is watched for ever")


async def ranks_held(run: Site, bus: Bus, checkpoint: str) -> list[set[int]]:
    """Return for each node the ranks of which it has the file of a checkpoint. Its server must be at the node's own
    address.
    """
    found = await holders(bus)
    for node, name in enumerate(NODES):
        assert found[node].url.startswith(f"http://{run.lab[name].in_url}:"), found
    files = [
        [file for file in found[node].held.get(checkpoint, ()) if file.endswith(".distcp")]
        for node in range(len(NODES))
    ]
    return [{int(file.split("_")[2]) for file in of_one} for of_one in files]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture
def healed(run: Site) -> Iterator[Site]:
    with healing(run):
        yield run
