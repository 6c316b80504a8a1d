"""The smoke run where machines have IPv6 addresses only; pushes, snapshots, the bus and a router included."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.lab import why_not
from tests.net.site import Site, site
from tests.net.test_smoke import MACHINES, STEPS, train
from tests.whole.running import SMOKE

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, SMOKE, f"learner.steps={STEPS}", machines=(*MACHINES, "router"), is_ipv6=True) as run:
        yield run


async def test_machines_with_ipv6_alone_train_together(run: Site) -> None:
    await train(run)
