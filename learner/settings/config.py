"""Settings of the learner: staleness, algorithm, optimizer, parallelism, checkpoints."""

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidemill.bus.section import (
    BASIC,
    IMPORT_PATH,
    NotNegative,
    NotNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Share,
    refusal,
    section,
)
from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.algorithms.choices import CREDITS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.settings.backends import BACKENDS
from tidemill.learner.settings.contradictions import refuse_contradictions
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import OptimizerConfig

LOCAL, SHARED = "local", "shared"
OF_THIS_MACHINE = ("file", "local")
"""Protocols for directories of the machine itself."""
MOST_PENDING = 2
"""Checkpoints that may wait for their copies, or for their upload; while there are as many, none is written."""
_FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#*\[\]]+")
_WORD, _UNQUOTED = re.compile(r"\S+"), re.compile(r"[^\s'\"]+")
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
"""Protocols with the name of a container before the @, where others have a user."""
_SECRET = re.compile(r"(?i)((?:AccountKey|Signature|Token)=)[^\s;&'\"]+")
_ADDRESS = re.compile(r"\w://")


@section
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where the learner's checkpoints are kept, and how they are written."""

    store: str = LOCAL
    """`local`, each node's files on its own disk; `shared`, one directory for all nodes (the same with one node); or
    the URL of an object store, such as `s3://bucket/path`, to which the files on the disks are uploaded, and from which
    nodes without them resume.
    """
    copies: Positive = 2
    """With ``local`` and several nodes: number of nodes that have each file before a checkpoint counts as the latest.
    """
    background: bool = True
    """Write while training goes on, from a copy in host memory; false = the step waits, and no copy is kept."""

    def __post_init__(self) -> None:
        if self.store not in (LOCAL, SHARED):
            refuse_url(self.store)
        if self.url and self.copies != 2:
            want = "2 with a URL as store, where each file is on the disk of the node that wrote it and in the store"
            raise ValueError(f"copies: want {want}, got {self.copies}")

    @property
    def url(self) -> str:
        """URL of the store; empty = there is none."""
        return "" if self.store in (LOCAL, SHARED) else self.store


def protocol_of(url: str) -> str:
    return url.partition("://")[0]


def refuse_url(store: str) -> None:
    """Raise ValueError for a text that is no URL of a store, and for a password: settings are in files and logs."""
    shown = masked(store)
    if ":" in store.partition("://")[2].rpartition("@")[0]:
        raise ValueError(
            "store: want a URL without a password, which the environment of each process gives its package, "
            f"got {shown!r}"
        )
    if not _FORM.fullmatch(store) or "::" in store or ".." in store.split("/"):
        raise ValueError(
            "store: want local, shared, or a URL like s3://bucket/path (no query, no pattern, no chain of "
            f"protocols), got {shown!r}"
        )
    path = store.partition("://")[2]
    if protocol_of(store) in OF_THIS_MACHINE and (not path.startswith("/") or not path.strip("/")):
        raise ValueError(f"store: want an absolute path of a directory behind {protocol_of(store)}://, got {shown!r}")


def masked(text: str) -> str:
    """Return a text without users, queries (which may be signatures) and keys of accounts in its URLs.

    Word by word, in time linear in the length: pages do it with logs, in which a line may have any length.
    """
    without_users = _WORD.sub(lambda word: _without_user(word[0]), text)
    return _SECRET.sub(r"\1***", _UNQUOTED.sub(lambda word: _without_query(word[0]), without_users))


def _without_user(word: str) -> str:
    """Return a word without the user of its URL; a password may have any character, up to the last @."""
    protocol, _, rest = word.partition("://")
    end = rest.rfind("@")
    if end < 0 or ":" not in rest[:end]:
        is_container = protocol.endswith(_CONTAINERS)
        end = -1 if is_container else rest.partition("/")[0].rfind("@")
    return word if end < 0 else f"{protocol}://***{rest[end:]}"


def _without_query(word: str) -> str:
    address = _ADDRESS.search(word)
    query = -1 if address is None else word.find("?", address.end())
    return word if query < 0 else f"{word[:query]}?***"


ROLLOUT = "rollout"
REPLAYS = ("none", "old", ROLLOUT)
"""Choices of ``learner.routing_replay``: which passes of a step use experts that an earlier pass has chosen."""
RECOMPUTE = ("none", "selective", "full")
"""Choices of ``learner.recompute``, from the most memory to the least."""


