"""A receiver of weights in a process of its own: SGLang's update paths over HTTP, real groups, a live row; no model.

It can be told to die or to hang (``kill`` or ``stop`` itself) at the first request of a phase after it serves a version.
"""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from bus.config import BusConfig
from bus.connection import connect
from bus.live import Heartbeat
from bus.messages import LiveRow
from weightstore.broadcast import BroadcastGroup
from weightstore.checksums import told_of
from weightstore.manifest import Manifest
from weightstore.staging import Staging, StagingPool

PATHS = {
    "/init_weights_update_group": "join",
    "/begin_weight_update": "begin",
    "/update_weights_from_distributed": "bucket",
    "/weights_checksums": "checksums",
    "/end_weight_update": "end",
    "/destroy_weights_update_group": "leave",
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How an engine of a test behaves."""

    phase: str = "serving"
    fails: str = ""
    """kill | stop | refuse | flip (a bit of the tensor received last) | "" = never."""
    at: str = ""
    """join | begin | bucket | checksums | end."""
    once_served: int = -1
    """Only when it serves this version or a later one."""
    only_once: bool = False
    mute: bool = False
    """It knows nothing of checksums."""


@dataclass
class Engine:
    behaviour: Behaviour
    version: int = 0
    epoch: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    standby: dict[str, torch.Tensor] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    groups: dict[str, BroadcastGroup] = field(default_factory=dict)
    failed: int = 0
    asked: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        body, phase = await request.json(), PATHS[request.path]
        if body["epoch"] < self.epoch:
            return web.json_response({"success": False, "epoch": self.epoch}, status=409)
        self.epoch = body["epoch"]
        if self._fails(phase):
            return web.json_response({"success": False, "message": f"refused at {phase}"}, status=400)
        answer = await getattr(self, phase)(body)
        return web.json_response({"success": True, **(answer or {})})

    def _fails(self, phase: str) -> bool:
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
        self.groups[body["group_name"]] = await asyncio.to_thread(
            BroadcastGroup.join,
            body["master_address"],
            body["master_port"],
            body["rank_offset"],
            body["world_size"],
            body["group_name"],
            body["backend"],
            body["timeout_s"],
        )

    async def begin(self, body: Mapping[str, Any]) -> None:
        self.received = set()

    async def bucket(self, body: Mapping[str, Any]) -> None:
        assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        group = self.groups[body["group_name"]]

        def receive() -> None:
            flat = group.receive(sum(sizes), body["timeout_s"])
            for name, dtype, shape, part in zip(body["names"], dtypes, body["shapes"], flat.split(sizes), strict=True):
                assert name not in self.received
                self.received.add(name)
                if name not in self.standby:
                    self.standby[name] = torch.empty(shape, dtype=dtype)
                self.standby[name].copy_(part.view(dtype).view(shape))

        await asyncio.to_thread(receive)

    async def checksums(self, body: Mapping[str, Any]) -> dict[str, Any]:
        assert body["of"] == "update" and self.received == self.standby.keys()
        self.asked += 1
        return told_of(self.standby).to_json()

    async def end(self, body: Mapping[str, Any]) -> dict[str, float]:
        assert self.received == self.standby.keys()
        self.tensors, self.standby = self.standby, self.tensors
        self.version = int(body["weight_version"])
        return {"stall_s": 0.001}

    async def leave(self, body: Mapping[str, Any]) -> None:
        group = self.groups.pop(body["group_name"], None)
        if group is not None:
            group.close()

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"version": self.version, "epoch": self.epoch, "digest": digest(self.tensors), "groups": len(self.groups), "asked": self.asked}
        )


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names and bytes."""
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
    row = LiveRow(role="engine", id=id, host="test", pid=os.getpid(), phase=behaviour.phase, address=url)
    async with connect(bus_url, run, BusConfig(), name=id, wait_s=10) as bus:
        async with Heartbeat(bus, row, every_s=0.5) as heartbeat:
            while heartbeat.written_s < 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ready.send(url)
            await asyncio.Event().wait()


def main(bus_url: str, run: str, id: str, behaviour: Behaviour, ready: Any) -> None:
    torch.set_num_threads(1)
    asyncio.run(serve(bus_url, run, id, behaviour, ready))


@contextmanager
def receivers(bus_url: str, run: str, behaviours: Mapping[str, Behaviour]) -> Iterator[dict[str, tuple[str, ForkServerProcess]]]:
    """A process for each, live on the bus: id -> (url, process). Killed in the end, whatever state they are in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.receiver_app"])
    started: dict[str, tuple[Any, ForkServerProcess]] = {}
    try:
        for id, behaviour in behaviours.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(bus_url, run, id, behaviour, theirs), daemon=True)
            process.start()
            theirs.close()
            started[id] = ours, process
        for id, (ours, _) in started.items():
            assert ours.poll(60), f"receiver {id} did not start"
        yield {id: (ours.recv(), process) for id, (ours, process) in started.items()}
    finally:
        for ours, process in started.values():
            process.kill()
            process.join()
            ours.close()


def tiny_tensors(seed: int, *, scale: int = 1) -> dict[str, torch.Tensor]:
    """Some tensors of mixed dtypes and odd sizes; about ``scale`` times 50 kB."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(64 * scale, 32, generator=generator),
        "model.layers.0.odd.weight": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "model.layers.0.up.weight": torch.randn(64, 96 * scale, generator=generator),
        "model.norm.weight": torch.randn(33, generator=generator),
        "model.scale": torch.tensor(float(seed)),
    }


def staged(tensors: Mapping[str, torch.Tensor]) -> Staging:
    """Ready to be pushed, in several buckets."""
    staging = StagingPool(Manifest.of(tensors.items()), 20_000).take(1)
    staging.fill(tensors.items())
    return staging


def write_tiny_companions(directory: Path) -> Path:
    """A model directory as far as a snapshot of it is concerned."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"old weights")
    return directory
