"""The bodies of engines, actors and scorers, from the run's configuration: settings become arguments here.

Those of the learner are in ``learner_process.py`` and ``feeder_process.py``, of the bus in ``bus_process.py``, of
routers, reward servers and teachers in ``servers.py``.
"""

import asyncio
import dataclasses
import fcntl
import gc
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.actors.engines.membership import config_of_run, connected, default_id, first_row
from tidemill.actors.rollout_settings import RolloutPrograms
from tidemill.bus.client.addresses import AUTO
from tidemill.bus.client.addresses import parse as parse_address
from tidemill.bus.client.connection import open_connection
from tidemill.bus.config import BusConfig
from tidemill.bus.streams.bus import find_run
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.limits import become_undumpable
from tidemill.bus.wire.rows import Capabilities
from tidemill.launch.settings.hub_names import MODEL, MODEL_PATH, kept, parse
from tidemill.launch.settings.prepare import prepare
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_row import from_row

if TYPE_CHECKING:
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.serving.port import Factory
    from tidemill.launch.settings.config_loader import Setting

log = logging.getLogger(__name__)

LONG_WAIT_S = 300.0  # Seconds that a process waits for a bus that is started after it


def run_prepare(config: RunConfig) -> None:
    """Make model and prompts if the configuration has ``prepare``."""
    if config.prepare is None:
        return
    config.root.mkdir(parents=True, exist_ok=True)
    with (config.root / "prepare.lock").open("w") as lock:
        # Several processes may call this at the same time; the second finds it done
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(config.prepare, config.root / "prepared")


# Objects that an actor allocates between two collections: Python's 700 are those of a few samples, and cost it 4 %
COLLECT_AFTER = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Settings of an engine's or actor's own machine; they override the configuration on the bus."""

    # Patterns of settings from the bus that may name code and files here (`actors/guarded_settings.py`).
    allowed: Sequence[str] = ()
    # Settings of this machine, by path: they replace the run's settings.
    changed: "Mapping[str, Setting]" = field(default_factory=dict)
    host: str = ""  # Address to listen on; empty = the address in the configuration of this machine
    advertise: str = ""
    port: int = 0  # Port of a scorer; 0 = any free one


@contextmanager
def importing() -> Iterator[None]:
    """Switch garbage collection off for large imports: it frees nothing then, and takes a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # the modules stay, so no later collection need walk them
        gc.enable()


async def reach_bus(bus_url: str, name: str, draining: asyncio.Event, *, wait_s: float) -> None:
    """Wait until the bus can be reached, or ``draining`` is set. Raises BusUnavailable after ``wait_s``."""

    async def reached() -> None:
        async with open_connection(bus_url, name, wait_s):
            pass

    log.info("reaching the bus at %s, for at most %g s (--wait)", parse_address(bus_url), wait_s)
    await first_of(reached(), draining.wait())


def engine_factory(config: "EngineConfig") -> "Factory":
    """Return the factory of the engine that ``config.kind`` names: the only place that names backends."""
    match config.kind:
        case "builtin":
            from tidemill.actors.serving.builtin.engine import BuiltinEngine

            return BuiltinEngine
        case "sglang":
            from tidemill.actors.serving.sglang.engine import SglangEngine

            return SglangEngine