def _checked(path: str) -> str:
    module, colon, function = path.partition(":")
    if path and not (module and colon and function):
        raise refusal(IMPORT_PATH)
    return path


Hook = Annotated[str, AfterValidator(_checked)]


@section
@dataclass(frozen=True, kw_only=True)
class HooksConfig:
    """Functions by import path that every rank calls within a step (docs/extending.md)."""

    before_log_probs: Hook = ""
    """module:function of a ``BeforeLogProbs``, before each pass for log-probs without gradient; empty = none."""
    before_step: Hook = ""
    """module:function of a ``BeforeStep``, before each optimizer step of the policy; empty = none."""

    @property
    def given(self) -> dict[str, str]:
        """Import paths by setting, of the hooks that are set."""
        return {field.name: path for field in fields(self) if (path := getattr(self, field.name))}


@section
@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """Largest age of the data, and the treatment of older data (admit, order, gate)."""

    max_lag: Annotated[NotNegative, BASIC] = 2
    """Largest lag in steps; 0 = synchronous on-policy, 1 = one step off."""
    gate: Literal["mask", "drop", "train"] = "mask"
    """For tokens older than max_lag: mask | drop (the group, and issue its prompt again) | train (with a warning)."""
    max_reissues: NotNegative = 3
    """Times a dropped prompt is issued again."""
    order_deadline_s: PositiveFloat = 30.0
    """Seconds that a step waits for a group in flight that would be too old for the next step."""
    filter_zero_variance: bool = False
    """Drop groups with equal rewards and draw others (dynamic sampling)."""
    over_sampling: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Further groups in flight, as a share of groups_per_step, so that filters leave enough. The gate applies."""
    max_refill: PositiveFloat = 4.0
    """After max_refill x groups_per_step filtered groups a step runs with fewer groups and logs a warning."""


@section
@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic: a second model with a value head, trained where ``algorithm.advantage`` is gae or vtrace."""

    path: str = ""
    """Directory of the model it starts from, Hugging Face format, with the policy's tokenizer; empty = ``model.path``.
    """
    warmup_steps: NotNegative = 0
    """First steps of the run in which the critic alone is trained."""
    value_clip: NotNegativeFloat = 0.2
    """Largest move of a value within a step that the loss rewards, in units of the reward; 0 = any."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The critic's optimizer: adamw or adam, usually with 5 to 10 times the policy's learning rate."""

    def __post_init__(self) -> None:
        if self.optimizer.freeze:
            raise ValueError(
                f"optimizer.freeze: want none, because the whole critic is trained, got {list(self.optimizer.freeze)}"
            )
        if self.optimizer.name not in ("adamw", "adam"):
            raise ValueError(f"optimizer.name: want adamw or adam for the critic, got {self.optimizer.name!r}")


