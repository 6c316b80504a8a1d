"""Requests at the port of a reader."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from tests.feeder_kit import KEYS
from tests.waits import LIMIT_S
from tidemill.learner.feed.feed_keys import admit_by
from tidemill.learner.feed.sample_transfer import SampleServer


@asynccontextmanager
async def serving() -> AsyncIterator[SampleServer]:
    server = SampleServer("tcp://127.0.0.1:*", KEYS)
    loops = [asyncio.create_task(loop) for loop in (server.admit(), server.serve())]
    try:
        yield server
        assert not any(loop.done() for loop in loops)
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        server.close()


async def test_an_odd_request_is_answered_with_no_sample() -> None:
    async with serving() as server:
        server.hold(7, b"seven")
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        try:
            admit_by(peer, KEYS)
            peer.connect(f"tcp://127.0.0.1:{server.port}")
            async with asyncio.timeout(LIMIT_S):
                odd = ([b"\x91\x07", b"\x00"], [b"\xc1"], [b"\x91\x08"])
                for request, want in (*((frames, []) for frames in odd), ([b"\x91\x07"], [b"seven"])):
                    await peer.send_multipart(request)
                    assert await peer.recv_multipart() == [b"samples", *want]
        finally:
            peer.close(linger=0)
            context.term()
