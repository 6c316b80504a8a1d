"""Placement: which rank and which engine gets which accelerator. Pure: it reads no device.

    nodes (machines with their visible devices) + Want (sizes and settings)  ->  Placed | PlacementRefused

Ranks come first, the lowest device first; a tensor-parallel group stays inside a node. Engines get blocks of
``devices_per_engine`` that begin at a multiple of it among the node's visible devices, on devices that the ranks leave;
colocated engines get the ranks' own devices. Where a machine has one device, the rank and built-in engines share it.
Without devices everything runs on the CPU. A placement is refused where the weights have no way to the engines, or a
device or /dev/shm has too little memory.

Sources: two ranks of one NCCL communicator on one GPU, and ends of different NCCL releases, are refused by NCCL itself
(NVIDIA/nccl, src/init.cc: "Duplicate GPU detected", "Mismatched NCCL version detected").
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tidemill.launch.devices.shapes import (
    CUDA,
    GLOO,
    HANDLES,
    NCCL,
    SGLANG,
    Device,
    EnginePlace,
    Node,
    Others,
    Placed,
    PlacementRefused,
    RankPlace,
    Want,
    every_device,
    listed,
)
from tidemill.weightstore.transport.nccl import nccl_differs

ALONE = Others()

# Share of a device's memory that processes may plan with; the rest is for the CUDA contexts of ranks and engines.
USABLE = 0.95


def place(nodes: Sequence[Node], want: Want) -> Placed:
    """Return the place of every rank and engine. Raises PlacementRefused, with the reason and a cure."""
    nodes = _ordered(nodes)
    why: list[str] = []
    _refuse_shortage(nodes, want)
    ranks = _ranks(nodes, want, why)
    engines: list[EnginePlace] = []
    for number in range(want.engines):
        engine_uuids = [uuid for engine in engines for uuid in engine.uuids]
        engines.append(replace(_engine(nodes, want, ranks, engine_uuids), number=number))
    _remark_idle(nodes, want, ranks, engines, why)
    transport = transport_of(nodes, want, ranks, engines, why)
    refuse_memory(nodes, want, ranks, engines, groups=_groups(want, len(engines), transport))
    refuse_shm(nodes, want, engines, transport)
    return Placed(ranks=ranks, engines=tuple(engines), transport=transport, why=tuple(why))


def engine_place(nodes: Sequence[Node], want: Want, *, others: Others = ALONE) -> EnginePlace:
    """Return the place of one more engine beside the ``others``. Raises PlacementRefused."""
    nodes = _ordered(nodes)
    ranks = _ranks(nodes, want, [])
    chosen = _engine(nodes, want, ranks, others.taken)
    uuids_here = {device.uuid for node in nodes for device in node.devices}
    here = [uuids for uuids in others.engines if uuids_here & set(uuids)]
    neighbours = [EnginePlace(number=0, node=chosen.node, uuids=uuids) for uuids in here]
    numbers, uuids = range(len(others.ranks)), others.ranks
    running = [RankPlace(rank=rank, node=chosen.node, local_rank=rank, uuids=uuids) for rank in numbers]
    groups = _groups(want, len(others.engines) + 1, transport_of(nodes, want, ranks, [chosen], [])) if ranks else 0
    refuse_memory(nodes, want, ranks or running, [*neighbours, chosen], groups=groups)
    if ranks or others.learner_is_here:  # engines elsewhere get the weights by broadcast
        refuse_shm(nodes, want, [*neighbours, chosen], want.transport)
    return chosen


def _groups(want: Want, engines: int, transport: str) -> int:
    """Return the number of NCCL groups of each rank that sends; of engines placed by their hosts at least one."""
    if transport == NCCL or (not transport and want.backend == NCCL):
        return -(-max(1, engines) // want.engines_together)
    return 0


# ---- machines


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes and devices by number. Raises PlacementRefused for a device that is named twice."""
    ordered = [
        replace(node, devices=tuple(sorted(node.devices, key=lambda device: (device.index, device.slice, device.uuid))))
        for node in sorted(nodes, key=lambda node: node.rank)
    ]
    uuids: set[str] = set()
    for device in (device for node in ordered for device in node.devices):
        if device.uuid in uuids:
            cure = "name each device, and each machine, once"
            raise PlacementRefused("devices", "every device once", f"{device.uuid} twice", cure)
        uuids.add(device.uuid)
    return ordered


