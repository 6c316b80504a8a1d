"""Sockets that are no rank of this learner connect to the feeder's port: they are refused, and the ranks go on."""

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgpack
import pytest
import zmq

from tests.feeder_kit import KEYS
from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tidemill.learner.errors import FeederFailed, FeedError, RankFailed
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_keys import FeedKeys, admit_by
from tidemill.learner.feed.feed_messages import FeedStart, pack
from tidemill.learner.feed.feed_server import FeedServer

START = FeedStart(epoch=1, checkpoint=None, step=0, steps=9, head_version=-1, head_step=-1, recorded_until=0)
MESSAGES = (
    pack("hello", rank=0, dp_rank=0, dp_size=1, metadata=False),
    pack("next", step=1, dp_rank=0),
    pack("done", step=1, metrics={"loss": 1.0}, weights_digest=None),
    pack("published", version=1, step=1),
    pack("checkpointed", step=1, directory="/"),
    pack("failed", rank=0, reason="made up", exit_code=1),
    pack("bye"),
    pack("drain"),
)
ODD = (msgpack.packb({"type": [1]}), msgpack.packb({"type": {}}), msgpack.packb({"type": None}), b"\x91" * 5000, b"")


@asynccontextmanager
async def serving(world_size: int = 1) -> AsyncIterator[tuple[FeedServer, "asyncio.Task[None]"]]:
    server = FeedServer("tcp://127.0.0.1:*", keys=KEYS, world_size=world_size, data_parallel=1)
    running = asyncio.create_task(server.run())
    try:
        await server.start(START)
        yield server, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()


@contextmanager
def dealer(url: str, keys: FeedKeys | None) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            admit_by(peer, keys)
        peer.connect(url)
        yield peer


def foreign() -> FeedKeys:
    """Return the feeder's public key, with a new pair in place of the ranks'."""
    own = FeedKeys.new()
    return FeedKeys(feeder_public=KEYS.feeder_public, ranks_public=own.ranks_public, ranks_secret=own.ranks_secret)


def mutated(rng: random.Random) -> list[bytes]:
    """Return frames: a real message with bytes of it changed, removed or added, or noise."""
    data = bytearray(rng.choice(MESSAGES + ODD) or b"\0")
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        data = data or bytearray(b"\0")
    return [bytes(data), *(rng.randbytes(rng.randrange(99)) for _ in range(rng.randrange(3)))]


def ask(url: str) -> FeedStart:
    with FeedClient(url, keys=KEYS, rank=0, dp_rank=0, dp_size=1, silence_s=20) as client:
        return client.hello()


