"""A web hook, as the example of a metric sink asks one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

_LOOK_S = 0.02
"""Seconds between two looks at the request to end."""


@contextmanager
def web_hook() -> Iterator[tuple[str, list[Any]]]:
    """Take every POST of JSON while entered; yields the URL, and the list to which each body is added."""
    got: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        serving = threading.Thread(target=server.serve_forever, args=(_LOOK_S,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", got
        finally:
            server.shutdown()
            serving.join()
