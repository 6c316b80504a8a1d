"""Rollouts of programs: an episode for each sample, from the start of the program to the sample that comes of it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tidemill.actors.config import GatewayConfig
from tidemill.actors.engines.responses import GenerationFailed, Responses
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.episode import LENGTH, Episode
from tidemill.actors.episodes.gateway import KEY_PATH, Gateway
from tidemill.actors.episodes.port import AlreadyStored, EpisodeResult, Made, ProgramFailed, Programs, Unfinished
from tidemill.actors.episodes.turn_log import MAX_IDS, TurnLog
from tidemill.actors.errors import BadRow, NoRenderer
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms
from tidemill.actors.router.token_history import ModelText
from tidemill.actors.text.rendering import Renderer
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.streams.episode_turns import NotStored, Superseded, TurnStream
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.messages import Partial, Sample, Status, Task, Timings

logger = logging.getLogger(__name__)

LEAVING = "the actor is draining"


class ProgramRollout:
    """A ``Rollout`` with samples made by a program in child processes, which asks the model through the gateway."""

    def __init__(
        self, gateway: Gateway, programs: Programs, config: RolloutConfig, turns: TurnStream | None = None
    ) -> None:
        """``turns``: where episodes are logged; None = nowhere."""
        self.drain_s = config.drain_s
        self._gateway, self._programs, self._config, self._turns = gateway, programs, config, turns
        self._episodes: set[Episode] = set()
        """Episodes under way."""
        self._leaving = False

    def interrupt(self) -> None:
        """Hand back the episodes that are under way, wherever they are. From now on none is begun."""
        self._leaving = True
        for episode in self._episodes:
            episode.stop(handed_back=LEAVING)

    async def group(self, task: Task, attempt: str) -> list[Made | Partial | None]:
        """Return an empty list: each episode has a program of its own."""
        return []

    async def sample(
        self, task: Task, index: int, attempt: str, partial: Partial | None = None, *, first: bool = True
    ) -> Made:
        """Run the program for sample ``index``. Raises GenerationFailed, Unfinished, AlreadyStored, Superseded."""
        self._check_staying()
        episode = Episode(task, index, attempt, log=await self._take_log(task, index, attempt, first=first))
        if episode.log.sample_seq:
            raise AlreadyStored(episode.log.sample_seq)
        self._check_staying()  # ``interrupt`` does not know this episode yet
        self._episodes.add(episode)
        continued = bool(episode.log.pending or episode.log.restored)
        try:
            async with self._gateway.opened(episode, self._config.max_calls_in_flight) as key:
                result = await self._run(episode, key)
            sample, scored = _sample_of(episode, result)
            check_sample(sample)
        except Unfinished as error:
            raise Unfinished(error.reason, turns=len(episode.recorder) - episode.log.num_stored) from None
        except GenerationFailed:
            # With the same answers it would fail again. Where its process ended, they are not the reason
            # (decision 034).
            if not episode.keeps_turns:
                await episode.log.failed()
            raise
        finally:
            self._episodes.discard(episode)
        return Made(sample=sample, scored=scored, stored=episode.log.end, continued=continued)

    def _check_staying(self) -> None:
        if self._leaving:
            raise Unfinished(LEAVING)

    async def _take_log(self, task: Task, index: int, attempt: str, *, first: bool) -> TurnLog:
        """Return the sample's log with its stored turns. Raises Superseded, GenerationFailed, Unfinished."""
        if self._turns is None:
            return TurnLog(None)
        try:
            records, log = await self._turns.take(task.id, index, attempt, first=first, needed=self._config.needs_log)
        except NotStored as error:
            if error.lasting:
                raise GenerationFailed(str(error)) from None
            raise Unfinished(str(error)) from None
        turn_log = TurnLog(log, records, again=self._config.again)
        if self._config.needs_log and turn_log.cut_off:
            raise GenerationFailed(
                f"the episode's log (TURNS): want at most {MAX_IDS} token ids of all turns with their contexts"
            )
        if records and not turn_log.sample_seq:
            logger.info(
                "episode goes on task=%d index=%d again=%s turns=%d behind=%d",
                *(task.id, index, self._config.again, turn_log.pending, len(turn_log.restored)),
            )
        return turn_log

    async def _run(self, episode: Episode, key: str) -> EpisodeResult:
        """Return the program's result. Raises GenerationFailed, Unfinished."""
        url, seconds = f"{self._gateway.url}{KEY_PATH}{key}/v1", episode.budget.seconds
        running = asyncio.ensure_future(
            self._programs.run(episode.name, base_url=url, api_key=key, task=_input_of(episode))
        )
        ends = [asyncio.ensure_future(episode.stopped.wait()), asyncio.ensure_future(episode.clock.reaches(seconds))]
        try:
            await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
            if episode.superseded:
                raise Superseded
            if episode.handed_back:
                raise Unfinished(episode.handed_back)
            if episode.failed:
                raise GenerationFailed(episode.failed.removeprefix("generation: "), outside=True)
            if not running.done():
                raise GenerationFailed(f"the episode is not done within {seconds:g} s (rollouts.NAME.budget.seconds)")
            return running.result()
        except ProgramFailed as error:
            episode.keeps_turns = error.ended
            if episode.spent and len(episode.recorder):  # a program may well end with the error that refuses a call
                return EpisodeResult()
            refused = f"; its last model call was refused: {episode.refused}" if episode.refused else ""
            raise GenerationFailed(error.reason + refused, outside=error.ended) from error
        finally:
            for task in (running, *ends):
                task.cancel()
            with suppress(asyncio.CancelledError, ProgramFailed):
                await running