def _selected(node: Node, selectors: Sequence[str], setting: str, nodes: Sequence[Node]) -> tuple[Device, ...]:
    """Return the devices of a node that a setting names. Raises PlacementRefused for unknown or repeated ones."""
    selected: list[Device] = []
    for selector in selectors:
        matches = [device for device in node.devices if selector in (device.name, device.uuid)]
        elsewhere = any(selector == device.uuid for node_of_device in nodes for device in node_of_device.devices)
        if not matches and not elsewhere:
            want_text = "indices or UUIDs of visible devices"
            raise PlacementRefused(setting, want_text, f"{selector!r}: {listed(nodes)}", "fix the list, or remove it")
        if any(device in selected for device in matches):
            raise PlacementRefused(setting, "every device once", f"{selector!r}, which is named before", "name it once")
        selected += matches
    return tuple(selected)


# ---- ranks


def _refuse_shortage(nodes: Sequence[Node], want: Want) -> None:
    have = len(every_device(nodes))
    by_hand = want.engine_devices or want.learner_devices
    ranks = 0 if want.learner_on_cpu else want.ranks
    engines = 0 if want.colocated else want.engines * want.devices_per_engine
    if have <= 1 or by_hand or ranks + engines <= have:
        return
    parts = [f"{ranks} for ranks"] * bool(ranks)
    parts += [f"{want.engines} x {want.devices_per_engine} for engines"] * bool(engines)
    sizes = "up.engines or the engines' tp_size, learner.data_parallel or learner.tensor_parallel"
    cure = f"lower {sizes}, or let more devices be visible"
    raise PlacementRefused("devices", f"{ranks + engines} devices ({', '.join(parts)})", listed(nodes), cure)


def _ranks(nodes: Sequence[Node], want: Want, why: list[str]) -> tuple[RankPlace, ...]:
    if not want.ranks:
        return ()
    model = want.tp * want.pp * want.cp
    if (total := want.ranks * want.nodes) % model:
        want_text = f"a multiple of tensor x pipeline x context parallel = {want.tp} x {want.pp} x {want.cp}"
        raise PlacementRefused("ranks", want_text, str(total), "change the number of ranks or the sizes")
    on_cpu = want.learner_on_cpu or not every_device(nodes)
    if want.learner_devices and not every_device(nodes):
        got, cure = "none on this machine", "remove it to train on the CPU"
        raise PlacementRefused("learner.devices", "visible devices", got, cure)
    named = want.learner_devices
    pools: list[tuple[Device, ...]] = [() if on_cpu else node.devices for node in nodes]
    if named and not on_cpu:
        pools = [_selected(node, named, "learner.devices", nodes) for node in nodes]
    counts = _ranks_of_a_node(nodes, want, [want.ranks if on_cpu else len(pool) for pool in pools])
    used = want.ranks // counts
    if used < len(nodes):
        rule = "equal parts, tensor-parallel groups inside a node"
        others = f"the others are hosts of engines: --nodes {used}"
        why.append(f"ranks on {used} of {len(nodes)} nodes ({rule}); {others}")
    places: list[RankPlace] = []
    for node, pool in zip(nodes[:used], pools, strict=False):
        uuids, first = tuple(device.uuid for device in pool[:counts]), len(places)
        places += [RankPlace(rank=first + at, node=node.rank, local_rank=at, uuids=uuids) for at in range(counts)]
    slices = [device for pool in pools[:used] for device in pool[:counts] if device.slice >= 0]
    if slices and want.ranks > 1:
        got = f"{want.ranks} ranks, with MIG slice {slices[0].name}"
        want_text = "one rank, or whole GPUs: NCCL does not work between MIG slices"
        raise PlacementRefused("learner", want_text, got, "switch MIG off, or use one rank")
    return tuple(places)


