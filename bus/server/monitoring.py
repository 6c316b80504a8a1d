"""A server's own account of its store, by HTTP on loopback. Its base path is a secret, so that no other program can read it.

nats-server keeps the first write error of a stream, and switches JetStream off after one in the log of a cluster: in both states it answers
no write until it is started again, also when the disk has room. Seen with 2.15.1.
"""

import http.client
import json
import re
import secrets
from urllib.parse import urlsplit

from tidemill.bus.server.quoting import quoted
from tidemill.bus.wire.json_object import JsonObject

_ANSWER_S = 2.0
"""Seconds for an answer: a frozen server gives none."""
_SECRET_BYTES = 24
_STOPPED = re.compile(r"write error|not enabled|disabled")
"""Reasons of a failed health check that only a restart cures. A cluster that is catching up has others, which pass."""


class Monitor:
    """Reader of one server's state; ``lines`` belong into its configuration."""

    def __init__(self) -> None:
        self._path, self._address = f"/{secrets.token_urlsafe(_SECRET_BYTES)}", ""

    @property
    def lines(self) -> list[str]:
        """Lines of the server's configuration: any free port of loopback, and the secret path."""
        return ['http: "127.0.0.1:-1"', f"http_base_path: {quoted(self._path)}"]

    def found(self, url: str) -> None:
        """Set the address, which is known when the server has started."""
        self._address = urlsplit(url).netloc

    def write_fault(self) -> str:
        """Return why the server stores nothing until it is started again; empty when it does, or gives no answer."""
        try:
            health = str(self.read("healthz").get("error", ""))
            store = self.read("jsz")
        except (OSError, http.client.HTTPException, ValueError):
            return ""
        if _STOPPED.search(health):
            return health
        most, used = int(store.get("config", {}).get("max_storage", 0)), int(store.get("storage", 0))
        return f"its store is at its limit of {most / 1e6:.1f} MB (three quarters of the room at its start)" if used >= most else ""

    def read(self, page: str) -> JsonObject:
        """Return one page. Raises OSError, HTTPException; ValueError when it is no JSON object."""
        connection = http.client.HTTPConnection(self._address, timeout=_ANSWER_S)  # urllib would take the way through a proxy
        try:
            connection.request("GET", f"{self._path}/{page}")
            fields = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if not isinstance(fields, dict):
            raise ValueError(f"{page}: want an object, got {fields!r}")
        return fields