async def run_engine(
    config: RunConfig | None, run: str, bus_url: str, engine_id: str, draining: asyncio.Event, local: LocalSettings
) -> None:
    """Serve a model; a run without ``config`` is read from the bus, a model that is not here from the learner.

    ``host``, ``advertise`` and ``devices`` of a configuration from the bus are never used. Raises NotAllowed,
    DeviceError.
    """
    from tidemill.actors.serving import engine_process
    from tidemill.bus.system.files import Scratch

    engine_id = engine_id or default_id()
    with Scratch("model") as fetched:
        if config is None:
            run = run or await found_run(bus_url, "engine", draining)
            config = await config_on_bus(run, bus_url, "engine", engine_id, draining, local) if run else None
            if config is None:
                return
            # an engine that the learner's machine did not start shares nothing with it
            settings = config.engine
            host = settings.host if "engine.host" in local.changed else AUTO
            advertise = settings.advertise if "engine.advertise" in local.changed else ""
            devices = settings.devices if "engine.devices" in local.changed else ()
            elsewhere = dataclasses.replace(settings, colocated=False, host=host, advertise=advertise, devices=devices)
            config = dataclasses.replace(config, engine=elsewhere)
        host, advertise = local.host or config.engine.host, local.advertise or config.engine.advertise
        engine = dataclasses.replace(config.engine, host=host, advertise=advertise)
        engine, engine_devices = await asyncio.to_thread(take_devices, dataclasses.replace(config, engine=engine))
        model = await model_here(config, bus_url, engine_id, fetched.path / "model", draining)
        if model is None:
            return
        if model != Path(config.model.path):  # its size was not known before
            await asyncio.to_thread(refuse_small_devices, config, model)
        places = engine_process.EnginePlaces(
            run=config.run, bus_url=bus_url, bus=config.bus, model_dir=model, id=engine_id, devices=engine_devices
        )
        limits = engine_process.EngineLimits(drain_s=config.up.drain_s)
        with importing():
            factory = engine_factory(engine)
        await engine_process.run_engine(places, engine, draining, factory=factory, limits=limits)


def take_devices(config: RunConfig) -> "tuple[EngineConfig, Capabilities]":
    """Choose this engine's devices and hide the others, before CUDA is initialised. Raises DeviceError."""
    from tidemill.launch.checks.model import size_here
    from tidemill.launch.devices.demand import nccl_of_engine, own_place, refuse_expandable_engine
    from tidemill.launch.devices.visible import VARIABLE, this_node

    engine, node = config.engine, this_node(os.environ)
    place = own_place(node, config, size_here(config))
    if engine.colocated and place.uuids:
        refuse_expandable_engine(engine, os.environ)
    if node.devices:
        os.environ[VARIABLE] = ",".join(place.visible)
    if not place.uuids:
        return engine, Capabilities()
    if engine.kind == "sglang" and place.visible != place.uuids:
        arguments = {**engine.sglang.arguments, "base_gpu_id": place.base_index}
        engine = dataclasses.replace(engine, sglang=dataclasses.replace(engine.sglang, arguments=arguments))
    memory = [device.memory_bytes for device in node.devices if device.uuid in place.uuids]
    log.info("devices own=%s visible=%d", ",".join(place.uuids), len(place.visible))
    nccl = nccl_of_engine(engine)
    return engine, Capabilities(
        devices=place.uuids, visible_devices=place.visible, nccl=nccl, device_memory_bytes=min(memory)
    )


def refuse_small_devices(config: RunConfig, model: Path) -> None:
    """Raise Refused when this engine's devices lack the memory for a model. Blocks while nvidia-smi runs."""
    from tidemill.launch.checks.model import size_here
    from tidemill.launch.devices.demand import own_place
    from tidemill.launch.devices.visible import this_node

    own_place(this_node(os.environ), config, size_here(config, model))


async def config_on_bus(
    run: str, bus_url: str, role: str, process_id: str, draining: asyncio.Event, local: LocalSettings
) -> RunConfig | None:
    """Return the learner's configuration with the changes made here; None if drained first. Raises NotAllowed."""

    read = partial(config_of_run, role=role, id=process_id, allowed=local.allowed, changed=local.changed)
    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, run, BusConfig(), name=role, draining=draining)
        values = None if bus is None else await read(bus, draining)
    return None if values is None else from_row(values, run, local.changed)


async def model_here(config: RunConfig, bus_url: str, name: str, into: Path, draining: asyncio.Event) -> Path | None:
    """Return the model's directory if it is here, else a snapshot from the learner; None if drained first."""

    from tidemill.bus.liveness import Waiting
    from tidemill.weightstore.catch_up import fetch_model

    model = Path(config.model.path)
    if await asyncio.to_thread(_is_whole, model):
        return model
    log.info("no model on this machine path=%s; it is requested over the bus", model)
    async with AsyncExitStack() as stack:
        bus = await connected(stack, bus_url, config.run, config.bus, name=name, draining=draining)
        if bus is None:
            return None
        waiting = await stack.enter_async_context(Waiting(bus, first_row("engine", name), "the model from the learner"))
        await first_of(fetch_model(bus, into, engine=name, on_wait=waiting.set), draining.wait())
    return None if draining.is_set() else into


