"""A run of the chart's pods: each container's command as a process, drained, replaced and lost as pods are."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.charts import RUN, objects, of_kind, rendered
from tests.kubernetes.kubelet import Node, Pod
from tests.launched import run_tidemill
from tests.net.lab import Lab, why_not
from tests.whole.running import SMOKE, until_step
from tidemill.bus.client.addresses import Address, parse
from tidemill.bus.server.auth import VIEWER, read_credentials
from tidemill.bus.streams.bus import connect

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
MACHINES = ("desk", "bus", "learner", "engine", "actor0", "actor1", "audit")
HOSTS = f"127.0.0.1 localhost\n10.77.0.11 {RUN}-bus-0.{RUN}-bus\n10.77.0.1 {{name}}\n"
SECRET = "smoke-auth"
DRAINED = 10
"""Exit code of a drained process, which a Job's podFailurePolicy ignores."""
STEPS = 100


@pytest.fixture
def cluster(tmp_path: Path) -> "Iterator[tuple[Lab, Node]]":
    """Make the machines, and render the chart for a run with users."""
    directory = tmp_path
    config = yaml.safe_load(SMOKE.read_text())
    config["learner"] |= {"steps": STEPS}
    config["bus"] |= {"auth_users": 2}
    values = {"config": config, "bus": {"authSecret": SECRET}, "engines": {"count": 1}, "actors": {"count": 2}}
    (directory / "values.yaml").write_text(yaml.safe_dump(values))
    documents = {(one["kind"], one["metadata"]["name"]): one for one in objects(rendered([directory / "values.yaml"]))}
    (directory / "run.yaml").write_text(documents["ConfigMap", f"{RUN}-config"]["data"]["run.yaml"])
    users = ("bus", "--config", str(directory / "run.yaml"), "--make-users", "--auth-dir", str(directory / "auth"))
    assert run_tidemill(*users).returncode == 0
    with Lab(directory, *MACHINES, hosts=HOSTS) as lab, lab["desk"].inside():
        yield lab, Node(directory=directory, objects=documents, secrets={SECRET: directory / "auth"})


async def test_a_run_of_pods_that_are_drained_replaced_and_lost(tmp_path: Path, cluster: "tuple[Lab, Node]") -> None:
    lab, node = cluster

    def pod(kind: str, role: str, *, index: int = 0, suffix: str = "a", machine: str = "") -> Pod:
        owner = of_kind(list(node.objects.values()), kind, role)
        return Pod(node=node, machine=lab[machine or role], owner=owner, index=index, suffix=suffix)

    bus = pod("StatefulSet", "bus", suffix="")
    await bus.ready()
    learner, engine, audit = pod("Job", "learner"), pod("Job", "engine"), pod("Job", "audit")
    first, second = (pod("Job", "actor", index=index, machine=f"actor{index}") for index in (0, 1))
    for started in (learner, engine, first, second):
        await started.ready()
    await audit.start()

    user, password = read_credentials(tmp_path / "auth" / f"{VIEWER}.env")
    address = Address(servers=parse(f"nats://{lab['bus'].address}:4222").servers, user=user, password=password)
    async with connect(address.line(), RUN, name="desk", wait_s=60) as viewed:
        await until_step(viewed, 4)
    # Without actors the run cannot come to its end in between, however fast the machine is.
    assert second.started is not None
    second.started.send(signal.SIGKILL)  # a node that is lost
    for drained in (first, engine, learner):  # nodes that are drained
        assert await drained.stop() == DRAINED, drained.tail()
    learner, engine = pod("Job", "learner", suffix="b"), pod("Job", "engine", suffix="b")
    first, second = (pod("Job", "actor", index=index, suffix="b", machine=f"actor{index}") for index in (0, 1))
    for replacement in (learner, engine):
        await replacement.ready()
    for replacement in (first, second):
        await replacement.start()
    for done in (learner, engine, first, second, audit):
        assert await done.ended() == 0, done.tail()
    counts = dict(re.findall(r"^ +(\w+) +(\w+)$", audit.log.read_text(), re.MULTILINE))
    balance = ("samples_trained", "samples_lost", "samples_trained_twice", "books_balance")
    assert [counts[name] for name in balance] == [str(STEPS * 8 * 4), "0", "0", "True"], audit.tail()
    assert await bus.stop() == 0, bus.tail()