@pytest.mark.parametrize("keys", [None, foreign()], ids=["no key", "a key of its own"])
async def test_a_peer_without_the_key_of_this_start_is_refused_before_its_first_message(
    keys: FeedKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (server, running):
        with dealer(server.url, keys) as peer:
            for message in MESSAGES + ODD:
                peer.send(message)
            await until(lambda: server.refused >= 1)
            assert await asyncio.to_thread(ask, server.url) == START
            assert not running.done()
            assert not server.outcomes.qsize()
        assert caplog.text.count("refused=1, the last one because") == 1


async def test_noise_on_the_port_is_refused() -> None:
    rng = random.Random(7)
    async with serving() as (server, running):
        host, _, port = server.url.removeprefix("tcp://").rpartition(":")
        for _ in range(20):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(
                    rng.choice([b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL", b"GET / HTTP/1.1\r\n\r\n", b""])
                    + rng.randbytes(200)
                )
        assert await asyncio.to_thread(ask, server.url) == START
        assert not running.done()


async def test_a_peer_with_the_key_that_is_no_rank_yet_is_refused_whatever_it_sends() -> None:
    """Peers without a handshake, and with handshakes of another layout, are no ranks."""
    rng = random.Random(11)
    async with serving() as (server, running):
        with dealer(server.url, KEYS) as peer:
            sent = [[message] for message in (*MESSAGES[1:5], *MESSAGES[6:], *ODD)]
            sent += [
                [pack("hello", rank=rank, dp_rank=0, dp_size=1, metadata=False)]
                for rank in (-1, 1, True, None, "0", 0.0, [0], 1 << 63)
            ]
            sent += [
                [pack("hello", rank=0, dp_rank=0, dp_size=2, metadata=False)],
                [pack("hello")],
                [pack("next", step=1, dp_rank=0, more=1)],
            ]
            for frames in sent:
                peer.send_multipart(frames)
            await until(lambda: server.refused >= len(sent))
            peer.send_multipart([b"", *rng.choices(MESSAGES, k=3)])  # only the first frame counts
            await until(lambda: server.refused >= len(sent) + 1)
        assert await asyncio.to_thread(ask, server.url) == START
        assert not running.done()


async def test_mutated_messages_end_nothing_but_by_the_rules() -> None:
    """A peer with the key is refused until its handshake is valid; then a message that breaks the rules is an error
    that names it.
    """
    rng = random.Random(3)
    async with serving() as (server, running):
        with dealer(server.url, KEYS) as peer:
            sent = [
                frames for frames in (mutated(rng) for _ in range(400)) if not re.search(b"hello|failed", frames[0])
            ]
            for frames in sent:
                peer.send_multipart(frames)
            await until(lambda: server.refused >= len(sent))
        assert await asyncio.to_thread(ask, server.url) == START
        assert not running.done()


@pytest.mark.parametrize(
    "message", [*MESSAGES[:1], *ODD, pack("next", step=7, dp_rank=0), pack("next", step=True, dp_rank=0)]
)
async def test_a_rank_that_breaks_the_rules_ends_the_feeder(message: bytes) -> None:
    async with serving(world_size=2) as (server, running):
        with dealer(server.url, KEYS) as rank:
            rank.send(MESSAGES[0])
            assert await asyncio.to_thread(rank.poll, 1000 * LIMIT_S), "no start"
            rank.recv()
            rank.send(message)
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(running, LIMIT_S)
        assert caught.group_contains(FeedError)


def failing_with(rank: int, reason: str) -> pytest.RaisesGroup[RankFailed]:
    failed = pytest.RaisesExc(RankFailed, check=lambda error: (error.rank, error.reason) == (rank, reason))
    return pytest.RaisesGroup(failed, flatten_subgroups=True)


async def test_a_rank_that_fails_before_its_handshake_ends_the_feeder_with_its_reason() -> None:
    async with serving() as (server, running):
        with FeedClient(server.url, keys=KEYS, rank=1, dp_rank=0, dp_size=1) as client:
            client.failed("no such model")
            with failing_with(1, "no such model"):
                await asyncio.wait_for(running, LIMIT_S)


async def test_the_error_of_a_rank_ends_the_feeder_with_its_reason() -> None:
    def fail(url: str) -> None:
        with FeedClient(url, keys=KEYS, rank=1, dp_rank=0, dp_size=1) as client:
            client._socket.setsockopt(zmq.LINGER, -1)  # the handshake is made in the other thread's loop, however late
            raise KeyError("output_layer.weight")

    async with serving() as (server, running):
        with pytest.raises(KeyError):
            await asyncio.to_thread(fail, server.url)  # it waits for the handshake, which the feeder makes in this loop
        with failing_with(1, "KeyError: 'output_layer.weight'"):
            await asyncio.wait_for(running, LIMIT_S)


async def test_a_second_rank_of_the_same_number_is_refused_and_the_first_goes_on() -> None:
    async with serving() as (server, running):
        with FeedClient(server.url, keys=KEYS, rank=0, dp_rank=0, dp_size=1, silence_s=20) as first:
            await asyncio.to_thread(first.hello)
            with refusal(FeederFailed, place="hello of rank 0", got="'a second hello'"):
                await asyncio.to_thread(ask, server.url)
            first.published(3, 2)
            outcome = await asyncio.wait_for(server.outcomes.get(), LIMIT_S)
            assert outcome.values == {"version": 3, "step": 2}
            assert not running.done()


def test_keys_pass_through_a_pipe_and_show_no_secret() -> None:
    keys = FeedKeys.new()
    assert FeedKeys.read(keys.pipe()) == keys
    assert keys.for_feeder().ranks_secret == keys.for_ranks().feeder_secret == ""
    assert keys.ranks_secret not in repr(keys) and keys.feeder_secret not in repr(keys)
    with refusal(ValueError, place="--feeder-keys 9999"):
        FeedKeys.read(9999)
