"""The feeder process, the learner's only connection to the bus except for pushes: runs one ``Feeder`` and reports its first error."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tidemill.bus.client.connection import cancellable
from tidemill.bus.wire.episode_limits import Budget
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.learner.data.curriculum import CurriculumRules
from tidemill.learner.data.filter_settings import FilterConfig, identity_of
from tidemill.learner.data.prompts import PromptFile
from tidemill.learner.data.rules import DataRules
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.feed.evaluations import EvalPlan
from tidemill.learner.feed.feeder_loops import Feeder
from tidemill.learner.feed.feeder_rules import FeederRules
from tidemill.learner.feed.filtering import opened_filters
from tidemill.learner.feed.opening import opened_ends
from tidemill.learner.feed.places import FeederPlaces
from tidemill.learner.settings.checkpoint_store import LOCAL
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.learner.settings.routing_replay import ROLLOUT
from tidemill.learner.settings.step_settings import record_of


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


_OF_THE_LEARNER = ("steps", "num_epochs", "groups_per_step", "min_group_size", "data_parallel", "max_tokens_per_micro_batch", "minibatches")
"""Settings of the learner that the data depends on."""


async def run_feeder(
    places: FeederPlaces,
    prompts: PromptFile,
    *,
    model: ModelFacts,
    learner: LearnerConfig,
    staleness: StalenessConfig,
    sampling: Sampling,
    push_every: int,
    draining: asyncio.Event,
    evaluation: EvalPlan | None = None,
    curriculum: CurriculumRules | None = None,
    filters: Sequence[FilterConfig] = (),
    budgets: Mapping[str, Budget] | None = None,
    debug: DebugConfig | None = None,
    recorded: frozenset[str] = frozenset(),
) -> None:
    """Feed all ranks of the learner until the last step is done and in a checkpoint.

    ``filters``: those of complete groups. ``budgets``: limits of episodes, by rollout. ``recorded``: rollouts of recorded responses.
    Once ``draining`` is set, it ends when no rank is left and their reports are stored.
    Raises ConfigRefused, ReplayMismatch, NoCheckpoint, NoProgress, TasksFail, RankFailed, RankSilent, FeedError, PromptError,
    UnknownReward, BadRewardOption, RewardFailed (of a filter); of the bus
    Fenced (another learner has taken over), StreamReplaced, StreamTrimmed, BusUnavailable (not there at the start).
    """
    debug = debug or DebugConfig()
    rules = _data_rules(places, prompts, model, learner, staleness, sampling, push_every=push_every, filters=filters)
    feeder_rules = _feeder_rules(places, model, learner, sampling, ahead=1 if learner.prefetch and staleness.max_lag >= 1 else 0)
    if curriculum is not None:
        feeder_rules = replace(feeder_rules, curriculum=curriculum)
    feeder_rules = replace(feeder_rules, budgets=budgets or {}, save_rollout=debug.save_rollout, recorded=recorded)
    if debug.rollout_only:
        feeder_rules = replace(feeder_rules, initial_model=model.directory)
    else:
        feeder_rules = replace(feeder_rules, step_settings=record_of(learner, push_every=push_every))
    rules = replace(rules, max_lag=rules.steps) if debug.rollout_only else rules  # version 0 makes all samples, and none is too old
    async with opened_ends(places, learner) as (server, connected), opened_filters(filters) as opened:
        await cancellable(Feeder(connected, feeder_rules, rules, prompts, server, evaluation or EvalPlan(), opened).run(draining))


def within(budget: Budget, max_context: int) -> Budget:
    """Return the budget with sequences of at most the model's context, 0 = not known: the learner takes no longer ones."""
    return budget if not max_context else replace(budget, context=min(budget.context or max_context, max_context))


def _data_rules(
    places: FeederPlaces,
    prompts: PromptFile,
    model: ModelFacts,
    learner: LearnerConfig,
    staleness: StalenessConfig,
    sampling: Sampling,
    *,
    push_every: int,
    filters: Sequence[FilterConfig],
) -> DataRules:
    return DataRules(
        run=places.run,
        max_context=model.max_context,
        push_every=push_every,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=prompts.seed,
        prompts_digest=prompts.digest,
        model=model.identity,
        filters=identity_of(filters),
        buffer_filters=any(one.scope == "buffer" for one in filters),
        demonstrations=learner.algorithm.demonstration_coef > 0,
        teacher=learner.algorithm.needs_teacher,
        teacher_top_k=learner.algorithm.listed_by_engine,
        **{name: getattr(learner, name) for name in _OF_THE_LEARNER},
        **asdict(staleness),
    )


def _feeder_rules(places: FeederPlaces, model: ModelFacts, learner: LearnerConfig, sampling: Sampling, *, ahead: int) -> FeederRules:
    return FeederRules(
        run=places.run,
        root=places.checkpoints,
        sampling=sampling,
        group_size=learner.group_size,
        checkpoint_every=learner.checkpoint_every,
        keep_checkpoints=learner.keep_checkpoints,
        copies=learner.checkpoint.copies if learner.checkpoint.store == LOCAL else 0,
        store=learner.checkpoint.url,
        num_nodes=places.num_nodes,
        ahead=ahead,
        batch_timeout_s=learner.batch_timeout_s,
        failing_tasks=learner.failing_tasks,
        failing_s=learner.failing_s,
        vocab_size=model.vocab_size,
        routed=model.routed if learner.routing_replay == ROLLOUT else None,
        pad_to=learner.row_multiple,
        eos_ids=model.eos_ids,
        from_checkpoint=Path(learner.from_checkpoint) if learner.from_checkpoint else None,
        epoch=places.epoch,
        metadata=learner.algorithm.may_need_metadata,
        alarms=learner.algorithm.alarms,
    )
