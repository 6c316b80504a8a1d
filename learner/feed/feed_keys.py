"""Keys of one start of the learner, with which its feeder and its ranks authenticate each other (CURVE of ZMQ).

They are new at every start. A process gets them through an inherited file descriptor, because other users can read its
arguments and environment. A ``Gate`` at the socket of the feeder, or of a process that sends samples, refuses
connections without one of these keys before any message.
"""

import asyncio
import hmac
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

_ZAP = "inproc://zeromq.zap.01"
"""Endpoint of libzmq's authentication requests: ZeroMQ RFC 27."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of a connection whose peer has another key, or does not use CURVE."""
_MAX_MESSAGE_BYTES = 1 << 24
"""Largest message to a gated socket; a peer that announces a larger one is disconnected. Ranks send headers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedKeys:
    """Key pairs (Z85) of the feeder and of a node's ranks. A secret is empty in processes that must not have it: ranks
    have no ``feeder_secret``, and the feeder has no ``ranks_secret``.
    """

    feeder_public: str
    ranks_public: str
    feeder_secret: str = field(default="", repr=False)
    ranks_secret: str = field(default="", repr=False)
    others_public: tuple[str, ...] = ()
    """Public keys of the ranks of other nodes, which the feeder admits, too."""

    @classmethod
    def new(cls) -> Self:
        """Return new key pairs."""
        feeder_public, feeder_secret = (key.decode() for key in zmq.curve_keypair())
        ranks_public, ranks_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(
            feeder_public=feeder_public,
            ranks_public=ranks_public,
            feeder_secret=feeder_secret,
            ranks_secret=ranks_secret,
        )

    def for_feeder(self) -> Self:
        """Return the keys without the secret of the ranks."""
        return replace(self, ranks_secret="")

    def for_ranks(self) -> Self:
        """Return the keys without the secret of the feeder."""
        return replace(self, feeder_secret="")

    def pipe(self) -> int:
        """Return a descriptor from which a child can read the keys once (``pass_fds``). The caller closes its copy."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "w") as file:  # does not block: the keys are much smaller than the buffer of a pipe
            json.dump(asdict(self), file)
        return reading

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the keys in the map of ``asdict``."""
        return cls(**{**values, "others_public": tuple(values.get("others_public", ()))})

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Return the keys from an inherited descriptor, and close it. Raises ValueError when it has none."""
        try:
            with os.fdopen(descriptor) as file:
                return cls.of(json.load(file))
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--feeder-keys {descriptor}: want an inherited descriptor with the keys of this start: {error}"
            ) from None


class Gate:
    """Authenticates the peers of one socket. Create it before the socket is bound.

    The socket needs a context of its own, because the endpoint of authentication requests is one for each context.

    Consumes authentication requests of libzmq (ZAP) and its events of failed handshakes; produces refusals.
    """

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: FeedKeys) -> None:
        self._socket, self._admitted = socket, [z85.decode(key) for key in (keys.ranks_public, *keys.others_public)]
        self._requests = context.socket(zmq.REP)
        self._requests.bind(_ZAP)
        self._failures = socket.get_monitor_socket(_FAILED)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.feeder_secret)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)

    async def run(self, refused: Callable[[str], None]) -> None:
        """Admit and refuse peers until cancelled; ``refused`` is called with the reason of each refusal."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._answer())
            group.create_task(self._report_failures(refused))

    async def _answer(self) -> None:
        while True:
            # The frames of request and answer, in the order of ZeroMQ RFC 27; the credentials of CURVE are the public
            # key of the client.
            version, request, *fields = await self._requests.recv_multipart()
            _domain, _address, _identity, mechanism, *credentials = fields
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and self._is_admitted(credentials[0])
            status = (b"200", b"OK") if admitted else (b"400", b"not a rank of this start")
            await self._requests.send_multipart([version, request, *status, b"", b""])

    def _is_admitted(self, key: bytes) -> bool:
        # A list, not a generator: the time of an answer must not depend on which key matches.
        return any([hmac.compare_digest(key, admitted) for admitted in self._admitted])

    async def _report_failures(self, refused: Callable[[str], None]) -> None:
        while True:
            event = await recv_monitor_message(self._failures)
            has_other_key = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            refused("it is no rank of this start" if has_other_key else "it does not speak CURVE")

    def close(self) -> None:
        """Close the gate; call it before the socket is closed."""
        self._socket.disable_monitor()
        self._failures.close(linger=0)
        self._requests.close(linger=0)


def admit_by(socket: zmq.Socket[bytes], keys: FeedKeys) -> None:
    """Configure a rank's socket so that the feeder of this start admits it, and so that it accepts no other feeder."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.feeder_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.ranks_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.ranks_secret)
