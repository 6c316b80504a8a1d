"""KEDA's arithmetic on the queue of tasks, against the pages of a real nats-server, with the triggers of the chart.

Source: pkg/scalers/nats_jetstream_scaler.go of kedacore/keda: of the account, stream and consumer named in a trigger it
adds num_pending and num_ack_pending; without such a consumer it takes the stream's last sequence. The Horizontal Pod
Autoscaler divides by lagThreshold and rounds up (an average value); KEDA starts from 0 and stops there by activity.
"""

import asyncio
import json
import math
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bus_kit import make_task, until_backlog
from tests.kubernetes.charts import RUN, Object, objects, of_kind, rendered
from tests.kubernetes.test_kubernetes import CASES
from tidemill.bus.client.addresses import Address, KeptPort, parse
from tidemill.bus.config import BusConfig
from tidemill.bus.server.auth import LEARNER, credentials_file, read_credentials
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.bus.streams.bus import Bus, connect

TASKS = 12
"""Open tasks of the learner, as its staleness allows."""


def lag(trigger: Mapping[str, str], monitoring: str) -> int:
    """Return the lag of a trigger as KEDA computes it."""
    query = urllib.parse.urlencode({"acc": trigger["account"], "consumers": "true", "config": "true"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{monitoring}/jsz?{query}", timeout=30) as answer:
        page = json.load(answer)
    (stream,) = [
        stream
        for account in page.get("account_details", ())
        if account["name"] == trigger["account"]
        for stream in account.get("stream_detail", ())
        if stream["name"] == trigger["stream"]
    ]
    for consumer in stream.get("consumer_detail", ()):
        if consumer["name"] == trigger["consumer"]:
            return int(consumer["num_pending"]) + int(consumer["num_ack_pending"])
    return int(stream["state"]["last_seq"])


def replicas(scaled: Object, monitoring: str) -> int:
    """Return the number of pods that KEDA and the Horizontal Pod Autoscaler settle at."""
    spec, wanted = scaled["spec"], 0
    for trigger in spec["triggers"]:
        each = int(trigger["metadata"]["lagThreshold"])
        wanted = max(wanted, math.ceil(lag(trigger["metadata"], monitoring) / each))
    return int(min(spec["maxReplicaCount"], max(spec["minReplicaCount"], wanted)))


@asynccontextmanager
async def monitored(directory: Path, **settings: Any) -> AsyncIterator[tuple[Bus, str]]:
    """Start a bus with an open monitoring page; yield the run on it, and the address of the page."""
    with KeptPort() as port:
        config = BusConfig(monitoring=f"127.0.0.1:{port.number}", **settings)
        servers = EmbeddedBus(directory, RUN, config, directory / "auth")
        url = await asyncio.to_thread(servers.start)
        try:
            user, password = "", ""
            if config.auth:
                user, password = read_credentials(credentials_file(directory / "auth", LEARNER))
            address = Address(servers=parse(url).servers, user=user, password=password).line()
            async with connect(address, RUN, config, name="learner", wait_s=60) as bus:
                await bus.create_layout()
                yield bus, config.monitoring
        finally:
            await asyncio.to_thread(servers.stop)


@pytest.mark.parametrize("case", ["deployments", "everything"])
async def test_replicas_follow_the_open_tasks(case: str, tmp_path: Path) -> None:
    """Before a starvation of the learner, in it, and after it."""
    documents = objects(rendered(CASES[case]))
    actors = of_kind(documents, "ScaledObject", "actor")
    with_users = {"auth": True, "auth_users": 1} if case == "everything" else {}
    rollouts = ("walk",) if case == "everything" else ()
    least, most = actors["spec"]["minReplicaCount"], actors["spec"]["maxReplicaCount"]
    each = int(actors["spec"]["triggers"][0]["metadata"]["lagThreshold"])
    async with monitored(tmp_path / "bus", rollouts=rollouts, **with_users) as (bus, monitoring):
        queue = bus.tasks
        assert replicas(actors, monitoring) == least  # the learner has no open task

        await queue.fence(1)
        for number in range(TASKS):
            await queue.issue(make_task(RUN, offset=number))
        await until_backlog(bus, waiting=TASKS, leased=0)
        assert replicas(actors, monitoring) == min(most, math.ceil(TASKS / each))

        # The learner starves: all tasks are leased, and no sample has come. A leased task counts as one that waits.
        leases = [await queue.lease(30) for _ in range(TASKS)]
        await until_backlog(bus, waiting=0, leased=TASKS)
        assert replicas(actors, monitoring) == min(most, math.ceil(TASKS / each))

        for number, lease in enumerate(leases, 1):
            assert lease is not None and await lease.ack()
            await until_backlog(bus, waiting=0, leased=TASKS - number)
            assert replicas(actors, monitoring) == min(most, max(least, math.ceil((TASKS - number) / each)))


async def test_a_consumer_that_is_not_there_would_ask_for_everything(tmp_path: Path) -> None:
    """Hence the test of names: KEDA takes the number of all messages that the stream has ever had."""
    trigger = {"account": "$G", "stream": f"TM_{RUN}_TASKS", "consumer": "rolout"}
    async with monitored(tmp_path / "bus") as (bus, monitoring):
        await bus.tasks.fence(1)
        for number in range(TASKS):
            await bus.tasks.issue(make_task(RUN, offset=number))
        lease = await bus.tasks.lease(30)
        assert lease is not None and await lease.ack()
        await until_backlog(bus, waiting=TASKS - 1, leased=0)
        assert lag({**trigger, "consumer": "rollout"}, monitoring) == TASKS - 1
        assert lag(trigger, monitoring) == TASKS + 1
