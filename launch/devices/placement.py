"""Placement: which rank and which engine gets which accelerator. Pure: reads no environment, no bus and no device, loads no torch.

    nodes (machines with their visible devices) + Want (sizes and settings)  ->  Placed | Refused

Ranks come first, the lowest device first; a tensor-parallel group stays inside a node. Engines get blocks of ``devices_per_engine`` that
begin at a multiple of it among the node's visible devices, on those that the ranks leave; colocated engines get the ranks' own devices.
Where a machine has one device, the rank and built-in engines share it. Without devices everything runs on the CPU.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tidemill.launch.devices.errors import Refused
from tidemill.launch.devices.fitness import refuse_memory, refuse_shm, transport_of
from tidemill.launch.devices.shapes import (
    CUDA,
    NCCL,
    SGLANG,
    Device,
    EnginePlace,
    Node,
    Others,
    Placed,
    RankPlace,
    Want,
    every_device,
    listed,
)

ALONE = Others()


def place(nodes: Sequence[Node], want: Want) -> Placed:
    """Return the place of every rank and engine. Raises Refused for a placement that cannot work, with the reason and a cure."""
    nodes = _ordered(nodes)
    why: list[str] = []
    _refuse_shortage(nodes, want)
    ranks = _ranks(nodes, want, why)
    engines: list[EnginePlace] = []
    for number in range(want.engines):
        taken = [uuid for engine in engines for uuid in engine.uuids]
        engines.append(replace(_engine(nodes, want, ranks, taken), number=number))
    _remark_idle(nodes, want, ranks, engines, why)
    transport = transport_of(nodes, want, ranks, engines, why)
    refuse_memory(nodes, want, ranks, engines, groups=_groups(want, len(engines), transport))
    refuse_shm(nodes, want, engines, transport)
    return Placed(ranks=ranks, engines=tuple(engines), transport=transport, why=tuple(why))


def engine_place(nodes: Sequence[Node], want: Want, *, others: Others = ALONE) -> EnginePlace:
    """Return the place of one more engine beside the ``others``. Raises Refused when there is none, or it lacks memory."""
    nodes = _ordered(nodes)
    ranks = _ranks(nodes, want, [])
    found = _engine(nodes, want, ranks, others.taken)
    here = {device.uuid for node in nodes for device in node.devices}
    beside = [EnginePlace(number=0, node=found.node, uuids=uuids) for uuids in others.engines if here & set(uuids)]
    running = [RankPlace(rank=local, node=found.node, local_rank=local, uuids=others.ranks) for local in range(len(others.ranks))]
    groups = _groups(want, len(others.engines) + 1, transport_of(nodes, want, ranks, [found], [])) if ranks else 0
    refuse_memory(nodes, want, ranks or running, [*beside, found], groups=groups)
    if ranks or others.learner_is_here:  # engines elsewhere get the weights by broadcast
        refuse_shm(nodes, want, [*beside, found], want.transport)
    return found


def _groups(want: Want, engines: int, transport: str) -> int:
    """Return the number of groups over NCCL that each rank that sends has; of engines that their hosts place there is one at least."""
    if transport == NCCL or (not transport and want.backend == NCCL):
        return -(-max(1, engines) // want.engines_together)
    return 0


# ---- machines


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes and devices in the order of their numbers. Raises Refused for a device that two machines, or one twice, name."""
    ordered = [
        replace(node, devices=tuple(sorted(node.devices, key=lambda device: (device.index, device.slice, device.uuid))))
        for node in sorted(nodes, key=lambda node: node.rank)
    ]
    seen: set[str] = set()
    for device in (device for node in ordered for device in node.devices):
        if device.uuid in seen:
            raise Refused("devices", "every device once", f"{device.uuid} twice", "name each device, and each machine, once")
        seen.add(device.uuid)
    return ordered


def _selected(node: Node, selectors: Sequence[str], setting: str, nodes: Sequence[Node]) -> tuple[Device, ...]:
    """Return the devices of a node that a setting names. Raises Refused for an unknown one, and for one named twice."""
    found: list[Device] = []
    for selector in selectors:
        matches = [device for device in node.devices if selector in (device.name, device.uuid)]
        elsewhere = any(selector == device.uuid for other in nodes for device in other.devices)
        if not matches and not elsewhere:
            raise Refused(setting, "indices or UUIDs of visible devices", f"{selector!r}: {listed(nodes)}", "fix the list, or remove it")
        if any(device in found for device in matches):
            raise Refused(setting, "every device once", f"{selector!r}, which is named before", "name it once")
        found += matches
    return tuple(found)


# ---- ranks


