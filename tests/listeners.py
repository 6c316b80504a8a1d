"""The HTTP listeners of all roles, really listening, and the table of their routes and keys in ``docs/security.md``.

``python -m tests.listeners`` prints the table.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from tests.episode_kit import task
from tests.router_kit import faulty
from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig, RouterConfig, SglangConfig
from tidemill.actors.episodes.episode import Episode
from tidemill.actors.episodes.gateway import Gateway
from tidemill.actors.router.server import RouterServer
from tidemill.actors.router.token_history import ModelText
from tidemill.actors.scoring import RewardServer
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.sglang.arguments import release_of
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.config import BusConfig
from tidemill.bus.http.access import Access, RunAccess, TokenAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.keys import Keys, RunKeys
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.launch.deploy.probes import Probes
from tidemill.launch.metrics.prometheus import RunState, listener_of
from tidemill.launch.page.access import PageAccess
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.commands import commands
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.samples import SampleAnswers
from tidemill.launch.page.server import PageServer
from tidemill.learner.checkpoints.node_copies import CheckpointServer
from tidemill.rewards.registry import load
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.format.manifest import Manifest
from tidemill.weightstore.push.snapshots import SnapshotServer
from tidemill.weightstore.store.registry import VersionRegistry
from tidemill.weightstore.transport.part_server import PartServer

KEYS = Keys.of("s3cret")
RUN = RunKeys.fixed(KEYS)
FAR = Reach("0.0.0.0", "127.0.0.1")
"""An address that other machines reach: requests need the api key."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A listener, and a request to it."""

    listener: Listener
    url: str
    request: str
    """Method and path."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The key that the request needs; empty = none."""

    @property
    def takes_json(self) -> bool:
        return self.request.startswith("POST")


Opened = Callable[[Path], AbstractAsyncContextManager[Place]]


@asynccontextmanager
async def _engine(made: Callable[[EngineConfig, Authority], Any], authority: Authority) -> AsyncIterator[Place]:
    far = authority.keys is not None
    engine = made(EngineConfig(host=FAR.bind if far else "127.0.0.1", advertise=FAR.advertised), authority)
    await asyncio.to_thread(engine.load)
    try:
        url = await engine.start()
        engine.phase = "serving"
        yield Place(
            listener=engine.server.listener, url=url, request="POST /generate", headers=KEYS.headers if far else {}
        )
    finally:
        await engine.close()


@asynccontextmanager
async def engine(model_dir: Path) -> AsyncIterator[Place]:
    async with _engine(
        lambda config, authority: BuiltinEngine(model_dir, config, authority=authority), Authority(RUN)
    ) as place:
        yield place


@asynccontextmanager
async def teacher(model_dir: Path) -> AsyncIterator[Place]:
    """As ``tidemill.launch.run.servers`` opens it: without keys."""
    async with _engine(
        lambda config, authority: BuiltinEngine(model_dir, config, authority=authority), Authority()
    ) as place:
        yield place


@asynccontextmanager
async def sglang(model_dir: Path) -> AsyncIterator[Place]:
    async with faulty() as server:
        server.does = "generate"

        def made(config: EngineConfig, authority: Authority) -> SglangEngine:
            settings = EngineConfig(
                kind="sglang", host=config.host, advertise=config.advertise, sglang=SglangConfig(url=server.url)
            )
            return SglangEngine(model_dir, settings, release=release_of("e", "0.5.23"), authority=authority)

        async with _engine(made, Authority(RUN)) as place:
            yield place


@asynccontextmanager
async def _router(keys: RunKeys | None, at: Reach) -> AsyncIterator[Place]:
    async with faulty() as server:
        router = RouterServer(RouterConfig(workers=(server.url,), host=at.bind, advertise=at.advertised), None, keys)
        url = await router.start()
        try:
            yield Place(
                listener=router.listener,
                url=url,
                request="POST /abort_request",
                headers={} if keys is None else KEYS.headers,
            )
        finally:
            await router.close()


@asynccontextmanager
async def router(model_dir: Path) -> AsyncIterator[Place]:
    async with _router(RUN, FAR) as place:
        yield place


@asynccontextmanager
async def lone_router(model_dir: Path) -> AsyncIterator[Place]:
    async with _router(None, HERE) as place:
        yield place


@asynccontextmanager
async def gateway(model_dir: Path) -> AsyncIterator[Place]:
    opened = Gateway(ModelText.read(str(model_dir), "model.path"), cast(Any, None))
    url = await opened.start()
    try:
        async with opened.opened(Episode(task(), 0, "n0"), max_calls_in_flight=1) as key:
            yield Place(
                listener=opened.listener, url=url, request="POST /reward", headers={"Authorization": f"Bearer {key}"}
            )
    finally:
        await opened.close()


@asynccontextmanager
async def _scoring(access: Access, at: Reach, headers: Mapping[str, str]) -> AsyncIterator[Place]:
    server = RewardServer("exact", load("exact"), access=access)
    listener = server.listener()
    try:
        url = await listener.start(at.bind, 0, advertise=at.advertised)
        yield Place(listener=listener, url=url, request="POST /score", headers=headers)
    finally:
        await listener.close()


@asynccontextmanager
async def scorer(model_dir: Path) -> AsyncIterator[Place]:
    async with _scoring(RunAccess(RUN), FAR, KEYS.headers) as place:
        yield place


@asynccontextmanager
async def reward_server(model_dir: Path) -> AsyncIterator[Place]:
    async with _scoring(TokenAccess("t0ken"), FAR, {"Authorization": "Bearer t0ken"}) as place:
        yield place


@asynccontextmanager
async def open_reward_server(model_dir: Path) -> AsyncIterator[Place]:
    async with _scoring(TokenAccess(""), HERE, {}) as place:
        yield place


