"""Client of the model of one episode, for programs: requests to the gateway, by OpenAI's API."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.bus.http.client import READ_BUFFER_BYTES, open_session


class BudgetSpent(Exception):
    """The episode has no tokens, turns or context left; it ends, and is trained as truncated."""


class PolicyClient:
    """The model of one episode. Close it at the end."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._base_url = base_url
        # Without a limit of time: the gateway has one, and waits for engines on behalf of its episodes.
        self._session = open_session(
            headers={"Authorization": f"Bearer {api_key}"}, read_buffer_bytes=READ_BUFFER_BYTES
        )

    async def __aenter__(self) -> "PolicyClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **parameters: Any
    ) -> dict[str, Any]:
        """Return the answer's choice, with ``id``, the name of the turn. Raises BudgetSpent, RuntimeError."""
        body = {"model": "policy", "messages": list(messages), **parameters}
        return await self._choice("/chat/completions", body | ({"tools": list(tools)} if tools else {}))

    async def complete(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        """Return the completion's choice, with ``id``. Raises BudgetSpent, RuntimeError."""
        return await self._choice("/completions", {"model": "policy", "prompt": prompt, **parameters})

    async def save(self, state: object) -> None:
        """Store the episode's state, from which another actor goes on (``again: resume``). Raises RuntimeError."""
        await self._post("/state", {"state": state})

    async def truncated(self, limit: str) -> None:
        """Report the limit at which the program ends the episode: its sample is truncated. Raises RuntimeError."""
        await self._post("/truncated", {"limit": limit})

    async def _post(self, path: str, body: object) -> None:
        async with self._session.post(self._base_url.removesuffix("/v1") + path, json=body) as response:
            if response.status != 200:
                text = (await response.read())[:1000].decode(errors="replace")
                raise RuntimeError(f"{path}: {response.status}: {text}")

    async def _choice(self, path: str, body: object) -> dict[str, Any]:
        async with self._session.post(self._base_url + path, json=body) as response:
            content = await response.read()
            if response.status != 200:
                text = content[:1000].decode(errors="replace")
                if response.status == 400 and "context_length_exceeded" in text:
                    raise BudgetSpent(text)
                raise RuntimeError(f"the model answered {response.status}: {text}")
        answer = json.loads(content)
        return {**answer["choices"][0], "id": answer["id"]}
