"""``debug score`` with an address that answers with anything but scores ends with one line."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.refusals import refusal
from tidemill.launch.cli.debug import RunningEngine


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """Serve these bytes as the answer to every request; yield the address."""

    class Handler(socketserver.BaseRequestHandler):
        """Reads the first part of a request, and answers."""

        def handle(self) -> None:
            """Answer one request."""
            self.request.recv(1 << 16)
            self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-server\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{",
        http(b"[]"),
        http(b'{"meta_info": {"input_token_logprobs": [[], []]}}'),
        http(b'{"meta_info": {"input_token_logprobs": [[null, 1]]}}'),
    ],
)
def test_an_answer_that_is_no_scores_is_refused(data: bytes) -> None:
    with answering(data) as url, refusal(ValueError, place="--engine"):
        RunningEngine(url, "").log_probs([[1, 2]])


@pytest.mark.parametrize("data", [b"SSH-2.0-server\r\n", http(b"[]"), http(b'{"dtype": ["bfloat16"]}')])
def test_an_answer_without_a_dtype_names_none(data: bytes) -> None:
    with answering(data) as url:
        assert RunningEngine(url, "").dtype() == ""
