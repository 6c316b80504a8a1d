"""The body of every process, made from the run's configuration: the one place where settings become arguments."""

import asyncio
import dataclasses
import fcntl
import gc
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from actors.rollout_settings import parse_rollouts, recorded_in
from bus.system.coroutines import beside, first_of
from bus.system.files import write_whole
from launch.run.access import LEARNER, address_line, auth_dir
from launch.settings.config_loader import SettingsError
from launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from actors.config import EngineConfig
    from actors.router.config import RouterConfig
    from actors.serving.engine_process import HeldDevices
    from bus.wire.budget import Budget
    from bus.wire.messages import Capabilities, Sampling
    from bus.wire.routed_experts import RoutedShape
    from launch.run.host_learner import HostLearner
    from launch.settings.config_loader import Setting
    from learner.data.config import DataConfig
    from learner.data.prompts import PromptFile
    from learner.feed.evaluations import EvalPlan
    from learner.feed.feed_keys import FeedKeys
    from rewards.children.limits import Limits

log = logging.getLogger(__name__)

BUS_URL_FILE = "bus.url"
"""File in the run's directory with the address of its embedded bus."""
CHECK_SERVER_S = 0.2
"""Interval in seconds at which the nats-server is checked."""
HOST_RESTART_WINDOW_S = 300.0
"""Seconds over which ``tidemill host`` counts the failures of a process (--restarts)."""
LONG_WAIT_S = 300.0
"""Seconds that a process waits for a bus that is started after it."""


