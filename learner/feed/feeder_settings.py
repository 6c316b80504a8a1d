"""Settings of the feeder: sections of the run's configuration, and values that follow from several of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.bus.config import BusConfig
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.bus.wire.task_settings import Budget
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.sample_index import ReadOptions
from tidemill.learner.data import DataConfig, FilterConfig, identity_of
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.debug.report import REPORTED_STEPS
from tidemill.learner.evaluation.evaluations import EvalPlan
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LOCAL, ROLLOUT, LearnerConfig, StalenessConfig
from tidemill.learner.settings.step_settings import record_of
from tidemill.weightstore.config import WeightsConfig

if TYPE_CHECKING:  # it loads zmq, which commands without a learner do not have
    from tidemill.learner.feed.feed_keys import FeedKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederPlaces:
    """Addresses, keys and directories of the feeder."""

    run: str
    bus_url: str
    bus: BusConfig = field(default_factory=BusConfig)
    listen: str
    """Where ranks connect: tcp://host:port."""
    keys: "FeedKeys"
    """They admit the ranks."""
    checkpoints: Path
    """Root of the checkpoints."""
    num_nodes: int = 1
    """Nodes of the learner."""
    epoch: int = 0
    """Epoch that the leader of several nodes has raised for this start; 0 = the feeder raises it."""
    rank_silence_s: float = 0.0
    """Longest time without a heartbeat of a rank; 0 = ranks send none, as on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Addresses, keys and directories of a rank."""

    run: str
    bus_url: str
    feeder_url: str
    feeder_keys: "FeedKeys"
    silence_s: float = 0.0
    """Longest time without a heartbeat of the feeder, in a collective, too; 0 = there are none, as on one node."""
    progress: int = -1
    """Inherited descriptor of a pipe that gets a byte for every step; -1 = none."""
    model_dir: Path
    """Initial weights, configuration and tokenizer, in Hugging Face format."""
    megatron_checkpoint: Path | None = None
    """Checkpoint of Megatron's own training, whose weights replace those in ``model_dir``; None = there is none."""
    checkpoints: Path
    """Root of the checkpoints, as the feeder's; with ``learner.checkpoint.store: local`` that of this rank's node."""
    node: int = 0
    """Node of the rank."""
    snapshots: Path
    """Snapshots of versions are kept here."""
    final_dir: Path
    """The trained model is written here, in Hugging Face format, after the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The sections of the run that a rank reads, and its places."""

    places: RankPlaces
    learner: LearnerConfig
    staleness: StalenessConfig
    weights: WeightsConfig
    bus: BusConfig
    debug: DebugConfig = field(default_factory=DebugConfig)