def _ranks_of_a_node(nodes: Sequence[Node], want: Want, have: Sequence[int]) -> int:
    """Return the number of ranks of each node that has any: as many nodes as possible. Raises PlacementRefused."""
    if want.tp > max(have):
        got = f"{want.tp}: {listed(nodes)}"
        cure = "lower learner.tensor_parallel: its ranks must be on one machine"
        raise PlacementRefused("learner.tensor_parallel", f"<= {max(have)}, the devices of one machine", got, cure)
    by_hand = bool(want.learner_devices)
    for used in range(len(nodes), 0, -1):
        per_node, remainder = divmod(want.ranks, used)
        fits = all(count == per_node if by_hand else count >= per_node for count in have[:used])
        if fits and not remainder and per_node % want.tp == 0:
            return per_node
    if by_hand:
        got = f"{' | '.join(map(str, have))} for {want.ranks} ranks"
        raise PlacementRefused("learner.devices", "one device for each rank", got, "name as many as there are ranks")
    if want.ranks > sum(have):
        want_text = f"a device for each of {want.ranks} ranks: NCCL refuses two ranks on one GPU"
        sizes = "learner.data_parallel, tensor_parallel, pipeline_parallel or context_parallel"
        cure = f"lower {sizes}, or let more devices be visible"
        raise PlacementRefused("devices", want_text, listed(nodes), cure)
    want_text = f"{want.ranks} ranks in equal parts on the machines, tensor-parallel groups of {want.tp} inside one"
    cure = "change learner.data_parallel or the number of machines"
    raise PlacementRefused("devices", want_text, f"machines of {' and '.join(map(str, have))} devices", cure)


# ---- engines


def _engine(nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], used_uuids: Collection[str]) -> EnginePlace:
    if want.engine_devices and not every_device(nodes):
        cure = "remove it to generate on the CPU"
        raise PlacementRefused("engine.devices", "visible devices", "none on this machine", cure)
    if not want.devices_per_engine or not every_device(nodes):
        return EnginePlace(number=0, node=nodes[0].rank)
    for node in nodes:
        for block in _blocks(node, nodes, want, ranks):
            if _shares(nodes, want) or not {device.uuid for device in block} & set(used_uuids):
                _refuse_sharing(want, ranks, block)
                return _engine_place(node, block, want)
    raise _no_block(nodes, want, ranks, used_uuids)


def _shares(nodes: Sequence[Node], want: Want) -> bool:
    """Return whether engines share the only device: built-in ones, and servers that leave memory to others."""
    leaves_memory = want.kind != SGLANG or want.memory_fraction is not None
    return len(every_device(nodes)) == 1 and not want.colocated and leaves_memory


def _blocks(node: Node, nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace]) -> list[tuple[Device, ...]]:
    size = want.devices_per_engine
    by_ranks = [uuid for rank in ranks if rank.node == node.rank and rank.local_rank == 0 for uuid in rank.uuids]
    if want.engine_devices:
        pool = _selected(node, want.engine_devices, "engine.devices", nodes)
        if len(pool) % size:
            want_text = f"a multiple of {size}, the devices of an engine"
            raise PlacementRefused("engine.devices", want_text, f"{len(pool)} devices", "name more or fewer")
        foreign = [device.name for device in pool if device.uuid not in by_ranks]
        if want.colocated and foreign:
            want_text = "devices of the ranks with learner.colocated"
            cure = "name devices of ranks, or remove the list"
            raise PlacementRefused("engine.devices", want_text, ", ".join(foreign), cure)
    elif want.colocated:
        by_uuid = {device.uuid: device for device in node.devices}
        pool = tuple(by_uuid[uuid] for uuid in by_ranks)
    else:
        pool = node.devices
    blocks = [pool[start : start + size] for start in range(0, len(pool) - size + 1, size)]
    if want.colocated or want.engine_devices or len(every_device(nodes)) == 1:
        return blocks
    return [block for block in blocks if not {device.uuid for device in block} & set(by_ranks)]


def _refuse_sharing(want: Want, ranks: Sequence[RankPlace], block: Sequence[Device]) -> None:
    """Raise PlacementRefused for an engine that cannot share a device, and for slices that cannot work together."""
    shared = [device for device in block if any(device.uuid == rank.uuid for rank in ranks)]
    if shared and not want.colocated and want.kind == SGLANG and want.memory_fraction is None:
        got = f"both on device {shared[0].name}: the server takes nearly all of its memory"
        cure = "set learner.colocated: true, or engine.sglang.arguments.mem_fraction_static"
        raise PlacementRefused("engine.sglang", "a device of its own, or a share of the memory", got, cure)
    if len(block) > 1 and any(device.slice >= 0 for device in block):
        got = f"an engine of {len(block)} devices on MIG slices"
        want_text = "whole GPUs: NCCL does not work between MIG slices"
        raise PlacementRefused("engine", want_text, got, "switch MIG off, or lower tp_size to 1")


