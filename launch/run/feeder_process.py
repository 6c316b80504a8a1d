"""The bodies of the learner's children, made from the run's configuration: the feeder with its prompts, and a rank."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.actors.rollout_settings import recorded_in
from tidemill.bus.wire.model_values import language_values
from tidemill.launch.devices.shapes import DevicesUnreadable
from tidemill.launch.devices.visible import devices
from tidemill.launch.run.workers import importing
from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig
from tidemill.rewards.model_text import EndTokens

if TYPE_CHECKING:
    from tidemill.bus.wire.messages import Sampling
    from tidemill.bus.wire.routed_experts import RoutedShape
    from tidemill.bus.wire.task_settings import Budget
    from tidemill.learner.data import DataConfig
    from tidemill.learner.evaluation.evaluations import EvalPlan
    from tidemill.learner.feed.feed_keys import FeedKeys
    from tidemill.learner.feed.feeder_settings import FeederPlaces
    from tidemill.learner.prompts.prompt_file import PromptFile


async def run_feeder(
    config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", draining: asyncio.Event, *, epoch: int = 0
) -> None:
    """Run the feeder of a learner with the run's settings, until its last step is done or ``draining`` is set.

    ``epoch``: of this start, if its parent has raised it.

    Raises SettingsError for a directory without a model, and the errors of ``tidemill.learner.feed.feeder.run_feeder``.
    """
    from tidemill.bus.wire.messages import Sampling
    from tidemill.launch.checks.resume import model_identity
    from tidemill.learner.feed import feeder, recorded_steps
    from tidemill.learner.feed.feeder_settings import FeederSettings, ModelFacts
    from tidemill.learner.layout.sizes import StepFlops

    model, debug, data = Path(config.model.path), config.debug, config.data
    vocab_size, max_context = model_shape(model)
    sampling = Sampling(**dataclasses.asdict(config.sampling))
    places = feeder_places(config, bus_url, feeder_url, keys, epoch=epoch)
    if debug.trains_only:
        facts = ModelFacts(eos_ids=eos_ids(model), routed=routed_of(model))
        recorded = FeederSettings(places=places, model=facts, learner=config.learner, debug=debug)
        await recorded_steps.run_recorded_feeder(recorded, draining)
        return
    facts = ModelFacts(
        vocab_size=vocab_size,
        routed=routed_of(model),
        max_context=max_context,
        eos_ids=eos_ids(model),
        identity=model_identity(model, config.model.megatron_checkpoint),
        directory=str(await asyncio.to_thread(model.resolve)),
        pair_tokens=StepFlops.read(model).pair_tokens if config.learner.levels_rows else 0,
        shares_prompts=await asyncio.to_thread(shares_prompts, config, os.environ),
    )
    # Without training there is one rank, and its batches are one part.
    settings = FeederSettings(
        places=places,
        model=facts,
        learner=config.learner.alone() if debug.rollout_only else config.learner,
        staleness=config.staleness,
        sampling=sampling,
        push_every=config.weights.push_every,
        evaluation=eval_plan(config, sampling, max_context),
        data=data,
        budgets=budgets(config, max_context),
        debug=debug,
        recorded=recorded_in(config.rollouts),
    )
    prompts = open_prompts(config, data, max_context, config.sampling.max_new_tokens)
    await feeder.run_feeder(settings, prompts, draining)


def shares_prompts(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Return whether ranks that wait for each other are expected to compute prompts once (``Policy.obstacle``).

    Where a rank finds another obstacle, such as layers with a state, only the balance of the ranks is worse.
    """
    learner = config.learner
    counted = learner.moe_aux_loss_coef or learner.moe_bias_update_rate or learner.mtp_loss_scaling_factor
    whole = learner.context_parallel > 1 or learner.routing_replay != "none" or counted or config.debug.save_train
    if not learner.levels_rows or whole or learner.attention not in ("auto", "sdpa"):
        return False
    if learner.attention == "sdpa" or learner.device == "cpu" or learner.dtype == "float32":
        return True
    try:  # on a GPU attention is flash attention, which takes whole sequences
        return learner.device == "auto" and not devices(environment)
    except DevicesUnreadable:  # the ranks report it
        return False


