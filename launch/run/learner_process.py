"""The learner on one machine: the parent of feeder and ranks, and its live row; the place of a node among several."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.actors.engines.membership import CONFIG_KEY, config_of_run, default_id
from tidemill.bus.errors import BusError
from tidemill.bus.keys import keep_keys, make_keys
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import Capabilities, LiveRow, NodeRow, Phase
from tidemill.launch.devices.demand import rank_variables, want_of
from tidemill.launch.devices.placement import place
from tidemill.launch.devices.shapes import Device, Node
from tidemill.launch.devices.visible import VARIABLE, nccl_of, this_node
from tidemill.launch.run.access import auth_dir, last_key, write_keys
from tidemill.launch.run.workers import LONG_WAIT_S
from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_row import to_row
from tidemill.weightstore.store.registry import EVICTED, VersionRegistry

if TYPE_CHECKING:
    from tidemill.learner.ranks.process import StartRank

log = logging.getLogger(__name__)

_PHASES = {Phase.READY: "waiting", Phase.RUNNING: "working"}


async def began_with(config: RunConfig, bus_url: str, *, role: str = "") -> JsonObject | None:
    """Return the configuration in the run's row, with which its learner began; None for a run that begins now.

    With the ``role`` of a process that does not lead the run, wait for the row. Raises BusUnavailable, NotFound.
    """
    async with connect(bus_url, config.run, config.bus, name=role or "learner", wait_s=LONG_WAIT_S) as bus:
        if role:  # names are read from it, and no code or files
            return await config_of_run(bus, asyncio.Event(), role=role, id=default_id(), allowed=["*"])
        await bus.create_layout(shadow=bool(config.debug.shadow_of))
        row = await bus.rows("run").get(CONFIG_KEY)
    return None if row is None else row[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarts:
    """How the ranks of this node are started, where a launcher has a process for each."""

    start: "StartRank | None" = None
    """None = they are children of this process."""
    node: Node | None = None
    """This node with the accelerators of all its processes; None = with the accelerators that this process sees."""
    own: tuple[str, ...] = ()
    """Accelerator of each rank, where its process sees no other; empty = all see all."""

    def bound(self, variables: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Return the variables of each rank with its accelerator alone, where its process sees no other."""
        if not self.own:
            return [dict(values) for values in variables]
        pairs = zip(variables, self.own, strict=True)
        return [{**values, VARIABLE: uuid, "LOCAL_RANK": "0"} for values, uuid in pairs]


HERE = RankStarts()


async def run_learner(
    config: RunConfig,
    bus_url: str,
    id: str,
    arguments: list[str],
    draining: asyncio.Event,
    *,
    starts: RankStarts = HERE,
    on_live: Callable[[], None] = lambda: None,
) -> None:
    """Run feeder and ranks; publish the run's configuration, for actors with only the bus's address, and a live row.

    The live row names the ranks' devices, and the engines that take no pushes; progress is in the feeder's row.
    ``on_live`` is called when the row is stored. Raises DeviceError.
    """
    from tidemill.actors.engines.address_checks import AddressChecker
    from tidemill.learner.ranks.process import run_learner

    if config.learner.checkpoint.url:
        from tidemill.learner.checkpoints.node_copies import clean

        await asyncio.to_thread(clean, config.checkpoints)
    variables, capabilities = [dict[str, str]()], Capabilities()
    if not config.debug.rollout_only:
        variables, capabilities = await asyncio.to_thread(place_ranks, config, starts)
    host, pid = socket.gethostname(), os.getpid()
    row = LiveRow(role="learner", id=id or "learner", host=host, pid=pid, phase="working", capabilities=capabilities)
    async with connect(bus_url, config.run, config.bus, name="learner", wait_s=LONG_WAIT_S) as bus:
        await bus.create_layout(shadow=bool(config.debug.shadow_of))
        heartbeat = HeartbeatPublisher(bus, row)
        shown = LearnerRow(heartbeat)
        async with (
            publishing(bus, config),
            heartbeat,
            beside(shown.follow_evicted(bus), AddressChecker(bus, heartbeat).run(), call_live(heartbeat, on_live)),
            uploading(bus, config),
        ):
            await run_learner(
                arguments,
                num_ranks=len(variables),
                threads=config.learner.threads,
                draining=draining,
                drain_s=config.up.drain_s,
                variables=variables,
                on_sigterm=shown.rank_drains,
                start_rank=starts.start,
            )


async def call_live(heartbeat: HeartbeatPublisher, on_live: Callable[[], None]) -> None:
    """Call ``on_live`` once the row of a learner is stored."""
    await heartbeat.stored()
    on_live()


@asynccontextmanager
async def publishing(bus: Bus, config: RunConfig) -> AsyncIterator[None]:
    """Publish the run's configuration and the keys of its HTTP servers, and keep both rows while entered."""
    values, directory = to_row(config), auth_dir(config)
    await bus.rows("run").put(CONFIG_KEY, values)
    keys = await make_keys(bus, last=last_key(directory))
    write_keys(directory, keys)
    async with beside(keep_keys(bus, keys), bus.rows("run").keep(CONFIG_KEY, values)):
        yield


@asynccontextmanager
async def uploading(bus: Bus, config: RunConfig, *, node: int = 0) -> AsyncIterator[None]:
    """Upload the checkpoints of a node in the background, if the run has a store for them."""
    if not config.learner.checkpoint.url:
        yield
        return
    from tidemill.learner.checkpoints.object_store import ObjectStore
    from tidemill.learner.checkpoints.store_uploads import Uploads

    store = ObjectStore(config.learner.checkpoint.url, config.run)
    async with beside(Uploads(bus, config.checkpoints, store, node=node, keep=config.learner.keep_checkpoints).run()):
        yield