def _refuse_shortage(nodes: Sequence[Node], want: Want) -> None:
    """Raise Refused when there are fewer devices than ranks and engines take together."""
    have = len(every_device(nodes))
    by_hand = want.engine_devices or want.learner_devices
    ranks = 0 if want.learner_on_cpu else want.ranks
    engines = 0 if want.colocated else want.engines * want.devices_per_engine
    if have <= 1 or by_hand or ranks + engines <= have:
        return
    parts = ([f"{ranks} for ranks"] if ranks else []) + (
        [f"{want.engines} x {want.devices_per_engine} for engines"] if want.engines and engines else []
    )
    cure = "lower up.engines or the engines' tp_size, learner.data_parallel or learner.tensor_parallel, or let more devices be visible"
    raise Refused("devices", f"{ranks + engines} devices ({', '.join(parts)})", listed(nodes), cure)


def _ranks(nodes: Sequence[Node], want: Want, why: list[str]) -> tuple[RankPlace, ...]:
    if not want.ranks:
        return ()
    model = want.tp * want.pp * want.cp
    if (total := want.ranks * want.nodes) % model:
        wanted = f"a multiple of tensor x pipeline x context parallel = {want.tp} x {want.pp} x {want.cp}"
        raise Refused("ranks", wanted, str(total), "change the number of ranks or the sizes")
    on_cpu = want.learner_on_cpu or not every_device(nodes)
    if want.learner_devices and not every_device(nodes):
        raise Refused("learner.devices", "visible devices", "none on this machine", "remove it to train on the CPU")
    named = want.learner_devices
    pools = [() if on_cpu else _selected(node, named, "learner.devices", nodes) if named else node.devices for node in nodes]
    each = _ranks_of_a_node(nodes, want, [want.ranks if on_cpu else len(pool) for pool in pools])
    used = want.ranks // each
    if used < len(nodes):
        why.append(
            f"ranks on {used} of {len(nodes)} nodes (equal parts, tensor-parallel groups inside a node); the others are hosts of engines: "
            f"--nodes {used}"
        )
    places = [
        RankPlace(
            rank=position * each + local,
            node=node.rank,
            local_rank=local,
            uuids=tuple(device.uuid for device in pool[:each]),
        )
        for position, (node, pool) in enumerate(zip(nodes[:used], pools, strict=False))
        for local in range(each)
    ]
    slices = [device for pool in pools[:used] for device in pool[:each] if device.slice >= 0]
    if slices and want.ranks > 1:
        found = f"{want.ranks} ranks, with MIG slice {slices[0].name}"
        raise Refused("learner", "one rank, or whole GPUs: NCCL does not work between MIG slices", found, "switch MIG off, or use one rank")
    return tuple(places)


def _ranks_of_a_node(nodes: Sequence[Node], want: Want, have: Sequence[int]) -> int:
    """Return the number of ranks of each node that has any: as many nodes as possible. Raises Refused."""
    if want.tp > max(have):
        found = f"{want.tp}: {listed(nodes)}"
        cure = "lower learner.tensor_parallel: its ranks must be on one machine"
        raise Refused("learner.tensor_parallel", f"<= {max(have)}, the devices of one machine", found, cure)
    by_hand = bool(want.learner_devices)
    for used in range(len(nodes), 0, -1):
        each, rest = divmod(want.ranks, used)
        if not rest and each % want.tp == 0 and all(count == each if by_hand else count >= each for count in have[:used]):
            return each
    if by_hand:
        found = f"{' | '.join(map(str, have))} for {want.ranks} ranks"
        raise Refused("learner.devices", "one device for each rank", found, "name as many as there are ranks")
    if want.ranks > sum(have):
        wanted = f"a device for each of {want.ranks} ranks: NCCL refuses two ranks on one GPU"
        cure = "lower learner.data_parallel, tensor_parallel, pipeline_parallel or context_parallel, or let more devices be visible"
        raise Refused("devices", wanted, listed(nodes), cure)
    wanted = f"{want.ranks} ranks in equal parts on the machines, tensor-parallel groups of {want.tp} inside one"
    cure = "change learner.data_parallel or the number of machines"
    raise Refused("devices", wanted, f"machines of {' and '.join(map(str, have))} devices", cure)


# ---- engines


def _engine(nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], taken: Collection[str]) -> EnginePlace:
    """Return the first free place of an engine. Raises Refused."""
    if want.engine_devices and not every_device(nodes):
        raise Refused("engine.devices", "visible devices", "none on this machine", "remove it to generate on the CPU")
    if not want.devices_per_engine or not every_device(nodes):
        return EnginePlace(number=0, node=nodes[0].rank)
    for node in nodes:
        for block in _blocks(node, nodes, want, ranks):
            if _shares(nodes, want) or not {device.uuid for device in block} & set(taken):
                _refuse_sharing(want, ranks, block)
                return _engine_place(node, block, want)
    raise _no_block(nodes, want, ranks, taken)