def feeder_places(config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", *, epoch: int) -> "FeederPlaces":
    """Return the addresses and directories of a feeder, and the limit on the silence of its ranks."""
    from tidemill.learner.feed.feed_client import SILENCE_S
    from tidemill.learner.feed.feeder_settings import FeederPlaces

    return FeederPlaces(
        run=config.run,
        bus_url=bus_url,
        bus=config.bus,
        listen=feeder_url,
        keys=keys,
        checkpoints=config.checkpoints,
        num_nodes=config.learner.nodes,
        epoch=epoch,
        rank_silence_s=SILENCE_S if config.learner.nodes > 1 else 0.0,
    )


def budgets(config: RunConfig, max_context: int) -> "dict[str, Budget]":
    """Return the limits of episodes by rollout, with sequences of at most the model's context."""
    from tidemill.learner.feed.feeder_settings import within

    asking = {name: rollout for name, rollout in config.rollouts.items() if not rollout.recorded}
    return {name: within(rollout.limits, max_context) for name, rollout in asking.items()}


def eval_plan(config: RunConfig, sampling: "Sampling", max_context: int) -> "EvalPlan":
    """Open the run's evaluation sets with the model's tokenizer. Raises PromptError."""
    from tidemill.learner.evaluation.evaluations import EvalPlan, EvalPrompts

    chosen = config.eval
    if not chosen.every:
        return EvalPlan()
    sets = []
    for name, own in chosen.sets.items():
        set_here = {key: getattr(own, key) for key in ("temperature", "max_new_tokens", "stop", "stop_token_ids")}
        changed = {key: value for key, value in set_here.items() if value is not None}
        distribution = dataclasses.replace(sampling, top_p=own.top_p, top_k=own.top_k, **changed)
        sets.append(
            EvalPrompts(
                name=name,
                prompts=open_prompts(config, own.data(config.data), max_context, distribution.max_new_tokens),
                sampling=distribution,
                samples=own.samples,
                passes_at=own.passes_at,
                limit=own.limit,
                budgets=budgets(config, max_context),
            )
        )
    return EvalPlan(config=chosen, sets=sets, last_step=config.learner.steps, max_context=max_context)


@contextmanager
def without_torch() -> Iterator[None]:
    """Let transformers, when it is imported, find no torch, and remember that, unless this process has torch already.

    The feeder needs tokenizers alone, and torch takes 3 s of processor time and 260 MB. transformers 5.24 has no
    setting for it: it ignores USE_TORCH.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the way to say that there is no such module
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


def open_prompts(config: RunConfig, data: "DataConfig", max_context: int, max_new_tokens: int) -> "PromptFile":
    """Open prompts with the model's tokenizer; ``max_new_tokens``: the longest response to them. Raises PromptError."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tidemill.launch.checks.rows import recordings_of, row_check
    from tidemill.learner.prompts.prompt_file import PromptFile
    from tidemill.learner.prompts.rows import RowRules
    from tidemill.learner.prompts.tokenizer import model_tokenizer

    with importing(), without_torch():
        tokenize = model_tokenizer(
            config.model.path, apply_chat_template=data.apply_chat_template, template_args=data.chat_template_args
        )
    vocab_size = model_shape(Path(config.model.path))[0]
    max_tokens = data.max_prompt_tokens or max_context - max_new_tokens
    return PromptFile(
        data.used,
        tokenize=tokenize.bounded(max_tokens),
        max_tokens=max_tokens,
        shuffle=data.shuffle,
        seed=data.seed,
        recordings=recordings_of(config, Path(config.model.path), tokenize, max_context),
        chat_template_args=data.chat_template_args,
        rules=RowRules(
            policy=data.bad_rows, unfit=row_check(config, max_new_tokens=max_new_tokens, vocab_size=vocab_size)
        ),
    )


def run_rank(config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", *, progress: int = -1) -> int:
    """Run one rank of a learner in this process (blocking). Returns its exit code. ``progress``: of ``RankPlaces``."""
    from tidemill.learner.feed.feed_client import SILENCE_S
    from tidemill.learner.feed.feeder_settings import RankPlaces, RankSettings

    places = RankPlaces(
        run=config.run,
        bus_url=bus_url,
        feeder_url=feeder_url,
        feeder_keys=keys,
        silence_s=SILENCE_S if config.learner.nodes > 1 else 0.0,
        progress=progress,
        model_dir=Path(config.model.path),
        megatron_checkpoint=Path(config.model.megatron_checkpoint) if config.model.megatron_checkpoint else None,
        checkpoints=config.checkpoints,
        # All nodes have as many ranks.
        node=int(os.environ["RANK"]) * config.learner.nodes // int(os.environ["WORLD_SIZE"]),
        snapshots=config.root / "snapshots",
        final_dir=config.root / "final",
    )
    if config.debug.rollout_only:
        from tidemill.learner.ranks import rollout_only

        return rollout_only.main(places)
    with importing():
        from tidemill.learner.ranks import rank
    return rank.main(
        RankSettings(
            places=places,
            learner=config.learner,
            staleness=config.staleness,
            weights=config.weights,
            bus=config.bus,
            debug=config.debug,
        )
    )


def model_shape(model: Path) -> tuple[int, int]:
    """Return the tokens of the vocabulary and of a context. Raises SettingsError for a directory without a model."""
    import json

    file = model / "config.json"
    if not file.exists():
        want = "a directory with a Hugging Face model (config.json in it)"
        raise SettingsError(f"model.path: want {want}, got {str(model)!r}")
    values = language_values(json.loads(file.read_text()))
    return int(values["vocab_size"]), int(values["max_position_embeddings"])


def routed_of(model: Path) -> "RoutedShape | None":
    """Return the sizes of the model's routing, by its config.json; None for a dense model."""
    import json

    from tidemill.bus.wire.routed_experts import RoutedShape

    return RoutedShape.of(language_values(json.loads((model / "config.json").read_text())))


def eos_ids(model: Path) -> frozenset[int]:
    """Return the tokens that end a response; empty if the files of the model name none."""
    return frozenset(EndTokens.read(model).ids)
