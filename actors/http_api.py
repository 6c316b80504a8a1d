"""What our engines' HTTP servers share: bodies and errors in SGLang's JSON.

400 = the request is wrong (it says why), 409 = its learner epoch is stale, 500 = the engine failed, 501 = it has no such thing,
503 = it does not serve now.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from actors.errors import BadRequest, CannotTell, EngineError, EngineUnavailable, NotLent, StaleEpoch, UpdateRefused

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Our errors as status codes; whatever else happens is a 500 that says what, and the engine lives on."""
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response(error_of(str(error), 400), status=400)
    except UpdateRefused as error:
        return web.json_response({"success": False, "message": str(error), **error_of(str(error), 400)}, status=400)
    except StaleEpoch as error:
        return web.json_response({"success": False, "message": str(error), **error_of(str(error), 409), "epoch": error.seen}, status=409)
    except NotLent as error:
        return web.json_response(error_of(str(error), 404), status=404)
    except CannotTell as error:
        return web.json_response({"success": False, "message": str(error), **error_of(str(error), 501)}, status=501)
    except EngineUnavailable as error:
        return web.json_response({**error_of(error.reason, 503), "unavailable": type(error).__name__}, status=503)
    except EngineError as error:
        return web.json_response(error_of(str(error), 500), status=500)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        log.exception("request failed path=%s", request.path)
        return web.json_response(error_of(repr(error), 500), status=500)


async def body_of(request: web.Request) -> Mapping[str, Any]:
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise BadRequest(f"body: want JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise BadRequest(f"body: want a JSON map, got {type(body).__name__}")
    return body


def need(body: Mapping[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadRequest(f"{name}: want {kind.__name__}, got {value!r}")
    return value


def version_in(body: Mapping[str, Any]) -> int | None:
    """SGLang's versions are strings; ours are numbers in them."""
    given = body.get("weight_version")
    if given is None:
        return None
    try:
        version = int(given)
    except (TypeError, ValueError):
        version = -1
    if version < 0 or isinstance(given, bool | float):
        raise BadRequest(f'weight_version: want a number >= 0 as a string, like "3", got {given!r}')
    return version


def of_update_in(body: Mapping[str, Any]) -> bool:
    """Which weights a request for checksums means: those of the open update, or those that are served."""
    of = body.get("of", "served")
    if of not in ("served", "update"):
        raise BadRequest(f"of: want served or update, got {of!r}")
    return bool(of == "update")


def done(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})


def error_of(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "code": code}}
