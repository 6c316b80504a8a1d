"""The body of an actor process: connect, send heartbeats, work until drained. Needs only the URL of the bus."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from tidemill.actors.actor.loop import Actor
from tidemill.actors.actor.sample_scoring import RemoteScoring, ScorerPool, Scorers
from tidemill.actors.actor.single_turn import SingleTurn
from tidemill.actors.config import ActorConfig, GatewayConfig
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.address_checks import failing
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.membership import config_of_run, connected, default_id, first_row, section
from tidemill.actors.engines.port import Engine
from tidemill.actors.engines.responses import Responses
from tidemill.actors.engines.server_discovery import BusDiscovery, UrlDiscovery
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.episodes.port import Rollout
from tidemill.actors.errors import ActorRefused, BadRow
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms, served
from tidemill.actors.scoring import open_rewards
from tidemill.actors.teachers import Teachers
from tidemill.bus.client.addresses import HERE, LOOPBACK, Reach, reach, route_to
from tidemill.bus.config import SINGLE_TURN, BusConfig, is_loopback
from tidemill.bus.keys import api_keys
from tidemill.bus.liveness import HeartbeatPublisher, LiveView
from tidemill.bus.section import Sections, read
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import cancellable
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.subjects import refused
from tidemill.rewards.scorers import never_waits

UPDATE_EVERY_S = 1.0
"""Seconds between two updates of the live row."""
REFUSAL_EVERY_S = 5.0
"""Seconds after which a refusal is found at the latest, if its notification was missed."""


async def run_actor(
    bus_url: str,
    run: str,
    actor_config: ActorConfig | None,
    bus_config: BusConfig | None,
    draining: asyncio.Event,
    actor_id: str | None = None,
    *,
    rollouts: RolloutPrograms | None = None,
    allowed: Sequence[str] = (),
    engine: Callable[[str], Engine] | None = None,
    locate: Callable[[str], str] = str,
) -> None:
    """Work on the tasks of ``run`` until ``draining`` is set and every leased task is done or returned by a nak.

    A config that is None is read from the bus (row run/config, sections ``actor``, ``bus`` and ``rollouts``) once it is
    written; with both of them, ``rollouts`` has the programs. ``allowed``: see ``config_of_run``;
    ``locate``: blocks, and returns the directory on this machine for ``model.path`` of the row. When cancelled, it naks
    its tasks. Raises BusUnavailable when there is no bus within five minutes, NotFound when there is no config within
    five minutes, BadRow, NotAllowed, UnknownReward, BadRewardOption, RewardFailed, ActorRefused.
    """
    actor_id = actor_id or default_id()
    if actor_config is None or bus_config is None:
        # A connection of its own, for this read: the settings of the next one are a section of the row.
        async with AsyncExitStack() as stack:
            bus = await connected(
                stack, bus_url, run, bus_config or BusConfig(), name=f"actor {actor_id}", draining=draining
            )
            config = (
                None if bus is None else await config_of_run(bus, draining, role="actor", id=actor_id, allowed=allowed)
            )
        if config is None:
            return
        actor_config = actor_config or section(config, "actor", ActorConfig)
        bus_config = bus_config or section(config, "bus", BusConfig)
        rollouts = rollouts or programs_in(config)
        if rollouts.rollouts:  # single turns need no tokenizer
            rollouts = replace(rollouts, model=await asyncio.to_thread(locate, rollouts.model))
    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, run, bus_config, name=f"actor {actor_id}", draining=draining)
        if bus is not None:
            experts = actor_config.routed_experts
            engine = engine or partial(HttpEngine, keys=api_keys(bus), routed_experts=experts)
            gateway_reach = await asyncio.to_thread(reach_of_gateway, actor_config.gateway, bus_url)
            await _work(bus, actor_id, actor_config, rollouts, draining, engine, gateway_reach)


def reach_of_gateway(config: GatewayConfig, bus_url: str) -> Reach:
    """Return where the gateway listens, and its address for programs. Blocking. Raises BadRow."""
    if is_loopback(config.host) and not config.advertise:
        return HERE if config.host == LOOPBACK else Reach(config.host, config.host)
    try:
        route = replace(route_to(bus_url), is_here=True)  # it may serve this machine alone
        return reach(config.host, config.advertise, route, name="actor.gateway.host")
    except ValueError as error:
        raise BadRow(str(error)) from None


def programs_in(config: JsonMapping) -> RolloutPrograms:
    """Return the rollouts of a run's config. Raises BadRow."""
    try:
        rollouts = read(Sections[RolloutConfig], config.get("rollouts") or {}, "rollouts")
    except (ValueError, AttributeError) as error:
        raise BadRow(str(error)) from None
    return RolloutPrograms(rollouts=rollouts, model=str((config.get("model") or {}).get("path", "")))


