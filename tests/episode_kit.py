"""Episodes on a real engine, with programs that run in this process: children have tests of their own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from tests.engine_serving import Served, serving
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.engines.responses import Responses
from tidemill.actors.engines.server_discovery import UrlDiscovery
from tidemill.actors.engines.server_pool import EnginePool
from tidemill.actors.episodes.gateway import Gateway
from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.actors.router.token_history import ModelText
from tidemill.actors.text.rendering import Renderer
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.streams.episode_turns import TurnStream
from tidemill.bus.wire.messages import Sampling, Task
from tidemill.bus.wire.task_settings import Budget


@dataclass
class Client:
    """The model as a program sees it."""

    session: aiohttp.ClientSession
    base_url: str
    api_key: str
    task: Mapping[str, Any]

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.root + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, *messages: tuple[str, str], **more: Any) -> dict[str, Any]:
        """Return the answer to (role, content) messages."""
        status, answer = await self.post("/v1/chat/completions", chat(*messages, **more))
        assert status == 200, answer
        return dict(answer)


def chat(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def said(answer: Mapping[str, Any], place: int = 0) -> str:
    return str(answer["choices"][place]["message"]["content"])


Program = Callable[[Client], Awaitable[Any]]


@dataclass
class InProcess:
    """``Programs`` of functions in this process."""

    session: aiohttp.ClientSession
    program: Program
    clients: list[Client] = field(default_factory=list)

    async def run(self, episode: str, *, base_url: str, api_key: str, task: Mapping[str, Any]) -> EpisodeResult:
        client = Client(self.session, base_url, api_key, task)
        self.clients.append(client)
        try:
            found = await self.program(client)
        except Exception as error:
            raise ProgramFailed(repr(error)) from error
        return found if isinstance(found, EpisodeResult) else EpisodeResult(value=found)


@dataclass
class Stage:
    """A rollout with all that it needs."""

    served: Served
    engines: EnginePool
    responses: Responses
    gateway: Gateway
    programs: InProcess
    rollout: ProgramRollout
    session: aiohttp.ClientSession


def task(
    *,
    budget: Budget | None = None,
    seed: int | None = 7,
    chat_template_args: dict[str, Any] | None = None,
    **sampling: Any,
) -> Task:
    return Task(
        id=5,
        run="r",
        epoch=1,
        prompt="What is three plus four?",
        prompt_tokens=np.array([3, 4], np.int32),
        group_size=4,
        sampling=Sampling(**{"temperature": 0.8, "max_new_tokens": 12, "seed": seed, **sampling}),
        prompt_epoch=0,
        offset=0,
        label="seven",
        metadata={"topic": "sums"},
        rollout="agent",
        budget=budget,
        chat_template_args=chat_template_args,
    )


@asynccontextmanager
async def stage(
    model_dir: Path,
    program: Program,
    *,
    max_calls: int = 16,
    timeout_s: float = 60.0,
    turns: TurnStream | None = None,
    again: str = "restart",
    unlogged: Literal["continue", "fail"] = "continue",
    at: Reach = HERE,
    renderer: Renderer | None = None,
    untrained_models: tuple[str, ...] = (),
    client: Callable[[str], HttpEngine] = HttpEngine,
) -> AsyncIterator[Stage]:
    async with serving(model_dir) as served, aiohttp.ClientSession() as session:
        engines = EnginePool(UrlDiscovery([served.engine.url], client), client)
        running = asyncio.create_task(engines.run())
        responses = Responses(engines, timeout_s=timeout_s, retries=3, activity=Activity())
        gateway = Gateway(ModelText.read(str(model_dir), "model.path"), responses, renderer, untrained_models)
        await gateway.start(at)
        programs = InProcess(session, program)
        try:
            config = RolloutConfig(
                use="agent:own:program", max_calls_in_flight=max_calls, again=again, unlogged=unlogged
            )
            rollout = ProgramRollout(gateway, programs, config, turns)
            yield Stage(served, engines, responses, gateway, programs, rollout, session)
        finally:
            await gateway.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
