"""The learner on several machines: this machine's agent, with the facts of the machine and the commands of its ranks.

The agent itself (``learner/nodes/``) knows no devices, no settings and no environment. gloo and NCCL are given the name
of a network interface, not an address. Source of the interfaces by address: ``man 3 getifaddrs`` (Linux).
"""

import asyncio
import ctypes
import dataclasses
import hashlib
import ipaddress
import os
import platform
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tidemill.actors.engines.address_checks import AddressChecker
from tidemill.bus.client.addresses import AUTO, Reach, bare, is_wildcard, reach, route_to
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import beside
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.rows import LiveRow, NodeRow
from tidemill.launch.devices.demand import rank_variables, want_of
from tidemill.launch.devices.placement import place as place_processes
from tidemill.launch.devices.shapes import Device, Node, PlacementRefused, RankPlace
from tidemill.launch.devices.visible import nccl_of, this_node
from tidemill.launch.run.learner_process import (
    HERE,
    LearnerRow,
    NodePlace,
    RankStarts,
    call_live,
    capabilities_of,
    publishing,
    uploading,
)
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.checkpoints.node_copies import Keeper, Ring
from tidemill.learner.errors import NodeRefused
from tidemill.learner.nodes.agent import Agent, Limits
from tidemill.learner.nodes.own_row import here
from tidemill.learner.nodes.rendezvous import refuse_public
from tidemill.learner.ranks.process import NodePart, run_part
from tidemill.learner.settings.config import SHARED

LONG_WAIT_S = 300.0  # Seconds that an agent waits for a bus that is started after it
# Settings of a rank, as variables: the addresses at which engines reach the part of the weights that it sends.
SENDS_FROM, SENDS_AS = "TIDEMILL_WEIGHTS__HOST", "TIDEMILL_WEIGHTS__ADVERTISE"
# File in the leader's directory of the checkpoints; on the other nodes it shows whether they share that directory.
PROOF = ".nodes"
PROOF_S = 30.0  # Seconds for a file to be seen on another node: NFS clients cache a directory for some seconds
PACKAGES = ("bus", "weightstore", "rewards", "learner", "launch")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