def place_ranks(config: RunConfig, starts: RankStarts = HERE) -> tuple[list[dict[str, str]], Capabilities]:
    """Return variables and devices of each rank, the latter for the learner's live row. Raises DeviceError."""
    node = starts.node or this_node(os.environ)
    ranks = place([node], want_of(config, node, learner=True, engines=0)).ranks
    variables = [rank_variables(node, rank, config, os.environ) for rank in ranks]
    used = [device for device in node.devices if any(device.uuid == rank.uuid for rank in ranks)]
    if used:
        log.info("devices ranks=%s", ",".join(rank.uuid for rank in ranks))
    return starts.bound(variables), capabilities_of(used)


def capabilities_of(devices: Sequence[Device]) -> Capabilities:
    """Return the devices of a learner's ranks for its live row."""
    if not devices:
        return Capabilities()
    memory = min(device.memory_bytes for device in devices)
    return Capabilities(devices=tuple(device.uuid for device in devices), nccl=nccl_of(), device_memory_bytes=memory)


class LearnerRow:
    """Phase and waits of the live row of a learner, or of one of its nodes."""

    def __init__(self, heartbeat: HeartbeatPublisher) -> None:
        self._heartbeat = heartbeat
        self._node = self._engines = self._rank = ""

    def show(self, row: NodeRow) -> None:
        """Show the agent's reason for waiting, and why its last attempt ended."""
        self._node = row.waits_for
        self._rank = ""
        phase = _PHASES.get(row.phase, row.phase.value)
        self._heartbeat.update(phase=phase, waits_for=self._waits_for(), trouble=row.reason)

    def rank_drains(self) -> None:
        """Show that a rank has received SIGTERM: its step may last long, and the learner ends behind it."""
        self._rank = "a rank that has received SIGTERM to end its step"
        self._heartbeat.update(phase="draining", waits_for=self._waits_for())

    async def follow_evicted(self, bus: Bus) -> None:
        """Background loop: show the engines that the learner does not push to, and why."""
        async for _ in bus.rows("weights").watch(EVICTED):
            with suppress(BusError):
                evicted = await VersionRegistry(bus).evicted()
                self._engines = "; ".join(f"{name} to take pushes: {why}" for name, why in sorted(evicted.items()))
                self._heartbeat.update(waits_for=self._waits_for())

    def _waits_for(self) -> str:
        return "; ".join(text for text in (self._rank, self._node, self._engines) if text)


NODES = ("GROUP_WORLD_SIZE", "SLURM_NNODES", "PET_NNODES")
RANKS = ("GROUP_RANK", "SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
# Variables that show several processes on a node, their largest value for one, and the cure.
PER_NODE = (("LOCAL_WORLD_SIZE", 1, "torchrun --nproc-per-node 1"), ("SLURM_LOCALID", 0, "srun --ntasks-per-node=1"))
_LARGEST = 1024


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Place of an agent among all nodes."""

    nodes: int
    rank: int


def node_place(nodes: int, rank: int | None, environment: Mapping[str, str]) -> NodePlace:
    """Return the place of this process: an option, else variables, which must agree.

    ``nodes``: learner.nodes, 0 = from the variables. ``rank``: --node-rank; None = from the variables. With one node no
    variable is read.
    Raises SettingsError naming the options and variables that do not fit.

    Sources: torchrun's documentation, "Environment Variables"; ``man srun``, "OUTPUT ENVIRONMENT VARIABLES";
    Kubernetes, "Indexed Job"; kubeflow/trainer, ``pkg/runtime/framework/plugins/torch/torch.go``.
    """
    if nodes == 1:
        if rank:
            raise SettingsError(f"--node-rank: want 0 with one node (learner.nodes: 1), got {rank}; cure: --nodes N")
        return NodePlace(1, 0)
    count, counted_by = (nodes, "learner.nodes") if nodes else _agreed(NODES, environment, "--nodes N", least=1)
    if count == 1 and rank is None:
        return NodePlace(1, 0)
    _refuse_several(environment)
    if rank is None:
        rank, by = _agreed(RANKS, environment, "--node-rank R", least=0)
    else:
        by = "--node-rank"
    if not 0 <= rank < count:
        raise SettingsError(f"{by}: want 0 to {count - 1} ({counted_by} says {count} nodes), got {rank}")
    return NodePlace(count, rank)


def _agreed(names: Sequence[str], environment: Mapping[str, str], cure: str, *, least: int) -> tuple[int, str]:
    """Return the number that all of these variables have, and the first one's name. Raises SettingsError."""
    numbers = {name: _number(name, environment[name], least) for name in names if environment.get(name, "")}
    if not numbers:
        variables = f"one of {', '.join(names)} in the environment"
        raise SettingsError(f"several nodes: want {cure}, or {variables}, got none of them")
    first = next(iter(numbers))
    for name, number in numbers.items():
        if number != numbers[first]:
            raise SettingsError(f"{first}, {name}: want equal numbers, got {numbers[first]} and {number}; cure: {cure}")
    return numbers[first], first


def _number(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and least <= int(text) <= _LARGEST):
        raise SettingsError(f"{name}: want a number from {least} to {_LARGEST}, got {text[:40]!r}")
    return int(text)


def _refuse_several(environment: Mapping[str, str]) -> None:
    """Raise SettingsError where a launcher starts several processes on a node: an agent starts its ranks itself."""
    for name, largest, cure in PER_NODE:
        if environment.get(name, "") and _number(name, environment[name], 0) > largest:
            raise SettingsError(f"{name}: want one agent on each node, got {name}={environment[name]}; cure: {cure}")
