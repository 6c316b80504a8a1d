"""A real SGLang server on this machine's CPU, for tests: started as in launch/configs/sglang-cpu.yaml."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.engine_serving import Served
from tests.waits import LIMIT_S
from tests.whole.running import ROOT
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.arguments import Release, release_of
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.server_process import Api

CONTEXT = 4096

OVERLAY = ROOT / "launch/configs/sglang-cpu.yaml"
_SGLANG: dict[str, Any] = yaml.safe_load(OVERLAY.read_text())["engine"]["sglang"]
ARGUMENTS: dict[str, Any] = _SGLANG["arguments"]
ENVIRONMENT: dict[str, str] = _SGLANG["environment"] | {"PYTHONPATH": str(ROOT / _SGLANG["environment"]["PYTHONPATH"])}


def config(python: str, *, url: str = "", log: str = "", pause: str = "in_place") -> EngineConfig:
    """Return the configuration of an engine with a server on CPU, in fp32."""
    sglang = SglangConfig(python=python, arguments=ARGUMENTS, environment=ENVIRONMENT, url=url, log=log, pause=pause)
    return EngineConfig(kind="sglang", max_running=16, sglang=sglang)


@asynccontextmanager
async def serving(python: str, server: str, directory: Path, *, pause: str = "in_place") -> AsyncIterator[Served]:
    """Serve the weights of ``directory`` as version 0 through a proxy of one test in front of the server."""
    engine = SglangEngine(
        directory, config(python, url=server, pause=pause), version=-1, authority=Authority(unguarded=True)
    )
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start())
    try:
        await engine.load_snapshot(directory, 0)
        engine.phase = "serving"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Served(engine, client, session)  # type: ignore[arg-type]
    finally:
        await client.close()
        await engine.close()


async def release_at(server: str) -> Release:
    api = Api(server)
    try:
        return release_of(server, (await api.call("GET", "/server_info"))["version"])
    finally:
        await api.close()
