"""The smoke run where machines have IPv6 addresses only: bus, pushes, snapshots and a router, and a learner of two
nodes.

The nodes are stages of a pipeline, and both push. Between them are the agents' calls, torch's store and gloo
(MASTER_ADDR), the feeder, and the servers of checkpoints, of which each file is copied to the other node.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.lab import why_not
from tests.net.learner_nodes import SIZES, latest, ranks_held
from tests.net.site import Site, site
from tests.net.test_smoke import MACHINES, STEPS, train
from tests.whole.running import SMOKE
from tidemill.learner.nodes.rows import ATTEMPT_KEY, attempt_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SETTINGS = (f"learner.steps={STEPS}", *SIZES, "learner.checkpoint_every=2")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, SMOKE, *SETTINGS, machines=(*MACHINES, "node1", "router"), is_ipv6=True) as run:
        yield run


async def test_machines_with_ipv6_alone_train_together(run: Site) -> None:
    await train(run)
    async with run.bus() as bus:
        row = await bus.rows("run").get(ATTEMPT_KEY)
        assert row is not None
        attempt = attempt_of(row[0])
        assert attempt.master.startswith(f"{run.lab['node'].address}:"), attempt
        assert attempt.feeder.startswith(f"tcp://{run.lab['node'].in_url}:"), attempt
        checkpoint, step = await latest(bus)
        assert step == STEPS
        assert await ranks_held(run, bus, checkpoint) == [{0, 1}, {0, 1}]
