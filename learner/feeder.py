"""The feeder process: the learner's only way to the bus, but for pushes. Settings in, one start of ``Feeder``, the first error out."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bus import exit_codes
from bus.config import BusConfig
from bus.connection import connect
from bus.coroutines import first_error
from bus.messages import Sampling
from bus.patience import cancellable
from learner.config import LearnerConfig, StalenessConfig
from learner.feed_keys import FeedKeys
from learner.feed_server import FeedServer
from learner.feeder_loops import Feeder, FeederRules
from learner.prompts import PromptFile
from learner.rules import DataRules


async def run_feeder(
    *,
    run: str,
    bus_url: str,
    root: Path,
    prompts: PromptFile,
    learner: LearnerConfig,
    staleness: StalenessConfig,
    sampling: Sampling,
    seed: int = 0,
    push_every: int = 1,
    keys: FeedKeys,
    listen: str = "tcp://127.0.0.1:*",
    bus: BusConfig | None = None,
    vocab_size: int | None = None,
    max_context: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    model: str = "",
    draining: asyncio.Event | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> None:
    """Feed ``data_parallel x tensor_parallel`` ranks until the last step is done and in a checkpoint under ``root``.

    ``keys`` admit the ranks. ``eos_ids``: tokens that end a response; empty = not known. ``model``: as ``DataRules.model``.
    ``on_listening`` is given the URL for FeedClient. ``seed`` is that of the prompts' order (DataConfig.seed). Once ``draining`` is set,
    it ends when no rank is left and what they reported is stored.
    Raises ConfigRefused, ReplayMismatch, NoCheckpoint, NoProgress, RankFailed, FeedError, PromptError; of the bus Fenced (another
    learner has taken over), StreamReplaced, StreamTrimmed, BusUnavailable (not there at the start).
    """
    rules = _data_rules(run, learner, staleness, sampling, seed, push_every, max_context, prompts, model)
    feeder_rules = FeederRules(
        run=run,
        root=root,
        sampling=sampling,
        group_size=learner.group_size,
        checkpoint_every=learner.checkpoint_every,
        keep_checkpoints=learner.keep_checkpoints,
        ahead=1 if learner.prefetch and staleness.max_lag >= 1 else 0,
        batch_timeout_s=learner.batch_timeout_s,
        vocab_size=vocab_size,
        pad_to=learner.tensor_parallel,
        eos_ids=eos_ids,
        from_checkpoint=Path(learner.from_checkpoint) if learner.from_checkpoint else None,
    )
    config = bus or BusConfig()
    world_size = learner.data_parallel * learner.tensor_parallel
    server = FeedServer(listen, keys=keys, world_size=world_size, data_parallel=learner.data_parallel)
    try:
        if on_listening is not None:
            on_listening(server.url)
        async with connect(bus_url, run, config, name="feeder") as connected:
            await connected.create_layout()
            await cancellable(Feeder(connected, feeder_rules, rules, prompts, server).run(draining or asyncio.Event()))
    except BaseException as error:
        first = first_error(error)
        ended = isinstance(first, asyncio.CancelledError)
        await server.fail("it was told to end" if ended else exit_codes.message(first), exit_codes.of(first))
        raise first from None
    finally:
        await server.close()


def _data_rules(
    run: str,
    learner: LearnerConfig,
    staleness: StalenessConfig,
    sampling: Sampling,
    seed: int,
    push_every: int,
    max_context: int,
    prompts: PromptFile,
    model: str,
) -> DataRules:
    return DataRules(
        run=run,
        steps=learner.steps,
        groups_per_step=learner.groups_per_step,
        data_parallel=learner.data_parallel,
        max_tokens_per_micro_batch=learner.max_tokens_per_micro_batch,
        minibatches=learner.minibatches,
        max_context=max_context,
        push_every=push_every,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        prompts_digest=prompts.digest,
        model=model,
        **asdict(staleness),
    )