async def _work(
    bus: Bus,
    actor_id: str,
    config: ActorConfig,
    programs: RolloutPrograms | None,
    draining: asyncio.Event,
    engine: Callable[[str], Engine],
    gateway_reach: Reach,
) -> None:
    """Open what the actor needs, and run it beside the loops that keep its live row up to date."""
    activity = Activity()
    discovery = UrlDiscovery(config.engines, engine) if config.engines else BusDiscovery(LiveView(bus))
    engines = EnginePool(discovery, engine)
    responses = Responses(engines, timeout_s=config.generate_timeout_s, retries=config.retries, activity=activity)
    async with AsyncExitStack() as stack:
        scorers = await _open_scorers(stack, config, bus)
        programs, names = _served(programs, config)
        rollouts: dict[str, Rollout] = (
            {"": SingleTurn(responses, join=config.join_requests)} if SINGLE_TURN in names else {}
        )
        if programs.programs:
            from tidemill.actors.episodes.rollouts import open_rollouts  # its tokenizer is not needed for single turns

            opening = open_rollouts(programs, responses, bus.turns, gateway_reach, config.gateway, activity.tool_hung)
            rollouts |= await stack.enter_async_context(opening)
        actor = Actor(
            bus,
            actor_id=actor_id,
            config=config,
            responses=responses,
            rollouts=rollouts,
            scorers=scorers,
            activity=activity,
        )
        row = replace(first_row("actor", actor_id), rollouts=names)
        heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, row))
        async with asyncio.TaskGroup() as loops:
            tasks = [
                loops.create_task(cancellable(engines.run()), name="engines"),
                loops.create_task(cancellable(_update_heartbeat(heartbeat, actor, activity, engines)), name="live row"),
                loops.create_task(cancellable(_watch_refusal(bus, actor_id)), name="refusal"),
            ]
            if scorers.run is not None:
                tasks.append(loops.create_task(cancellable(scorers.run()), name="scorers"))
            await actor.run(draining)
            for task in tasks:
                task.cancel()


def _served(programs: RolloutPrograms | None, config: ActorConfig) -> tuple[RolloutPrograms, tuple[str, ...]]:
    """Return the rollouts that the actor loads, and the names of all that it serves. Raises BadRow."""
    programs = programs or RolloutPrograms(rollouts={}, model="")
    try:
        names = served(programs.rollouts, config.rollouts)
    except ValueError as error:
        raise BadRow(str(error)) from None
    return programs.only(names), names


async def _open_scorers(stack: AsyncExitStack, config: ActorConfig, bus: Bus) -> Scorers:
    """Open the rewards and teachers of the run, or the pool of its scorers. ``stack`` closes them."""
    teachers = Teachers(config) if config.teachers else None
    if teachers is not None:
        stack.push_async_callback(teachers.close)
    # With scorers an actor loads no reward: their machine needs the packages, and the permission to run it.
    if not config.scorers.enabled:
        score, group_score = await open_rewards(stack, config)
        at_once = score is None or (not config.reward_parts and never_waits(config.reward, config.reward_options))
        return Scorers(score=score, group_score=group_score, teachers=teachers, never_waits=at_once)
    pool = ScorerPool.on_bus(LiveView(bus), api_keys(bus))
    remote = RemoteScoring(pool)
    return Scorers(
        score=remote.score if config.reward or config.reward_parts or not config.group_reward else None,
        group_score=remote.group_score if config.group_reward else None,
        teachers=teachers,
        waits_for=pool.waits_for,
        stop_waiting=pool.give_up,
        run=pool.run,
    )


async def _watch_refusal(bus: Bus, actor_id: str) -> None:
    """Raise ActorRefused when the learner refuses this actor. A row from before the start is of an earlier process."""
    before: int | None = None
    async for row in bus.rows("run").watch(refused(actor_id), REFUSAL_EVERY_S):
        revision = 0 if row is None else row[1]
        if before is None:
            before = revision
        elif row is not None and revision > before:
            raise ActorRefused(actor_id, int(row[0].get("invalid", 0)), str(row[0].get("reason", "")))


async def _update_heartbeat(
    heartbeat: HeartbeatPublisher, actor: Actor, activity: Activity, engines: EnginePool
) -> None:
    while True:
        phase, waits_for = actor.phase()
        limit = actor.observe(engines.loads())
        load = {**activity.load(), "in_flight": float(actor.in_flight), "max_in_flight": limit}
        heartbeat.update(
            phase=phase, waits_for=waits_for, trouble=activity.trouble, load=load, reached=failing(engines)
        )
        await asyncio.sleep(UPDATE_EVERY_S)