def _shares(nodes: Sequence[Node], want: Want) -> bool:
    """Return whether engines share the only device there is: built-in ones do, and SGLang servers that leave memory to others."""
    return len(every_device(nodes)) == 1 and not want.colocated and (want.kind != SGLANG or want.memory_fraction is not None)


def _blocks(node: Node, nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace]) -> list[tuple[Device, ...]]:
    """Return the blocks of a node that engines may have, free or not."""
    size = want.devices_per_engine
    by_ranks = [uuid for rank in ranks if rank.node == node.rank and rank.local_rank == 0 for uuid in rank.uuids]
    if want.engine_devices:
        pool = _selected(node, want.engine_devices, "engine.devices", nodes)
        if len(pool) % size:
            wanted = f"a multiple of {size}, the devices of an engine"
            raise Refused("engine.devices", wanted, f"{len(pool)} devices", "name more or fewer")
        foreign = [device.name for device in pool if device.uuid not in by_ranks]
        if want.colocated and foreign:
            wanted = "devices of the ranks with learner.colocated"
            raise Refused("engine.devices", wanted, ", ".join(foreign), "name devices of ranks, or remove the list")
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
    """Raise Refused for an engine that cannot share a device, and for slices that cannot work together."""
    shared = [device for device in block if any(device.uuid == rank.uuid for rank in ranks)]
    if shared and not want.colocated and want.kind == SGLANG and want.memory_fraction is None:
        found = f"both on device {shared[0].name}: the server takes nearly all of its memory"
        cure = "set learner.colocated: true, or engine.sglang.arguments.mem_fraction_static"
        raise Refused("engine.sglang", "a device of its own, or a share of the memory", found, cure)
    if len(block) > 1 and any(device.slice >= 0 for device in block):
        found = f"an engine of {len(block)} devices on MIG slices"
        raise Refused("engine", "whole GPUs: NCCL does not work between MIG slices", found, "switch MIG off, or lower tp_size to 1")


def _engine_place(node: Node, block: Sequence[Device], want: Want) -> EnginePlace:
    """Return the place on a block. Where the learner shares device memory, the engine sees all devices of its machine."""
    own, everything = tuple(device.uuid for device in block), tuple(device.uuid for device in node.devices)
    if want.staging != CUDA:
        return EnginePlace(number=0, node=node.rank, uuids=own, visible=own)
    if want.kind != SGLANG:
        others = tuple(uuid for uuid in everything if uuid not in own)
        return EnginePlace(number=0, node=node.rank, uuids=own, visible=own + others)
    base = everything.index(own[0])
    if everything[base : base + len(own)] != own:
        names = ", ".join(device.name for device in block)
        cure = "name neighbours in ascending order, or set weights.staging: host"
        raise Refused("engine.devices", "devices one behind the other with weights.staging: cuda", names, cure)
    return EnginePlace(number=0, node=node.rank, uuids=own, visible=everything, base_index=base)


def _no_block(nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], taken: Collection[str]) -> Refused:
    size = want.devices_per_engine
    if want.colocated:
        wanted = f"at most one engine for each {size} devices of the ranks of a machine: learner.colocated has none elsewhere"
        found, cure = f"{want.engines} engines of {size} devices, {len(ranks)} ranks", "lower up.engines, or the engines' tp_size"
        return Refused("up.engines", wanted, found, cure)
    if want.engine_devices:
        wanted, found = f"{size} devices for each engine", f"{len(want.engine_devices)} for {want.engines or 'one more'}"
        return Refused("engine.devices", wanted, found, "name more devices, or lower the number of engines")
    used = {uuid for rank in ranks for uuid in rank.uuids} | set(taken)
    free = [device.name for device in every_device(nodes) if device.uuid not in used]
    wanted = f"{size} free device(s)" + (f", one behind the other, from a multiple of {size} on" if size > 1 else "")
    found = f"{', '.join(free) or 'none'} free of {listed(nodes)}"
    cure = "lower the number of engines or of ranks" + (", or name the devices: engine.devices" if size > 1 else "")
    return Refused("engine", wanted, found, cure)


def _remark_idle(nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], why: list[str]) -> None:
    used = {uuid for rank in ranks for uuid in rank.uuids} | {uuid for engine in engines for uuid in engine.uuids}
    idle = [device.name for device in every_device(nodes) if device.uuid not in used]
    if idle and ranks and engines:
        why.append(f"no process on device {', '.join(idle)}")
    if ranks and not want.engines:
        why.append("engines are placed by their hosts")
