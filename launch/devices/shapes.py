"""Machines with their devices, the requirements of a run, and the places of its processes: plain values."""

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tidemill.bus import exit_codes
from tidemill.bus.errors import DetailedError
from tidemill.learner.layout.sizes import stage_layers
from tidemill.learner.settings.backends import FSDP, MEGATRON
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import frozen_names

HANDLES, BROADCAST, CUDA, NCCL, GLOO, AUTO, SGLANG = "handles", "broadcast", "cuda", "nccl", "gloo", "auto", "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One visible accelerator: a GPU, or a MIG slice of one."""

    index: int  # Number of the GPU, as nvidia-smi counts
    uuid: str
    memory_bytes: int = 0  # 0 = not known
    slice: int = -1  # Number of the MIG slice on its GPU; -1 = the whole GPU

    @property
    def name(self) -> str:
        """The number by which settings and messages name it: ``2``, or ``2:0`` for a slice."""
        return str(self.index) if self.slice < 0 else f"{self.index}:{self.slice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with its visible devices."""

    rank: int = 0
    host: str = ""
    devices: tuple[Device, ...] = ()  # In any order; empty = everything runs on the CPU
    hidden_by: str = ""  # Reason why further devices of the machine are not visible; empty = all are
    shm_bytes: int = 0  # Free bytes in /dev/shm; 0 = not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Sizes and settings of a run that decide on the placement."""

    ranks: int = 0  # Ranks to place
    nodes: int = 1  # Nodes of the learner, each with as many ranks; these ranks are placed
    tp: int = 1
    pp: int = 1
    cp: int = 1
    engines: int = 0  # Engines to place; 0 = engines are placed by their hosts
    devices_per_engine: int = 1  # 0 = engines take no device
    kind: str = "builtin"  # builtin | sglang
    colocated: bool = False  # Engines share the ranks' devices, in turns
    learner_on_cpu: bool = False
    # Devices of the ranks by hand, in the order of the ranks: indices (of each node) or UUIDs; empty = chosen.
    learner_devices: tuple[str, ...] = ()
    engine_devices: tuple[str, ...] = ()  # Devices of the engines by hand, cut into blocks; empty = chosen
    transport: str = ""  # broadcast | handles; empty = the better one
    staging: str = "host"  # host | cuda
    backend: str = AUTO  # auto | gloo | nccl
    nccl_learner: str = ""  # Version of NCCL; empty = not known
    nccl_engine: str = ""
    memory_rank: int = 0  # Least bytes of device memory of a rank; 0 = not known
    senders: int = 1  # Ranks of each stage that send weights
    memory_sender: int = 0  # Bytes that each of them needs besides, for staging on its device
    # Bytes that each needs besides for a process that sends over NCCL, one for each group of engines.
    memory_group: int = 0
    engines_together: int = 1  # Maximum number of engines in one group
    memory_engine: int = 0  # Least bytes of device memory of an engine, on each of its devices
    # Share of a device's memory that an SGLang server takes (mem_fraction_static); None = nearly all that is free.
    memory_fraction: float | None = None
    bucket_bytes: int = 0  # Bytes of the largest bucket of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of one rank."""

    rank: int
    node: int
    local_rank: int  # Number of the rank on its node, and the ordinal of its device among `uuids`
    # Devices that it sees: the devices of all ranks of its node; empty = it runs on the CPU.
    uuids: tuple[str, ...] = ()

    @property
    def uuid(self) -> str:
        """The rank's own device; empty = it runs on the CPU."""
        return self.uuids[self.local_rank] if self.uuids else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The place of one engine."""

    number: int
    node: int
    uuids: tuple[str, ...] = ()  # The engine's own devices; empty = it runs on the CPU
    visible: tuple[str, ...] = ()  # Devices that it sees, its own among them
    base_index: int = 0  # Ordinal of its first device among `visible`


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Processes of a run that have their places already, when one more engine gets its own."""

    engines: tuple[tuple[str, ...], ...] = ()  # Devices of each engine (UUIDs), also on other machines
    ranks: tuple[str, ...] = ()  # Devices of the ranks that are not placed with the engine, one for each
    learner_is_here: bool = False  # Such ranks are on the machine

    @property
    def taken(self) -> frozenset[str]:
        """The devices of all of them."""
        return frozenset(self.ranks).union(*self.engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The places of all ranks and engines."""

    ranks: tuple[RankPlace, ...] = ()
    engines: tuple[EnginePlace, ...] = ()
    transport: str = ""  # Way of the weights: nccl | gloo | handles; empty = no engine is placed
    why: tuple[str, ...] = field(default=())  # Remarks on choices that a user may not expect

    @property
    def processes(self) -> "list[RankPlace | EnginePlace]":
        """All ranks, then all engines."""
        return [*self.ranks, *self.engines]


def every_device(nodes: Sequence[Node]) -> list[Device]:
    """Return the visible devices of all machines."""
    return [device for node in nodes for device in node.devices]


def listed(nodes: Sequence[Node]) -> str:
    """Return the visible devices for a message: ``3 visible (2, 3, 6; others hidden by CUDA_VISIBLE_DEVICES)``."""
    count = len(every_device(nodes))
    names = " | ".join(", ".join(device.name for device in node.devices) or "none" for node in nodes)
    hidden = "".join(sorted({f"; others hidden by {node.hidden_by}" for node in nodes if node.hidden_by}))
    return f"{count} visible ({names}{hidden})"


def described(nodes: Iterable[Node], placed: Placed) -> list[str]:
    """Return the placement as lines: devices of ranks and engines, the transport, the remarks."""
    names = {device.uuid: device.name for node in nodes for device in node.devices}

    def on(uuids: Sequence[str]) -> str:
        numbers = ", ".join(names[uuid] for uuid in uuids)
        return f"device{'s' * (len(uuids) > 1)} {numbers}" if uuids else "the CPU"

    numbers = {process.node for process in placed.processes}
    of = {number: f" of node {number}" if len(numbers) > 1 else "" for number in numbers}
    lines = []
    for node in sorted({rank.node for rank in placed.ranks}):
        first, *others = [rank for rank in placed.ranks if rank.node == node]
        which = f"ranks {first.rank} to {others[-1].rank}" if others else f"rank {first.rank}"
        lines.append(f"{which} on {on(first.uuids)}{of[node]}")
    lines += [f"engine {engine.number} on {on(engine.uuids)}{of[engine.node]}" for engine in placed.engines]
    if placed.transport:
        lines.append(f"weights over {placed.transport}")
    return lines + list(placed.why)


class DeviceError(ValueError):
    """No restart cures it: the configuration, the environment or the machine must change."""

    exit_code = exit_codes.CONFIG


class PlacementRefused(DetailedError, DeviceError):
    """A placement that cannot work: the setting or thing at fault, the value wanted, the value found, and a cure."""

    where: str
    want: str
    got: str
    cure: str
    template = "{where}: want {want}, got {got}; {cure}"


class DevicesUnreadable(PlacementRefused):
    """The devices of this machine are not known: nvidia-smi failed, or CUDA_VISIBLE_DEVICES names none of them."""


# Layers with their input split over tensor-parallel ranks; of the others the output is.
ROW_SPLIT = ("o_proj", "down_proj")

Shapes = Mapping[str, tuple[int, ...]]


def stages_of(
    tensors: Shapes, pipeline_parallel: int, virtual_pipeline: int = 1, *, edge_layers: tuple[int, int] = (0, 0)
) -> Sequence[Shapes]:
    """Return the tensors of each stage: its layers, the embedding in the first, head and final norm in the last.

    A tied embedding is in both. ``edge_layers``: of the first and of the last stage; 0 = as many as each other stage.
    """
    numbers = {name: int(name.split(".layers.")[1].split(".")[0]) for name in tensors if ".layers." in name}
    num_layers, chunks = max(numbers.values(), default=0) + 1, pipeline_parallel * virtual_pipeline
    ends = list(accumulate(stage_layers(num_layers, chunks, *edge_layers)))
    tied = not any("lm_head" in name for name in tensors)
    stages: list[dict[str, tuple[int, ...]]] = [{} for _ in range(pipeline_parallel)]
    for name, tensor in tensors.items():
        if name in numbers:
            places = {bisect(ends, numbers[name]) % pipeline_parallel}
        elif "embed" in name:
            places = {0, pipeline_parallel - 1} if tied else {0}
        else:
            places = {pipeline_parallel - 1}
        for place in places:
            stages[place][name] = tensor
    return stages


def trained_tensors(tensors: Shapes, learner: LearnerConfig, *, backend: str = MEGATRON) -> Shapes:
    """Return name -> shape of the tensors that have gradients and optimizer state. ``tensors``: the model's tensors."""
    if learner.lora.rank:
        return adapter_tensors(tensors, learner.lora, backend=backend)
    frozen = frozen_names(learner.optimizer.freeze, list(tensors))
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def adapter_tensors(tensors: Shapes, lora: LoraConfig, *, backend: str = MEGATRON) -> Shapes:
    """Return name -> shape of the matrices of all adapters."""
    adapters: dict[str, tuple[int, ...]] = {}
    rank, targets = lora.rank, lora.targets
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        at, _, target = layer.rpartition(".")
        # On Megatron experts have none, neither routed nor shared ones, nor have the queries of latent attention.
        latent = target == "q_proj" and f"{at}.kv_b_proj.weight" in tensors
        without = ".experts." in name if backend == FSDP else "expert" in name or latent
        if name.endswith(".weight") and not without and target in targets:
            adapters[f"{layer}.lora_A"] = (rank, tensor[1])
            adapters[f"{layer}.lora_B"] = (tensor[0], rank)
    for name, (experts, outputs, inputs) in fused_experts(tensors).items() if backend == FSDP else ():
        layer, _, projection = name.rpartition(".")
        if f"experts.{projection}" in targets:
            adapters[f"{layer}.lora_A.{projection}"] = (experts, rank, inputs)
            adapters[f"{layer}.lora_B.{projection}"] = (experts, outputs, rank)
    return adapters


_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(?:(gate_proj|w1)|(up_proj|w3)|(down_proj|w2))\.weight")
_ALL_EXPERTS = re.compile(
    r"(.+?)(?:\.experts)?\.(?:(gate_up_proj|input_linear)|(up_proj)|(?:down_proj|output_linear))(?:\.weight|_blocks)?"
)
"""Names in files of a weight of one expert, and of all experts of a layer; MXFP4 has blocks of 32 numbers."""


def fused_experts(tensors: Shapes) -> Mapping[str, tuple[int, int, int]]:
    """Return (experts, outputs, inputs) of the weights that transformers has for all experts of a layer, by their names
    there. Names that no release of a tried family has are left out. gpt_oss has the last two the other way round.
    """
    fused: dict[str, tuple[int, int, int]] = {}
    split: dict[str, dict[str, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for name, shape in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            layer, gate, up, _ = expert.groups()
            split[layer]["gate" if gate else "up" if up else "down"].append(shape)
        elif len(shape) > 2 and (whole := _ALL_EXPERTS.fullmatch(name)):
            layer, joint, up = whole.groups()
            inputs = shape[2] if len(shape) == 3 else 2 * shape[2] * shape[3]
            projection = "gate_up_proj" if joint else "up_proj" if up else "down_proj"
            fused[f"{layer}.experts.{projection}"] = (shape[0], shape[1], inputs)
    for layer, parts in split.items():
        first = "gate_up_proj" if parts["gate"] else "up_proj"
        for projection, shapes in ((first, parts["up"]), ("down_proj", parts["down"])):
            if shapes:
                outputs = shapes[0][0] * (2 if projection == "gate_up_proj" else 1)
                fused[f"{layer}.{projection}"] = (len(shapes), outputs, shapes[0][1])
    return fused


def is_whole(name: str) -> bool:
    """Return whether every tensor-parallel rank has a whole adapter matrix: A of output-split layers, else B."""
    layer, _, letter = name.rpartition(".lora_")
    return bool(layer) and (letter == "B") is layer.endswith(ROW_SPLIT)
