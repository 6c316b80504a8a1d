"""Pushes by handles: the engines that get them, the learner's memory after deaths, and the requests that an engine
refuses.
"""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import torch
import zmq.asyncio

from tests.engine_serving import Served, greedy, prompts, serving
from tests.handle_push import joined_by_handles
from tests.integration.test_weightstore_publisher import GOOD, publishing, state
from tests.receiver_app import Behaviour, ByHandles, Engine, digest, receivers, staged, tiny_tensors
from tests.refusals import refusal
from tests.tiny_models import tiny_model, write_tiny_model
from tests.waits import LIMIT_S, poll, until
from tidemill.actors.errors import UpdateRefused
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.handles import HandleListener
from tidemill.actors.serving.updates import Updates
from tidemill.bus.errors import Fenced
from tidemill.weightstore.errors import BadManifest, ReceiverFailed
from tidemill.weightstore.format.manifest import Bucket, TensorSpec
from tidemill.weightstore.transport.handle_receiver import HandleReceiver
from tidemill.weightstore.transport.handles import HostMemory, Mapped, Offered
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import Staging

MEMFD = "memfd:tidemill-staging"


def maps_of(pid: int) -> int:
    """Count the mappings of any learner's memory in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count(MEMFD)


# -- whole pushes


def test_engines_elsewhere_are_pushed_to_by_broadcast_and_named_once(
    bus_url: str, run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Behaviour(handles="", fails="refuse", at="bucket", only_once=True)  # evicted once, and taken in again
    behaviours = {"here": GOOD, "elsewhere": Behaviour(handles="elsewhere"), "old": old}
    with (
        receivers(bus_url, run_id, behaviours) as engines,
        caplog.at_level(logging.WARNING, logger="tidemill.weightstore.transport.handle_receiver"),
    ):
        with publishing(bus_url, run_id, tmp_path, transport="handles", verify="always") as publisher:
            reports = [publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0) for step in (1, 2, 3)]
            assert [report.engines for report in reports] == [
                ("elsewhere", "here"),
                *[("elsewhere", "here", "old")] * 2,
            ]
            assert [report.verified for report in reports] == [report.engines for report in reports]
            assert sorted(reports[-1].gb_per_s) == ["gloo", "host_handles"]
        states = {id: state(url) for id, (url, _) in engines.items()}
    assert {each["digest"] for each in states.values()} == {digest(tiny_tensors(3))}
    assert {id: bool(each["read"]) for id, each in states.items()} == {"here": True, "elsewhere": False, "old": False}
    said = re.findall(r"no handles for this engine.* engine=(\w+)", caplog.text)
    assert sorted(said) == ["elsewhere", "old"], caplog.text


@pytest.mark.parametrize("at_once", [True, False])
def test_an_engine_that_cannot_read_handles_is_pushed_to_by_broadcast_from_the_next_push_on(
    bus_url: str, run_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    behaviours = {
        "good": Behaviour(at_once=at_once),
        "blind": Behaviour(handles="blind", at_once=at_once),
        "odd": Behaviour(handles="odd", at_once=at_once),
    }
    with receivers(bus_url, run_id, behaviours) as engines:
        with publishing(bus_url, run_id, tmp_path, transport="handles", verify="always") as publisher:
            reports = [publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0) for step in (1, 2, 3)]
            assert [report.engines for report in reports] == [("good", "odd"), *[("blind", "good", "odd")] * 2]
            assert "handle: device: want no GPU, got one" in reports[0].evicted["blind"]
        states = {id: state(url) for id, (url, _) in engines.items()}
    assert {each["digest"] for each in states.values()} == {digest(tiny_tensors(3))}
    assert {id: bool(each["read"]) for id, each in states.items()} == {"good": True, "blind": False, "odd": False}
    assert re.findall(r"no handles for this engine.* engine=(\w+) reason=it cannot take them", caplog.text) == [
        "odd",
        "blind",
    ]


def test_a_stopped_engine_that_wakes_up_later_serves_no_torn_weights(bus_url: str, run_id: str, tmp_path: Path) -> None:
    """It continues with a bucket of an abandoned push, from memory that has been overwritten since."""
    slow = Behaviour(fails="stop", at="bucket", once_served=1, only_once=True)
    with receivers(bus_url, run_id, {"slow": slow, "good": GOOD}) as engines:
        with publishing(bus_url, run_id, tmp_path, transport="handles", phase_deadline_s=8.0) as publisher:
            url, process = engines["slow"]
            assert publisher.publish(1, tiny_tensors(1).items(), wait=True).result(0).engines == ("good", "slow")
            assert (
                publisher.publish(2, tiny_tensors(2).items(), wait=True)
                .result(0)
                .evicted["slow"]
                .startswith("transfer: no answer")
            )
            for step in (3, 4):  # both copies are used again while it is stopped
                assert publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0).engines == ("good",)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
            assert (state(url)["version"], state(url)["digest"]) == (1, digest(tiny_tensors(1)))
            deadline, step = time.monotonic() + LIMIT_S, 5
            while "slow" not in publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0).engines:
                assert time.monotonic() < deadline
                step += 1
            assert state(url)["digest"] == digest(tiny_tensors(step))
            assert state(url)["groups"] == 0, "it was slow: it is still asked by handles"


PUSHES_FOR_EVER = """
import sys
from pathlib import Path
from tests.receiver_app import tiny_tensors
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.push.publisher import Publisher
url, run, directory = sys.argv[1:]
config = WeightsConfig(transport="handles", bucket_bytes=16_000)
publisher = Publisher(config, bus_url=url, run=run, epoch=1, directory=Path(directory))
publisher.start()
for step in range(1, 1_000_000):
    report = publisher.publish(step, tiny_tensors(step, scale=20).items(), wait=True).result(0)
    if step >= 3:
        print(*report.engines, flush=True)