_OF_THE_LEARNER = (
    *("steps", "num_epochs", "groups_per_step", "min_group_size"),
    *("data_parallel", "max_tokens_per_micro_batch", "minibatches"),
)
"""Settings of the learner that the data depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts of the trained model that the data depends on."""

    vocab_size: int | None = None
    """Samples with other token ids are refused; None = not known."""
    routed: RoutedShape | None = None
    """Sizes of its routing; None = it has no experts."""
    max_context: int = 0
    """Length of the longest valid sample, see ``DataRules.max_context``."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a response; empty = not known."""
    identity: str = ""
    """Description of the model, see ``DataRules.model``."""
    directory: str = ""
    """Directory of the model."""
    pair_tokens: int = 0
    """See ``DataRules.pair_tokens``."""
    shares_prompts: bool = False
    """See ``DataRules.shares_prompts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederSettings:
    """The sections of the run, and the places and the model of this start."""

    places: FeederPlaces
    model: ModelFacts
    learner: LearnerConfig
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=1))
    push_every: int = 1
    """``weights.push_every``."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    evaluation: EvalPlan = field(default_factory=EvalPlan)
    data: DataConfig = field(default_factory=DataConfig)
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    """Limits of episodes, by rollout."""
    recorded: frozenset[str] = frozenset()
    """Rollouts that take the recorded responses of the rows as samples."""

    @property
    def filters(self) -> tuple[FilterConfig, ...]:
        """Filters of complete groups, and of the buffer."""
        return tuple(self.data.filters.values())

    @property
    def ahead(self) -> int:
        """Steps planned before a rank requests them: 0 or 1."""
        # At max_lag 0 the samples of a step planned ahead would be of weights that are too old for it.
        return int(self.learner.prefetch and self.staleness.max_lag >= 1)

    @property
    def num_copies(self) -> int:
        """Holders of each file of a checkpoint; 0 = all nodes share one directory, or there is a store."""
        return self.learner.checkpoint.copies if self.learner.checkpoint.store == LOCAL else 0

    @property
    def replayed_routing(self) -> RoutedShape | None:
        """Sizes of the model's routing, where the experts in samples are replayed; else None."""
        return self.model.routed if self.learner.routing_replay == ROLLOUT else None

    @property
    def initial_checkpoint(self) -> Path | None:
        """Checkpoint with the initial weights of the run; None = they are in the model directory."""
        return Path(self.learner.from_checkpoint) if self.learner.from_checkpoint else None

    @property
    def initial_model(self) -> str:
        """Directory that the feeder publishes as version 0, because no rank publishes any; empty = a rank does."""
        return self.model.directory if self.debug.rollout_only else ""

    @property
    def records_values(self) -> bool:
        """True if the ranks send values of trained tokens."""
        return self.learner.record.trained > 0 and not self.debug.rollout_only

    @property
    def step_settings(self) -> JsonObject:
        """Record of the settings that decide the result of a step; empty = no step trains."""
        return {} if self.debug.rollout_only else record_of(self.learner, push_every=self.push_every)

    @property
    def packing(self) -> dict[str, Any]:
        """Arguments of ``build_batches`` that are the same for all steps."""
        return {"pad_to": self.learner.row_multiple, "eos_ids": self.model.eos_ids, "routed": self.replayed_routing}

    @property
    def read_options(self) -> ReadOptions:
        """How samples are read."""
        return ReadOptions(
            vocab_size=self.model.vocab_size,
            routed=self.replayed_routing,
            with_data=bool(self.filters or self.debug.save_rollout),
            with_metadata=self.learner.algorithm.may_need_metadata,
        )

    @property
    def _leaves_out(self) -> bool:
        """True if plans can know the samples that ranks leave out."""
        learner = self.learner
        counted = learner.moe_aux_loss_coef or learner.moe_bias_update_rate or learner.mtp_loss_scaling_factor
        known = learner.algorithm.leaves_out_equal and learner.credit == "episode"
        return bool(self.model.pair_tokens and known) and not (counted or self.debug.save_train)

    def data_rules(self, prompts: PromptFile) -> DataRules:
        """Return the rules of the DataSource, whose digest is recorded with every plan."""
        staleness = self.staleness
        if self.debug.rollout_only:  # version 0 makes all samples, and none is too old
            staleness = replace(staleness, max_lag=self.learner.steps)
        return DataRules(
            run=self.places.run,
            staleness=staleness,
            max_context=self.model.max_context,
            push_every=self.push_every,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            seed=prompts.seed,
            prompts_digest=prompts.digest,
            model=self.model.identity,
            pair_tokens=self.model.pair_tokens,
            shares_prompts=self.model.shares_prompts,
            leaves_out_from=REPORTED_STEPS + 1 if self._leaves_out else 0,
            filters=identity_of(self.filters),
            buffer_filters=any(config.scope == "buffer" for config in self.filters),
            demonstrations=self.learner.algorithm.demonstration_coef > 0,
            teacher=self.learner.algorithm.needs_teacher,
            teacher_top_k=self.learner.algorithm.listed_by_engine,
            **{name: getattr(self.learner, name) for name in _OF_THE_LEARNER},
        )


def within(budget: Budget, max_context: int) -> Budget:
    """Return the budget with sequences of at most the model's context, which the learner requires; 0 = not known."""
    return budget if not max_context else replace(budget, context=min(budget.context or max_context, max_context))
