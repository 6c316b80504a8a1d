"""The configuration of a run: one frozen tree, made from defaults, a YAML file, ``--set``, the environment and derived values.

Strict: an unknown key or a wrong type is refused with its full path, where it stands, and the nearest name. Loads no torch.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.actors.config import ActorConfig, EngineConfig
from tidemill.actors.rollout_settings import DATASET, RolloutConfig, parse_rollouts, recorded_in, served
from tidemill.actors.sglang_arguments import refuse_untried
from tidemill.actors.teacher_settings import parse_teachers
from tidemill.bus.config import RUN_NAME, SINGLE_TURN, BusConfig, refuse_odd
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.launch.settings.prepare_config import PrepareConfig
from tidemill.learner.algorithms.alarms import refuse_unknown
from tidemill.learner.data.config import DataConfig, refuse_stops
from tidemill.learner.data.filter_settings import read_filters
from tidemill.learner.data.rules import refuse_rare_pushes, refuse_sampling
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.evaluation.config import EvalConfig
from tidemill.learner.settings.checkpoint_store import masked
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.learner.settings.routing_replay import ROLLOUT
from tidemill.rewards.part_settings import BY_ROLLOUT
from tidemill.weightstore.config import WeightsConfig

CONFIG_FILE = "config.yaml"
"""File in a run's directory with all settings of its last start."""
SAMPLE_BYTES_PER_TOKEN = 9
"""Bytes of a sample per token: int32 token, float32 log-prob, uint8 mask."""
SAMPLE_BYTES = 1024
"""Bytes of the text, names and headers of a short sample, estimated."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: str = ""
    """A directory in Hugging Face format (configuration, safetensors, tokenizer); empty = made by ``prepare``."""
    megatron_checkpoint: str = ""
    """A ``torch_dist`` checkpoint of this model by Megatron's own training, of any layout: its weights replace those in ``path``."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution actors sample from; it travels with every sample."""

    temperature: float = 1.0
    """Sampling temperature, by which the learner divides its logits; a row may have its own (``data.sampling_key``)."""
    top_p: float = 1.0
    """Nucleus sampling; only 1 is accepted: the correction needs the log-probs of the whole distribution."""
    top_k: int = -1
    """-1 or 0 = the whole vocabulary, the only accepted choice, as with ``top_p``."""
    max_new_tokens: int = 128
    """Longest response, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's end of sequence."""

    def __post_init__(self) -> None:
        if self.max_new_tokens <= 0:
            raise ValueError(f"max_new_tokens: want > 0, got {self.max_new_tokens}")
        refuse_stops(self.stop, self.stop_token_ids)


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """``tidemill up``: everything on this machine."""

    engines: int = 1
    """Engines that ``tidemill up`` starts on this machine."""
    actors: int = 1
    """Actors that ``tidemill up`` starts on this machine."""
    scorers: int = 0
    """Scorers that ``tidemill up`` starts on this machine, for ``actor.scorers.enabled``."""
    restarts: int = 5
    """Restarts of a crashed process within ``restart_window_s``; after them the run ends with the last lines of its log."""
    restart_window_s: float = 300.0
    """Window in which ``restarts`` are counted."""
    drain_s: float = 60.0
    """Seconds for every process to drain: a learner finishes its step, then writes a checkpoint and the model. With an engine that has
    just frozen it needs twice ``weights.phase_deadline_s`` more."""
    view: str = "auto"
    """live | plain | auto (live on a terminal)."""
    require_reward: float = -1e30
    """The run fails when the mean reward of its last ten steps is below this."""

    def __post_init__(self) -> None:
        if self.engines < 0 or self.actors < 0 or self.scorers < 0 or self.restarts < 0:
            raise ValueError("engines, actors, scorers, restarts: want >= 0")
        for name in ("restart_window_s", "drain_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.view not in ("live", "plain", "auto"):
            raise ValueError(f"view: want live, plain or auto, got {self.view!r}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    run: str = ""
    """Name of the run, in every subject and key; derived from the file's name."""
    seed: int = 0
    """Seed of the order of prompts, of sampling and of the learner, unless they have a seed of their own."""
    directory: str = ""
    """Directory of the run's files; derived: runs/<run>."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model to train."""
    prepare: PrepareConfig | None = None
    """A small model and prompts to make first."""
    data: DataConfig = field(default_factory=DataConfig)
    """The prompts."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The sampling distribution of the rollouts."""
    rollouts: JsonObject = field(default_factory=dict)
    """Programs that make samples of many model calls, by name: ``{NAME: {use, options, python, budget, ...}}`` (docs/rollouts.md)."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation beside training (docs/evaluation.md)."""
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    """The bound on the age of data."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """The learner."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Weight pushes."""
    bus: BusConfig = field(default_factory=BusConfig)
    """The bus."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The inference engines."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The rollout actors."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """Debugging modes (docs/debugging.md)."""
    up: UpConfig = field(default_factory=UpConfig)
    """Settings of ``tidemill up`` itself."""

    def __post_init__(self) -> None:
        refuse_odd("directory", self.directory)
        _refuse_contradictions(self)

    @property
    def samples_per_step(self) -> int:
        """Number of samples that one step trains: groups per step x group size."""
        return self.learner.groups_per_step * self.learner.group_size

    @property
    def root(self) -> Path:
        """Directory of the run's files."""
        return Path(self.directory)

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.root / "checkpoints"

    @property
    def trained_rollouts(self) -> dict[str, RolloutConfig]:
        """The rollouts that training prompts may have, by name."""
        known = parse_rollouts(self.rollouts)
        return {name: known[name] for name in sorted(self.data.rollouts(known))}

    @property
    def recorded_rollouts(self) -> frozenset[str]:
        """Names of the rollouts that give the recorded responses of the rows as samples."""
        return recorded_in(parse_rollouts(self.rollouts))

    @property
    def sampled_limits(self) -> dict[str, int]:
        """The most tokens that a sample may have sampled, by the setting that says it; 0 = no limit."""
        trained = {name: one for name, one in self.trained_rollouts.items() if name not in self.recorded_rollouts}
        limits = {f"rollouts.{name}.budget.tokens": one.budget.tokens for name, one in trained.items()}
        return limits | ({"sampling.max_new_tokens": self.sampling.max_new_tokens} if self.data.single_turns else {})

    @property
    def samples_nothing(self) -> bool:
        """True if all samples of the run are recorded responses, so that it needs no engine, no actor and no reward."""
        sources, recorded = self.data.used, self.recorded_rollouts
        return bool(sources) and not self.eval.every and all(one.rollout in recorded and not one.rollout_key for one in sources)

    def stream_bytes(self, max_prompt_tokens: int, routed_bytes: int = 0) -> int:
        """Return the bytes that SAMPLES needs for kept checkpoints, lag and history, with every sample as long as possible.

        ``routed_bytes``: bytes of the experts of one token, where samples have them.
        """
        tokens = self.sampling.max_new_tokens + max_prompt_tokens
        tokens = max(tokens, *(one.budget.total_tokens for one in self.trained_rollouts.values()), 0)
        per_sample = SAMPLE_BYTES + (SAMPLE_BYTES_PER_TOKEN + routed_bytes) * tokens
        interval = self.learner.checkpoint_every or self.learner.steps
        steps = min(self.learner.keep_checkpoints * interval, self.learner.steps) + self.staleness.max_lag + 2
        history = min(self.bus.history_samples, self.learner.steps * self.samples_per_step)
        return int(1.5 * steps * self.samples_per_step * per_sample) + history * per_sample

    def digest(self) -> str:
        """Return the SHA-256, hexadecimal, of the settings that change the training; places, machines and names are left out."""
        parts: JsonObject = {name: dataclasses.asdict(getattr(self, name)) for name in ("sampling", "staleness")}
        parts["learner"] = self._learner_settings()
        parts["prepare"] = None if self.prepare is None else dataclasses.asdict(self.prepare)
        parts["data"] = self._data_settings()
        parts["reward"] = self.actor.reward_parts or (self.actor.reward, self.actor.reward_options)
        if self.actor.teachers:  # without their addresses, which are places
            parts["teachers"] = [(one.name, one.model, dict(one.when)) for one in parse_teachers(self.actor.teachers)]
        if self.actor.group_reward:
            when = [self.actor.group_reward_when] if self.actor.group_reward_when else []
            parts["group_reward"] = (self.actor.group_reward, self.actor.group_reward_options, *when)
        _leave_out(parts["staleness"], {"over_sampling": 0.0})
        _leave_out(parts["sampling"], {"stop_token_ids": ()})
        rollouts = {name: (one.use, one.options, dataclasses.asdict(one.budget)) for name, one in self.trained_rollouts.items()}
        if rollouts:
            parts["rollout"] = rollouts[self.data.rollout] if [self.data.rollout] == [*rollouts] else rollouts
        parts["push_every"] = self.weights.push_every
        return hashlib.sha256(json.dumps({"seed": self.seed, **parts}, sort_keys=True, default=str).encode()).hexdigest()

    def _learner_settings(self) -> JsonObject:
        """Return the learner's settings that change the training."""
        settings = {name: value for name, value in dataclasses.asdict(self.learner).items() if name not in _SAME_BITS}
        _leave_out(settings, _LATER_OF_LEARNER)
        if not self.learner.hooks.given:
            del settings["hooks"]
        _leave_out(settings["algorithm"], _LATER_OF_ALGORITHM)
        if not self.learner.algorithm.entropy_target:
            for name in ("entropy_target", "entropy_delta", "entropy_coef_max"):
                del settings["algorithm"][name]
        return settings

    def _data_settings(self) -> JsonObject:
        """Return the settings of the data that change the training."""
        settings = {name: value for name, value in dataclasses.asdict(self.data).items() if name not in ("path", "bad_rows")}
        _leave_out(settings, _LATER_OF_DATA)
        if self.data.skip_easy <= 0 and self.data.skip_hard < 0:
            for name in ("skip_easy", "skip_hard", "skip_passes", "passes_at"):
                del settings[name]
        return settings


_SAME_BITS = frozenset(
    {
        *("checkpoint", "colocated", "devices", "nodes", "nodes_wait_s", "insecure_network"),
        *("offload_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        *("failing_tasks", "failing_s"),
    }
)
"""Settings of the learner with which the training has the same bits."""
_LATER_OF_LEARNER: JsonMapping = {
    "distributed_optimizer": False,
    "num_epochs": 0,
    "first_stage_layers": 0,
    "last_stage_layers": 0,
    "grouped_experts": "auto",
    "bridge": "",
}
"""Settings that came later, with their defaults, at which they are no part of the digest: those of former runs stay."""
_LATER_OF_ALGORITHM: JsonMapping = {
    "sft_coef": 0.0,
    "distill_teacher": "reference",
    "distill_loss": "token",
    "distill_top_k": 0,
    "rae_decay": 0.95,
    "rae_role": "",
}
_LATER_OF_DATA: JsonMapping = dict.fromkeys(
    ("reward", "reward_key", "sampling_key", "tools_key", "rollout", "rollout_key", "responses_key", "filters")
)


def _leave_out(settings: JsonObject, defaults: JsonMapping) -> None:
    """Remove the settings that have their default, or nothing."""
    for name, default in defaults.items():
        if not settings[name] or settings[name] == default:
            del settings[name]


def _refuse_contradictions(config: RunConfig) -> None:
    """Raise ValueError for settings that are right one by one and wrong together."""
    if config.run and not RUN_NAME.fullmatch(config.run):
        raise ValueError(f"run: want 1 to 64 of A-Z a-z 0-9 _ -, got {config.run!r}")
    _refuse_sharing(config)
    refuse_untried(config.engine.sglang.arguments)
    _refuse_routing(config)
    _refuse_stale(config)
    _refuse_rollouts(config)
    _refuse_hooks(config)
    _refuse_rewards(config)
    _refuse_terms(config)
    _refuse_teachers(config)
    _refuse_columns(config)
    _refuse_debug(config)
    _refuse_recorded(config)
    _refuse_megatron(config)
    try:
        refuse_unknown(config.learner.algorithm.alarms)
    except ValueError as bad:
        raise ValueError(f"learner.algorithm.{bad}") from None
    processes = max(config.up.actors, config.up.engines, config.up.scorers)
    if config.bus.auth and config.bus.auth_users < processes:
        raise ValueError(f"bus.auth_users: want a user for each of {processes} actors, engines or scorers, got {config.bus.auth_users}")
    for name, one in parse_rollouts(config.rollouts).items():
        if one.drain_s is not None and one.drain_s >= config.up.drain_s:
            want = f"less than up.drain_s = {config.up.drain_s:g}, after which an actor is ended; raise that one"
            raise ValueError(f"rollouts.{name}.drain_s: want {want}, got {one.drain_s:g}")
    if config.up.scorers and not config.actor.scorers.enabled:
        raise ValueError(f"up.scorers: want actor.scorers.enabled: true, or none is asked; got up.scorers: {config.up.scorers}")


def _refuse_sharing(config: RunConfig) -> None:
    """Raise ValueError for settings that cannot hold where learner and engines share an accelerator."""
    if config.engine.colocated and not config.learner.colocated:
        raise ValueError("engine.colocated: follows from learner.colocated; set that one")
    if config.learner.colocated and config.weights.overlap:
        raise ValueError("weights.overlap: want false with learner.colocated: the step has the memory that a push beside it would need")
    if config.learner.colocated and config.weights.backend == "nccl":
        raise ValueError("weights.backend: want auto or gloo with learner.colocated: NCCL refuses two processes on one GPU, got 'nccl'")
    if config.learner.colocated and config.weights.staging == "cuda":
        raise ValueError(
            "weights.staging: want host with learner.colocated: the copies would stay on the GPU in the engines' turn, got 'cuda'"
        )
    if config.learner.colocated and config.engine.kind == "sglang" and config.engine.sglang.url:
        raise ValueError("engine.sglang.url: want a server that is started here with learner.colocated: it needs arguments for that")


def _refuse_routing(config: RunConfig) -> None:
    """Raise ValueError for a replay of the engines' experts that samples cannot have, and for a derived setting that is set without it."""
    wanted = config.learner.routing_replay == ROLLOUT
    for path, given in (("actor.routed_experts", config.actor.routed_experts), ("engine.routed_experts", config.engine.routed_experts)):
        if given and not wanted:
            raise ValueError(f"{path}: follows from learner.routing_replay: rollout; set that one")
    if not wanted:
        return
    if config.engine.sglang.arguments.get("enable_return_routed_experts") is False:
        raise ValueError(
            "engine.sglang.arguments.enable_return_routed_experts: want true with learner.routing_replay: rollout, got false; leave it out"
        )


def _refuse_stale(config: RunConfig) -> None:
    """Raise ValueError for data that is too old, or from a distribution that cannot be corrected for."""
    algorithm, lag, push_every = config.learner.algorithm, config.staleness.max_lag, config.weights.push_every
    if algorithm.uncorrected and lag > 0 and not algorithm.train_without_correction:
        raise ValueError(
            f"learner.algorithm.correction: {algorithm.correction} with staleness.max_lag = {lag} trains on stale data as if it were "
            "fresh, which looks healthy and then collapses; use decoupled, tis or bypass, or set "
            "learner.algorithm.train_without_correction: true as well"
        )
    refuse_sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k)
    refuse_rare_pushes(push_every, max_lag=lag)
    if config.learner.checkpoint_every % push_every:
        raise ValueError(
            f"learner.checkpoint_every: want a multiple of weights.push_every = {push_every}, got {config.learner.checkpoint_every}"
        )


def _refuse_hooks(config: RunConfig) -> None:
    """Raise ValueError for a hook that would never be called."""
    learner, algorithm, push_every = config.learner, config.learner.algorithm, config.weights.push_every
    passes = algorithm.needs_reference or algorithm.needs_old(minibatches=learner.minibatches, published_every=push_every)
    if learner.hooks.before_log_probs and not passes:
        raise ValueError(
            "learner.hooks.before_log_probs: want a run with a pass for log-probs before the steps (a reference, a coupled correction, or "
            "learner.minibatches or weights.push_every above 1 with a proximal anchor), got "
            f"{learner.hooks.before_log_probs!r}, which would never be called; remove it, or take learner.hooks.before_step"
        )


def _refuse_columns(config: RunConfig) -> None:
    """Raise ValueError for columns of the prompts that other settings would pass over, or that would mislead them."""
    algorithm = config.learner.algorithm
    held_out = [one.data(config.data) for one in config.eval.parsed.values()]
    if config.actor.reward and any(data.names_rewards for data in (config.data, *held_out)):
        raise ValueError(
            f"data.reward: want actor.reward_parts with when: {{reward: NAME}}, got actor.reward: {config.actor.reward}, which scores all "
            "rows; remove one of them"
        )
    constant = algorithm.by_constant
    if config.data.limits_rows and (algorithm.overlong_buffer or constant):
        raise ValueError(
            f"data.sampling_key: want none with learner.algorithm.{'loss_constant: 0' if constant else 'overlong_buffer'}, which refers to "
            "one sampling.max_new_tokens of all rows; remove one of them"
        )


def _places(config: RunConfig) -> dict[str, DataConfig]:
    """Return the data of training and of each evaluation set, by the section of the configuration."""
    return {"data": config.data} | {f"eval.sets.{name}": one.data(config.data) for name, one in config.eval.parsed.items()}


def _refuse_rollouts(config: RunConfig) -> None:
    """Raise ValueError for rollouts that cannot be, and for budgets that no sample could keep."""
    rollouts = parse_rollouts(config.rollouts)
    if tuple(config.bus.rollouts) != tuple(sorted(rollouts)):
        raise ValueError(f"bus.rollouts: follows from rollouts; want {sorted(rollouts)}, got {list(config.bus.rollouts)}; leave it out")
    served(rollouts, config.actor.rollouts)
    for place, data in _places(config).items():
        named = data.rollouts(rollouts)
        if unknown := sorted(named - set(rollouts)):
            want = f"a name in rollouts ({', '.join(sorted(rollouts)) or 'which has none'}) or {SINGLE_TURN}"
            raise ValueError(f"{place}.rollout: want {want}, got {unknown[0]!r}")


def _refuse_megatron(config: RunConfig) -> None:
    """Raise ValueError for a checkpoint of Megatron where the weights of ``model.path`` are used."""
    lora, generates = config.learner.lora.rank > 0, config.debug.rollout_only
    if config.model.megatron_checkpoint and (lora or generates):
        why = "debug.rollout_only, whose engines load model.path" if generates else "learner.lora, whose adapters belong to model.path"
        cure = "convert it (tidemill convert), and make the result model.path"
        raise ValueError(f"model.megatron_checkpoint: want none with {why}, got {config.model.megatron_checkpoint!r}; {cure}")


def _refuse_debug(config: RunConfig) -> None:
    """Raise ValueError for settings that have no meaning in a debugging mode."""
    debug = config.debug
    mode = "debug.rollout_only" if debug.rollout_only else "debug.load_rollout" if debug.trains_only else ""
    if mode and config.learner.colocated:
        raise ValueError(f"learner.colocated: want false with {mode}: only one side of the run has memory to share, got true")
    if debug.rollout_only and config.learner.from_checkpoint:
        raise ValueError(
            "learner.from_checkpoint: want none with debug.rollout_only, whose engines load model.path, got "
            f"{config.learner.from_checkpoint!r}; set model.path to the model to generate with"
        )
    if debug.rollout_only and config.learner.lora.adapter:
        raise ValueError(
            "learner.lora.adapter: want none with debug.rollout_only, whose engines load model.path, got "
            f"{config.learner.lora.adapter!r}; merge the adapters first (tidemill convert their checkpoint), and make the result model.path"
        )
    if mode and config.learner.checkpoint.url:
        got = masked(config.learner.checkpoint.url)
        raise ValueError(
            f"learner.checkpoint.store: want local with {mode}, whose checkpoints have no weights to come back for, got {got!r}"
        )
    if debug.rollout_only and config.learner.nodes > 1:
        raise ValueError(f"learner.nodes: want 1 with debug.rollout_only, which has no ranks, got {config.learner.nodes}")
    if debug.trains_only and config.eval.every:
        raise ValueError(f"eval.every: want 0 with {mode}, which has no engine to evaluate with, got {config.eval.every}")
    if debug.trains_only and config.learner.num_epochs:
        raise ValueError(
            f"learner.num_epochs: want 0 with {mode}, which reads no prompts, got {config.learner.num_epochs}; set learner.steps"
        )
    if debug.trains_only and debug.save_rollout:
        raise ValueError(f"debug.save_rollout: want none with {mode}: its batches are in files already; remove one of them")


def _refuse_recorded(config: RunConfig) -> None:
    """Raise ValueError for recorded responses where nothing can use them."""
    recorded = config.recorded_rollouts
    for name, one in config.eval.parsed.items():
        if wrong := sorted(one.data(config.data).rollouts(parse_rollouts(config.rollouts)) & recorded):
            raise ValueError(
                f"eval.sets.{name}.rollout: want {SINGLE_TURN}, or a rollout that asks the model, got {wrong[0]!r}, whose use is {DATASET}"
            )
    used = config.data.rollouts(parse_rollouts(config.rollouts)) & recorded
    if used:
        return
    cure = f"rollouts: {{NAME: {{use: {DATASET}}}}} and data.rollout: NAME"
    if any(one.responses_key for one in config.data.used):
        raise ValueError(f"data.responses_key: want a rollout of recorded responses with it ({cure}), got none; set them, or remove it")
    if config.learner.algorithm.sft_coef:
        raise ValueError(f"learner.algorithm.sft_coef: want a rollout of recorded responses with it ({cure}), got none; set them, or 0")


def _refuse_teachers(config: RunConfig) -> None:
    """Raise ValueError for teachers with scores that nothing uses, and for a loss that needs scores which no teacher makes."""
    algorithm, teachers = config.learner.algorithm, config.actor.teachers
    if teachers and not algorithm.needs_teacher:
        raise ValueError(
            "actor.teachers: nothing uses their scores; want learner.algorithm.distill_coef > 0 with distill_teacher: engine, got "
            f"distill_coef {algorithm.distill_coef:g}, distill_teacher {algorithm.distill_teacher}; set it, or remove the teachers"
        )
    if algorithm.needs_teacher and not teachers and not config.debug.trains_only:
        raise ValueError(
            "learner.algorithm.distill_teacher: engine wants actor.teachers: {NAME: {urls: [http://HOST:PORT]}}, got none; set them, or "
            "distill_teacher: reference with kl.reference"
        )
    if algorithm.advantage == "none" and not algorithm.distill_coef:
        raise ValueError(
            "learner.algorithm.advantage: none learns nothing from rewards; want learner.algorithm.distill_coef > 0, or "
            f"another advantage, got distill_coef {algorithm.distill_coef:g}"
        )
    if config.actor.teacher_top_k != (algorithm.distill_top_k if teachers else 0):
        want = f"{algorithm.distill_top_k if teachers else 0}, as learner.algorithm.distill_top_k"
        raise ValueError(f"actor.teacher_top_k: want {want}, got {config.actor.teacher_top_k}; leave it out")


def _refuse_rewards(config: RunConfig) -> None:
    """Raise ValueError for rewards from which nothing is learnt."""
    algorithm = config.learner.algorithm
    if config.staleness.filter_zero_variance and config.learner.group_size == 1:
        raise ValueError(
            "staleness.filter_zero_variance: want learner.group_size >= 2, got 1: the rewards of a group of one are all equal, so every "
            "group would be dropped; turn it off, or raise learner.group_size"
        )
    if config.staleness.filter_zero_variance and algorithm.by_critic:
        raise ValueError(
            f"staleness.filter_zero_variance: want false with learner.algorithm.advantage: {algorithm.advantage}: groups of equal rewards "
            "teach a critic too, and without them its values are biased"
        )
    equal = [one.name for one in read_filters(config.data.filters) if one.use == "equal_rewards" and not one.count_only]
    if equal and config.learner.group_size == 1:
        raise ValueError(
            f"data.filters.{equal[0]}: want learner.group_size >= 2, got 1: the rewards of a group of one are all equal, so every group "
            "would be dropped; remove it, or raise learner.group_size"
        )
    parts = config.actor.reward_parts
    if algorithm.advantage == "gdpo" and not parts and not algorithm.gdpo_weights:
        raise ValueError(
            "learner.algorithm.advantage: gdpo wants several rewards: set actor.reward_parts, or learner.algorithm.gdpo_weights with the "
            "names that the reward returns"
        )
    if parts and (unknown := sorted(name for name in algorithm.gdpo_weights if name.partition(".")[0] not in parts)):
        raise ValueError(f"learner.algorithm.gdpo_weights: want names of actor.reward_parts ({', '.join(parts)}), got {', '.join(unknown)}")
    if config.actor.reward == BY_ROLLOUT:
        for place, data in _places(config).items():
            if data.single_turns:
                raise ValueError(
                    f"actor.reward: want the reward of rows without a program, got {BY_ROLLOUT}: {place} has such rows, or may have; name "
                    f"one, or set {place}.rollout"
                )


def _refuse_terms(config: RunConfig) -> None:
    """Raise ValueError for terms of the loss or the reward that would outweigh the reward, or have nothing to refer to."""
    algorithm = config.learner.algorithm
    if algorithm.distill_coef and algorithm.distill_teacher == "reference" and not algorithm.kl.reference:
        raise ValueError(
            f"learner.algorithm.distill_coef: want learner.algorithm.kl.reference, the directory of the teacher, got "
            f"{algorithm.distill_coef!r} without one: the teacher would be the model that the run starts from"
        )
    for place, limit in config.sampled_limits.items():
        if algorithm.overlong_buffer > limit > 0:
            raise ValueError(
                f"learner.algorithm.overlong_buffer: want <= {place} = {limit}, got {algorithm.overlong_buffer}: every response would lose "
                "reward; lower it"
            )
        if not limit and (algorithm.overlong_buffer or algorithm.by_constant):
            setting = "overlong_buffer" if algorithm.overlong_buffer else "loss_constant: 0"
            raise ValueError(
                f"{place}: want > 0 with learner.algorithm.{setting}, which refers to the most tokens that an episode may sample, got 0"
            )
    if algorithm.kl.target and algorithm.kl.horizon <= 0.2 * config.samples_per_step:
        raise ValueError(
            f"learner.algorithm.kl.horizon: want > 0.2 x samples per step = {0.2 * config.samples_per_step:g}, got "
            f"{algorithm.kl.horizon:g}: one step could turn the sign of the coefficient"
        )