# Offset and length of the address in `sockaddr_in` and `sockaddr_in6`.
_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Place and addresses of this node, from the command line."""

    place: NodePlace
    host: str = ""
    advertise: str = ""
    id: str = ""


async def run_agent(
    config: RunConfig,
    bus_url: str,
    node_arguments: Given,
    arguments: Sequence[str],
    draining: asyncio.Event,
    *,
    starts: RankStarts = HERE,
    on_live: Callable[[], None] = lambda: None,
) -> None:
    """Run this node's part of the learner until drained. The leader publishes the configuration.

    ``on_live`` is called when its live row is stored.
    """
    place = node_arguments.place
    addresses = await asyncio.to_thread(_addresses, bus_url, node_arguments, config)
    node = await asyncio.to_thread(this_node, os.environ) if starts.node is None else starts.node
    devices = _own_devices(node, config)
    row = NodeRow(
        node=place.rank,
        nodes=place.nodes,
        nonce="",
        host=socket.gethostname(),
        place=here(),
        pid=os.getpid(),
        address=bare(addresses.advertised),
        versions=await asyncio.to_thread(library_versions, config, devices),
        devices=tuple(device.uuid for device in devices),
        device_memory_bytes=min((device.memory_bytes for device in devices), default=0),
    )
    name = node_arguments.id or ("learner" if row.node == 0 else f"learner-node-{row.node}")
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(bus_url, config.run, config.bus, name=name, wait_s=LONG_WAIT_S))
        await bus.create_layout(shadow=bool(config.debug.shadow_of))
        if row.node == 0:
            await stack.enter_async_context(publishing(bus, config))
        used = capabilities_of(devices[: config.learner.num_ranks // row.nodes])
        live = LiveRow(role="learner", id=name, host=row.host, pid=row.pid, phase="waiting", capabilities=used)
        heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, live))
        await stack.enter_async_context(beside(call_live(heartbeat, on_live)))
        shown = LearnerRow(heartbeat)
        if row.node == 0:  # its rank 0 pushes to the engines
            await stack.enter_async_context(beside(shown.follow_evicted(bus), AddressChecker(bus, heartbeat).run()))
        on_sigterm = shown.rank_drains
        work = NodeWork(
            config, arguments, node, devices, reach=addresses, place=place, on_sigterm=on_sigterm, starts=starts
        )
        limits = Limits(wait_s=config.learner.nodes_wait_s)
        await Agent(bus, row, work, bind=addresses.bind, limits=limits, on_change=shown.show).run(draining)


class NodeWork:
    """The ranks of this node: ``tidemill.learner.nodes.rows.Work``."""

    def __init__(
        self,
        config: RunConfig,
        arguments: Sequence[str],
        node: Node,
        devices: Sequence[Device],
        *,
        reach: Reach,
        place: NodePlace,
        on_sigterm: Callable[[], None],
        starts: RankStarts = HERE,
    ) -> None:
        """``devices``: devices that ranks may have. ``reach``: this node's addresses."""
        self._starts = starts
        self._config, self._arguments, self._node, self._devices, self._reach = config, arguments, node, devices, reach
        self._interface = interface_of(_bound(reach))
        self._place, self._on_sigterm = place, on_sigterm
        self._is_local = config.learner.checkpoint.store != SHARED

    @asynccontextmanager
    async def opened(self, bus: Bus) -> AsyncIterator[None]:
        """Keep the checkpoints of this node, if it has some of its own. Raises OSError, BusUnavailable."""
        if not self._is_local:
            yield
            return
        kept = self._config.learner.checkpoint
        copies, keep = 0 if kept.url else kept.copies, self._config.learner.keep_checkpoints
        ring = Ring(node=self._place.rank, num_nodes=self._place.nodes, copies=copies, keep=keep)
        keeper = Keeper(bus, self._config.checkpoints, ring, reach=self._reach)
        async with keeper.opened(), beside(keeper.run()), uploading(bus, self._config, node=self._place.rank):
            yield

    def layout(self, offers: Sequence[NodeRow]) -> tuple[int, ...]:
        """Return the number of ranks of each node. Raises NodeRefused."""
        nodes = [_node_of(row) for row in offers]
        of_one = want_of(self._config, nodes[0], learner=True, engines=0)
        want = dataclasses.replace(of_one, ranks=self._config.learner.num_ranks, nodes=1, learner_devices=())
        try:
            ranks = place_processes(nodes, want).ranks
        except PlacementRefused as error:
            raise NodeRefused(error.where, error.want, error.got, error.cure) from None
        counts = tuple(sum(rank.node == node.rank for rank in ranks) for node in nodes)
        if not all(counts):
            got = f"{len(ranks)} ranks, which take {sum(map(bool, counts))} nodes"
            cure = "a host for engines is no node: lower --nodes"
            raise NodeRefused("learner.nodes", f"ranks on each of {len(nodes)} nodes", got, cure)
        return counts

    async def prove(self, proof: str) -> None:
        """Write the proof into the directory of the checkpoints. Raises OSError."""
        await asyncio.to_thread(write_whole, self._config.checkpoints / PROOF, proof)

    async def check(self, proof: str) -> None:
        """Look for the leader's proof in this node's directory of the checkpoints.

        Raises NodeRefused when it is missing from a shared directory, or is in one that should be this node's own.
        """
        if self._is_local:
            await self._refuse_shared(proof)
            return
        file, proof_there = self._config.checkpoints / PROOF, ""
        deadline = asyncio.get_running_loop().time() + PROOF_S
        while asyncio.get_running_loop().time() < deadline:
            proof_there = await asyncio.to_thread(_text, file)
            if proof_there == proof:
                return
            await asyncio.sleep(0.2)
        got = f"{proof_there[:40]!r} in {file} on {socket.gethostname()}"
        want = f"one directory that all nodes share (the leader wrote {proof!r})"
        raise NodeRefused("checkpoints", want, got, "directory: a shared path, or learner.checkpoint.store: local")

    async def _refuse_shared(self, proof: str) -> None:
        """Raise NodeRefused when this node's directory is the leader's: each would remove the other's files."""
        file = self._config.checkpoints / PROOF
        if self._place.rank and await asyncio.to_thread(_text, file) == proof:
            want = "a directory of this node's own (learner.checkpoint.store: local)"
            got = f"that of node 0: {file.parent} on {socket.gethostname()}"
            raise NodeRefused("checkpoints", want, got, "learner.checkpoint.store: shared, or another directory")

    async def run(self, part: NodePart, draining: asyncio.Event, on_step: Callable[[], None]) -> None:
        """Run the processes of this node. Raises ChildFailed."""
        count = part.num_ranks
        uuids = tuple(device.uuid for device in self._devices[:count])
        places = [
            RankPlace(rank=part.first_rank + local, node=self._node.rank, local_rank=local, uuids=uuids)
            for local in range(count)
        ]
        network = network_variables(self._interface, os.environ)
        if self._place.rank > 0:  # the run's settings have an address of the leader
            network |= {SENDS_FROM: self._reach.bind, SENDS_AS: self._reach.advertised}
        variables = [rank_variables(self._node, place, self._config, os.environ) | network for place in places]
        await run_part(
            self._arguments,
            part,
            draining=draining,
            threads=self._config.learner.threads,
            drain_s=self._config.up.drain_s,
            on_step=on_step,
            on_sigterm=self._on_sigterm,
            variables=self._starts.bound(variables),
            start_rank=self._starts.start,
        )


