"""Requests as an SGLang engine answers them: /generate validated and held during updates, aborts repeated, the rest as the server answers."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from actors.serving.host import EngineHost
from actors.serving.port import COMMAND_S, Body
from actors.serving.sglang.aborts import AGAIN_S, Aborts
from actors.serving.sglang.api import Api
from actors.serving.sglang.generating import Generating, translated
from actors.serving.sglang.updates import WeightUpdates
from weightstore.listener import Handler

SERVER_KEYS = ("api_key", "admin_api_key")


class Proxy:
    """The requests of one engine."""

    def __init__(self, host: EngineHost[WeightUpdates], api: Api, counters: dict[str, float], cache_prefix: str) -> None:
        self._host, self._api = host, api
        self._aborts = Aborts(host.updates, counters)
        generating = Generating(host, api, self._aborts, counters, cache_prefix)
        self.generate, self.states = generating.generate, generating.states

    async def abort(self, rid: str | None, body: Body) -> web.Response:
        aborted = self._aborts.abort(rid)
        for watch in aborted:
            watch.send_aborts(self._api, AGAIN_S if rid is None else 0.0)
        return await self._pass_on("POST", "/abort_request", body) if rid is None or not aborted else web.Response()

    async def loads(self, request: web.Request) -> web.Response:
        return await self._pass_on(request.method, request.path_qs, None)

    flush_cache = loads

    async def _pass_on(self, method: str, path: str, body: Body | None) -> web.Response:
        async with translated(self._host), self._api.open(method, path, body) as answer:
            return web.Response(body=await answer.read(), content_type=answer.content_type)

    async def model_info(self) -> dict[str, Any]:
        host = self._host
        info = await self._api.call("GET", "/model_info", timeout_s=COMMAND_S)
        ours = {
            "weight_version": str(host.version),
            "vocab_size": host.limits.vocab_size,
            "has_tokenizer": host.limits.encode is not None,
        }
        return {**info, **ours}

    async def server_info(self) -> dict[str, Any]:
        host = self._host
        info = await self._api.call("GET", "/server_info", timeout_s=COMMAND_S)
        ours = {
            "engine": "sglang",
            "weight_version": str(host.version),
            "context_length": host.limits.max_context,
            "phase": host.phase,
            "epoch": host.epoch,
        }
        return {**_without_keys(info), **ours}

    def own_routes(self, command: Callable[[web.Request], Awaitable[Body]]) -> Mapping[str, Handler]:
        return {}


def _without_keys(info: Any) -> Any:
    """Return a server's state, settings included, without the keys that it requires."""
    if isinstance(info, dict):
        return {name: _without_keys(value) for name, value in info.items() if name not in SERVER_KEYS}
    return [_without_keys(each) for each in info] if isinstance(info, list) else info