def run_prepare(config: RunConfig) -> int:
    """Make model and prompts if the configuration has ``prepare``; return 0."""
    if config.prepare is not None:
        from launch.settings.prepare import prepare

        config.root.mkdir(parents=True, exist_ok=True)
        with (config.root / "prepare.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may call this at the same time; the second finds it done
            prepare(config.prepare, config.root / "prepared")
    return 0


async def run_bus(config: RunConfig, draining: asyncio.Event) -> None:
    """Run the embedded nats-server, or three: one that ends is started again at once, on the same port; all are stopped when drained."""
    from bus.liveness.heartbeats import HeartbeatPublisher
    from bus.server.cluster import EmbeddedBus
    from bus.streams.bus import connect
    from bus.wire.messages import LiveRow

    servers = EmbeddedBus(config.root / "bus", config.run, config.bus, auth_dir(config))
    url = await asyncio.to_thread(servers.start)
    try:
        async with connect(own_address(config, url), config.run, config.bus, name="bus") as bus:
            await bus.jet.retry_for_ever(bus.create_layout)
            write_whole(config.root / BUS_URL_FILE, url)  # not before the streams exist: `tidemill up` waits for this file
            log.info("listening url=%s pids=%s", url, " ".join(str(server.pid) for server in servers.servers))
            id = config.bus.server_name or "bus"
            row = LiveRow(role="bus", id=id, host=socket.gethostname(), pid=servers.pid, phase="serving", address=url)
            async with HeartbeatPublisher(bus, row) as heartbeat:

                async def keep_up() -> None:
                    """Start every server again that has ended, without end."""
                    while True:
                        await asyncio.sleep(CHECK_SERVER_S)
                        for server in servers.ended():
                            log.warning("nats-server ended and is started again; its last log lines:\n%s", server.log_tail(5))
                            await asyncio.to_thread(server.start)
                            heartbeat.update(pid=servers.pid)

                await first_of(keep_up(), draining.wait())
    finally:
        (config.root / BUS_URL_FILE).unlink(missing_ok=True)
        await asyncio.to_thread(servers.stop)


def own_address(config: RunConfig, url: str) -> str:
    """Return the address with the learner's password, for processes of the run's own machine that may do everything."""
    return address_line(url, config, LEARNER, os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Settings of an engine's or actor's own machine; they override the configuration that the run has written to the bus."""

    allowed: Sequence[str] = ()
    """Patterns of settings in that configuration that may name code and files of this machine (``actors/allowed.py``)."""
    changed: "Mapping[str, Setting]" = field(default_factory=dict)
    """Settings given here, by path: they replace those of the run."""
    host: str = ""
    """Address to listen on; empty = that of the configuration of this machine."""
    advertise: str = ""


@contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off while entered, for large imports: collections free nothing then, and take a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the modules stay, so no later collection need walk them
        gc.enable()


async def reach_bus(bus_url: str, name: str, draining: asyncio.Event, *, wait_s: float) -> None:
    """Wait until the bus can be reached, or ``draining`` is set. Raises BusUnavailable after ``wait_s``."""
    from bus.client.address import parse
    from bus.client.connection import open_connection

    async def reached() -> None:
        """Connect to the bus and disconnect."""
        async with open_connection(bus_url, name, wait_s):
            pass

    log.info("reaching the bus at %s, for at most %g s (--wait)", parse(bus_url), wait_s)
    await first_of(reached(), draining.wait())


async def run_engine(config: RunConfig | None, run: str, bus_url: str, id: str, draining: asyncio.Event, own: LocalSettings) -> None:
    """Serve a model. Without ``config``, the run's is read from the bus; a model that is not on this machine comes from the learner.

    ``host``, ``advertise`` and ``devices`` of a configuration from the bus are never used. Raises NotAllowed, DeviceError.
    """
    from actors.engines.membership import default_id
    from actors.scratch import Scratch
    from actors.serving import engine_process
    from bus.client.reach import AUTO
    from launch.settings.wiring import engine_factory

    id = id or default_id()
    with Scratch("model") as fetched:
        if config is None:
            run = run or await found_run(bus_url, "engine", draining)
            config = await config_on_bus(run, bus_url, "engine", id, draining, own) if run else None
            if config is None:
                return
            # an engine that the learner's machine did not start shares nothing with it
            given = config.engine
            host = given.host if "engine.host" in own.changed else AUTO
            advertise = given.advertise if "engine.advertise" in own.changed else ""
            devices = given.devices if "engine.devices" in own.changed else ()
            elsewhere = dataclasses.replace(given, colocated=False, host=host, advertise=advertise, devices=devices)
            config = dataclasses.replace(config, engine=elsewhere)
        engine = dataclasses.replace(config.engine, host=own.host or config.engine.host, advertise=own.advertise or config.engine.advertise)
        engine, held = await asyncio.to_thread(take_devices, dataclasses.replace(config, engine=engine))
        model = await model_here(config, bus_url, id, fetched.path / "model", draining)
        if model is None:
            return
        places = engine_process.EnginePlaces(run=config.run, bus_url=bus_url, bus=config.bus, model_dir=model, id=id, devices=held)
        limits = engine_process.EngineLimits(drain_s=config.up.drain_s)
        with importing():
            factory = engine_factory(engine)
        await engine_process.run_engine(places, engine, draining, factory=factory, limits=limits)


def take_devices(config: RunConfig) -> "tuple[EngineConfig, HeldDevices]":
    """Choose this engine's devices and hide the others from this process, before it initialises CUDA. Returns its settings and devices.

    Nothing is changed on a machine without devices. Raises DeviceError. Blocks while nvidia-smi runs.
    """
    from actors.serving.engine_process import HeldDevices
    from launch.devices.visible import VARIABLE, this_node
    from launch.devices.wanted import nccl_of_engine, own_place

    engine, node = config.engine, this_node(os.environ)
    place = own_place(node, config)
    if node.devices:
        os.environ[VARIABLE] = ",".join(place.visible)
    if not place.uuids:
        return engine, HeldDevices()
    if engine.kind == "sglang" and place.visible != place.uuids:
        arguments = {**engine.sglang.arguments, "base_gpu_id": place.base_index}
        engine = dataclasses.replace(engine, sglang=dataclasses.replace(engine.sglang, arguments=arguments))
    memory = [device.memory_bytes for device in node.devices if device.uuid in place.uuids]
    log.info("devices own=%s visible=%d", ",".join(place.uuids), len(place.visible))
    held = HeldDevices(own=place.uuids, visible=place.visible, nccl=nccl_of_engine(engine), memory_bytes=min(memory))
    return engine, held


async def config_on_bus(run: str, bus_url: str, role: str, id: str, draining: asyncio.Event, own: LocalSettings) -> RunConfig | None:
    """Return the learner's configuration with the changes made here; None if ``draining`` is set first. Raises NotAllowed."""
    from contextlib import AsyncExitStack

    from actors.engines.membership import CONFIG_KEY, config_of_run, connected
    from bus.config import BusConfig
    from launch.settings.config_loader import from_map

    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, run, BusConfig(), name=role, draining=draining)
        values = None if bus is None else await config_of_run(bus, draining, role=role, id=id, allowed=own.allowed)
    return None if values is None else from_map(values, f"run {run}, row run/{CONFIG_KEY}", own.changed)


async def model_here(config: RunConfig, bus_url: str, name: str, into: Path, draining: asyncio.Event) -> Path | None:
    """Return the model's directory if it is on this machine, else a snapshot from the learner; None if ``draining`` is set first."""
    from contextlib import AsyncExitStack

    from actors.engines.membership import connected, first_row
    from bus.liveness.waiting import Waiting
    from weightstore.catchup.joining import fetch_model

    model = Path(config.model.path)
    if (model / "config.json").exists():
        return model
    log.info("no model on this machine path=%s; it is requested over the bus", model)
    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, config.run, config.bus, name=name, draining=draining)
        if bus is None:
            return None
        waiting = await stack.enter_async_context(Waiting(bus, first_row("engine", name), "the model from the learner"))
        await first_of(fetch_model(bus, into, engine=name, on_wait=waiting.set), draining.wait())
    return None if draining.is_set() else into


