"""The configuration of a run: one frozen tree.

Strict: an unknown key or a wrong type is refused with its full path, where it stands, and the nearest name.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tidemill.actors.config import ActorConfig, EngineConfig
from tidemill.actors.rollout_settings import RolloutConfig, recorded_in
from tidemill.bus.config import BusConfig, refuse_odd
from tidemill.bus.section import BASIC, NotNegative, NotNegativeFloat, Positive, PositiveFloat, Sections, section
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.launch.settings.contradictions import refuse_contradictions
from tidemill.launch.settings.hub_names import named
from tidemill.launch.settings.prepare import PrepareConfig
from tidemill.learner.buffer.rules import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from tidemill.learner.data import DataConfig, Stops, StopTokens
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.evaluation.config import EvalConfig
from tidemill.learner.settings.config import ROLLOUT, LearnerConfig, StalenessConfig
from tidemill.learner.settings.step_settings import flat
from tidemill.weightstore.config import WeightsConfig

CONFIG_FILE = "config.yaml"  # File in a run's directory with all settings of its last start
SAMPLE_BYTES_PER_TOKEN = 9  # Bytes of a sample per token: int32 token, float32 log-prob, uint8 mask
SAMPLE_BYTES = 1024  # Bytes of the text, names and headers of a short sample, estimated


@section
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    path: Annotated[str, BASIC] = ""
    """A directory in Hugging Face format (configuration, safetensors, tokenizer), or ``org/name[@revision]`` on the Hub
    (docs/hub.md); empty = made by ``prepare``.
    """
    megatron_checkpoint: str = ""
    """A ``torch_dist`` checkpoint of this model by Megatron's own training, of any layout: its weights replace those in
    ``path``.
    """


@section
@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution actors sample from; it travels with every sample."""

    temperature: Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)] = 1.0
    """Sampling temperature, by which the learner divides its logits; a row may have its own (``data.sampling_key``)."""
    top_p: float = 1.0
    """Nucleus sampling; only 1 is accepted: the correction needs the log-probs of the whole distribution."""
    top_k: int = -1
    """-1 or 0 = the whole vocabulary, the only accepted choice, as with ``top_p``."""
    max_new_tokens: Annotated[Positive, BASIC] = 128
    """Longest response, in tokens."""
    stop: Stops = ()
    """Strings that end a response."""
    stop_token_ids: StopTokens = ()
    """Token ids that end a response, besides the model's end of sequence."""


@section
@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """``tidemill up``: everything on this machine."""

    engines: NotNegative = 1
    """Engines that ``tidemill up`` starts on this machine."""
    actors: NotNegative = 1
    """Actors that ``tidemill up`` starts on this machine."""
    scorers: NotNegative = 0
    """Scorers that ``tidemill up`` starts on this machine, for ``actor.scorers.enabled``."""
    restarts: NotNegative = 5
    """Restarts of a crashed process within ``restart_window_s``; after them the run ends with the last lines of its
    log.
    """
    restart_window_s: PositiveFloat = 300.0
    """Window in which ``restarts`` are counted."""
    drain_s: PositiveFloat = 60.0
    """Seconds for every process to drain: a learner finishes its step, then writes a checkpoint and the model. With an
    engine that has just frozen it needs twice ``weights.phase_deadline_s`` more.
    """
    view: Literal["live", "plain", "auto"] = "auto"
    """live | plain | auto (live on a terminal)."""
    webhook: Literal["auto", "slack", "json"] = "auto"
    """Form of the notices to the URL of ``TIDEMILL_WEBHOOK`` (docs/operating.md): auto = slack for Slack's hooks."""
    dashboard: bool = True
    """Serve the page of the run on a free port of this machine's loopback address (docs/dashboard.md)."""
    gpu_hour_price: NotNegativeFloat = 0.0
    """Price of an hour of one GPU, in any currency, for the cost of the run on its page; 0 = not shown."""
    require_reward: float = -1e30
    """The run fails when the mean reward of its last ten steps is below this."""


