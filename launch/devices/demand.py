"""From a run's settings to its demands on a machine; from places of processes to their environment variables."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.actors.config import OF_RANKS, EngineConfig
from tidemill.launch.devices.fsdp_memory import num_parts, sharded_bytes
from tidemill.launch.devices.memory_table import dtype_on, group_bytes, senders_of, staged_bytes, training_bytes
from tidemill.launch.devices.placement import engine_place
from tidemill.launch.devices.rank_memory import ITEM_BYTES
from tidemill.launch.devices.shapes import CUDA, SGLANG, EnginePlace, Node, PlacementRefused, RankPlace, Shapes, Want
from tidemill.launch.devices.visible import VARIABLE, nccl_of
from tidemill.launch.settings.run_config import RunConfig
from tidemill.learner.settings.backends import FSDP, MEGATRON

# Variable of the setting `engine.devices`: a host names each engine's devices in it.
ENGINE_DEVICES = "TIDEMILL_ENGINE__DEVICES"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
# Variables of torch's allocator; where the user has set one, it is left alone.
OWN_ALLOCATOR = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
# The rows of a step have all lengths: with fixed segments the memory would be torn into pieces. torch-memory-saver
# refuses it, so not for colocated ranks; memory that other processes open is not tried with it.
EXPANDS = re.compile(r"expandable_segments\s*:\s*True")
# NCCL's variables that SGLang sets to 0 in its processes (0.5.23, `entrypoints/engine.py`). Both ends of a push group
# should have the same; a built-in engine has the defaults of the NCCL that the ranks have.
AS_SGLANG = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
# Variable that keeps NCCL to one algorithm, and its value: else NCCL chooses by size and machine, and with the
# algorithm the order of a sum. Every release has rings for all its collectives, and no other algorithm has a broadcast
# or a reduction to one rank; without `Ring` in the list releases from 2.24 on fail there. Sources: NVIDIA/nccl,
# docs/userguide/source/env.rst, "NCCL_ALGO"; src/graph/tuning.cc, `ncclTopoTuneModel`.
RING = ("NCCL_ALGO", "Ring")
BY_HAND = ("base_gpu_id", "gpu_id_step")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The tensors of a model, and their division by the backend that trains them; none = not known."""

    tensors: Shapes = field(default_factory=dict)
    critic: Shapes | None = None  # The tensors of the critic's model; None = as large as the policy
    backend: str = MEGATRON

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.tensors.values()))

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest tensor."""
        return max(map(math.prod, self.tensors.values()), default=0)


def want_of(config: RunConfig, node: Node, *, learner: bool, engines: int, size: ModelSize | None = None) -> Want:
    """Return a run's requirements of a machine, for ranks (``learner``) and engines. Raises PlacementRefused."""
    size, ours, engine = size or ModelSize(), config.learner, config.engine
    num_devices = devices_of(engine)
    if node.devices and num_devices and engines:
        _refuse_by_hand(engine)
    has_devices = bool(node.devices)
    cuda = has_devices and ours.device != "cpu"
    dtype = dtype_on(ours.dtype, cuda=cuda)
    is_sharded = size.backend == FSDP
    sharded, bytes_of = (num_parts(ours), sharded_bytes) if is_sharded else (1, training_bytes)
    weights = ITEM_BYTES[dtype_on(engine.dtype, cuda=has_devices and num_devices > 0)] * size.parameters
    return Want(
        ranks=ours.num_ranks // max(1, ours.nodes) if learner else 0,
        nodes=max(1, ours.nodes) if learner else 1,
        tp=ours.tensor_parallel,
        pp=ours.pipeline_parallel,
        cp=ours.context_parallel,
        engines=engines,
        devices_per_engine=num_devices,
        kind=engine.kind,
        colocated=ours.colocated and learner,
        learner_on_cpu=ours.device == "cpu",
        learner_devices=ours.devices if learner else (),
        engine_devices=engine.devices if engines and num_devices else (),
        transport=config.weights.transport,
        staging=config.weights.staging,
        backend=config.weights.backend,
        nccl_learner=nccl_of() if has_devices and learner else "",
        nccl_engine=nccl_of_engine(engine) if has_devices and engines else "",
        memory_rank=bytes_of(size.tensors, dtype, ours, cuda=cuda, critic=size.critic),
        senders=senders_of(config, sharded=sharded),
        memory_sender=(
            staged_bytes(size.tensors, config, dtype, sharded=sharded) if config.weights.staging == CUDA else 0
        ),
        memory_group=group_bytes(size.largest_tensor, config, dtype),
        engines_together=config.weights.engines_together,
        memory_engine=weights // max(1, num_devices) if engine.kind == SGLANG else 2 * weights,
        memory_fraction=_fraction(engine),
        bucket_bytes=max(config.weights.bucket_size(on_gpu=cuda), ITEM_BYTES[dtype] * size.largest_tensor),
    )


