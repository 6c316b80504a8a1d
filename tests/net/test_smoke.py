"""Four machines with host names and the defaults: bus, learner, an engine's host, an actor's host."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.lab import why_not
from tests.net.site import Site, site
from tests.waits import LIMIT_S
from tests.whole.running import SMOKE, until_step
from tidemill.bus.liveness import LiveView

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
MACHINES = ("bus", "node", "gpu", "act0")
STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, SMOKE, f"learner.steps={STEPS}", machines=MACHINES) as run:
        yield run


@pytest.mark.slow
async def test_four_machines_train_together(run: Site) -> None:
    await train(run)


async def train(run: Site) -> None:
    """Run to the last step; every process must end with 0 and the audit be right."""
    run.start()
    async with run.bus() as bus:
        try:
            async with asyncio.timeout(200):
                await until_step(bus, STEPS)
        except TimeoutError:
            pytest.fail(run.logs())
        for row in await LiveView(bus).alive():
            where = "router" if row.role == "router" else "gpu" if row.role == "engine" else ""
            assert not where or row.address.startswith(f"http://{run.lab[where].in_url}:"), row
    for node in run.nodes:
        assert await asyncio.to_thread(run.started[node].wait, LIMIT_S) == 0, run.logs()
    codes = await asyncio.to_thread(run.end_all_but_bus)
    assert set(codes.values()) == {0}, run.logs()
    accounting = await run.audited()
    assert accounting.trained == STEPS * 8 * 4