@section
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
    rollouts: Sections[RolloutConfig] = field(default_factory=Sections)
    """Programs that make samples of many model calls, by name: ``{NAME: {use, options, python, budget, ...}}``
    (docs/rollouts.md).
    """
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
        self._set_derived()
        refuse_odd("directory", self.directory)
        refuse_contradictions(self)

    def _set_derived(self) -> None:
        """Set the fields of other sections that follow from settings (``tidemill.bus.section.Derived``)."""
        routed, algorithm = self.learner.routing_replay == ROLLOUT, self.learner.algorithm
        sections = {
            "bus": dataclasses.replace(self.bus, rollouts=tuple(sorted(self.rollouts))),
            "engine": dataclasses.replace(
                self.engine, colocated=self.learner.colocated, routed_experts=routed, family=self.learner.family
            ),
            "actor": dataclasses.replace(
                self.actor, routed_experts=routed, teacher_top_k=algorithm.distill.top_k if self.actor.teachers else 0
            ),
        }
        for name, made in sections.items():
            object.__setattr__(self, name, made)  # the dataclass is frozen, and nothing has read it yet

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
        return {name: self.rollouts[name] for name in sorted(self.data.rollouts(self.rollouts))}

    @property
    def recorded_rollouts(self) -> frozenset[str]:
        """Names of the rollouts that give the recorded responses of the rows as samples."""
        return recorded_in(self.rollouts)

    @property
    def sampled_limits(self) -> dict[str, int]:
        """Maximum number of sampled tokens of a sample, by the setting that limits it; 0 = no limit."""
        trained = {name: self.trained_rollouts[name] for name in self.trained_rollouts.keys() - self.recorded_rollouts}
        limits = {f"rollouts.{name}.budget.tokens": trained[name].budget.tokens for name in sorted(trained)}
        return limits | ({"sampling.max_new_tokens": self.sampling.max_new_tokens} if self.data.single_turns else {})

    @property
    def samples_nothing(self) -> bool:
        """True if all samples of the run are recorded responses, so that it needs no engine, no actor and no reward."""
        sources, recorded = self.data.used, self.recorded_rollouts
        alone = all(source.rollout in recorded and not source.rollout_key for source in sources)
        return bool(sources) and not self.eval.every and alone

    def stream_bytes(self, max_prompt_tokens: int, routed_bytes: int = 0) -> int:
        """Return the bytes that SAMPLES needs for the longest samples, with ``routed_bytes`` more per token."""
        tokens = self.sampling.max_new_tokens + max_prompt_tokens
        tokens = max(tokens, *(rollout.budget.total_tokens for rollout in self.trained_rollouts.values()), 0)
        per_sample = SAMPLE_BYTES + (SAMPLE_BYTES_PER_TOKEN + routed_bytes) * tokens
        interval = self.learner.checkpoint_every or self.learner.steps
        steps = min(self.learner.keep_checkpoints * interval, self.learner.steps) + self.staleness.max_lag + 2
        history = min(self.bus.history_samples, self.learner.steps * self.samples_per_step)
        return int(1.5 * steps * self.samples_per_step * per_sample) + history * per_sample

    def digest(self) -> str:
        """Return the SHA-256 of the settings that change the training, without places, machines and names."""
        parts: JsonObject = {name: dataclasses.asdict(getattr(self, name)) for name in ("sampling", "staleness")}
        parts["learner"] = self._learner_settings()
        parts["prepare"] = None if self.prepare is None else self.prepare.recorded()
        parts["data"] = self._data_settings()
        parts["reward"] = self.actor.reward_parts.given or (self.actor.reward, self.actor.reward_options)
        if self.actor.teachers:  # without their addresses, which are places
            parts["teachers"] = [
                (teacher.name, teacher.model, dict(teacher.when)) for teacher in self.actor.teachers.values()
            ]
        if self.actor.group_reward:
            when = [self.actor.group_reward_when] if self.actor.group_reward_when else []
            parts["group_reward"] = (self.actor.group_reward, self.actor.group_reward_options, *when)
        _leave_out(parts["staleness"], {"over_sampling": 0.0})
        _leave_out(parts["sampling"], {"stop_token_ids": ()})
        trained = self.trained_rollouts.items()
        rollouts = {name: (own.use, own.options, dataclasses.asdict(own.budget)) for name, own in trained}
        if rollouts:
            parts["rollout"] = rollouts[self.data.rollout] if [self.data.rollout] == [*rollouts] else rollouts
        parts["push_every"] = self.weights.push_every
        text = json.dumps(named({"seed": self.seed, **parts}), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _learner_settings(self) -> JsonObject:
        settings = {name: value for name, value in dataclasses.asdict(self.learner).items() if name not in _SAME_BITS}
        _leave_out(settings, _LATER_OF_LEARNER)
        if not self.learner.hooks.given:
            del settings["hooks"]
        settings["algorithm"] = flat(self.learner.algorithm)
        _leave_out(settings["algorithm"], _LATER_OF_ALGORITHM)
        if not self.learner.algorithm.entropy.target:
            for name in ("entropy_target", "entropy_delta", "entropy_coef_max"):
                del settings["algorithm"][name]
        return settings

    def _data_settings(self) -> JsonObject:
        settings = dataclasses.asdict(self.data)
        del settings["path"], settings["bad_rows"]
        settings |= {"sources": self.data.sources.given, "filters": self.data.filters.given}
        _leave_out(settings, _LATER_OF_DATA)
        if self.data.skip_easy <= 0 and self.data.skip_hard < 0:
            for name in ("skip_easy", "skip_hard", "skip_passes", "passes_at"):
                del settings[name]
        return settings


# Settings of the learner with which the training has the same bits.
_SAME_BITS = frozenset(
    {
        *("checkpoint", "colocated", "devices", "nodes", "nodes_wait_s", "insecure_network"),
        *("offload_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        *("failing_tasks", "failing_s", "record"),
    }
)
# Settings that came later, with their defaults, at which they are no part of the digest: those of former runs stay.
_LATER_OF_LEARNER: JsonMapping = {
    "backend": "auto",
    "distributed_optimizer": False,
    "fsdp_replicas": 1,
    "mtp_loss_scaling_factor": 0.0,
    "num_epochs": 0,
    "first_stage_layers": 0,
    "last_stage_layers": 0,
    "grouped_experts": "auto",
    "bridge": "",
    "family": "",
}
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
    for name, default in defaults.items():
        if not settings[name] or settings[name] == default:
            del settings[name]