def _input_of(episode: Episode) -> dict[str, object]:
    """Return the program's input: its task, and the stored state from which it resumes."""
    task, state, sampling = episode.task, episode.log.state, episode.sampling
    return {
        **({"state": state.state.get("state")} if state is not None else {}),
        "task": task.id,
        "index": episode.index,
        "attempt": episode.attempt,
        "group_size": task.group_size,
        "prompt": task.prompt,
        "label": task.label,
        "metadata": task.metadata,
        "kind": str(task.kind),
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        },
    }


def _sample_of(episode: Episode, result: EpisodeResult) -> tuple[Sample, bool]:
    """Return an ended episode's sample, and whether it has its reward. Raises GenerationFailed."""
    try:
        ended_s = time.monotonic() - episode.began_s
        exported = episode.recorder.export(ended_s=ended_s)
    except ValueError as error:
        raise GenerationFailed(str(error)) from error
    before_s, behind_s = episode.recorder.tools_s(ended_s)
    reward, turn_rewards = _rewards(episode, result)
    by_number = {number: place for place, number in enumerate(exported.numbers)}
    untrained = [turn for turn in turn_rewards if turn not in by_number]
    if untrained:
        reason = "has no trained turn: it has no sampled token, or was asked without training"
        raise GenerationFailed(f"the reward of turn {untrained[0]} {reason}")
    rewards = tuple(sorted((by_number[turn], value) for turn, value in turn_rewards.items()))
    task, finish_reason = episode.task, _finish_reason(episode, result)
    sample = Sample(
        run=task.run,
        task=task.id,
        index=episode.index,
        group_size=task.group_size,
        attempt=episode.attempt,
        prompt=task.prompt,
        tokens=exported.tokens,
        response_length=exported.response_length,
        response=episode.text,
        rollout_log_probs=exported.rollout_log_probs,
        loss_mask=exported.loss_mask,
        spans=exported.spans,
        reward=reward if reward is not None else 0.0,
        status=Status.COMPLETED if finish_reason == "stop" else Status.TRUNCATED,
        sampling=task.sampling,
        kind=task.kind,
        label=task.label,
        metadata={**task.metadata, **_remarks(episode)},
        engine=episode.engine,
        timings=Timings(queued_s=episode.queued_s, generating_s=episode.generating_s, tools_s=before_s + sum(behind_s)),
        finish_reason=finish_reason,
        rollout=task.rollout,
        sequences=exported.sequences if len(exported.sequences) > 1 else (),
        turns=replace(exported.turns, rewards=rewards),
        transcript=episode.show(),
        routed_experts=exported.routed_experts,
    )
    return sample, reward is not None


