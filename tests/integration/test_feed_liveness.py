"""Heartbeats of ranks and feeder of several nodes, and the keys of several nodes, on real sockets."""

import asyncio
import queue
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.feeder_kit import KEYS
from tests.integration.test_feed_strangers import START, foreign
from tests.refusals import refusal
from tests.waits import until
from tidemill.bus.system.processes import Child
from tidemill.learner.errors import RankSilent
from tidemill.learner.feed.feed_client import FeedClient, Heartbeats, progress_noted
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.ranks import process

SECOND = foreign()
"""Keys of the ranks of a second node: its own pair, and the public key of the feeder."""
WITHIN_S = 60.0


@asynccontextmanager
async def serving(silence_s: float = 0.0, host: str = "127.0.0.1") -> AsyncIterator[FeedServer]:
    keys = replace(KEYS, others_public=(SECOND.ranks_public,))
    server = FeedServer(f"tcp://{host}:*", keys=keys, world_size=2, data_parallel=2, rank_silence_s=silence_s)
    running = asyncio.create_task(server.run())
    try:
        await server.start(START)
        yield server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()


def hello(url: str, keys: FeedKeys, rank: int) -> int:
    with FeedClient(url, keys=keys, rank=rank, dp_rank=rank, dp_size=2, silence_s=WITHIN_S) as client:
        return client.hello().epoch


async def test_the_gate_admits_the_keys_of_every_node_of_the_attempt_and_no_other() -> None:
    async with serving() as server:
        assert await asyncio.to_thread(hello, server.url, KEYS, 0) == 1
        assert await asyncio.to_thread(hello, server.url, SECOND, 1) == 1
        with Heartbeats(server.url, keys=foreign(), rank=1):
            async with asyncio.timeout(WITHIN_S):
                await until(lambda: server.refused)


def test_keys_reach_a_child_with_those_of_other_nodes() -> None:
    keys = replace(KEYS, others_public=(SECOND.ranks_public,))
    assert FeedKeys.read(keys.for_feeder().pipe()) == keys.for_feeder()


async def test_a_rank_that_sends_no_heartbeat_ends_the_feeder() -> None:
    async with serving(silence_s=0.2) as server:
        with FeedClient(server.url, keys=KEYS, rank=0, dp_rank=0, dp_size=2) as client:
            await asyncio.to_thread(client.hello)
            with refusal(RankSilent, rank=0):
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        await server.beat("nothing")
                        await asyncio.sleep(0.05)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_a_rank_in_a_collective_lives_by_its_heartbeats(host: str) -> None:
    """The main connection is silent; the heartbeats go on, and are answered. Each end counts its silence from the last
    of them.
    """
    silent: queue.Queue[str] = queue.Queue()
    async with serving(silence_s=WITHIN_S, host=host) as server:
        with FeedClient(server.url, keys=KEYS, rank=0, dp_rank=0, dp_size=2) as client:
            await asyncio.to_thread(client.hello)
            with Heartbeats(server.url, keys=KEYS, rank=0, silence_s=WITHIN_S, on_silence=silent.put) as heartbeats:
                async with asyncio.timeout(WITHIN_S):
                    for _ in range(2):
                        noted_s, answered_s = server.last_heartbeat_s[0], heartbeats.answered_s

                        async def both_heard(noted_s: float = noted_s, answered_s: float = answered_s) -> bool:
                            await server.beat("nothing")
                            return server.last_heartbeat_s[0] != noted_s and heartbeats.answered_s != answered_s

                        await until(both_heard)
        assert silent.empty()


async def test_a_feeder_without_heartbeats_is_reported_once() -> None:
    silent: queue.Queue[str] = queue.Queue()
    with Heartbeats("tcp://127.0.0.1:9", keys=KEYS, rank=0, silence_s=0.1, on_silence=silent.put):
        reason = await asyncio.to_thread(silent.get, True, WITHIN_S)
    assert reason == "feeder at tcp://127.0.0.1:9: no heartbeat for 0 s" and silent.empty()


async def test_a_rank_that_hangs_without_a_feeder_ends_with_the_reason() -> None:
    code = (
        "import time; from tidemill.learner.feed.feed_keys import FeedKeys; from "
        "tidemill.learner.feed.feed_client import Heartbeats\n"
        "with Heartbeats('tcp://127.0.0.1:9', keys=FeedKeys.new(), rank=0, silence_s=0.1): time.sleep(600)"
    )
    child = Child("rank 0", [sys.executable, "-c", code])
    await child.start()
    async with asyncio.timeout(WITHIN_S):
        assert await child.wait() == -9
    assert child.reason() == "feeder at tcp://127.0.0.1:9: no heartbeat for 0 s"


async def test_steps_of_ranks_reach_the_parent() -> None:
    stepped = asyncio.Event()
    code = "import os, sys; os.write(int(sys.argv[sys.argv.index('--progress') + 1]), b'.')"
    with progress_noted(stepped.set, pytest.fail) as descriptor:
        child = await process.start_child("rank 0", [sys.executable, "-c", code], {}, KEYS, descriptor)
        async with asyncio.timeout(WITHIN_S):
            await stepped.wait()
            assert await child.wait() == 0


async def test_a_sigterm_reaches_the_parent_while_the_rank_computes() -> None:
    """The rank is in one call that never returns, so no handler in Python runs."""
    begun, notified = asyncio.Event(), asyncio.Event()
    code = (
        "import ctypes, sys\nfrom tidemill.learner.feed.feed_client import FeedClient\n"
        "from tidemill.learner.feed.feed_keys import FeedKeys\n"
        "from tidemill.learner.feed.feed_client import note_step; progress = "
        "int(sys.argv[sys.argv.index('--progress') + 1])\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "with FeedClient('tcp://127.0.0.1:9', keys=FeedKeys.new(), rank=0, dp_rank=0, "
        "dp_size=1).drained_by_sigterm(progress):\n"
        "    lock(mutex), note_step(progress), lock(mutex)\n"
    )
    with progress_noted(begun.set, notified.set) as descriptor:
        child = await process.start_child("rank 0", [sys.executable, "-c", code], {}, KEYS, descriptor)
        async with asyncio.timeout(WITHIN_S):
            await begun.wait()
            child.send(signal.SIGTERM)
            await notified.wait()
        child.send(signal.SIGKILL)
        await child.wait()
