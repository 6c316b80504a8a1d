"""The bodies of ``tidemill router``, ``reward-server`` and ``teacher``; and the processes that ``tidemill up``
starts beside a run: its teachers, and its page, which neither delays nor ends it.

A teacher is the built-in engine alone, with one fixed model. It needs no bus, and has no version but 0.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidemill.actors.config import TeacherConfig, Teachers
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.section import read
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.output import STANDARD_OUTPUT, lossy
from tidemill.launch.run.process import launched
from tidemill.launch.run.workers import engine_factory, found_run
from tidemill.launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from tidemill.actors.config import EngineConfig, RouterConfig
    from tidemill.bus.system.limits import ProcessLimits


log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
URL_FILE = "dashboard.url"  # File in the run's directory with the address of its page
LOOK_S = 0.2
END_S = 2.0


async def run_router(
    config: "RouterConfig", run: str, bus_url: str, router_id: str, draining: asyncio.Event, *, drain_s: float
) -> None:
    """Serve one address for the engines of a run, and for those named in ``config``."""
    from tidemill.actors.router import server

    if bus_url:
        run = run or await found_run(bus_url, "router", draining)
        if not run:
            return
    await server.run_router(config, bus_url, run, router_id, draining, drain_s=drain_s)


async def run_reward_server(
    name: str,
    options: Mapping[str, object],
    limits: "ProcessLimits",
    draining: asyncio.Event,
    *,
    of_groups: bool,
    host: str,
    port: int,
    token: str,
) -> None:
    """Serve a reward, by name or import path, until drained. ``of_groups``: it is a reward of groups.

    Raises UnknownReward, BadRewardOption, RewardFailed, OSError.
    """
    from tidemill.actors.scoring import SCORE, SCORE_GROUP, RewardServer, serving
    from tidemill.bus.system.limits import become_undumpable
    from tidemill.rewards.scorers import opened, opened_group

    become_undumpable()
    async with AsyncExitStack() as stack:
        if of_groups:
            group_score = await stack.enter_async_context(opened_group(name, options, limits))
            server = RewardServer(name, None, group_score, token=token)
        else:
            server = RewardServer(name, await stack.enter_async_context(opened(name, options, limits)), token=token)
        url = await stack.enter_async_context(serving(server, host, port, insecure=True))
        print(f"reward {name} at {url}{SCORE_GROUP if of_groups else SCORE}", file=lossy(STANDARD_OUTPUT))
        await draining.wait()


async def run_teacher(model: Path, config: "EngineConfig", draining: asyncio.Event, *, drain_s: float) -> None:
    """Serve a model directory until drained. Raises UnsupportedModel, SnapshotBroken, EngineFailed, OSError."""
    engine = engine_factory(config)(model, config, version=0)
    await asyncio.to_thread(engine.load)
    try:
        url = await engine.start()
        engine.phase = "serving"
        await engine.probe()
        print(f"teacher {model} at {url}", file=lossy(STANDARD_OUTPUT))
        await first_of(draining.wait(), engine.failed())
        if not await engine.drain(drain_s):
            log.warning("requests left unanswered after %.0f s", drain_s)
    finally:
        await engine.close()


def placed(config: RunConfig, ports: ExitStack) -> RunConfig:
    """Return the configuration with a local address for every teacher that has a model; ``ports`` keep them.

    A port of an earlier start is used again if it is free.
    """
    teachers = {teacher.name: _entry(teacher, ports) for teacher in config.actor.teachers.values()}
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, teachers=read(Teachers, teachers)))


def _entry(teacher: TeacherConfig, ports: ExitStack) -> dict[str, object]:
    urls: Sequence[str] = teacher.servers
    if teacher.model:
        urls = [f"http://{LOOPBACK}:{ports.enter_context(_kept_port(urls)).number}"]
    values: dict[str, object] = {"urls": list(urls), "model": teacher.model, "when": dict(teacher.when)}
    return {name: value for name, value in values.items() if value}


def _kept_port(before: Sequence[str]) -> KeptPort:
    for url in before:
        parts = urlsplit(url)
        if parts.hostname == LOOPBACK and parts.port:
            try:
                return KeptPort(LOOPBACK, parts.port)
            except OSError:
                log.info("port taken, another one is used port=%d", parts.port)
    return KeptPort(LOOPBACK)


def commands(config: RunConfig) -> dict[str, list[str]]:
    """Return the arguments behind ``python -m tidemill`` of every teacher with a model, by the name of its process."""
    arguments = {}
    for teacher in config.actor.teachers.values():
        if teacher.model and teacher.servers:
            port = urlsplit(teacher.servers[0]).port
            words = ["--port", str(port), "--threads", str(config.engine.threads)]
            words += ["--device", "cpu", "--dtype", "float32"]
            arguments[f"teacher-{teacher.name}"] = ["teacher", teacher.model, *words]
    return arguments


async def keep_page(root: Path, run: str, bus_url: str, report: Callable[[str], None]) -> None:
    """Background loop: serve the page on a free port of loopback until cancelled, and report its address once.

    A page that ends is reported, and not started again: `tidemill dashboard` does that.
    """
    file = root / URL_FILE
    file.unlink(missing_ok=True)
    words = ["dashboard", "--run-dir", str(root), "--bus", bus_url, "--run", run, "--port", "0"]
    page = launched("dashboard", [*words, "--url-file", str(file)], root / "logs" / "dashboard.log")
    try:
        await page.start()
        ending = asyncio.create_task(page.wait(), name="dashboard")
        while not ending.done() and not file.exists():
            await asyncio.wait({ending}, timeout=LOOK_S)
        if file.exists():
            url, _, token = file.read_text().strip().partition("?")
            report(f"page of the run: {url}" + (f" (with its token in {file})" if token else ""))
        code = await ending
        report(f"the page of the run has ended with code {code}; log: {root}/logs/dashboard.log")
        await asyncio.Event().wait()
    except OSError as error:
        log.warning("the page of the run was not started: %s", error)
    finally:
        await page.end(END_S)
        file.unlink(missing_ok=True)