@section
@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Values of trained tokens (log-prob, entropy, advantage, weight) that are kept for viewers (docs/looking.md)."""

    trained: Share = 1.0
    """Share of the groups whose samples are recorded, as far as ``step_bytes`` allow; 0 = none."""
    step_bytes: Annotated[int, Field(ge=1024, le=4_000_000)] = 524_288
    """Bytes of a step and data-parallel rank, 16 for each trained token; further samples are left out."""


@section
@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The learner: batch sizes, parallelism, precision, checkpoints."""

    steps: Annotated[Positive, BASIC] = 100
    """Batches of the run: each makes a new version."""
    num_epochs: NotNegative = 0
    """Passes over the prompts after which the run ends, if ``steps`` does not end it; 0 = any (docs/data.md)."""
    groups_per_step: Annotated[Positive, BASIC] = 32
    """Groups (prompts) in the batch of one step."""
    group_size: Annotated[Positive, BASIC] = 8
    """Samples of one task (n)."""
    min_group_size: NotNegative = 0
    """Samples with which the group of a dead task is trained, when its others failed for good; 0 = it is dropped."""
    credit: Annotated[str, OneOf(CREDITS)] = "episode"
    """Unit of an advantage: episode, or turn (its return; algorithm.advantage reinforce, rloo or grpo_no_std)."""
    credit_gamma: Share = 1.0
    """Discount from one turn to the next, with ``credit: turn``."""
    minibatches: Positive = 1
    """Optimizer steps per batch and version, each on its share of the groups."""
    max_tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed row; micro-batches are filled to it."""
    backend: Annotated[str, OneOf(BACKENDS)] = "auto"
    """auto | megatron | fsdp (docs/parallelism.md). megatron = its families, with every kind of parallelism; fsdp = any
    model of transformers, divided over the data-parallel ranks; auto = megatron where the model or a setting has it.
    """
    data_parallel: Positive = 1
    """Replicas of the model; with backend fsdp the ranks, over which its weights are divided."""
    fsdp_replicas: NotNegative = 1
    """With backend fsdp, copies of the model (HSDP): each weight is divided over data_parallel / fsdp_replicas
    neighbouring ranks, and gradients are added up over the copies. 0 = a copy on each node.
    """
    tensor_parallel: Positive = 1
    """Ranks over which every matrix is split; must divide vocabulary, key/value heads and intermediate size."""
    sequence_parallel: bool = False
    """With tensor_parallel, divide the tokens between the split matrices, too (docs/parallelism.md)."""
    pipeline_parallel: Positive = 1
    """Stages of the layers, each on its own ranks; divides the layers of inner stages (docs/parallelism.md)."""
    first_stage_layers: NotNegative = 0
    """Layers of the first stage of the pipeline, which has the embedding, too; 0 = as many as each other stage."""
    last_stage_layers: NotNegative = 0
    """Layers of the last stage of the pipeline, which computes the logits, too; 0 = as many as each other stage."""
    virtual_pipeline: Positive = 1
    """Chunks of layers of each stage, so that stages wait less; with the stages they must divide the layers."""
    context_parallel: Positive = 1
    """Ranks that divide the tokens of each packed row; times tensor_parallel they must divide the attention heads."""
    distributed_optimizer: bool = False
    """Each data-parallel replica has the optimizer state of its share of the weights; no effect with one replica."""
    overlap_grad_reduce: Literal["auto", "always", "never"] = "auto"
    """Reduce gradients over the replicas during the backward pass: auto | always | never; auto = on CUDA."""
    overlap_param_gather: Literal["auto", "always", "never"] = "auto"
    """With distributed_optimizer, gather weights during the forward pass of the next minibatch; auto = on CUDA."""
    offload_optimizer: bool = False
    """Keep Adam's moments, on Megatron also its main weights, in host memory; a step moves them through the accelerator
    in blocks. The weights that passes compute with, and gradients, stay on the accelerator.
    """
    expert_parallel: Positive = 1
    """Ranks over which experts are spread; divides data x tensor x context parallel, and a layer's experts."""
    routing_replay: Annotated[str, OneOf(REPLAYS)] = "none"
    """none | old | rollout. old = train with the experts that the pass for old log-probs has chosen, where a step has
    that pass; rollout = with those that the engine has chosen, in both (docs/models.md).
    """
    moe_aux_loss_coef: NotNegativeFloat = 0.0
    """Coefficient of the loss that balances the tokens of the experts, of every packed row; 0 = none."""
    moe_bias_update_rate: NotNegativeFloat = 0.0
    """Step of a router's bias per expert (glm4_moe, deepseek_v3) towards idle experts; 0 = it is fixed."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the loss of the model's heads for further tokens (MTP), which it trains; 0 = they stay as they are."""
    bridge: str = ""
    """module:Class of a bridge to Megatron for another model family (docs/models.md); empty = by ``model_type``."""
    family: Hook = ""
    """module:name of a ``Family`` for FSDP2, whose module may register a model with transformers (docs/families.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto | float32 | bfloat16; auto = bfloat16 on CUDA, float32 on the CPU. The log of rank 0 has the one in use."""
    attention: Literal["auto", "sdpa", "varlen", "cudnn"] = "auto"
    """auto | sdpa | varlen | cudnn. varlen = torch's flash attention over rows of any lengths, on CUDA in half
    precision; cudnn = the same, with cuDNN's attention for long sequences, on Hopper and with ``deterministic: false``;
    auto = the last of these that works.
    """
    recompute: Annotated[str, OneOf(RECOMPUTE)] = "none"
    """Activations that the backward pass computes again: none, those of MLPs (selective) or of layers (full)."""
    fused_activation: Literal["auto", "always", "never"] = "auto"
    """SwiGLU as one kernel; auto = on CUDA with triton and a C compiler, unless deterministic."""
    grouped_experts: Literal["auto", "always", "never"] = "auto"
    """One product for all experts of a rank instead of one for each; auto = on the CPU, and on CUDA in bfloat16."""
    fused_log_probs: Literal["auto", "always", "never"] = "auto"
    """Log-probs and entropies by kernels of triton: auto | always | never; auto = on CUDA with triton and a C compiler.
    """
    fused_rotary: Literal["auto", "always", "never"] = "auto"
    """Rotary positions, and norms of queries and keys, by kernels of triton; auto = as for ``fused_log_probs``."""
    megatron: JsonObject = field(default_factory=dict)
    """Further arguments of Megatron's TransformerConfig that are known to have an effect (docs/parallelism.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto | cpu | cuda."""
    devices: tuple[str, ...] = ()
    """GPUs of the ranks: numbers of nvidia-smi or UUIDs; empty = the first ones (docs/devices.md)."""
    nodes: NotNegative = 1
    """Machines with ranks, an agent on each (docs/machines.md); 0 = from the variables of torchrun or Slurm."""
    nodes_wait_s: PositiveFloat = 600.0
    """Seconds that the agents of several nodes wait for one that is not there."""
    insecure_network: bool = False
    """Let ranks of several nodes talk over public addresses: torch's store, gloo and NCCL have no authentication."""
    threads: Positive = 1
    """Torch threads of a rank on CPU."""
    seed: int = 0
    """Seed of the learner's random numbers; derived from ``seed`` of the run."""
    checkpoint_every: Annotated[NotNegative, BASIC] = 20
    """Steps; 0 = only at the end."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept on disk; older ones are deleted."""
    save_hf_every: NotNegative = 0
    """Steps after which the model is saved, ``models/step-<k>``, in Hugging Face format; 0 = only ``final``."""
    keep_hf: NotNegative = 2
    """Newest of these that are kept; 0 = all. One whose step has a checkpoint is kept with it."""
    from_checkpoint: str = ""
    """Directory of a checkpoint of this model, whose weights, and nothing else, a new run begins with."""
    prefetch: bool = True
    """Plan one batch ahead (never at max_lag 0)."""
    weights_digest: bool = False
    """Record a digest of the weights after every step (deterministic resume checks)."""
    batch_timeout_s: PositiveFloat = 3600.0
    """Seconds without a batch after which the learner ends with an error."""
    failing_tasks: NotNegative = 16
    """Tasks that fail for good, without a complete group between them, after which the run ends (78); 0 = never."""
    failing_s: NotNegativeFloat = 600.0
    """Seconds for which all tasks must have failed by then; before the first step a tenth of it."""
    deterministic: bool = True
    """Use deterministic kernels: a resumed run repeats the recorded steps to the same bits on one machine."""
    colocated: bool = False
    """Share the accelerator with the engines of ``tidemill up`` (docs/colocated.md)."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Where checkpoints are kept, and how they are written (docs/recovery.md)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic of ``algorithm.advantage: gae`` and ``vtrace`` (docs/algorithms.md)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters instead of all weights (docs/lora.md)."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages, loss and correction for stale data (docs/algorithms.md)."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Values of trained tokens that are recorded for viewers (docs/looking.md)."""
    hooks: HooksConfig = field(default_factory=HooksConfig)
    """Functions of yours within a step (docs/extending.md)."""

    def __post_init__(self) -> None:
        refuse_contradictions(self)

    def alone(self) -> "LearnerConfig":
        """Return these settings with one rank."""
        sizes: JsonObject = {f"{name}_parallel": 1 for name in ("data", "tensor", "pipeline", "context", "expert")}
        sizes["fsdp_replicas"] = 1
        return replace(
            self, virtual_pipeline=1, sequence_parallel=False, first_stage_layers=0, last_stage_layers=0, **sizes
        )

    @property
    def edge_layers(self) -> tuple[int, int]:
        """Layers of the first and of the last stage of the pipeline; 0 = as many as each other stage."""
        return self.first_stage_layers, self.last_stage_layers

    @property
    def levels_rows(self) -> bool:
        """True if ranks or stages wait for each other, so that rows are balanced by operations."""
        return self.data_parallel > 1 or self.pipeline_parallel > 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.data_parallel * self.ranks_of_replica

    @property
    def fsdp_copies(self) -> int:
        """Copies of a model that FSDP divides over ranks."""
        return self.fsdp_replicas or self.nodes

    @property
    def ranks_of_replica(self) -> int:
        """Ranks that share one replica of the model and its batch."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def row_multiple(self) -> int:
        """Number that must divide the tokens of every row, for equal parts of it."""
        return self.tensor_parallel * self.context_parallel
