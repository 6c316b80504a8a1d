"""Checks that a placement can work: the way of the weights from the learner to its engines, the memory of each device, /dev/shm. Pure.

Sources: two ranks of one NCCL communicator on one GPU, and ends of different NCCL releases, are refused by NCCL itself (NVIDIA/nccl,
src/init.cc: "Duplicate GPU detected", "Mismatched NCCL version detected").
"""

from collections.abc import Sequence

from tidemill.launch.devices.errors import Refused
from tidemill.launch.devices.shapes import CUDA, GLOO, HANDLES, NCCL, SGLANG, EnginePlace, Node, RankPlace, Want, every_device
from tidemill.weightstore.transport.nccl import nccl_differs

USABLE = 0.95
"""Share of a device's memory that processes may plan with; the rest is for the CUDA contexts of ranks and engines."""


def transport_of(nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], why: list[str]) -> str:
    """Return the way of the weights. Raises Refused where the settings want one that is not possible."""
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
        raise Refused("weights.backend", "gloo or auto here", f"nccl: {reason}", cure)
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


def _no_nccl(nodes: Sequence[Node], want: Want, sender: str, engines: Sequence[EnginePlace], *, shared: bool) -> tuple[str, bool]:
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
    """Raise Refused where an engine cannot open memory of the learner's GPU."""
    where, cure = "weights.staging", "set weights.staging: host"
    if want.colocated:
        found = "cuda with learner.colocated: the copies would stay there in the engines' turn"
        raise Refused(where, "host", found, cure)
    if not sender.uuid:
        raise Refused(where, "host where the learner runs on the CPU", "cuda", cure)
    if any(device.slice >= 0 for device in every_device(nodes) if device.uuid == sender.uuid):
        raise Refused(where, "host on a MIG slice, whose memory other processes cannot open", "cuda", cure)
    for engine in engines:
        if sender.uuid not in engine.visible:
            raise Refused(where, f"engines that see the learner's {sender.uuid}", f"engine {engine.number}, which does not", cure)


def refuse_memory(
    nodes: Sequence[Node], want: Want, ranks: Sequence[RankPlace], engines: Sequence[EnginePlace], *, groups: int = 0
) -> None:
    """Raise Refused for a device whose memory is too small for the least that its processes need.

    ``groups``: of engines over NCCL; each rank that sends has a process for each of them. A device of unknown memory is not checked.
    """
    sending = want.memory_sender + groups * want.memory_group
    for device in every_device(nodes):
        own = [rank for rank in ranks if rank.uuid == device.uuid]
        learner = want.memory_rank * len(own) + sending * len([rank for rank in senders(want, ranks) if rank in own])
        here = [engine for engine in engines if device.uuid in engine.uuids]
        one = want.memory_engine
        if want.kind == SGLANG and want.memory_fraction is not None and not want.colocated:
            one = max(one, int(want.memory_fraction * device.memory_bytes))
        generating = one * len(here)
        needed = max(learner, generating) if want.colocated else learner + generating
        if device.memory_bytes and needed > USABLE * device.memory_bytes:
            parts = [f"{_gb(learner)} for the learner"] * bool(learner) + [f"{_gb(generating)} for {len(here)} engine(s)"] * bool(here)
            over = (
                f", {_gb(groups * want.memory_group)} of it for {groups} group(s) over NCCL" if groups and want.memory_group and own else ""
            )
            wanted = f"{_gb(needed)} ({', '.join(parts)}{over}; activations not counted)"
            found = f"{_gb(USABLE * device.memory_bytes)}, {USABLE:.0%} of it"
            cure = "use bfloat16, a smaller model, more devices (learner.tensor_parallel, pipeline_parallel, tp_size), or learner.colocated"
            raise Refused(f"memory of device {device.name}", wanted, found, cure)


def refuse_shm(nodes: Sequence[Node], want: Want, engines: Sequence[EnginePlace], transport: str) -> None:
    """Raise Refused for a /dev/shm too small for the copies of a bucket that SGLang servers read there (else they get SIGBUS)."""
    if want.kind != SGLANG or transport != HANDLES or want.staging == CUDA:
        return
    for node in nodes:
        count = sum(engine.node == node.rank for engine in engines)
        needed = count * want.bucket_bytes
        if node.shm_bytes and needed > node.shm_bytes:
            wanted = f"{_gb(needed)} free for the largest bucket of {count} SGLang server(s)"
            cure = "start the container with a larger --shm-size, or set weights.transport: broadcast"
            raise Refused("/dev/shm", wanted, f"{_gb(node.shm_bytes)}", cure)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