def _engine_place(node: Node, block: Sequence[Device], want: Want) -> EnginePlace:
    """Return the place on a block. Where the learner shares device memory, the engine sees all devices."""
    own_uuids, everything = tuple(device.uuid for device in block), tuple(device.uuid for device in node.devices)
    if want.staging != CUDA:
        return EnginePlace(number=0, node=node.rank, uuids=own_uuids, visible=own_uuids)
    if want.kind != SGLANG:
        other_uuids = tuple(uuid for uuid in everything if uuid not in own_uuids)
        return EnginePlace(number=0, node=node.rank, uuids=own_uuids, visible=own_uuids + other_uuids)
    base = everything.index(own_uuids[0])
    if everything[base : base + len(own_uuids)] != own_uuids:
        names = ", ".join(device.name for device in block)
        cure = "name neighbours in ascending order, or set weights.staging: host"
        raise PlacementRefused("engine.devices", "devices one behind the other with weights.staging: cuda", names, cure)
    return EnginePlace(number=0, node=node.rank, uuids=own_uuids, visible=everything, base_index=base)


def _no_block(
    nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], used_uuids: Collection[str]
) -> PlacementRefused:
    size = want.devices_per_engine
    if want.colocated:
        most = f"at most one engine for each {size} devices of the ranks of a machine"
        want_text = f"{most}: learner.colocated has none elsewhere"
        got = f"{want.engines} engines of {size} devices, {len(ranks)} ranks"
        return PlacementRefused("up.engines", want_text, got, "lower up.engines, or the engines' tp_size")
    if want.engine_devices:
        want_text = f"{size} devices for each engine"
        got = f"{len(want.engine_devices)} for {want.engines or 'one more'}"
        return PlacementRefused("engine.devices", want_text, got, "name more devices, or lower the number of engines")
    used = {uuid for rank in ranks for uuid in rank.uuids} | set(used_uuids)
    free = [device.name for device in every_device(nodes) if device.uuid not in used]
    want_text = f"{size} free device(s)" + (f", one behind the other, from a multiple of {size} on" if size > 1 else "")
    got = f"{', '.join(free) or 'none'} free of {listed(nodes)}"
    cure = "lower the number of engines or of ranks" + (", or name the devices: engine.devices" if size > 1 else "")
    return PlacementRefused("engine", want_text, got, cure)


def _remark_idle(
    nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], why: list[str]
) -> None:
    used = {uuid for rank in ranks for uuid in rank.uuids} | {uuid for engine in engines for uuid in engine.uuids}
    idle = [device.name for device in every_device(nodes) if device.uuid not in used]
    if idle and ranks and engines:
        why.append(f"no process on device {', '.join(idle)}")
    if ranks and not want.engines:
        why.append("engines are placed by their hosts")


def transport_of(
    nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], why: list[str]
) -> str:
    """Return the way of the weights. Raises PlacementRefused where the settings want one that is not possible."""
    if not ranks or not engines:
        return ""
    sender = ranks[0].uuid
    shared = [engine.number for engine in engines if sender and any(rank.uuid in engine.uuids for rank in ranks)]
    if want.staging == CUDA and every_device(nodes):
        for rank in senders(want, ranks):
            _refuse_cuda_handles(nodes, want, rank, engines)
    reason, certain = _no_nccl(nodes, want, sender, engines, shared=bool(shared))
    if want.backend == NCCL and reason and certain and want.transport != HANDLES:
        cure = "set weights.backend: auto" + (" or weights.transport: handles" if shared else "")
        raise PlacementRefused("weights.backend", "gloo or auto here", f"nccl: {reason}", cure)
    if shared and not want.colocated:
        why.append(f"the learner and engine {shared[0]} share a GPU: {reason}")
    if want.transport == HANDLES or (want.transport == "" and shared):
        return HANDLES
    if want.backend == NCCL:
        if reason:
            why.append(f"weights.backend: nccl may be refused at the first push: {reason}")
        return NCCL
    if want.backend == GLOO or reason:
        if reason and sender and want.backend != GLOO:
            why.append(f"weights go over gloo: {reason}")
        return GLOO
    return NCCL