class _NoVersions:
    async def snapshot(self) -> None:
        return None


@asynccontextmanager
async def snapshots(model_dir: Path) -> AsyncIterator[Place]:
    directory = model_dir.parent / "snapshots"
    store = SnapshotServer(directory, cast(VersionRegistry, _NoVersions()), keep=1, model_dir=None, at=FAR, keys=RUN)
    await store.open()
    (directory / "file").write_text("x")
    try:
        assert store.listener is not None
        yield Place(listener=store.listener, url=store.url, request="GET /file", headers=KEYS.headers)
    finally:
        await store.close()


@asynccontextmanager
async def parts(model_dir: Path) -> AsyncIterator[Place]:
    server = PartServer(Manifest.of({"w": torch.zeros(4)}.items()), WeightsConfig(), rank=1, at=HERE)
    with closing(server):
        listener = server.listener()
        url = await listener.start("127.0.0.1", 0)
        try:
            yield Place(listener=listener, url=url, request="POST /differences", headers=Keys.of(server._key).headers)
        finally:
            await listener.close()


@asynccontextmanager
async def checkpoints(model_dir: Path) -> AsyncIterator[Place]:
    listener = Listener(CheckpointServer(model_dir.parent, node=0).routes, RunAccess(RUN))
    try:
        url = await listener.start(FAR.bind, 0, advertise=FAR.advertised)
        yield Place(listener=listener, url=url, request="GET /checkpoints", headers=KEYS.headers)
    finally:
        await listener.close()


@asynccontextmanager
async def _page(access: PageAccess, request: str, *, operator: bool) -> AsyncIterator[Place]:
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), BusConfig(port=-1)) as server:
        async with connect(server.url, "listeners", name="page") as bus:
            await bus.create_layout()
            reader = RunReader(bus, held=64)
            reader.loaded.set()
            compared = ComparedRuns(server.url, "listeners")
            routes = commands(bus) if operator else None
            page = PageServer(reader, RunAnswers(reader), SampleAnswers(reader), access, compared, routes)
            async with page.serving("127.0.0.1", 0) as url:
                cookie = f"{access.cookie_name}={access.cookie('operator' if operator else 'viewer')}"
                headers = {"Cookie": cookie, "Origin": "http://localhost"}
                yield Place(listener=page.listener, url=url, request=request, headers=headers)


@asynccontextmanager
async def page(model_dir: Path) -> AsyncIterator[Place]:
    async with _page(PageAccess("v" * 16, "", []), "GET /api/run", operator=False) as place:
        yield place


@asynccontextmanager
async def operators_page(model_dir: Path) -> AsyncIterator[Place]:
    async with _page(PageAccess("v" * 16, "o" * 16, []), "POST /do/scale", operator=True) as place:
        yield place


@asynccontextmanager
async def _scraped(listener: Listener, token: str, at: Reach, *, insecure: bool = False) -> AsyncIterator[Place]:
    url = await listener.start(at.bind, 0, advertise=at.advertised, insecure=insecure)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        yield Place(listener=listener, url=url, request="GET /metrics", headers=headers)
    finally:
        await listener.close()


@asynccontextmanager
async def metrics(model_dir: Path) -> AsyncIterator[Place]:
    async with _scraped(listener_of(RunState(run="listeners"), "t0ken"), "t0ken", FAR) as place:
        yield place


@asynccontextmanager
async def open_metrics(model_dir: Path) -> AsyncIterator[Place]:
    async with _scraped(listener_of(RunState(run="listeners")), "", HERE) as place:
        yield place


def _probes(token: str, at: Reach) -> AbstractAsyncContextManager[Place]:
    return _scraped(Probes([], asyncio.Event()).listener(at.bind, token), token, at, insecure=True)


@asynccontextmanager
async def probes(model_dir: Path) -> AsyncIterator[Place]:
    async with _probes("t0ken", FAR) as place:
        yield place


@asynccontextmanager
async def open_probes(model_dir: Path) -> AsyncIterator[Place]:
    async with _probes("", HERE) as place:
        yield place


ROLES: dict[str, Opened] = {
    "engine, built-in": engine,
    "engine, SGLang": sglang,
    "teacher": teacher,
    "router of a run": router,
    "router without a run": lone_router,
    "gateway of an actor": gateway,
    "scorer": scorer,
    "reward-server with a token": reward_server,
    "reward-server without a token": open_reward_server,
    "snapshots of the learner": snapshots,
    "part of the weights in a rank, with a key of its own": parts,
    "checkpoints of a node": checkpoints,
    "metrics for Prometheus, with a token": metrics,
    "metrics for Prometheus, without a token": open_metrics,
    "probes of a process, with a token": probes,
    "probes of a process, without a token": open_probes,
    "page of a run, with a token": page,
    "page of an operator": operators_page,
}
"""The listeners by their names in ``docs/security.md``."""


def rows(role: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield the rows of a listener's table: the routes of every key, by their method."""
    by_key: dict[str, dict[str, list[str]]] = {}
    for route, key in sorted(keys.items()):
        method, path = route.split(" ", 1)
        by_key.setdefault(key, {}).setdefault(method.replace("*", "any method"), []).append(f"`{path}`")
    for key, methods in sorted(by_key.items()):
        routes = "; ".join(f"{method} {', '.join(paths)}" for method, paths in methods.items())
        yield f"| {role} | {key} | {routes} |"


async def table(model_dir: Path) -> str:
    """Return the table of all listeners."""
    lines = ["| listener | key | routes |", "|---|---|---|"]
    for role, opened in ROLES.items():
        async with opened(model_dir) as place:
            lines += rows(role, place.listener.keys)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(asyncio.run(table(write_tiny_model(Path(directory) / "model", max_position_embeddings=64))), end="")
