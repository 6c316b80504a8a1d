"""``tidemill teacher``: the built-in engine alone, with one fixed model; and the teachers that ``tidemill up`` starts.

A teacher needs no bus. Its weights never change, so it has no version but 0.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidemill.actors.config import TeacherConfig, Teachers
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.section import read
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.output import STANDARD_OUTPUT, lossy
from tidemill.launch.settings.run_config import RunConfig

if TYPE_CHECKING:
    from tidemill.actors.config import EngineConfig

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


async def run_teacher(model: Path, config: "EngineConfig", draining: asyncio.Event, *, drain_s: float) -> None:
    """Serve a model directory until drained. Raises UnsupportedModel, SnapshotBroken, EngineFailed, OSError."""
    from tidemill.launch.settings.wiring import engine_factory

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
            words = [
                "--port",
                str(port),
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--threads",
                str(config.engine.threads),
            ]
            arguments[f"teacher-{teacher.name}"] = ["teacher", teacher.model, *words]
    return arguments
