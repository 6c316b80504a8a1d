"""The body of the learner's processes, made from the run's configuration: parent, feeder and ranks."""

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.actors.rollout_settings import parse_rollouts, recorded_in
from tidemill.bus.system.coroutines import beside
from tidemill.launch.run.access import auth_dir
from tidemill.launch.run.roles import LONG_WAIT_S, importing
from tidemill.launch.settings.config_loader import SettingsError
from tidemill.launch.settings.run_config import RunConfig
from tidemill.rewards.end_tokens import EndTokens

if TYPE_CHECKING:
    from tidemill.bus.streams.bus import Bus
    from tidemill.bus.wire.episode_limits import Budget
    from tidemill.bus.wire.messages import Sampling
    from tidemill.bus.wire.routed_experts import RoutedShape
    from tidemill.bus.wire.rows import Capabilities
    from tidemill.learner.data.config import DataConfig
    from tidemill.learner.data.prompts import PromptFile
    from tidemill.learner.feed.evaluations import EvalPlan
    from tidemill.learner.feed.feed_keys import FeedKeys
    from tidemill.learner.feed.places import FeederPlaces

log = logging.getLogger(__name__)


async def run_learner(config: RunConfig, bus_url: str, id: str, arguments: list[str], draining: asyncio.Event) -> None:
    """Run feeder and ranks; publish the run's configuration, for actors that have only the bus's address, and a live row.

    The live row names the ranks' devices, and the engines that take no pushes; progress is in the feeder's row. Raises DeviceError.
    """
    from tidemill.actors.engines.witness import Witness
    from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
    from tidemill.bus.liveness.keys import keep_keys, make_keys
    from tidemill.bus.streams.bus import connect
    from tidemill.bus.wire.rows import Capabilities, LiveRow
    from tidemill.launch.run.access import last_key, write_keys
    from tidemill.launch.run.learner_row import LearnerRow
    from tidemill.launch.settings.config_loader import to_map
    from tidemill.learner.ranks.process import run_learner

    if config.learner.checkpoint.url:
        from tidemill.learner.checkpoints.keeper import clean

        await asyncio.to_thread(clean, config.checkpoints)
    variables, capabilities = await asyncio.to_thread(place_ranks, config) if not config.debug.rollout_only else ([{}], Capabilities())
    async with connect(bus_url, config.run, config.bus, name="learner", wait_s=LONG_WAIT_S) as bus:
        await bus.create_layout()
        await bus.rows("run").put("config", to_map(config))
        keys = await make_keys(bus, last=last_key(auth_dir(config)))
        write_keys(auth_dir(config), keys)
        row = LiveRow(
            role="learner",
            id=id or "learner",
            host=socket.gethostname(),
            pid=os.getpid(),
            phase="working",
            capabilities=capabilities,
        )
        async with (
            HeartbeatPublisher(bus, row) as heartbeat,
            beside(LearnerRow(heartbeat).follow_evicted(bus), Witness(bus, heartbeat).run()),
            beside(keep_keys(bus, keys), bus.rows("run").keep("config", to_map(config))),
            uploading(bus, config),
        ):
            await run_learner(
                arguments,
                num_ranks=len(variables),
                threads=config.learner.threads,
                draining=draining,
                drain_s=config.up.drain_s,
                variables=variables,
            )


@asynccontextmanager
async def uploading(bus: "Bus", config: RunConfig, *, node: int = 0) -> AsyncIterator[None]:
    """Upload the checkpoints of a node in the background, if the run has a store for them."""
    if not config.learner.checkpoint.url:
        yield
        return
    from tidemill.learner.checkpoints.object_store import ObjectStore
    from tidemill.learner.checkpoints.uploads import Uploads

    store = ObjectStore(config.learner.checkpoint.url, config.run)
    async with beside(Uploads(bus, config.checkpoints, store, node=node, keep=config.learner.keep_checkpoints).run()):
        yield


