"""Weights in parts that several ranks of a learner send, each from memory of its own: exact bytes, checks, snapshots, a
lost rank.
"""

import asyncio
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import Forked, piped
from tests.integration.test_weightstore_broadcast import FAR_S, hang_before_receiving
from tests.integration.test_weightstore_publisher import BUCKET_BYTES, DEADLINE_S, SOME_HUNG_S, look, state
from tests.receiver_app import START_S, Behaviour, digest, receivers, tiny_tensors, write_tiny_companions
from tests.receiver_app import staged as staged_here
from tests.refusals import refusal
from tests.waits import until
from tidemill.bus.client.addresses import HERE
from tidemill.bus.config import BusConfig
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.errors import BadManifest, PartLost, PeerLost, PushFailed
from tidemill.weightstore.format.checksums import ChecksumReport, TensorChecksum, report_checksums
from tidemill.weightstore.format.manifest import Manifest, joined
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushReport
from tidemill.weightstore.transport.part_server import PartServer
from tidemill.weightstore.transport.parts import Division, PartPlace, PartTensors, RemotePart, leave, release, staged
from tidemill.weightstore.transport.port import Deadlines
from tidemill.weightstore.transport.staging import StagedModel

Tensors = dict[str, torch.Tensor]
KINDS: tuple[dict[str, Any], ...] = ({}, {"at_once": False}, {"ranks": 2})
"""An engine that gets a push in one request, one with a request for every bucket, and one of two processes."""


def split(tensors: Mapping[str, torch.Tensor], parts: int = 3) -> list[Tensors]:
    """Deal the tensors out to the ranks, as the layers of a model are."""
    dealt: list[Tensors] = [{} for _ in range(parts)]
    for index, (name, tensor) in enumerate(tensors.items()):
        dealt[index % parts][name] = tensor
    return dealt


class Learner:
    """A publisher and the servers of the other ranks, in one process."""

    def __init__(self, publisher: Publisher, servers: Sequence[PartServer]) -> None:
        self.publisher, self.servers = publisher, servers

    def push(self, step: int, tensors: Tensors) -> PushReport:
        own, *others = split(tensors, 1 + len(self.servers))

        def fill(number: int) -> None:
            for server, part in zip(self.servers, others, strict=True):
                server.stage(number, part.items())

        copy = self.publisher.stage(step, own.items(), fill)
        handle = self.publisher.push(copy)
        copy.release()
        for tensor in tensors.values():
            tensor.zero_()
        handle.wait()
        return handle.result(0)


@contextmanager
def learning(
    bus_url: str, run: str, directory: Path, *, places: Sequence[PartPlace] = (), parts: int = 3, **settings: Any
) -> Iterator[Learner]:
    """``places``: parts that other processes serve; ``parts``: in all, the others are served here."""
    config = WeightsConfig(**{"bucket_bytes": BUCKET_BYTES, "phase_deadline_s": DEADLINE_S, **settings})
    own, *others = [Manifest.of(part.items()) for part in split(tiny_tensors(0), parts)]
    with ExitStack() as stack:
        servers = [
            PartServer(manifest, config, rank=rank, at=HERE) for rank, manifest in enumerate(others[len(places) :], 2)
        ]
        for server in servers:
            stack.callback(server.close)
        found = [*places, *(server.start() for server in servers)]
        publisher = Publisher(
            config,
            bus_url=bus_url,
            run=run,
            epoch=1,
            directory=directory / "snapshots",
            model_dir=write_tiny_companions(directory / "model"),
            division=Division(own, tuple(found)),
            bus_config=BusConfig(),
        )
        stack.callback(publisher.close, drain=False)
        publisher.start()
        assert publisher.connected is not None
        publisher.connected.view.dead_after_s = DEADLINE_S
        yield Learner(publisher, servers)


