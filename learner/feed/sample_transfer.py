"""Transfer of samples from the readers of SAMPLES to the ranks, over ZMQ and past the feeder.

A request is a msgpack list of sequences. Its answer has their encoded samples, a frame each; a single frame for a
sample that the reader does not have. Ranks and readers authenticate each other by the keys of the feed.
"""

import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.codec import decode_sample
from tidemill.bus.wire.messages import Sample
from tidemill.learner.errors import FeederLost, FeedError, LearnerError
from tidemill.learner.feed.feed_keys import FeedKeys, Gate, admit_by

log = logging.getLogger(__name__)

_CONNECT_S = 5.0  # Longest wait for a connection to a reader that has not answered

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
        self._host = urlsplit(feeder_url).hostname or ""
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def close(self) -> None:
        """Close the connections."""
        for dealer in self._sockets.values():
            dealer.close(linger=0)

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

        Raises FeederLost when no reader answers for ``silence_s``; FeedError for one that cannot be reached, and for
        samples that a reader does not have.
        """
        by_port: dict[int, list[int]] = {}
        for seq in seqs:
            by_port.setdefault(ports[seq % len(ports)], []).append(seq)
        poller = zmq.Poller()
        poller.register(feeder, zmq.POLLIN)
        for port, wanted in by_port.items():
            dealer = self._sockets.get(port) or self._connect(port)
            poller.register(dealer, zmq.POLLIN)
            dealer.send(msgspec.msgpack.encode(wanted))
        samples: dict[int, Sample] = {}
        while by_port:
            began_s = time.monotonic()
            ready = dict(poller.poll(int(silence_s * 1000)))
            if not ready:
                raise self._silent(ports, by_port, time.monotonic() - began_s)
            if feeder in ready:
                on_feeder()
            for port in [port for port in by_port if self._sockets[port] in ready]:
                wanted = by_port.pop(port)
                _, *frames = self._sockets[port].recv_multipart()
                if len(frames) != len(wanted):
                    raise FeedError(f"reader at port {port}", f"{len(wanted)} samples", len(frames))
                samples |= zip(wanted, map(decode_sample, frames), strict=True)
        return samples

    def _silent(self, ports: Sequence[int], waited_for: Collection[int], waited_s: float) -> LearnerError:
        """Return the error of readers that have not answered: one that cannot be reached, or all."""
        readers = {f"reader of shard {shard} at {self._host} port {port}": port for shard, port in enumerate(ports)}
        readers = {reader: port for reader, port in readers.items() if port in waited_for}
        for reader, port in readers.items():
            try:
                socket.create_connection((self._host, port), timeout=_CONNECT_S).close()
            except OSError as error:
                cure = "let the machines of all ranks connect to any port of the feeder's machine"
                return FeedError(reader, f"a connection from this rank ({cure})", str(error))
        return FeederLost(self._feeder_url, waited_s, "samples of the step", ", ".join(readers))

    def _connect(self, port: int) -> "zmq.Socket[bytes]":
        host = f"[{self._host}]" if ":" in self._host else self._host
        dealer = self._context.socket(zmq.DEALER)
        admit_by(dealer, self._keys)
        dealer.setsockopt(zmq.IPV6, int("[" in self._feeder_url))
        dealer.connect(f"tcp://{host}:{port}")
        self._sockets[port] = dealer
        return dealer