def devices_of(engine: EngineConfig) -> int:
    """Return the number of devices of an engine: 0 on the CPU, and for a server that runs already."""
    if engine.device == "cpu":
        return 0
    if engine.kind != SGLANG:
        return 1
    if engine.sglang.url or engine.sglang.argument("device") == "cpu":
        return 0
    count = 1
    for names in OF_RANKS:
        if names[0] == "dp_size" and engine.sglang.argument("enable_dp_attention"):
            continue  # its replicas share the tensor-parallel ranks
        value = engine.sglang.argument(*names)
        count *= int(value) if isinstance(value, int) and value > 0 else 1
    return count


def nccl_of_engine(engine: EngineConfig) -> str:
    """Return the NCCL version of an engine on this machine; empty = not known."""
    if engine.kind != SGLANG:
        return nccl_of()
    return "" if engine.sglang.url else nccl_of(engine.sglang.python)


def _fraction(engine: EngineConfig) -> float | None:
    value = engine.sglang.argument("mem_fraction_static") if engine.kind == SGLANG else None
    return float(value) if isinstance(value, int | float) else None


def _refuse_by_hand(engine: EngineConfig) -> None:
    if engine.kind != SGLANG:
        return
    by_hand = {f"arguments.{name}": engine.sglang.argument(name) for name in BY_HAND}
    by_hand[f"environment.{VARIABLE}"] = engine.sglang.environment.get(VARIABLE)
    for name, value in by_hand.items():
        if value is not None:
            want_text = "no device: it would be the same for all engines"
            cure = "remove it; engine.devices names the devices"
            raise PlacementRefused(f"engine.sglang.{name}", want_text, repr(value), cure)


# ---- places as environment


def rank_variables(node: Node, place: RankPlace, config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank: the devices of all ranks of its node, of which LOCAL_RANK is its own.

    Without devices there are none, but for the algorithm of NCCL with ``learner.device: cuda``.
    ``environment``: what it inherits. Raises PlacementRefused for an allocator there that a colocated rank cannot have.
    """
    if config.learner.colocated and config.learner.device != "cpu" and (place.uuids or config.learner.device == CUDA):
        refuse_expandable(environment)
    is_ring = config.learner.deterministic and config.learner.num_ranks > 1 and RING[0] not in environment
    ring = dict([RING]) if is_ring else {}
    if not node.devices:  # without nvidia-smi torch may find some
        return ring if config.learner.device == CUDA else {}
    if not place.uuids:
        return {VARIABLE: ""}
    variables = {VARIABLE: ",".join(place.uuids), "LOCAL_RANK": str(place.local_rank), **ring}
    private = not config.learner.colocated and config.weights.staging != CUDA
    if private and not any(name in environment for name in OWN_ALLOCATOR):
        variables[ALLOCATOR] = EXPANDABLE
    if config.engine.kind == SGLANG:
        variables |= {name: "0" for name in AS_SGLANG if name not in environment}
    return variables


def refuse_expandable(environment: Mapping[str, str], where: str = "") -> None:
    """Raise PlacementRefused for an allocator with segments that torch-memory-saver cannot release.

    torch-memory-saver looks at PYTORCH_CUDA_ALLOC_CONF alone, and when memory is first allocated (0.0.10,
    ``entrypoint.py``).
    ``where``: the setting that has the variables; empty = they are this process's own.
    """
    for name in OWN_ALLOCATOR:
        if EXPANDS.search(environment.get(name, "")):
            why = "memory of such segments cannot be released for the other side"
            want_text = f"no expandable_segments with learner.colocated: {why}"
            cure = f"unset {name}, or take expandable_segments out of it"
            raise PlacementRefused(f"{where}.{name}" if where else name, want_text, repr(environment[name]), cure)


def refuse_expandable_engine(engine: EngineConfig, environment: Mapping[str, str]) -> None:
    """Raise PlacementRefused as ``refuse_expandable`` for an SGLang server started here."""
    if engine.kind == SGLANG and not engine.sglang.url:
        refuse_expandable({name: value for name, value in environment.items() if name not in engine.sglang.environment})
        refuse_expandable(engine.sglang.environment, "engine.sglang.environment")


def engine_variables(node: Node, place: EnginePlace) -> dict[str, str]:
    """Return the variables of an engine: the devices that it sees, and its own among them. None without devices."""
    if not node.devices:
        return {}
    if not place.uuids:
        return {VARIABLE: ""}
    return {VARIABLE: ",".join(place.visible), ENGINE_DEVICES: json.dumps(place.uuids)}


def own_place(node: Node, config: RunConfig, size: ModelSize) -> EnginePlace:
    """Return the place of the one engine that this process is. Raises PlacementRefused."""
    return engine_place([node], want_of(config, node, learner=False, engines=1, size=size))