async def run_actor(config: RunConfig | None, run: str, bus_url: str, id: str, draining: asyncio.Event, own: LocalSettings) -> None:
    """Work on a run's tasks. Without ``config``, the run's is read from the bus."""
    from actors.engines.membership import default_id
    from actors.rollout import actor_process
    from actors.rollout_settings import RolloutPrograms
    from rewards.children.limits import become_undumpable

    become_undumpable()  # the user's code in its children has the same user id, and could read the credentials of the bus
    run = run or await found_run(bus_url, "actor", draining)
    if not run:
        return
    id = id or default_id()
    if config is None and own.changed:
        config = await config_on_bus(run, bus_url, "actor", id, draining, own)
        if config is None:
            return
    actor, bus, rollouts = None, None, None
    if config is not None:
        actor, bus = config.actor, config.bus
        rollouts = RolloutPrograms(rollouts=parse_rollouts(config.rollouts), model=config.model.path)
    await actor_process.run_actor(bus_url, run, actor, bus, draining, id, rollouts=rollouts, allowed=own.allowed)


async def run_router(config: "RouterConfig", run: str, bus_url: str, id: str, draining: asyncio.Event, *, drain_s: float) -> None:
    """Serve one address for the engines of a run, and for those named in ``config``."""
    from actors.router import process

    if bus_url:
        run = run or await found_run(bus_url, "router", draining)
        if not run:
            return
    await process.run_router(config, bus_url, run, id, draining, drain_s=drain_s)


async def run_reward_server(
    name: str, options: Mapping[str, object], limits: "Limits", draining: asyncio.Event, *, host: str, port: int, token: str
) -> None:
    """Serve a reward until ``draining`` is set. Raises UnknownReward, BadRewardOption, RewardFailed, OSError (address taken)."""
    from launch.run.reward_server import RewardServer, serving
    from rewards.children.limits import become_undumpable
    from rewards.children.pool import opened

    become_undumpable()
    async with opened(name, options, limits) as score, serving(RewardServer(name, score, token=token), host, port) as url:
        print(f"reward {name} at {url}/score", flush=True)
        await draining.wait()


