"""Millions of samples in the stream of a run, for benchmarks of what reads them: small payloads, true headers.

A client of NATS in Python needs 15 us for a message, so these are written as bytes of its protocol. An acknowledgement
is asked for each ``ACK_EVERY`` messages, and at most two of them are outstanding: the server drops messages of its own
queue beyond 10,000. Source: docs.nats.io, "NATS Client Protocol".
"""

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.bench.sample_path import make_sample
from tidemill.bus.streams.samples import headers_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import encode_sample

ACK_EVERY = 2_000
_INBOX = b"_INBOX_bench"
_CONNECT = b'CONNECT {"verbose":false,"headers":true,"name":"many"}\r\nSUB ' + _INBOX + b".* 1\r\n"


def write_samples(url: str, run: str, count: int) -> None:
    """Store ``count`` samples of four tokens, eight of a task."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        answers = connection.makefile("rb")
        answers.readline()
        connection.sendall(_CONNECT)
        outstanding = 0
        for batch in _batches(run, count):
            connection.sendall(batch)
            outstanding += 1
            while outstanding > 2:
                outstanding -= _acknowledged(answers.readline())
        while outstanding:
            outstanding -= _acknowledged(answers.readline())


def _acknowledged(line: bytes) -> int:
    assert b"error" not in line and not line.startswith(b"-ERR"), line
    return line.startswith(b'{"stream"')


def _batches(run: str, count: int) -> Iterator[bytes]:
    sample = make_sample(run, 1, 4)
    data, headers = encode_sample(sample), headers_of(sample)
    subject = subjects.sample(run, "train", 3, "bench-0").encode()
    named = [f"{name}: {value}" for name, value in headers.items() if name != subjects.MESSAGE_ID]
    for first in range(0, count, ACK_EVERY):
        messages = bytearray()
        last = min(first + ACK_EVERY, count) - 1
        for number in range(first, last + 1):
            name = f"{subjects.MESSAGE_ID}: {1 + number // 8}.{number % 8}.{number}"
            head = "\r\n".join(["NATS/1.0", name, *named, "", ""]).encode()
            reply = b" " + _INBOX + b".a" if number == last else b""
            messages += b"HPUB %b%b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(data), head, data)
        yield bytes(messages)
