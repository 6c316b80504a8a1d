"""Request ids of a request's responses: the client's, and the proxy's own, which are sent to the server.

SGLang (0.5.21 to 0.5.23) ends every request with an id that begins with the id of an abort, and aborts a stream's id once more 2 s
after the stream has ended. So the server gets ids of one length, new ones each time a request is sent; the client sees its own.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping

_ID = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')


class RequestIds:
    """Request ids of the ``responses`` to one validated body of /generate."""

    def __init__(self, body: JsonMapping, responses: int) -> None:
        prompts: Any = body["input_ids"] if body.get("text") is None else body["text"]
        self._batch = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
        self.given: str | Sequence[str] = body.get("rid") or secrets.token_hex(16)
        if not isinstance(self.given, str):
            self.responses = tuple(self.given)
        elif self._batch or responses > 1:
            self.responses = tuple(f"{self.given}_{place}" for place in range(responses))
        else:
            self.responses = (self.given,)
        self._known = responses == (len(prompts) if self._batch else 1)
        """True when the ids at the server are known: SGLang does not report those of several responses to one prompt (``n``)."""
        self.replaced = self._known and not body.get("session_params")
        """True when the server gets ids of the proxy. A session continues a request by its id, so that is not changed."""
        self.at_server: Mapping[str, str] = {}
        """Ids that the server has now -> ids of the client."""

    def for_sending(self) -> str | Sequence[str]:
        """Return the ids with which to send the request now."""
        if not self.replaced:
            self.at_server = {name: name for name in self.responses} if self._known else {}
            return self.given
        self.at_server = {secrets.token_hex(16): name for name in self.responses}
        return list(self.at_server) if self._batch else next(iter(self.at_server))

    def matching(self, name: str | None) -> set[str]:
        """Return the responses with this id, or of the request with this id; None = all."""
        if name is None or name == self.given:
            return set(self.responses)
        return {name} & set(self.responses)

    def with_client_ids(self, raw: bytes) -> bytes:
        """Return whole lines of an answer with the client's ids."""
        return _ID.sub(self._client_id, raw) if self.replaced else raw

    def _client_id(self, found: re.Match[bytes]) -> bytes:
        name = self.at_server.get(found[1].decode())
        return found[0] if name is None else b'"id":' + json.dumps(name).encode()