def network_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that name the interface to its peers. Those that the user has set are left alone.

    NCCL takes a name as a prefix unless it begins with ``=``. Source: NCCL's documentation, NCCL_SOCKET_IFNAME.
    """
    names = {GLOO: interface, NCCL: f"={interface}"} if interface else {}
    return {name: value for name, value in names.items() if name not in environment}


def _addresses(bus_url: str, node_arguments: Given, config: RunConfig) -> Reach:
    """Return where this node listens and how others reach it. Raises ValueError. Looks a host name up."""
    addresses = reach(node_arguments.host or AUTO, node_arguments.advertise, route_to(bus_url), name="learner: --host")
    refuse_public(bare(addresses.advertised), insecure=config.learner.insecure_network)
    return addresses


def _bound(addresses: Reach) -> str:
    return bare(addresses.advertised) if is_wildcard(addresses.bind) else addresses.bind


def _own_devices(node: Node, config: RunConfig) -> tuple[Device, ...]:
    """Return the devices that ranks may have here. Raises DeviceError for unknown ``learner.devices``."""
    if not node.devices or config.learner.device == "cpu":
        return ()
    chosen = place_processes([node], want_of(config, node, learner=True, engines=0)).ranks
    return tuple(next(device for device in node.devices if device.uuid == rank.uuid) for rank in chosen if rank.uuids)


def _node_of(row: NodeRow) -> Node:
    devices = tuple(
        Device(index=index, uuid=uuid, memory_bytes=row.device_memory_bytes, slice=0 if uuid.startswith("MIG") else -1)
        for index, uuid in enumerate(row.devices)
    )
    return Node(rank=row.node, host=row.host, devices=devices)


def library_versions(config: RunConfig, devices: Sequence[Device]) -> dict[str, str]:
    """Return versions and settings that must be equal on all nodes. Blocks while the source files are read."""
    code = hashlib.sha256()
    root = Path(__file__).parents[2]
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        code.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    kept = config.learner.checkpoint
    versions = {"code": code.hexdigest()[:12], "settings": config.digest()[:12], "python": platform.python_version()}
    versions["learner.checkpoint"] = f"store {kept.store}, copies {kept.copies}"
    for package in ("torch", "megatron-core", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions | ({"NCCL": nccl_of() or "not known"} if devices else {})


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class InterfaceEntry(ctypes.Structure):
    """``struct ifaddrs``; the fields after the address are not read."""


InterfaceEntry._fields_ = [
    ("next", ctypes.POINTER(InterfaceEntry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(address: str) -> str:
    """Return the interface that has an address (IPv4 or IPv6, text); empty = none has it, or no Linux.

    Several interfaces may have one link-local address: then it is the one behind ``%``, else the first.
    """
    bare, _, zone = address.strip("[]").partition("%")
    try:
        wanted_address = ipaddress.ip_address(bare)
    except ValueError:
        return ""
    names = [name for name, interface_address in _interface_addresses() if interface_address == wanted_address]
    return zone if zone in names else next(iter(names), "")


def _interface_addresses() -> list[tuple[str, IpAddress]]:
    """Return (interface, address) of every address of this machine."""
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(InterfaceEntry)]
    first = ctypes.POINTER(InterfaceEntry)()
    if libc.getifaddrs(ctypes.byref(first)):
        return []
    addresses: list[tuple[str, IpAddress]] = []
    try:
        entry = first
        while entry:
            row = entry.contents
            if row.address:  # an interface may have none
                family = ctypes.c_ushort.from_address(row.address).value
                if family in _ADDRESS_AT:
                    offset, length = _ADDRESS_AT[socket.AddressFamily(family)]
                    address = ipaddress.ip_address(ctypes.string_at(row.address + offset, length))
                    addresses.append((row.name.decode(), address))
            entry = row.next
    finally:
        libc.freeifaddrs(first)
    return addresses