def senders(want: Want, ranks: Sequence[RankPlace]) -> list[RankPlace]:
    """Return the ranks that send weights: the first ones of each stage, whose ranks have neighbouring numbers."""
    of_stage = max(1, len(ranks) * want.nodes // want.pp)
    return [rank for rank in ranks if rank.rank % of_stage < want.senders]


def _no_nccl(
    nodes: Sequence[Node], want: Want, sender: str, engines: Sequence[EnginePlace], *, shared: bool
) -> tuple[str, bool]:
    """Return why weights cannot go over NCCL (empty: they can), and whether that is certain before the first push."""
    used = {sender} | {uuid for engine in engines for uuid in engine.uuids}
    if not sender or not all(engine.uuids for engine in engines):
        return "NCCL needs a GPU at both ends", bool(every_device(nodes))
    if shared:
        return "one GPU: NCCL is not possible", True
    if any(device.slice >= 0 for device in every_device(nodes) if device.uuid in used):
        return "NCCL does not work between MIG slices", True
    return nccl_differs(want.nccl_learner, want.nccl_engine), bool(want.nccl_learner and want.nccl_engine)


def _refuse_cuda_handles(nodes: Sequence[Node], want: Want, sender: RankPlace, engines: Sequence[EnginePlace]) -> None:
    where, cure = "weights.staging", "set weights.staging: host"
    if want.colocated:
        got = "cuda with learner.colocated: the copies would stay there in the engines' turn"
        raise PlacementRefused(where, "host", got, cure)
    if not sender.uuid:
        raise PlacementRefused(where, "host where the learner runs on the CPU", "cuda", cure)
    if any(device.slice >= 0 for device in every_device(nodes) if device.uuid == sender.uuid):
        raise PlacementRefused(where, "host on a MIG slice, whose memory other processes cannot open", "cuda", cure)
    for engine in engines:
        if sender.uuid not in engine.visible:
            want_text = f"engines that see the learner's {sender.uuid}"
            raise PlacementRefused(where, want_text, f"engine {engine.number}, which does not", cure)


def refuse_memory(
    nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], *, groups: int = 0
) -> None:
    """Raise PlacementRefused for a device whose memory is too small for the least that its processes need.

    ``groups``: of engines over NCCL; each rank that sends has a process for each of them. A device of unknown memory is
    not checked.
    """
    sending = want.memory_sender + groups * want.memory_group
    for device in every_device(nodes):
        own_ranks = [rank for rank in ranks if rank.uuid == device.uuid]
        own_senders = [rank for rank in senders(want, ranks) if rank in own_ranks]
        learner = want.memory_rank * len(own_ranks) + sending * len(own_senders)
        engines_here = [engine for engine in engines if device.uuid in engine.uuids]
        engine_bytes = want.memory_engine
        if want.kind == SGLANG and want.memory_fraction is not None and not want.colocated:
            engine_bytes = max(engine_bytes, int(want.memory_fraction * device.memory_bytes))
        generating = engine_bytes * len(engines_here)
        needed = max(learner, generating) if want.colocated else learner + generating
        if device.memory_bytes and needed > USABLE * device.memory_bytes:
            parts = [f"{_gb(learner)} for the learner"] * bool(learner)
            parts += [f"{_gb(generating)} for {len(engines_here)} engine(s)"] * bool(engines_here)
            over = f", {_gb(groups * want.memory_group)} of it for {groups} group(s) over NCCL"
            over = over if groups and want.memory_group and own_ranks else ""
            want_text = f"{_gb(needed)} ({', '.join(parts)}{over}; activations not counted)"
            got = f"{_gb(USABLE * device.memory_bytes)}, {USABLE:.0%} of it"
            sizes = "learner.tensor_parallel, pipeline_parallel, tp_size"
            cure = f"use bfloat16, a smaller model, more devices ({sizes}), or learner.colocated"
            raise PlacementRefused(f"memory of device {device.name}", want_text, got, cure)


def refuse_shm(nodes: Sequence[Node], want: Want, engines: Sequence[EnginePlace], transport: str) -> None:
    """Raise PlacementRefused for a /dev/shm too small for the buckets of SGLang servers (they would get SIGBUS)."""
    if want.kind != SGLANG or transport != HANDLES or want.staging == CUDA:
        return
    for node in nodes:
        count = sum(engine.node == node.rank for engine in engines)
        needed = count * want.bucket_bytes
        if node.shm_bytes and needed > node.shm_bytes:
            want_text = f"{_gb(needed)} free for the largest bucket of {count} SGLang server(s)"
            cure = "start the container with a larger --shm-size, or set weights.transport: broadcast"
            raise PlacementRefused("/dev/shm", want_text, f"{_gb(node.shm_bytes)}", cure)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