@pytest.mark.parametrize("transport", ["broadcast", "handles"])
@pytest.mark.parametrize("group", ["pairs", "all"])
def test_every_rank_sends_its_part_and_the_engines_have_all(
    bus_url: str, run_id: str, tmp_path: Path, transport: str, group: str
) -> None:
    engines = {f"e{number}": Behaviour(**kind) for number, kind in enumerate(KINDS)}
    with (
        receivers(bus_url, run_id, engines) as started,
        learning(
            bus_url, run_id, tmp_path, transport=transport, group=group, verify="always", snapshot_every=2
        ) as learner,
    ):
        for step in (1, 2, 3):
            report = learner.push(step, tiny_tensors(step))
            assert (report.engines, report.evicted, report.verified) == (("e0", "e1", "e2"), {}, ("e0", "e1", "e2"))
            assert report.num_bytes == Manifest.of(tiny_tensors(step).items()).num_bytes
        for id in engines:
            told = state(started[id][0])
            assert (told["version"], told["digest"]) == (3, digest(tiny_tensors(3)))
            assert told["groups"] == (3 if transport == "broadcast" else 0), "one for each rank that sends"
            assert bool(told["read"]) == (transport == "handles")
        row = learner.publisher.latest()
        assert (
            row is not None
            and row.digest == joined(Manifest.of(part.items()) for part in split(tiny_tensors(0))).digest
        )
        found = load_file(tmp_path / "snapshots" / "v2" / "model.safetensors")
        assert digest(found) == digest(tiny_tensors(2)), "written by rank 0, from the memory of all"


