"""Decide whether weights can go from the learner's GPU to an engine over NCCL, or as CUDA handles, by the facts that
both state.

NCCL ends a broadcast, or waits in it, for ends of different releases and for two ends on one GPU (NVIDIA/nccl,
src/init.cc), and an SGLang server ends when it is given memory of a GPU that it does not see. So both are decided
before anything is sent. Not tried on several GPUs.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.bus.wire.rows import Capabilities

MIG = "MIG-"


@dataclass(frozen=True, slots=True)
class DeviceEnd:
    """The GPU of this process, and its NCCL version; empty = none, or not known."""

    uuid: str = ""
    nccl: str = ""


def own_end() -> DeviceEnd:
    """Return the GPU that is current in this thread. Loads torch."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return DeviceEnd()
    version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    return DeviceEnd(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid), version)


def no_nccl(end: DeviceEnd, engine: "Capabilities") -> str:
    """Return why this process and an engine cannot share an NCCL group; empty = they can."""
    if not end.uuid:
        return "the learner has no GPU"
    if not engine.devices:
        return "the engine states no GPU"
    if _same(end.uuid) in map(_same, engine.devices):
        return f"learner and engine share GPU {end.uuid}, which NCCL refuses"
    if any(uuid.startswith(MIG) for uuid in (end.uuid, *engine.devices)):
        return "NCCL does not work between MIG slices"
    return nccl_differs(end.nccl, engine.nccl)


def nccl_differs(learner: str, engine: str) -> str:
    """Return why two releases of NCCL cannot form a group (major and minor number must be equal); "" = they can."""
    if not learner or not engine:
        whose = "the learner" if not learner else "the engine"
        return f"the NCCL version of {whose} is not known"
    if learner.split(".")[:2] != engine.split(".")[:2]:
        return f"NCCL {learner} of the learner and {engine} of the engine differ"
    return ""


def no_cuda_handles(uuid: str, engine: "Capabilities") -> str:
    """Return why an engine cannot open memory of the GPU ``uuid``; empty = it can."""
    if sees(engine.visible_devices, uuid):
        return ""
    visible = ", ".join(engine.visible_devices) or "none that it states"
    return f"it does not see the learner's GPU {uuid}, which weights.staging: cuda needs; it sees {visible}"


def sees(visible: Collection[str], uuid: str) -> bool:
    """Return whether a GPU is among the visible ones."""
    return _same(uuid) in map(_same, visible)


def share(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Return whether two lists of UUIDs have one in common."""
    return bool(set(map(_same, left)) & set(map(_same, right)))


def _same(uuid: str) -> str:
    """Return a UUID in one form: nvidia-smi writes ``GPU-`` before it, torch does not."""
    return uuid.removeprefix("GPU-").lower()
