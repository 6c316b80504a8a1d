"""Transfer of samples from the readers of SAMPLES to the ranks, over ZMQ and past the feeder.

A request is a msgpack list of sequences. Its answer has their encoded samples, a frame each; a single frame for a
sample that the reader does not have. Ranks and readers authenticate each other by the keys of the feed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.messages import Sample
from tidemill.learner.errors import FeederLost, FeedError
from tidemill.learner.feed.feed_keys import FeedKeys, Gate, admit_by

log = logging.getLogger(__name__)

_SEQS: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])


class SampleServer:
    """Socket of a reader at ``listen`` (``tcp://host:*``), from which ranks fetch the samples that it holds."""

    def __init__(self, listen: str, keys: FeedKeys) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in listen))
        self._gate = Gate(self._context, self._socket, keys)
        self._socket.bind(listen)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._samples: dict[int, bytes] = {}
        self._failures = FailureLog(log)  # a port scanner must not fill the log
        self.refused = 0
        """Number of refused connections and requests."""

    def hold(self, seq: int, data: bytes) -> None:
        """Keep a sample until it is released."""
        self._samples[seq] = data

    def release(self, seqs: Sequence[int]) -> None:
        """Forget samples."""
        for seq in seqs:
            self._samples.pop(seq, None)

    async def admit(self) -> None:
        """Admit ranks until cancelled."""
        await self._gate.run(
            lambda reason: self._refuse("connection to a reader refused", f"{reason}, port={self.port}")
        )

    def _refuse(self, kind: str, reason: str) -> None:
        self.refused += 1
        self._failures(kind, reason)

    async def serve(self) -> None:
        """Answer ranks until cancelled."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                samples = [self._samples[seq] for seq in _SEQS.decode(b"".join(frames))]
            except (KeyError, msgspec.DecodeError) as error:
                self._refuse("request of a rank refused", repr(error))
                samples = []
            await self._socket.send_multipart([identity, b"samples", *samples], copy=False)

    def close(self) -> None:
        """Release the port."""
        self._gate.close()
        self._socket.close()
        self._context.term()


class SampleClient:
    """A rank's connections to the readers. Not thread-safe."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", feeder_url: str, keys: FeedKeys) -> None:
        self._context, self._feeder_url, self._keys = context, feeder_url, keys
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def close(self) -> None:
        """Close the connections."""
        for socket in self._sockets.values():
            socket.close(linger=0)

    def fetch(
        self,
        seqs: Sequence[int],
        ports: Sequence[int],
        *,
        silence_s: float,
        feeder: "zmq.Socket[bytes]",
        on_feeder: Callable[[], None],
    ) -> dict[int, Sample]:
        """Return samples by sequence. ``ports``: of the reader of each shard; ``on_feeder``: called when the feeder
        sends something meanwhile.

        Raises FeederLost when no reader answers for ``silence_s``, FeedError for samples that a reader does not have.
        """
        by_port: dict[int, list[int]] = {}
        for seq in seqs:
            by_port.setdefault(ports[seq % len(ports)], []).append(seq)
        poller = zmq.Poller()
        poller.register(feeder, zmq.POLLIN)
        for port, wanted in by_port.items():
            socket = self._sockets.get(port) or self._connect(port)
            poller.register(socket, zmq.POLLIN)
            socket.send(msgspec.msgpack.encode(wanted))
        samples: dict[int, Sample] = {}
        while by_port:
            began_s = time.monotonic()
            ready = dict(poller.poll(int(silence_s * 1000)))
            if not ready:
                raise FeederLost(self._feeder_url, time.monotonic() - began_s, "samples of the step", "its readers")
            if feeder in ready:
                on_feeder()
            for port in [port for port in by_port if self._sockets[port] in ready]:
                wanted = by_port.pop(port)
                _, *frames = self._sockets[port].recv_multipart()
                if len(frames) != len(wanted):
                    raise FeedError(f"reader at port {port}", f"{len(wanted)} samples", len(frames))
                samples |= zip(wanted, map(decode_sample, frames), strict=True)
        return samples

    def _connect(self, port: int) -> "zmq.Socket[bytes]":
        url = urlsplit(self._feeder_url)
        host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
        socket = self._context.socket(zmq.DEALER)
        admit_by(socket, self._keys)
        socket.setsockopt(zmq.IPV6, int("[" in self._feeder_url))
        socket.connect(f"tcp://{host}:{port}")
        self._sockets[port] = socket
        return socket