def place_ranks(config: RunConfig) -> "tuple[list[dict[str, str]], Capabilities]":
    """Return the variables of each rank, with its devices, and the capabilities that the learner's live row states.

    Raises DeviceError. Blocks while nvidia-smi runs.
    """
    from tidemill.bus.wire.rows import Capabilities
    from tidemill.launch.devices.nccl import nccl_of
    from tidemill.launch.devices.placement import place
    from tidemill.launch.devices.visible import this_node
    from tidemill.launch.devices.wanted import rank_variables, want_of

    node = this_node(os.environ)
    ranks = place([node], want_of(config, node, learner=True, engines=0)).ranks
    variables = [rank_variables(node, rank, config, os.environ) for rank in ranks]
    used = [device for device in node.devices if any(device.uuid == rank.uuid for rank in ranks)]
    if not used:
        return variables, Capabilities()
    log.info("devices ranks=%s", ",".join(rank.uuid for rank in ranks))
    memory = min(device.memory_bytes for device in used)
    return variables, Capabilities(devices=tuple(device.uuid for device in used), nccl=nccl_of(), device_memory_bytes=memory)


async def run_feeder(
    config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", draining: asyncio.Event, *, epoch: int = 0
) -> None:
    """Run the feeder of a learner with the run's settings, until its last step is done or ``draining`` is set.

    ``epoch``: of this start, if its parent has raised it.

    Raises SettingsError for a directory without a model, and the errors of ``tidemill.learner.feed.feeder.run_feeder``.
    """
    from tidemill.bus.wire.messages import Sampling
    from tidemill.launch.checks.resume import model_identity
    from tidemill.learner.data.curriculum import CurriculumRules
    from tidemill.learner.data.filter_settings import read_filters
    from tidemill.learner.feed import feeder, recorded_steps

    model, debug = Path(config.model.path), config.debug
    vocab_size, max_context = model_shape(model)
    sampling = Sampling(**dataclasses.asdict(config.sampling))
    places = feeder_places(config, bus_url, feeder_url, keys, epoch=epoch)
    if debug.trains_only:
        await recorded_steps.run_recorded_feeder(
            places, config.learner, draining, files=debug.load_rollout, eos_ids=eos_ids(model), routed=routed_of(model)
        )
        return
    facts = {"identity": model_identity(model, config.model.megatron_checkpoint), "directory": str(await asyncio.to_thread(model.resolve))}
    # Without training there is one rank, and its batches are one part.
    learner = config.learner.alone() if debug.rollout_only else config.learner
    await feeder.run_feeder(
        places,
        open_prompts(config, config.data, max_context, config.sampling.max_new_tokens),
        model=feeder.ModelFacts(vocab_size=vocab_size, routed=routed_of(model), max_context=max_context, eos_ids=eos_ids(model), **facts),
        learner=learner,
        staleness=config.staleness,
        sampling=sampling,
        push_every=config.weights.push_every,
        draining=draining,
        evaluation=eval_plan(config, sampling, max_context),
        curriculum=CurriculumRules(
            skip_easy=config.data.skip_easy,
            skip_hard=config.data.skip_hard,
            skip_passes=config.data.skip_passes,
            passes_at=config.data.passes_at,
        ),
        filters=read_filters(config.data.filters),
        budgets=budgets(config, max_context),
        debug=debug,
        recorded=recorded_in(parse_rollouts(config.rollouts)),
    )