async def found_run(bus_url: str, name: str, draining: asyncio.Event) -> str:
    """Wait for the one run of a bus and return its name; empty if ``draining`` is set first. Raises SeveralRuns, BusUnavailable."""
    from bus.client.discovery import find_run

    found = ""

    async def find() -> None:
        """Set ``found`` to the name of the bus's one run."""
        nonlocal found
        found = await find_run(bus_url, name=name, wait_s=LONG_WAIT_S)

    await first_of(find(), draining.wait())
    if found:
        log.info("run found run=%s", found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine as a host of a run, from the command line."""

    name: str
    pool: str
    own: Mapping[str, int]
    """Desired numbers of this machine itself, by role; empty = its share of the total."""
    directory: Path
    drain_s: float
    restarts: int
    users: Mapping[str, Sequence[Path]] | None
    allowed: Sequence[str]
    engine_words: Sequence[str]
    """Arguments passed on to its engines."""
    learner: "HostLearner | None" = None
    """The learner's node of this machine."""

    def command(self, role: str, id: str, *, bus_url: str, run: str) -> list[str]:
        """Return the arguments behind ``python -m launch`` of one of its processes."""
        passed_on = [word for pattern in self.allowed for word in ("--allow", pattern)]
        return [role, "--bus", bus_url, "--run", run, "--id", id, *passed_on, *(self.engine_words if role == "engine" else ())]


async def run_host(run: str, bus_url: str, draining: asyncio.Event, machine: Machine) -> None:
    """Run the engines and actors of this machine in the desired numbers, and the learner's node of it, if it has one.

    Raises HostExists, BusUnavailable, ValueError when its user may not write ``machine.own`` to the bus.
    """
    from contextlib import AsyncExitStack

    from actors.engines.membership import connected
    from bus.config import BusConfig
    from bus.errors import Forbidden
    from launch.run import desired
    from launch.run.engine_devices import EngineDevices
    from launch.run.host import Host, refuse_another
    from launch.run.supervisor import Supervisor

    name, directory, learner = machine.name, machine.directory, machine.learner
    address = address_line(bus_url, None, name, os.environ)
    run = run or (learner.config.run if learner else await found_run(address, "host", draining))
    if not run:
        return
    supervisor = Supervisor(directory / "logs", restarts=machine.restarts, window_s=HOST_RESTART_WINDOW_S)
    async with AsyncExitStack() as stack:
        if learner is not None:  # before the wait for the run: its leader begins it
            await stack.enter_async_context(learner.kept(supervisor, drain_s=machine.drain_s))
        bus = await connected(stack, address, run, BusConfig(), name=f"host {name}", draining=draining)
        if bus is None:
            return
        await refuse_another(bus, name)
        if machine.own:
            try:
                await desired.change(bus, desired.host_key(name), machine.own)
            except Forbidden as error:
                words = " ".join(f"{role}s={count}" for role, count in machine.own.items())
                raise ValueError(f"{error}; set it as operator: tidemill scale {words} --host {name}") from None
        host = Host(
            bus,
            supervisor,
            desired.LiveHost(name, machine.pool),
            prefix=f"{name}-",
            arguments=partial(machine.command, bus_url=bus_url, run=run),
            drain_s=machine.drain_s,
            users=machine.users,
            devices=EngineDevices(bus, learner.config) if learner else None,
        )
        log.info("host running run=%s name=%s pool=%s logs=%s", run, name, machine.pool or "-", directory / "logs")
        await host.run(draining)


async def run_learner(config: RunConfig, bus_url: str, id: str, arguments: list[str], draining: asyncio.Event) -> None:
    """Run feeder and ranks; publish the run's configuration, for actors that have only the bus's address, and a live row.

    The live row names the ranks' devices, and the engines that take no pushes; progress is in the feeder's row. Raises DeviceError.
    """
    from actors.engines.witness import Witness
    from bus.liveness.heartbeats import HeartbeatPublisher
    from bus.liveness.keys import make_keys
    from bus.streams.bus import connect
    from bus.wire.messages import Capabilities, LiveRow
    from launch.run.access import write_keys
    from launch.run.learner_row import LearnerRow
    from launch.settings.config_loader import to_map
    from learner.ranks.process import run_learner

    variables, capabilities = await asyncio.to_thread(place_ranks, config) if not config.debug.rollout_only else ([{}], Capabilities())
    async with connect(bus_url, config.run, config.bus, name="learner", wait_s=LONG_WAIT_S) as bus:
        await bus.create_layout()
        await bus.rows("run").put("config", to_map(config))
        write_keys(auth_dir(config), await make_keys(bus))
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
        ):
            await run_learner(
                arguments,
                num_ranks=len(variables),
                threads=config.learner.threads,
                draining=draining,
                drain_s=config.up.drain_s,
                variables=variables,
            )


