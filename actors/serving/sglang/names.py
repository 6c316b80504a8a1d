"""The names of a request's responses: those its client knows, and the guard's own, by which the server is asked.

SGLang (0.5.21 to 0.5.23) ends every request whose name begins with the one that an abort gives, and aborts a stream's name once more 2 s
after the stream has ended. So each request has names of one length there, other ones each time it is sent; its client sees its own.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

_ID = re.compile(rb'"id"\s*:\s*"([0-9a-f]{32})"')


class Names:
    """Of one checked body of /generate that asks for so many responses."""

    def __init__(self, body: Mapping[str, Any], responses: int) -> None:
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
        """Those of several responses to one prompt (``n``) are SGLang's secret."""
        self.ours = self._known and not body.get("session_params")
        """A session goes on from a request by its name: that is not changed."""
        self.at_server: Mapping[str, str] = {}
        """Those the server has now -> those of the client."""

    def ask(self) -> str | Sequence[str]:
        """What to ask the server by now."""
        if not self.ours:
            self.at_server = {name: name for name in self.responses} if self._known else {}
            return self.given
        self.at_server = {secrets.token_hex(16): name for name in self.responses}
        return list(self.at_server) if self._batch else next(iter(self.at_server))

    def meant(self, name: str | None) -> set[str]:
        """The responses with this name, or of the request with this name; None = all."""
        if name is None or name == self.given:
            return set(self.responses)
        return {name} & set(self.responses)

    def told(self, raw: bytes) -> bytes:
        """Whole lines of an answer, with the client's names."""
        return _ID.sub(self._told, raw) if self.ours else raw

    def _told(self, found: re.Match[bytes]) -> bytes:
        name = self.at_server.get(found[1].decode())
        return found[0] if name is None else b'"id":' + json.dumps(name).encode()