def feeder_places(config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", *, epoch: int) -> "FeederPlaces":
    """Return the addresses and directories of a feeder, and the limit on the silence of its ranks."""
    from tidemill.learner.feed.feed_liveness import SILENCE_S
    from tidemill.learner.feed.places import FeederPlaces

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
    from tidemill.learner.feed.feeder import within

    return {name: within(one.budget, max_context) for name, one in parse_rollouts(config.rollouts).items() if not one.recorded}


def eval_plan(config: RunConfig, sampling: "Sampling", max_context: int) -> "EvalPlan":
    """Open the run's evaluation sets with the model's tokenizer. Raises PromptError."""
    from tidemill.learner.evaluation.prompts import EvalPrompts
    from tidemill.learner.feed.evaluations import EvalPlan

    chosen = config.eval
    if not chosen.every:
        return EvalPlan()
    sets = []
    for name, one in chosen.parsed.items():
        longest = sampling.max_new_tokens if one.max_new_tokens is None else one.max_new_tokens
        temperature = sampling.temperature if one.temperature is None else one.temperature
        sets.append(
            EvalPrompts(
                name=name,
                prompts=open_prompts(config, one.data(config.data), max_context, longest),
                sampling=dataclasses.replace(
                    sampling,
                    temperature=temperature,
                    top_p=one.top_p,
                    top_k=one.top_k,
                    max_new_tokens=longest,
                    stop=sampling.stop if one.stop is None else one.stop,
                    stop_token_ids=sampling.stop_token_ids if one.stop_token_ids is None else one.stop_token_ids,
                ),
                samples=one.samples,
                passes_at=one.passes_at,
                limit=one.limit,
                budgets=budgets(config, max_context),
            )
        )
    return EvalPlan(
        sets=sets,
        every=chosen.every,
        best=chosen.best,
        stop_after=chosen.stop_after,
        at_start=chosen.at_start,
        at_end=chosen.at_end,
        exact=chosen.exact,
        last_step=config.learner.steps,
        max_open_tasks=chosen.max_open_tasks,
        stall_s=chosen.stall_s,
        seed=chosen.seed,
        max_context=max_context,
    )


def open_prompts(config: RunConfig, data: "DataConfig", max_context: int, max_new_tokens: int) -> "PromptFile":
    """Open prompts with the model's tokenizer; ``max_new_tokens``: the longest response to them. Raises PromptError."""
    # The feeder needs transformers for the tokenizer alone, which imports torch where it may: 3 s of processor time and 260 MB.
    os.environ.setdefault("USE_TORCH", "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tidemill.launch.checks.rows import row_check
    from tidemill.learner.data.prompts import PromptFile, RowRules, model_tokenizer
    from tidemill.learner.data.responses import Recordings

    with importing():
        tokenize = model_tokenizer(config.model.path, apply_chat_template=data.apply_chat_template, template_args=data.chat_template_args)
    vocab_size = model_shape(Path(config.model.path))[0]
    return PromptFile(
        data.used,
        tokenize=tokenize,
        max_tokens=data.max_prompt_tokens or max_context - max_new_tokens,
        shuffle=data.shuffle,
        seed=data.seed,
        recordings=Recordings(
            tokenize,
            rollouts=recorded_in(parse_rollouts(config.rollouts)),
            end_ids=EndTokens.read(Path(config.model.path)).ids,
            max_tokens=max_context,
            chat=data.apply_chat_template,
            texts=tokenize,
        ),
        chat_template_args=data.chat_template_args,
        rules=RowRules(policy=data.bad_rows, unfit=row_check(config, max_new_tokens=max_new_tokens, vocab_size=vocab_size)),
    )


def run_rank(config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", *, progress: int = -1) -> int:
    """Run one rank of a learner in this process (blocking), with the run's settings. Returns its exit code.

    ``progress``: as ``RankPlaces.progress``.
    """
    from tidemill.learner.feed.feed_liveness import SILENCE_S
    from tidemill.learner.feed.places import RankPlaces

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
        node=int(os.environ["RANK"]) * config.learner.nodes // int(os.environ["WORLD_SIZE"]),  # all nodes have as many ranks
        snapshots=config.root / "snapshots",
        final_dir=config.root / "final",
    )
    if config.debug.rollout_only:
        from tidemill.learner.ranks import rollout_only

        return rollout_only.main(places)
    with importing():
        from tidemill.learner.ranks import rank
    return rank.main(places, learner=config.learner, staleness=config.staleness, weights=config.weights, bus=config.bus, debug=config.debug)


def model_shape(model: Path) -> tuple[int, int]:
    """Return the tokens of the vocabulary and of a context. Raises SettingsError for a directory without a model."""
    import json

    file = model / "config.json"
    if not file.exists():
        raise SettingsError(f"model.path: want a directory with a Hugging Face model (config.json in it), got {str(model)!r}")
    values = json.loads(file.read_text())
    return int(values["vocab_size"]), int(values["max_position_embeddings"])


def routed_of(model: Path) -> "RoutedShape | None":
    """Return the sizes of the model's routing, by its config.json; None for a dense model."""
    import json

    from tidemill.bus.wire.routed_experts import RoutedShape

    return RoutedShape.of(json.loads((model / "config.json").read_text()))


def eos_ids(model: Path) -> frozenset[int]:
    """Return the tokens that end a response; empty if the files of the model name none."""
    return frozenset(EndTokens.read(model).ids)