def test_no_rank_has_the_tensors_of_another(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with receivers(bus_url, run_id, {"a": Behaviour()}), learning(bus_url, run_id, tmp_path) as learner:
        learner.push(1, tiny_tensors(1))
        parts = [set(part) for part in split(tiny_tensors(0))]
        assert learner.publisher.pool is not None
        held = [
            {name for name, _ in pool.at(0).tensors()}
            for pool in (learner.publisher.pool, *(one.pool for one in learner.servers))
        ]
        assert held == parts
        with refusal(BadManifest, got="one that is not in it"):
            learner.servers[0].stage(0, split(tiny_tensors(1))[0].items())


@pytest.mark.parametrize("parts", [3, 4], ids=["of rank 1", "of rank 0"])
def test_an_engine_with_a_changed_tensor_of_any_rank_is_found(
    bus_url: str, run_id: str, tmp_path: Path, parts: int
) -> None:
    flips = Behaviour(fails="flip", at="checksums")
    where = [rank for rank, part in enumerate(split(tiny_tensors(0), parts)) if max(tiny_tensors(0)) in part]
    assert where == [1 if parts == 3 else 0], "the engine changes the tensor with the last name"
    with (
        receivers(bus_url, run_id, {"bad": flips, "good": Behaviour()}),
        learning(bus_url, run_id, tmp_path, verify="always", parts=parts) as learner,
    ):
        report = learner.push(1, tiny_tensors(1))
        assert report.engines == ("good",)
        assert "differs from what was sent in 1 tensors: model.scale" in report.evicted["bad"]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("group", ["pairs", "all"])
def test_an_engine_that_fails_is_evicted_alone(
    bus_url: str, run_id: str, tmp_path: Path, at_once: bool, group: str
) -> None:
    bad = {how: Behaviour(fails=how, at="bucket", once_served=1, at_once=at_once) for how in ("kill", "stop", "refuse")}
    with (
        receivers(bus_url, run_id, {"good": Behaviour(at_once=at_once), **bad}) as engines,
        learning(bus_url, run_id, tmp_path, group=group, phase_deadline_s=SOME_HUNG_S) as learner,
    ):
        assert len(learner.push(1, tiny_tensors(1)).engines) == 4
        report = learner.push(2, tiny_tensors(2))
        assert report.engines == ("good",) and sorted(report.evicted) == ["kill", "refuse", "stop"]
        assert state(engines["good"][0])["digest"] == digest(tiny_tensors(2))
        assert state(engines["refuse"][0])["digest"] == digest(tiny_tensors(1))


def serve_part(config: WeightsConfig, pipe: Any) -> None:
    """Serve the second part of three as rank 7, and fill copies on request, until the end of the process."""
    part = split(tiny_tensors(0))[1]
    server = PartServer(Manifest.of(part.items()), config, rank=7, at=HERE)
    pipe.send(server.start())
    while True:
        number, step = pipe.recv()
        server.stage(number, split(tiny_tensors(step))[1].items())
        pipe.send(number)


@contextmanager
def rank_apart(config: WeightsConfig) -> Iterator[tuple[Any, Forked, PartPlace]]:
    with piped(serve_part, config) as (pipe, process):
        assert pipe.poll(START_S), process.output.read_text()
        yield pipe, process, pipe.recv()


@pytest.mark.parametrize("transport", ["broadcast", "handles"])
def test_no_engine_is_evicted_where_the_rank_of_a_part_is_gone(
    bus_url: str, run_id: str, tmp_path: Path, transport: str
) -> None:
    config = WeightsConfig(bucket_bytes=BUCKET_BYTES, phase_deadline_s=DEADLINE_S, transport=transport)
    with (
        rank_apart(config) as (pipe, process, place),
        receivers(bus_url, run_id, {"a": Behaviour()}) as engines,
        learning(bus_url, run_id, tmp_path, places=[place], transport=transport) as learner,
    ):

        def push(step: int, theirs: Callable[[int], None]) -> PushReport:
            own, _, last = split(tiny_tensors(step))

            def fill(number: int) -> None:
                learner.servers[0].stage(number, last.items())
                theirs(number)

            copy = learner.publisher.stage(step, own.items(), fill)
            handle = learner.publisher.push(copy)
            copy.release()
            handle.wait()
            return handle.result(0)

        def filled(number: int) -> None:
            pipe.send((number, 1))
            assert pipe.recv() == number

        def killed(number: int) -> None:
            process.kill()
            process.wait()

        assert push(1, filled).engines == ("a",)
        assert state(engines["a"][0])["digest"] == digest(tiny_tensors(1)), "from the memory of two processes"
        with refusal(PushFailed, version=2, reason=re.compile(r"\brank 7\b"), evicted={}):
            push(2, killed)
        assert state(engines["a"][0])["digest"] == digest(tiny_tensors(1)), "it serves the version before"
        head = learner.publisher.latest()
        assert head is not None and head.version == 1
        assert learner.publisher.connected is not None and not learner.publisher.connected.groups.evicted
        assert look(bus_url, run_id, "evicted") == {}


def test_a_push_is_repeated_when_the_rank_of_a_part_was_frozen(bus_url: str, run_id: str, tmp_path: Path) -> None:
    config = WeightsConfig(bucket_bytes=BUCKET_BYTES, phase_deadline_s=SOME_HUNG_S)
    with (
        rank_apart(config) as (pipe, process, place),
        receivers(bus_url, run_id, {"a": Behaviour(), "b": Behaviour(at_once=False)}) as engines,
        learning(bus_url, run_id, tmp_path, places=[place], phase_deadline_s=SOME_HUNG_S) as learner,
    ):
        own, _, last = split(tiny_tensors(1))

        def filled(number: int) -> None:
            learner.servers[0].stage(number, last.items())
            pipe.send((number, 1))
            assert pipe.recv() == number
            process.send_signal(signal.SIGSTOP)

        copy = learner.publisher.stage(1, own.items(), filled)
        handle = learner.publisher.push(copy)
        handle.wait()
        with refusal(PushFailed, version=1, reason=re.compile(r"\brank 7\b"), evicted={}):
            handle.result(0)
        process.send_signal(signal.SIGCONT)
        handle = learner.publisher.push(copy)
        copy.release()
        handle.wait()
        report = handle.result(0)
        assert (report.engines, report.evicted) == (("a", "b"), {})
        assert {state(engines[id][0])["digest"] for id in engines} == {digest(tiny_tensors(1))}


def test_a_part_elsewhere_is_broadcast_although_rank_0_shares_its_memory(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    manifest = Manifest.of(split(tiny_tensors(0))[1].items())
    config = WeightsConfig(bucket_bytes=BUCKET_BYTES, phase_deadline_s=DEADLINE_S, transport="handles")
    server = PartServer(manifest, config, rank=1, at=HERE)
    with ExitStack() as stack:
        stack.callback(server.close)
        place = server.start()
        away = replace(place, domain="another host")
        engines = stack.enter_context(receivers(bus_url, run_id, {"a": Behaviour()}))
        learner = stack.enter_context(learning(bus_url, run_id, tmp_path, places=[away], transport="handles"))
        learner.servers = [server, *learner.servers]
        assert learner.push(1, tiny_tensors(1)).engines == ("a",)
        told = state(engines["a"][0])
        assert (told["digest"], told["groups"], told["read"]) == (digest(tiny_tensors(1)), 3, 0)


@pytest.fixture
def server() -> Iterator[tuple[PartServer, PartPlace]]:
    manifest = Manifest.of(tiny_tensors(0).items())
    one = PartServer(manifest, WeightsConfig(bucket_bytes=BUCKET_BYTES, transport="handles"), rank=3, at=HERE)
    try:
        yield one, one.start()
    finally:
        one.close()


def ask(place: PartPlace, method: str, path: str, body: bytes = b"{}", key: str | None = None) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {place.key if key is None else key}"}
    request = urllib.request.Request(
        place.url + path, method=method, data=body if method != "GET" else None, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


PATHS = [
    ("GET", "/alive"),
    ("POST", "/leave"),
    ("POST", "/groups"),
    ("POST", "/groups/1/meet"),
    ("POST", "/groups/1/send"),
    ("DELETE", "/groups/1"),
    ("POST", "/differences"),
    ("POST", "/handles"),
    ("GET", "/buckets/0/0"),
    ("GET", "/tensors/staged-0?name=model.scale"),
    ("DELETE", "/tensors/staged-0"),
]


def test_nothing_is_answered_without_the_key_and_bad_requests_are_survived(
    server: tuple[PartServer, PartPlace],
) -> None:
    one, place = server
    one.stage(0, tiny_tensors(4).items())
    bodies = [
        b"",
        b"[]",
        b"no json",
        b"{}",
        b'{"copy": 9, "bucket": 0, "ranks": 1}',
        b'{"copy": 0, "bucket": "x", "ranks": []}',
    ]
    for method, path in PATHS:
        for key in ("", "another"):
            assert ask(place, method, path, key=key)[0] == 401
    for method, path in PATHS[2:8]:
        for body in bodies:
            if method != "DELETE":  # which may be asked twice
                assert 400 <= ask(place, method, path, body)[0] <= 500, (method, path, body)
    for path in (
        "/buckets/7/0",
        "/buckets/0/99",
        "/buckets/x/y",
        "/tensors/staged-0?name=none",
        "/tensors/none?name=model.scale",
    ):
        assert 400 <= ask(place, "GET", path)[0] < 500, path
    assert digest({name: PartTensors(place, staged(0))[name] for name in tiny_tensors(0)}) == digest(tiny_tensors(4))
    assert place.key not in repr(place)
    assert not one.wait_until_left(0)
    leave(place)
    assert one.wait_until_left(60)


def test_a_rank_that_is_cut_off_is_told_again_that_its_tensors_are_read(server: tuple[PartServer, PartPlace]) -> None:
    one, place = server
    one.offer("saved", tiny_tensors(5))
    with pytest.raises(OSError, match="refused"):
        release(
            replace(place, url=place.url.rpartition(":")[0] + ":9"), "saved"
        )  # no process listens there: the rank has ended
    with pytest.raises(OSError, match="401"):
        release(replace(place, key="another"), "saved")
    assert not one.wait_until_read("saved", 0)
    release(place, "saved")
    assert one.wait_until_read("saved", 60)


def test_an_offered_set_is_read_and_released(server: tuple[PartServer, PartPlace]) -> None:
    one, place = server
    assert one.wait_until_read("saved", 0), "there is nothing to wait for"
    one.offer("saved", tiny_tensors(5))
    one.offer("final", tiny_tensors(6))
    assert not one.wait_until_read("saved", 0)
    found = PartTensors(place, "saved")
    assert digest(dict(found)) == digest(tiny_tensors(5)) and len(found) == len(tiny_tensors(5))
    assert ask(place, "DELETE", "/tensors/saved")[0] == 200
    assert one.wait_until_read("saved", 60)
    assert not one.wait_until_read("final", 0)
    with pytest.raises(OSError, match=r"/tensors/saved\?name=model.scale: rank 3 of the learner: HTTP Error 400"):
        found["model.scale"]
    assert digest(dict(PartTensors(place, "final"))) == digest(tiny_tensors(6))


async def test_a_lost_engine_is_no_lost_rank(server: tuple[PartServer, PartPlace]) -> None:
    """An engine that dies in a broadcast of another rank is charged with it; a rank that has ended is not taken for an
    engine.
    """
    one, place = server
    one.stage(0, tiny_tensors(4).items())
    remote = RemotePart(place, 1)
    group = await remote.host("pair", 2, "gloo", FAR_S, FAR_S)
    with piped(hang_before_receiving, group.port, 1, 2) as (_, process):
        await group.meet()
        process.kill()
        process.wait()
        with pytest.raises(PeerLost) as lost:
            for _ in range(10_000):  # the first bytes may go into a buffer of the system
                await group.send(remote.buckets(0)[0][1], None, FAR_S)
        assert not isinstance(lost.value, PartLost)
    await group.delete()
    await group.delete()
    with refusal(PartLost, place="rank 3 of the learner"):
        await group.send(remote.buckets(0)[0][1], None, FAR_S)
    await asyncio.to_thread(one.close)
    with refusal(PartLost, place="rank 3 of the learner"):
        await remote.check()
    await remote.close()


async def test_a_client_that_is_closed_requests_the_end_of_its_groups_no_longer(
    server: tuple[PartServer, PartPlace], caplog: pytest.LogCaptureFixture
) -> None:
    """No task is left (``tests/conftest.py``), though the request would be repeated."""
    one, place = server
    remote = RemotePart(place, 1)
    group = await remote.host("pair", 2, "gloo", FAR_S, FAR_S)
    await asyncio.to_thread(one.close)
    caplog.set_level("INFO")
    group.close()
    await until(lambda: any("group not closed" in record.message for record in caplog.records))
    await remote.close()


async def test_checksums_are_compared_in_the_rank_that_has_the_weights(server: tuple[PartServer, PartPlace]) -> None:
    one, place = server
    one.stage(0, tiny_tensors(4).items())
    remote = RemotePart(place, 1)
    own = {"model.other.weight": torch.ones(3)}
    try:
        whole = StagedModel(staged_here(own), (remote,), Deadlines(60.0))
        report = report_checksums(own | tiny_tensors(4))
        assert await whole.differences(report) == []
        changed = await whole.differences(report_checksums(own | tiny_tensors(5)))
        assert len(changed) == len(tiny_tensors(4))
        missing = await whole.differences(report_checksums(own))
        assert sorted(line.partition(":")[0] for line in missing) == sorted(tiny_tensors(4))
        raw = await remote.buckets(0)[0][1].tensor()
        assert torch.equal(raw, one.pool.at(0).buckets[0][1])
        # No rank has the bytes of both: such an engine is not taken for verified.
        fused = TensorChecksum(names=("model.other.weight", "model.norm.weight"), dtype="float32", sum="0" * 16)
        both = await whole.differences(ChecksumReport(scheme="sum64", parts=(*report.parts, fused)))
        assert len(both) == 1 and "sent by several ranks" in both[0] and "model.norm.weight" in both[0]
    finally:
        await remote.close()


async def test_a_group_that_no_engine_is_requested_to_join_is_closed(server: tuple[PartServer, PartPlace]) -> None:
    one, place = server
    remote = RemotePart(place, 1)

    async def drop() -> None:
        for group_id in ("1", "2"):
            one.drop_unmet(group_id)

    try:
        groups = [await remote.host(name, 2, "gloo", FAR_S, FAR_S) for name in ("lost", "pair")]
        with piped(hang_before_receiving, groups[1].port, 1, 2):
            await groups[1].meet()
            await asyncio.wrap_future(one.thread.submit(drop()))
            assert set(one.groups) == {"2"}
        with pytest.raises(PartLost):
            await groups[0].meet()
    finally:
        await remote.close()