"""


def test_a_killed_learner_leaves_no_memory_behind(bus_url: str, run_id: str, tmp_path: Path) -> None:
    """The learner's memory has no name, and the engines that have mapped it unmap it by themselves; the next learner
    goes on with them.
    """
    with receivers(bus_url, run_id, {"a": GOOD, "b": GOOD}) as engines:
        pids = [process.pid for _, process in engines.values() if process.pid is not None]
        words = [sys.executable, "-c", PUSHES_FOR_EVER, bus_url, run_id, str(tmp_path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as learner:
            try:
                assert learner.stdout is not None and learner.stdout.readline().split() == ["a", "b"]
                assert maps_of(learner.pid) == 2 and [maps_of(pid) for pid in pids] == [2, 2]
                assert "/dev/shm/" not in Path(f"/proc/{learner.pid}/maps").read_text(), "a file there would outlive it"
            finally:
                learner.kill()
        poll(lambda: [maps_of(pid) for pid in pids] == [0, 0])  # no engine maps a dead learner's memory
        with publishing(bus_url, run_id, tmp_path, epoch=2, transport="handles") as publisher:
            assert publisher.publish(9, tiny_tensors(9, scale=20).items(), wait=True).result(0).engines == ("a", "b")
            assert [state(url)["digest"] for url, _ in engines.values()] == [digest(tiny_tensors(9, scale=20))] * 2


# -- one engine, one learner


@asynccontextmanager
async def pushing(
    served: Served, memory: HostMemory, *, epoch: int = 1, refused: Callable[[str], None] = lambda reason: None
) -> AsyncIterator[HandleReceiver]:
    context, deadlines = zmq.asyncio.Context(), Deadlines(LIMIT_S)
    receiver = HandleReceiver(
        context, served.engine.handles, epoch=epoch, deadlines=deadlines, memory=memory, refused=refused
    )
    try:
        await receiver.join(None)
        yield receiver
    finally:
        receiver.close()
        context.destroy(linger=0)


async def push(receiver: HandleReceiver, staging: Staging, version: int) -> None:
    assert await receiver.receive(version, staging.buckets, serve=True) is None, "never served in the same request"
    await receiver.end()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def test_all_or_nothing(directory: Path) -> None:
    """Nothing of a push is served before its end, and nothing at all of one with a hole, a doubled tensor or a flipped
    bit.
    """
    (prompt,) = prompts(1)
    memory, models = HostMemory(), [tiny_model(seed=seed) for seed in range(3)]
    stagings = [staged(dict(model.state_dict()), memory) for model in models]
    buckets = stagings[1].buckets
    async with serving(directory) as served, pushing(served, memory) as receiver:
        for sent, why in ((buckets[:-1], "are missing"), ([*buckets[:2], buckets[0]], "received twice")):
            await receiver.begin(1)
            with pytest.raises(ReceiverFailed, match=why):
                for bucket, flat in sent:
                    await receiver.bucket(bucket.specs, flat)
                await receiver.end()
            with refusal(ReceiverFailed, phase="end"):
                await receiver.end()
        await receiver.begin(1)
        with refusal(
            ReceiverFailed, phase="bucket", reason=re.compile(rf"\bgot {len(buckets[0][1]) - 4}$"), answered=True
        ):
            await receiver.bucket(buckets[0][0].specs, buckets[0][1][:-4])
        await receiver.begin(1)
        for bucket, flat in buckets:
            await receiver.bucket(bucket.specs, flat)
        told = await receiver.checksums()
        assert told is not None and stagings[1].differences(told) == []
        stagings[2].buckets[0][1][5] ^= 1
        assert len(stagings[2].differences(told)) > 1, "other weights"
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[0], prompt, 8
        )
        await receiver.end()
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
        assert served.engine.version == 1
    memory.close()


async def test_all_or_nothing_in_one_request(directory: Path) -> None:
    (prompt,) = prompts(1)
    memory, models, refused = HostMemory(), [tiny_model(seed=seed) for seed in range(2)], list[str]()
    staging = staged(dict(models[1].state_dict()), memory)
    buckets = staging.buckets
    assert len(buckets) > 2
    async with serving(directory) as served, pushing(served, memory, refused=refused.append) as receiver:
        await receiver.receive(1, buckets[:-1], serve=False)
        with refusal(ReceiverFailed, phase="end", reason=re.compile(r"\b1 of 25\b.*\blm_head\.weight$"), answered=True):
            await receiver.end()
        assert not refused
        for sent, why in (
            ([*buckets[:2], buckets[0]], "bucket 3: .*received twice"),
            ([buckets[0], (buckets[1][0], buckets[1][1][:-4])], "bucket 2: .*which these tensors have"),
        ):
            with pytest.raises(ReceiverFailed, match=why) as failed:
                await receiver.receive(1, sent, serve=False)
            assert failed.value.answered and refused.pop() == failed.value.reason, "such an engine gets broadcasts"
            with refusal(ReceiverFailed, phase="end"):
                await receiver.end()
        await receiver.receive(1, buckets, serve=True)
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[0], prompt, 8
        )
        told = await receiver.checksums()
        assert told is not None and staging.differences(told) == []
        await receiver.end()
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
        with refusal(ReceiverFailed, phase="end", reason=re.compile(r"\bweight_version: .*\bgot 0$"), answered=True):
            await push(receiver, staging, 0)
        assert not refused, "it has read the memory"
        for version in (2, 3, 4, 5):  # into either copy, and with the buckets that are known by then
            await push(receiver, staging, version)
        assert (await served.generate(prompt, temperature=0, max_new_tokens=8))["output_ids"] == await greedy(
            models[1], prompt, 8
        )
    memory.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_memory_that_the_device_refuses_is_the_bucket_s_failure(
    directory: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """CUDA's errors are RuntimeErrors: the update is discarded, and the engine gets broadcasts."""
    memory, refused = HostMemory(), list[str]()
    staging = staged(dict(tiny_model(seed=1).state_dict()), memory)

    def part(mapped: Mapped, handle: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices")

    async with serving(directory) as served, pushing(served, memory, refused=refused.append) as receiver:
        monkeypatch.setattr(Mapped, "part", part)
        with pytest.raises(ReceiverFailed, match="peer access is not supported"):
            if at_once:
                await receiver.receive(1, staging.buckets, serve=True)
            else:
                await receiver.begin(1)
                await receiver.bucket(staging.buckets[0][0].specs, staging.buckets[0][1])
        assert len(refused) == 1
        with refusal(ReceiverFailed, phase="end"):
            await receiver.end()
        monkeypatch.undo()
        await push(receiver, staging, 1)
        assert served.engine.version == 1
    memory.close()


class Held(ByHandles):
    """Reads no bucket before ``go``."""

    def __init__(self) -> None:
        super().__init__(Engine(GOOD))
        self.go, self.reading = asyncio.Event(), asyncio.Event()

    async def read_bucket(self, bucket: Bucket, offered: Offered, *, version: int | None, timeout_s: float) -> None:
        self.reading.set()
        await self.go.wait()
        self.engine.read += 1


async def test_a_push_ends_with_the_join_of_another_learner() -> None:
    memory, updates = HostMemory(), Held()
    (bucket,) = staged({"model.norm.weight": torch.zeros(3)}, memory).buckets
    listener, context = HandleListener(cast(Updates, updates)), zmq.asyncio.Context()
    url = await listener.start()
    old, new = (HandleReceiver(context, url, epoch=1, deadlines=Deadlines(LIMIT_S), memory=memory) for _ in range(2))
    try:
        await old.join(None)
        receiving = asyncio.create_task(old.receive(1, [bucket, bucket], serve=True))
        await updates.reading.wait()
        await new.join(None)
        updates.go.set()
        with refusal(ReceiverFailed, phase="push", reason=re.compile(r"^bucket 2: .*\bjoin\b"), answered=True):
            await receiving
        assert updates.engine.read == 1
    finally:
        old.close()
        new.close()
        context.destroy(linger=0)
        await listener.close()
        memory.close()


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times to which deadlines are moved, from now on."""
    moved: list[float] = []

    class Limit(asyncio.Timeout):  # type: ignore[misc]
        def reschedule(self, when: float | None) -> None:
            if when is not None and when != self.when():  # not when it is entered
                moved.append(when)
            super().reschedule(when)

    loop_time = time.monotonic
    monkeypatch.setattr(asyncio, "timeout", lambda delay_s: Limit(None if delay_s is None else loop_time() + delay_s))
    return moved


async def test_the_deadline_of_a_push_in_one_request_begins_anew_with_each_bucket(
    directory: Path, restarts: list[float]
) -> None:
    memory = HostMemory()
    staging = staged(dict(tiny_model(seed=1).state_dict()), memory)
    async with serving(directory) as served, pushing(served, memory) as receiver:
        restarts.clear()
        await push(receiver, staging, 1)
        assert len(restarts) == len(staging.buckets) - 1 > 1
        assert served.engine.version == 1
    memory.close()


async def test_an_engine_that_says_without_end_that_it_is_at_work_has_no_more_time_for_it(
    restarts: list[float],
) -> None:
    memory, context = HostMemory(), zmq.asyncio.Context()
    (bucket,) = staged({"model.norm.weight": torch.zeros(3)}, memory).buckets
    engine = context.socket(zmq.ROUTER)
    engine.bind_to_random_port("tcp://127.0.0.1")
    receiver = HandleReceiver(
        context, engine.last_endpoint.decode(), epoch=1, deadlines=Deadlines(LIMIT_S), memory=memory
    )
    receiving = asyncio.create_task(receiver.receive(1, [bucket, bucket], serve=False))
    sender, request = await engine.recv_multipart()
    for status in (*[102] * 50, 200):
        await engine.send_multipart([sender, msgpack.packb({"id": msgpack.unpackb(request)["id"], "status": status})])
    await receiving
    assert len(restarts) == 2, "one for each bucket"
    receiver.close()
    context.destroy(linger=0)
    memory.close()


async def test_a_message_behind_the_deadline_ends_no_other_request() -> None:
    """The waiter of another request may read it, while this one's time limit is being handled."""
    memory, context = HostMemory(), zmq.asyncio.Context()
    (bucket,) = staged({"model.norm.weight": torch.zeros(3)}, memory).buckets
    engine = context.socket(zmq.ROUTER)
    engine.bind_to_random_port("tcp://127.0.0.1")
    receiver = HandleReceiver(context, engine.last_endpoint.decode(), epoch=1, deadlines=Deadlines(0.2), memory=memory)
    receiving = asyncio.create_task(receiver.receive(1, [bucket, bucket], serve=False))
    await engine.recv_multipart()
    (waiter,) = receiver._waiters.values()
    with refusal(ReceiverFailed, phase="push"):
        await receiving
    waiter.under_way()
    receiver.close()
    context.destroy(linger=0)
    memory.close()


async def test_one_flipped_byte_is_caught(directory: Path) -> None:
    memory = HostMemory()
    staging = staged(dict(tiny_model(seed=1).state_dict()), memory)
    async with serving(directory) as served, pushing(served, memory) as receiver:
        await receiver.begin(1)
        for bucket, flat in staging.buckets:
            await receiver.bucket(bucket.specs, flat)
        staging.buckets[1][1][7] ^= 1  # as if it had been read before it was complete
        told = await receiver.checksums()
        assert told is not None and len(staging.differences(told)) == 1
        assert served.engine.version == 0
    memory.close()


async def test_a_stale_learner_is_fenced_in_every_verb(directory: Path) -> None:
    memory = HostMemory()
    staging = staged(dict(tiny_model(seed=1).state_dict()), memory)
    (bucket, flat), *_ = staging.buckets
    async with serving(directory) as served, pushing(served, memory, epoch=4) as old:
        await old.begin(1)
        async with pushing(served, memory, epoch=5) as new:
            for verb in (
                lambda: old.join(None),
                lambda: old.begin(2),
                lambda: old.bucket(bucket.specs, flat),
                lambda: old.receive(2, staging.buckets, serve=False),
                old.checksums,
                old.end,
                old.leave,
                lambda: old.load_snapshot(str(directory), 2),
            ):
                with refusal(Fenced, mine=4, seen=5):
                    await verb()
            with refusal(ReceiverFailed, phase="end"):
                await new.end()  # the old learner's push is not the new one's
            await push(new, staging, 3)
            assert (served.engine.version, served.engine.epoch) == (3, 5)
    memory.close()


async def test_late_messages_from_before_a_join_are_refused(directory: Path) -> None:
    """An engine was evicted and taken in again by the same learner: requests of the two sockets may arrive in any
    order.
    """
    memory = HostMemory()
    old_weights, staging = (staged(dict(tiny_model(seed=seed).state_dict()), memory) for seed in (1, 2))
    async with serving(directory) as served, pushing(served, memory) as old:
        await old.begin(1)
        async with pushing(served, memory) as receiver:
            await receiver.begin(2)
            for verb in (
                lambda: old.bucket(old_weights.buckets[0][0].specs, old_weights.buckets[0][1]),
                lambda: old.receive(2, old_weights.buckets, serve=False),
                old.end,
                lambda: old.begin(1),
            ):
                with refusal(ReceiverFailed, reason=re.compile(r"^status 400: .*\bjoin\b"), answered=True):
                    await verb()
            for bucket, flat in staging.buckets:
                await receiver.bucket(bucket.specs, flat)
            told = await receiver.checksums()
            assert told is not None and staging.differences(told) == []
            await receiver.end()
            assert served.engine.version == 2
    memory.close()


async def test_an_engine_that_ends_is_noticed_at_once(directory: Path) -> None:
    memory, context = HostMemory(), zmq.asyncio.Context()
    async with serving(directory) as served:
        receiver = HandleReceiver(context, served.engine.handles, epoch=1, deadlines=Deadlines(3600.0), memory=memory)
        await receiver.join(None)
    with refusal(ReceiverFailed, phase="begin"):
        await receiver.begin(1)
    receiver.close()
    refused: list[str] = []
    nobody = HandleReceiver(
        context, served.engine.handles, epoch=1, deadlines=Deadlines(3600.0), memory=memory, refused=refused.append
    )
    with refusal(ReceiverFailed, phase="join"):
        await nobody.join(None)
    nobody.close()
    assert not refused, "who says nothing has refused nothing: it is asked by handles again"
    context.destroy(linger=0)
    assert not Path(served.engine.handles.removeprefix("ipc://")).parent.exists()


class ForeignMemory(HostMemory):
    """Handles of a GPU that an engine may not see."""

    def handle(self, flat: torch.Tensor, ranks: int) -> dict[str, Any]:
        return {
            "device": "aaaa",
            "start": 0,
            "num_bytes": flat.numel(),
            "shares": [[b"one", 100, 0, b"", 0, b"", True]],
        }


async def test_a_handle_of_a_gpu_that_the_engine_does_not_see_is_refused_before_any_server_opens_it() -> None:
    refused: list[str] = []
    engine, authority = Engine(GOOD), Authority(visible_devices=("GPU-bbbb",))
    listener, context, memory = (
        HandleListener(cast(Updates, ByHandles(engine)), authority),
        zmq.asyncio.Context(),
        ForeignMemory(),
    )
    url = await listener.start()
    receiver = HandleReceiver(
        context, url, epoch=1, deadlines=Deadlines(LIMIT_S), memory=memory, refused=refused.append
    )
    try:
        await receiver.join(None)
        await receiver.begin(1)
        with refusal(ReceiverFailed, phase="bucket", place="status 400: handle: device", got="'aaaa'"):
            await receiver.bucket([], memory.empty(8))
        assert len(refused) == 1, "it gets the weights by broadcast next time"
        assert engine.read == 0 and authority.refused.startswith("handle: device")
    finally:
        receiver.close()
        context.destroy(linger=0)
        await listener.close()
        memory.close()


async def test_an_unreadable_message_is_refused_and_the_socket_stays_open(directory: Path) -> None:
    """Only the owner can enter the socket's directory, and a client that has not joined gets nothing."""
    context = zmq.asyncio.Context()
    async with serving(directory) as served:
        mode = await asyncio.to_thread(os.stat, os.path.dirname(served.engine.handles.removeprefix("ipc://")))
        assert mode.st_mode & 0o777 == 0o700
        socket = context.socket(zmq.DEALER)
        socket.connect(served.engine.handles)

        async def ask(message: Any) -> tuple[int, str]:
            await socket.send(
                message
                if isinstance(message, bytes)
                else msgpack.packb({"id": 1, "epoch": 1, "timeout_s": 5.0, **message})
            )
            async with asyncio.timeout(LIMIT_S):
                answer = msgpack.unpackb(await socket.recv())
            return answer["status"], answer["message"]

        for message, why in (
            (b"\xc1", "want msgpack"),
            (msgpack.packb([1]), "want a map"),
            ({"verb": "begin", "epoch": "1"}, "epoch: want an integer"),
            ({"verb": "open"}, "verb: want one of join, push"),
            ({"verb": "join", "pid": 2**22}, "want a process of this host"),
            ({"verb": "bucket", "version": 1, "handle": {}, "specs": []}, "want join first"),
            ({"verb": "push", "version": 1, "buckets": []}, "want join first"),
            ({"verb": "end", "version": 1}, "want join first"),
            ({"verb": "leave"}, "want join first"),
        ):
            status, said = await ask(message)
            assert (status, why in said) == (400, True), (message, said)
        assert served.engine.epoch == 1
        await socket.send_multipart([b"", b"two more", b"frames"])
        assert msgpack.unpackb((await asyncio.wait_for(socket.recv_multipart(), LIMIT_S))[-1])["status"] == 400
        socket.close()
        request = context.socket(zmq.REQ)
        request.connect(served.engine.handles)
        await request.send(msgpack.packb({"id": 1, "epoch": 1, "verb": "leave"}))
        assert msgpack.unpackb(await asyncio.wait_for(request.recv(), LIMIT_S))["status"] == 400
        request.close()
        async with joined_by_handles(served) as strange:
            spec = ["model.norm.weight", "float32", [32]]
            for fields, why in (
                ({}, "buckets: want a list"),
                ({"buckets": [1]}, "buckets: want a map for each, got 1"),
                ({"buckets": [{"handle": {}}]}, "specs: want bytes"),
                ({"buckets": [{"specs": b"\xc1", "handle": {}}]}, "specs: want msgpack of"),
                ({"buckets": [{"specs": msgpack.packb([spec[:2]]), "handle": {}}]}, "specs: want msgpack of"),
                ({"buckets": [{"specs": msgpack.packb([["a", "int3", []]]), "handle": {}}]}, "a: dtype"),
                ({"buckets": [{"specs": msgpack.packb([spec])}]}, "handle: want a map"),
                ({"buckets": [{"specs": msgpack.packb([spec]), "handle": {}}]}, "handle: num_bytes"),
                ({"buckets": [], "timeout_s": -1}, "timeout_s: want"),
                ({"buckets": [], "version": None}, "version: want an integer"),
            ):
                answered, answer = await strange.ask("push", **{"version": 1, **fields})
                assert (answered, why in answer["message"]) == (400, True), (fields, answer)
        with_memory = HostMemory()
        async with pushing(served, with_memory) as receiver:
            await push(receiver, staged(dict(tiny_model(seed=1).state_dict()), with_memory), 1)
        with_memory.close()
    context.destroy(linger=0)


class Late:
    """Memory of a learner that cannot be read until ``come`` is set."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message: torch.Tensor | None = message
        self.num_bytes, self.come, self.read = message.numel(), threading.Event(), weakref.ref(message)

    def tensor(self) -> torch.Tensor:
        self.come.wait(LIMIT_S)
        message, self._message = self._message, None
        assert message is not None
        return message


async def test_a_copy_that_outlasts_its_deadline_is_not_written_into_what_is_served_then(directory: Path) -> None:
    wrong = list(tiny_model(seed=1).state_dict().items())
    specs = [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in wrong
    ]
    bucket = Bucket(specs=tuple(specs), num_bytes=sum(spec.num_bytes for spec in specs))
    late = Late(torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in wrong]))
    model, (prompt,) = tiny_model(seed=2), prompts(1)
    async with serving(directory) as served, joined_by_handles(served) as push:
        updates = served.engine.updates
        await updates.run_shielded(updates.begin(1))
        try:
            with pytest.raises(UpdateRefused, match="not done in time"):
                await updates.run_shielded(updates.read_bucket(bucket, late, version=1, timeout_s=0.05))  # type: ignore[arg-type]
            await push.whole(model, 2)
        finally:
            late.come.set()
        await until(lambda: late.read() is None)  # the thread that copies it lets go of it last
        made = await served.generate(prompt, temperature=0, max_new_tokens=8)
    assert made["output_ids"] == await greedy(model, prompt, 8)


# -- memory


def test_a_handle_means_the_learners_bytes_or_nothing() -> None:
    memory, mapped = HostMemory(), Mapped()
    flat = memory.empty(10_000)
    part = flat[4096:4200]
    part.copy_(torch.arange(104))
    handle = memory.handle(part, 1)
    assert torch.equal(mapped.part(handle), part)
    part.fill_(9)
    there = mapped.part(handle)
    assert there.unique().tolist() == [9], "mapped once, and what is written later is seen"
    there.fill_(1)
    assert part.unique().tolist() == [9], "a reader cannot write into it"
    for wrong, why in (
        ({"offset": 9_999}, "want a part of 10000 bytes"),
        ({"num_bytes": -1}, "num_bytes: want a number"),
        ({"inode": handle["inode"] + 1}, "want inode"),
        ({"fd": 1_000_000}, "want the learner's memory, got No such file"),
    ):
        with pytest.raises(BadManifest, match=why):
            Mapped().part({**handle, **wrong})
    memory.close()
    with pytest.raises(BadManifest):
        Mapped().part(handle)
    with pytest.raises(AssertionError):
        memory.handle(torch.zeros(3, dtype=torch.uint8), 1)


class Cudart:
    """CUDA's registry of pinned memory: no address twice."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if address in self.pinned:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 713 if self.pinned.pop(address, None) is None else 0


def test_pinned_memory_is_unpinned_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives the address to the next memory, which could not be pinned."""
    cudart = Cudart()

    def check(error: int) -> None:
        assert error == 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    memory = HostMemory(pin=True)
    flats = [memory.empty(10_000), memory.empty(5)]
    assert cudart.pinned == {flat.data_ptr(): flat.numel() for flat in flats}
    memory.close()
    memory.close()
    assert len(cudart.pinned) == 2 and int(flats[0].sum()) == 0, "both are still mapped"
    del flats[0]
    assert cudart.pinned == {flats[0].data_ptr(): 5}
    flats.clear()
    assert not cudart.pinned