def _is_whole(model: Path) -> bool:
    """Return whether a model is here with its weights: an actor may have fetched the tokenizer of a name alone."""
    return (model / "config.json").exists() and any(model.glob("*.safetensors"))


async def run_actor(
    config: RunConfig | None, run: str, bus_url: str, actor_id: str, draining: asyncio.Event, local: LocalSettings
) -> None:
    """Work on a run's tasks. Without ``config``, the run's is read from the bus."""
    from tidemill.actors.actor import process

    become_undumpable()  # the user's code in its children has the same user id: it could read the bus's credentials
    run = run or await found_run(bus_url, "actor", draining)
    if not run:
        return
    actor_id = actor_id or default_id()
    if config is None and local.changed:
        config = await config_on_bus(run, bus_url, "actor", actor_id, draining, local)
        if config is None:
            return
    actor, bus, rollouts = None, None, None
    if config is not None:
        actor, bus = config.actor, config.bus
        model = config.model.path
        if config.rollouts:
            model = await asyncio.to_thread(tokenizer_here, await _as_the_run_has_it(config, run, bus_url))
        rollouts = RolloutPrograms(rollouts=config.rollouts, model=model)
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    await process.run_actor(
        bus_url, run, actor, bus, draining, actor_id, rollouts=rollouts, allowed=local.allowed, locate=tokenizer_here
    )


async def _as_the_run_has_it(config: RunConfig, run: str, bus_url: str) -> str:
    """Return ``model.path``, of a name of the hub with the commit in the run's row. Waits for the row."""
    from tidemill.launch.run.learner_process import began_with

    name = parse(MODEL, config.model.path)
    if name is None or name.is_pinned:
        return config.model.path
    row = await began_with(dataclasses.replace(config, run=run), bus_url, role="actor")
    return str(kept(name, parse(MODEL, str(row["model"]["path"])) if row else None))


def tokenizer_here(model: str) -> str:
    """Return ``model.path`` on this machine: of a pinned name the directory with its tokenizer, which is fetched if
    need be. Blocks. Raises HubRefused.
    """
    name = parse(MODEL, model)
    if name is None or not name.is_pinned:
        return model
    from tidemill.launch.hub.repository import fetch

    return fetch(name, MODEL_PATH, weights=False, tokenizer=True).name.path


async def run_scorer(
    config: RunConfig | None, run: str, bus_url: str, scorer_id: str, draining: asyncio.Event, local: LocalSettings
) -> None:
    """Compute a run's rewards for its actors. Without ``config``, the run's is read from the bus."""
    from tidemill.actors.scoring import ScorerPlace, run_scorer

    become_undumpable()  # as actors do
    run = run or await found_run(bus_url, "scorer", draining)
    if not run:
        return
    scorer_id = scorer_id or default_id()
    is_own_config = config is not None
    if config is None and local.changed:
        config = await config_on_bus(run, bus_url, "scorer", scorer_id, draining, local)
        if config is None:
            return
    host, advertise = local.host, local.advertise
    if config is not None:  # from the bus, addresses belong to another machine, unless they are changed here
        scorers, changed = config.actor.scorers, local.changed
        host = host or (scorers.host if is_own_config or "actor.scorers.host" in changed else "")
        advertise = advertise or (scorers.advertise if is_own_config or "actor.scorers.advertise" in changed else "")
    place = ScorerPlace(host=host or AUTO, advertise=advertise, port=local.port)
    actor, bus = (None, None) if config is None else (config.actor, config.bus)
    await run_scorer(bus_url, run, actor, bus, draining, scorer_id, place=place, allowed=tuple(local.allowed))


async def found_run(bus_url: str, name: str, draining: asyncio.Event) -> str:
    """Wait for the one run of a bus; return its name, empty if drained first. Raises SeveralRuns, BusUnavailable."""
    finding, _ = await first_of(find_run(bus_url, name=name, wait_s=LONG_WAIT_S), draining.wait())
    if finding.cancelled() or finding.exception() is not None:  # drained first
        return ""
    log.info("run found run=%s", finding.result())
    return str(finding.result())