def place_ranks(config: RunConfig) -> "tuple[list[dict[str, str]], Capabilities]":
    """Return the variables of each rank, with its devices, and what the learner's live row states of them.

    Raises DeviceError. Blocks while nvidia-smi runs.
    """
    from bus.wire.messages import Capabilities
    from launch.devices.nccl import nccl_of
    from launch.devices.placement import place
    from launch.devices.visible import this_node
    from launch.devices.wanted import rank_variables, want_of

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

    Raises SettingsError for a directory without a model, and the errors of ``learner.feed.feeder.run_feeder``.
    """
    from bus.wire.messages import Sampling
    from launch.checks.resume import model_identity
    from learner.data.curriculum import CurriculumRules
    from learner.data.filter_settings import read_filters
    from learner.feed import feeder, recorded_steps
    from learner.feed.feed_liveness import SILENCE_S
    from learner.feed.places import FeederPlaces

    model, debug = Path(config.model.path), config.debug
    vocab_size, max_context = model_shape(model)
    sampling = Sampling(**dataclasses.asdict(config.sampling))
    places = FeederPlaces(
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
    if debug.trains_only:
        await recorded_steps.run_recorded_feeder(
            places, config.learner, draining, files=debug.load_rollout, eos_ids=eos_ids(model), routed=routed_of(model)
        )
        return
    facts = {"identity": model_identity(model), "directory": str(await asyncio.to_thread(model.resolve))}
    # Without training there is one rank, whose batches are one part.
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


def budgets(config: RunConfig, max_context: int) -> "dict[str, Budget]":
    """Return the limits of episodes by rollout, with sequences of at most the model's context."""
    from learner.feed.feeder import within

    return {name: within(one.budget, max_context) for name, one in parse_rollouts(config.rollouts).items() if not one.recorded}


def eval_plan(config: RunConfig, sampling: "Sampling", max_context: int) -> "EvalPlan":
    """Open the run's evaluation sets with the model's tokenizer. Raises PromptError."""
    from learner.evaluation.prompts import EvalPrompts
    from learner.feed.evaluations import EvalPlan

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
                sampling=dataclasses.replace(sampling, temperature=temperature, top_p=one.top_p, top_k=one.top_k, max_new_tokens=longest),
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
    from launch.checks.rows import refuse_unfit
    from launch.settings.end_ids import end_ids
    from learner.data.prompts import PromptFile, model_tokenizer
    from learner.data.responses import Recordings

    with importing():
        tokenize = model_tokenizer(config.model.path, apply_chat_template=data.apply_chat_template, template_args=data.chat_template_args)
    prompts = PromptFile(
        data.used,
        tokenize=tokenize,
        max_tokens=data.max_prompt_tokens or max_context - max_new_tokens,
        shuffle=data.shuffle,
        seed=data.seed,
        recordings=Recordings(
            tokenize,
            rollouts=recorded_in(parse_rollouts(config.rollouts)),
            end_ids=end_ids(Path(config.model.path)),
            max_tokens=max_context,
            chat=data.apply_chat_template,
        ),
    )
    # All rows: ``check`` reads some of a large file.
    refuse_unfit(prompts.rows, config, max_new_tokens=max_new_tokens, vocab_size=model_shape(Path(config.model.path))[0])
    return prompts


def run_rank(config: RunConfig, bus_url: str, feeder_url: str, keys: "FeedKeys", *, progress: int = -1) -> int:
    """Run one rank of a learner in this process (blocking), with the run's settings. Returns its exit code.

    ``progress``: as ``RankPlaces.progress``.
    """
    from learner.feed.feed_liveness import SILENCE_S
    from learner.feed.places import RankPlaces

    places = RankPlaces(
        run=config.run,
        bus_url=bus_url,
        feeder_url=feeder_url,
        feeder_keys=keys,
        silence_s=SILENCE_S if config.learner.nodes > 1 else 0.0,
        progress=progress,
        model_dir=Path(config.model.path),
        checkpoints=config.checkpoints,
        node=int(os.environ["RANK"]) * config.learner.nodes // int(os.environ["WORLD_SIZE"]),  # all nodes have as many ranks
        snapshots=config.root / "snapshots",
        final_dir=config.root / "final",
    )
    if config.debug.rollout_only:
        from learner.ranks import rollout_only

        return rollout_only.main(places)
    with importing():
        from learner.ranks import rank
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

    from bus.wire.routed_experts import RoutedShape

    return RoutedShape.of(json.loads((model / "config.json").read_text()))


def eos_ids(model: Path) -> frozenset[int]:
    """Return the tokens that end a response, from the model's configuration and generation settings; empty if they name none."""
    from launch.settings.end_ids import end_ids

    return frozenset(end_ids(model))