def _finish_reason(episode: Episode, result: EpisodeResult) -> str:
    """Return the limit that ended an episode or cut its last answer; else, and for a fault of the policy, ``stop``."""
    limit = episode.spent or episode.cut
    if limit:
        return f"budget.{limit}"
    return LENGTH if episode.cut_by_length and result.fault is None else "stop"


def _rewards(episode: Episode, result: EpisodeResult) -> tuple[float | dict[str, float] | None, dict[int, float]]:
    """Return the episode's reward, None = the actor scores it, and rewards of turns. Raises GenerationFailed."""
    turns, value = dict(episode.turn_rewards), result.value
    if result.fault is not None:
        return result.fault, turns
    if isinstance(value, Mapping):
        ids = [name for name in value if episode.has_turn(name)]
        if ids and len(ids) < len(value):
            part = next(name for name in value if name not in ids)
            raise GenerationFailed(
                f"reward: want parts, or turns by id, got both: {ids[0]!r} is a turn, {part!r} is none"
            )
        if not ids:
            return dict(value), turns
        turns |= {episode.turn(name): number for name, number in value.items()}
        value = None
    if value is not None:
        return value, turns  # type: ignore[return-value]
    if not turns:
        return None, turns
    total = sum(turns.values())
    if not abs(total) <= MAX_REWARD:
        raise GenerationFailed(f"reward: want turn rewards with a sum within +-{MAX_REWARD:g}, got {total!r}")
    return total, turns


def _remarks(episode: Episode) -> dict[str, object]:
    """Return remarks on the sampling, the calls and the places of the turns, for viewers and the learner's metrics."""
    recorder = episode.recorder
    remarks = {
        "branched_turns": dict(recorder.branched) if any(recorder.branched.values()) else {},
        "untrained_turns": {why: count for why, count in recorder.untrained.items() if count},
        "overridden_sampling": sorted(episode.overridden),
        "malformed_calls": episode.malformed_calls,
    }
    return {name: remark for name, remark in remarks.items() if remark}


@asynccontextmanager
async def open_rollouts(
    programs: RolloutPrograms,
    responses: Responses,
    turns: TurnStream | None = None,
    reach: Reach = HERE,
    gateway_config: GatewayConfig | None = None,
    note_hung: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[dict[str, ProgramRollout]]:
    """Give the rollouts by name. Every program is loaded once, in a child that stays.

    ``turns``: where their episodes are logged; ``reach``: address of the gateway; ``note_hung``: called for each call
    of a tool that hangs.

    Raises BadRow for a program that cannot be loaded, for a model or an address that is not of this machine, and for a
    renderer that cannot be used.
    """
    try:
        text = ModelText.read(programs.model, "model.path")
    except ValueError as error:
        raise BadRow(f"{error}: an actor with rollouts needs the model's tokenizer on its machine") from None
    async with AsyncExitStack() as stack:
        config = gateway_config or GatewayConfig()
        gateway = Gateway(text, responses, await _renderer(config, programs.model, text), config.untrained_models)
        try:
            await gateway.start(reach)
        except OSError as error:
            raise BadRow(f"actor.gateway.host: want an address of this machine, got {reach.bind}: {error}") from None
        stack.push_async_callback(gateway.close)
        rollouts = {}
        for name, rollout in programs.programs.items():
            note = partial(_note_hung, note_hung, name)
            host = urlsplit(gateway.url).hostname or ""
            children = Children(rollout, model=programs.model, gateway_host=host, note_hung=note)
            await stack.enter_async_context(children)
            try:
                await children.load()
            except ProgramFailed as error:
                raise BadRow(f"rollouts.{name}.use: {error.reason}") from None
            rollouts[name] = ProgramRollout(gateway, children, rollout, turns)
        yield rollouts


def _note_hung(note_hung: Callable[[str], None], rollout: str, text: str) -> None:
    note_hung(f"rollouts.{rollout}: {text}")


async def _renderer(config: GatewayConfig, model: str, text: ModelText) -> Renderer | None:
    """Return the gateway's renderer; None = the model's chat template. Raises BadRow."""
    if not config.renderer:
        return None
    try:
        return await asyncio.to_thread(Renderer.read, config.renderer, config.renderer_options, Path(model), text.text)
    except NoRenderer as error:
        raise BadRow(f"actor.gateway.{error}") from None
