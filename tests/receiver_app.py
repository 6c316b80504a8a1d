"""A receiver of weights in a process of its own: SGLang's update paths over HTTP, real groups, handles, a live row; no
model.

It can be set to die or to hang (``kill`` or ``stop`` itself) at the first request of a phase after it serves a version.
"""

import asyncio
import hashlib
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from aiohttp import web

from tests.forked import Forked, piped
from tests.waits import until
from tidemill.actors.errors import CannotTell, StaleEpoch, UpdateRefused
from tidemill.actors.serving.handles import HandleListener
from tidemill.actors.serving.updates import Updates
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import connect
from tidemill.bus.system.coroutines import new_event_loop
from tidemill.bus.wire.rows import Capabilities, LiveRow
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.checksums import ChecksumReport, report_checksums
from tidemill.weightstore.format.manifest import Bucket, Manifest, unflatten
from tidemill.weightstore.transport.broadcast import BroadcastGroup
from tidemill.weightstore.transport.handles import HostMemory, Offered, shared_memory_domain
from tidemill.weightstore.transport.staging import Staging, StagingPool

PATHS = {
    "/init_weights_update_group": "join",
    "/begin_weight_update": "begin",
    "/update_weights_from_distributed": "bucket",
    "/weights_checksums": "checksums",
    "/end_weight_update": "end",
    "/receive_push": "push",
    "/destroy_weights_update_group": "leave",
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Behaviour of an engine in a test."""

    phase: str = "serving"
    fails: str = ""
    """Failure: kill | stop | refuse | flip (a bit of the tensor received last) | "" = none."""
    at: str = ""
    """Phase of the failure: join | begin | bucket | checksums | end."""
    once_served: int = -1
    """Version from which on it fails, once it serves that one or a later one."""
    only_once: bool = False
    mute: bool = False
    """True = it has no checksums."""
    ranks: int = 1
    """Size of its process group, all behind one URL and in one process: a stand-in for tensor parallelism."""
    at_once: bool = True
    """True = it receives a push in a single request, as the built-in engine does, unlike SGLang."""
    handles: str = "here"
    """Handles in its live row: here | blind (here, but it cannot read them) | odd (no URL) | elsewhere (another host) |
    "" = none.
    """


@dataclass
class Engine:
    behaviour: Behaviour
    version: int = 0
    epoch: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    standby: dict[str, torch.Tensor] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    flats: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    """Memory of the standby copy: names of a bucket -> its bytes."""
    served_flats: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    receiving: set[tuple[str, ...]] = field(default_factory=set)
    """Buckets in transfer, by their names."""
    groups: dict[str, list[BroadcastGroup]] = field(default_factory=dict)
    threads: dict[str, list[ThreadPoolExecutor]] = field(default_factory=dict)
    failed: int = 0
    asked: int = 0
    ended: list[int] = field(default_factory=list)
    """Versions, in the order in which they were served."""
    read: int = 0
    """Number of buckets that came as handles."""

    async def handle(self, request: web.Request) -> web.Response:
        body, phase = await request.json(), PATHS[request.path]
        if body["epoch"] < self.epoch:
            return web.json_response({"success": False, "epoch": self.epoch}, status=409)
        self.epoch = body["epoch"]
        try:
            answer = await self.asked_to(phase, body)
        except UpdateRefused as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, **(answer or {})})

    async def asked_to(self, phase: str, body: Mapping[str, Any]) -> Any:
        if self.fails(phase):
            raise UpdateRefused(f"refused at {phase}")
        return await getattr(self, phase)(body)

    async def push(self, body: Mapping[str, Any]) -> dict[str, Any]:
        await self.asked_to("begin", body)
        joined = dict(self.groups)
        common = {name: body[name] for name in ("group_name", "timeout_s")} | {
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        for told in body["buckets"]:
            self.refuse_without(joined[(common | told)["group_name"]])
            await self.asked_to("bucket", common | told)
        return await self.asked_to("end", body) if body["serve"] else {}

    def fails(self, phase: str) -> bool:
        behaviour = self.behaviour
        if phase != behaviour.at or self.version < behaviour.once_served or (behaviour.only_once and self.failed):
            return False
        self.failed += 1
        if behaviour.fails == "refuse":
            return True
        if behaviour.fails == "flip":
            self.standby[max(self.received)].view(-1).view(torch.uint8)[-1] ^= 1
            return False
        os.kill(os.getpid(), SIGNALS[behaviour.fails])
        return False

    async def join(self, body: Mapping[str, Any]) -> None:
        first = body["rank_offset"]
        self.threads[body["group_name"]] = [ThreadPoolExecutor(1) for _ in range(self.behaviour.ranks)]
        self.groups[body["group_name"]] = await asyncio.gather(
            *[
                asyncio.to_thread(
                    BroadcastGroup.join,
                    body["master_address"],
                    body["master_port"],
                    rank,
                    body["world_size"],
                    body["group_name"],
                    body["backend"],
                    body["timeout_s"],
                )
                for rank in range(first, first + self.behaviour.ranks)
            ]
        )

    async def begin(self, body: Mapping[str, Any]) -> None:
        self.received, self.standby = set(), {}
        if self.receiving:  # of an interrupted push: its memory may yet be written
            self.flats, self.receiving = {}, set()

    async def bucket(self, body: Mapping[str, Any]) -> None:
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        groups = self.groups[body["group_name"]]

        names = tuple(body["names"])
        if names not in self.flats:
            self.flats[names] = torch.empty(sum(sizes), dtype=torch.uint8)
        flat, receiving = self.flats[names], self.receiving
        receiving.add(names)
        loop, into = asyncio.get_running_loop(), [flat] + [None] * (len(groups) - 1)
        flats = await asyncio.gather(
            *[
                loop.run_in_executor(thread, group.receive, sum(sizes), body["timeout_s"], place)
                for thread, group, place in zip(self.threads[body["group_name"]], groups, into, strict=True)
            ]
        )
        self.refuse_without(groups)
        receiving.discard(names)
        assert all(torch.equal(other, flat) for other in flats[1:])
        for name, dtype, shape, part in zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True):
            assert name not in self.received
            self.received.add(name)
            self.standby[name] = part.view(dtype).view(shape)

    def refuse_without(self, groups: list[BroadcastGroup]) -> None:
        """Raise UpdateRefused when it has left these groups: the request is of a push that was broken off, and the next
        one has others.

        Gloo ends the process that receives another message than it expects.
        """
        if not any(own is groups for own in self.groups.values()):
            raise UpdateRefused("the group was left meanwhile")

    def store(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Store a bucket that came as a handle."""
        names = tuple(spec.name for spec in bucket.specs)
        if names not in self.flats:
            self.flats[names] = torch.empty_like(flat)
        self.flats[names].copy_(flat)
        for name, tensor in unflatten(bucket, self.flats[names]):
            assert name not in self.received
            self.received.add(name)
            self.standby[name] = tensor

    async def checksums(self, body: Mapping[str, Any]) -> dict[str, Any]:
        assert body["of"] == "update" and self.received == self.standby.keys()
        self.asked += 1
        return report_checksums(self.standby).to_json()

    async def end(self, body: Mapping[str, Any]) -> dict[str, float]:
        assert self.received == self.standby.keys()
        self.tensors, self.flats, self.served_flats = self.standby, self.served_flats, self.flats
        self.version = int(body["weight_version"])
        self.ended.append(self.version)
        return {"stall_s": 0.001}

    async def leave(self, body: Mapping[str, Any]) -> None:
        for group in self.groups.pop(body["group_name"], []):
            group.close()

    async def state(self, request: web.Request) -> web.Response:
        told = {
            "version": self.version,
            "epoch": self.epoch,
            "digest": digest(self.tensors),
            "asked": self.asked,
            "read": self.read,
        }
        sizes = [groups[0].world_size for groups in self.groups.values()]
        return web.json_response(told | {"groups": len(self.groups), "ended": self.ended, "sizes": sizes})


@dataclass
class ByHandles:
    """An engine as an object that ``tidemill.actors.serving.handles`` drives."""

    engine: Engine

    def require_current_epoch(self, epoch: int | None, what: str) -> None:
        assert epoch is not None
        if epoch < self.engine.epoch:
            raise StaleEpoch(what, epoch, self.engine.epoch)
        self.engine.epoch = epoch
        if what not in ("begin", "bucket", "end"):  # which are also steps of a push in one request
            self.fail_at(what)

    def fail_at(self, phase: str) -> None:
        if self.engine.fails(phase):
            raise UpdateRefused(f"refused at {phase}")

    async def run_shielded(self, operation: Coroutine[Any, Any, Any]) -> Any:
        return await operation

    async def begin(self, version: int | None, *, adapter: None) -> None:
        self.fail_at("begin")
        await self.engine.begin({})

    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        self.fail_at("bucket")
        if self.engine.behaviour.handles == "blind":
            raise BadManifest("handle: device", "no GPU", "one")
        self.engine.read += 1
        await asyncio.to_thread(lambda: self.engine.store(bucket, offered.tensor()))

    async def checksum_report(self, *, of: str) -> tuple[int, ChecksumReport]:
        if self.engine.behaviour.mute:
            raise CannotTell("", "mute")
        return 0, ChecksumReport.parse(await self.engine.checksums({"of": of}))

    async def end(self, version: int | None) -> float:
        self.fail_at("end")
        return (await self.engine.end({"weight_version": version}))["stall_s"]


async def handles_of(engine: Engine) -> str:
    """Return the address at which it receives handles."""
    if engine.behaviour.handles in ("", "odd"):
        return engine.behaviour.handles and "odd://nowhere"
    return await HandleListener(cast(Updates, ByHandles(engine))).start()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


async def serve(bus_url: str, run: str, id: str, behaviour: Behaviour, ready: Any) -> None:
    engine = Engine(behaviour)
    app = web.Application()
    app.router.add_get("/state", engine.state)
    for path in PATHS if not behaviour.mute else PATHS.keys() - {"/weights_checksums"}:
        app.router.add_post(path, engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    row = LiveRow(
        role="engine",
        id=id,
        host="test",
        pid=os.getpid(),
        phase=behaviour.phase,
        address=url,
        handles=await handles_of(engine),
        place="elsewhere" if behaviour.handles in ("", "elsewhere") else shared_memory_domain(),
        capabilities=Capabilities(ranks=behaviour.ranks, single_request_push=behaviour.at_once),
    )
    async with connect(bus_url, run, BusConfig(), name=id, wait_s=START_S) as bus:
        async with HeartbeatPublisher(bus, row, every_s=0.5) as heartbeat:
            await until(lambda: heartbeat.written_s >= 0)
            ready.send(url)
            await asyncio.Event().wait()


START_S = 200.0
"""Seconds to wait for a start: the first one imports Megatron, on a busy machine for half a minute."""


def main(bus_url: str, run: str, id: str, behaviour: Behaviour, ready: Any) -> None:
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # like an engine's process
        runner.run(serve(bus_url, run, id, behaviour, ready))


@contextmanager
def receivers(bus_url: str, run: str, behaviours: Mapping[str, Behaviour]) -> Iterator[dict[str, tuple[str, Forked]]]:
    """Run a process for each, live on the bus; yield id -> (url, process). They are killed at the end, whatever their
    state.

    The output of those that have ended before is printed.
    """
    with ExitStack() as stack:
        started = {
            id: stack.enter_context(piped(main, bus_url, run, id, behaviour)) for id, behaviour in behaviours.items()
        }
        for id, (ours, process) in started.items():
            assert ours.poll(START_S), f"receiver {id} did not start:\n{process.output.read_text()}"
        try:
            yield {id: (_url_from(ours, process), process) for id, (ours, process) in started.items()}
        finally:
            for id, (_, process) in started.items():
                if process.returncode is not None:
                    print(f"receiver {id} ended with {process.returncode}:\n{process.output.read_text()[-4000:]}")


def _url_from(ours: Any, process: Forked) -> str:
    try:
        return str(ours.recv())
    except EOFError:
        raise AssertionError(f"a receiver ended before it was ready:\n{process.output.read_text()}") from None


def tiny_tensors(seed: int, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """Return tensors of mixed dtypes and odd sizes; about ``scale`` times 50 kB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64 * scale, 32, generator=generator),
        "model.layers.0.odd.weight": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "model.layers.0.up.weight": torch.randn(64, 96 * scale, generator=generator),
        "model.norm.weight": torch.randn(33, generator=generator),
        "model.scale": torch.tensor(float(seed)),
    }


def staged(tensors: Mapping[str, torch.Tensor], memory: HostMemory | None = None) -> Staging:
    """Return a staging copy in several buckets, ready to be pushed."""
    staging = StagingPool(Manifest.of(tensors.items()), 20_000, memory=memory).take(1)
    staging.fill(tensors.items())
    return staging


def write_tiny_companions(directory: Path) -> Path:
    """Write the files of a model directory that a snapshot needs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"old weights")
    return directory
