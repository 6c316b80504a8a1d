"""Authentication on the feeder's socket (CURVE): only holders of a key of the ranks may connect. Others are refused
before any message.

Consumes authentication requests of libzmq (ZAP) and its events of failed handshakes; produces refusals. Runs until it
is cancelled.
"""

import asyncio
import hmac
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tidemill.learner.feed.feed_keys import FeedKeys

_ZAP = "inproc://zeromq.zap.01"
"""Endpoint of libzmq's authentication requests: ZeroMQ RFC 27."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of peers that were refused, or that use no CURVE."""
_MAX_MESSAGE_BYTES = 1 << 24
"""Largest message to the feeder; a peer that announces a larger one is disconnected. Ranks send headers only."""


class Gate:
    """Authenticates the peers of one socket. Create it before the socket is bound, on a context that no other gate
    uses.
    """

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: FeedKeys) -> None:
        self._socket, self._admitted = socket, [z85.decode(key) for key in (keys.ranks_public, *keys.others_public)]
        self._questions = context.socket(zmq.REP)
        self._questions.bind(_ZAP)
        self._failures = socket.get_monitor_socket(_FAILED)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.feeder_secret)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)

    async def run(self, refused: Callable[[str], None]) -> None:
        """Admit and refuse peers until cancelled; ``refused`` is called with the reason of each refusal."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._answer())
            group.create_task(self._count(refused))

    async def _answer(self) -> None:
        while True:
            # The frames of request and answer, in the order of ZeroMQ RFC 27; the credentials of CURVE are the public
            # key of the client.
            (
                version,
                request,
                _domain,
                _address,
                _identity,
                mechanism,
                *credentials,
            ) = await self._questions.recv_multipart()
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and self._is_admitted(credentials[0])
            status = (b"200", b"OK") if admitted else (b"400", b"not a rank of this start")
            await self._questions.send_multipart([version, request, *status, b"", b""])

    def _is_admitted(self, key: bytes) -> bool:
        return any([hmac.compare_digest(key, admitted) for admitted in self._admitted])

    async def _count(self, refused: Callable[[str], None]) -> None:
        while True:
            event = await recv_monitor_message(self._failures)
            refused(
                "it is no rank of this start"
                if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                else "it does not speak CURVE"
            )

    def close(self) -> None:
        """Close the gate; call it before the socket is closed."""
        self._socket.disable_monitor()
        self._failures.close(linger=0)
        self._questions.close(linger=0)


def admit_by(socket: zmq.Socket[bytes], keys: FeedKeys) -> None:
    """Configure a rank's socket so that the feeder of this start admits it, and so that it accepts no other feeder."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.feeder_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.ranks_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.ranks_secret)
