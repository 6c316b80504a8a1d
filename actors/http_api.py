"""Parts shared by the HTTP servers of engines and routers: bodies as JSON maps, and errors in SGLang's JSON.

400 = the request is wrong (the message states why), 401 = a key of the run is required, 403 = a command where there is
no run, 404 = no such path or snapshot, 409 = the learner's epoch is stale, 500 = the engine failed, 501 = not supported
by this engine, 503 = not serving now. ``tidemill.bus.http.bodies`` has those of bodies.
"""

import logging
import re
from collections.abc import Mapping

from aiohttp import web

from tidemill.actors.errors import (
    BadRequest,
    CannotTell,
    EngineError,
    EngineUnavailable,
    PeerTransferRefused,
    StaleEpoch,
    UpdateRefused,
)
from tidemill.bus.http.access import Handler
from tidemill.bus.http.bodies import body_in, json_in
from tidemill.bus.wire.json_object import JsonObject, with_whole_characters

log = logging.getLogger(__name__)

NONCE_HEADER = "X-Tidemill-Nonce"
"""Header of an engine's answer to GET /health: the nonce of its live row."""
BODIES_BYTES = 1 << 30
"""Maximum number of bytes of request bodies that an engine or a router holds, waiting requests included."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A surrogate in JSON, with its other half (an emoji) or without."""


@web.middleware
async def translate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors of ``tidemill.actors.errors`` into their statuses, and any other exception into a 500."""
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response(error_of(str(error), 400), status=400)
    except UpdateRefused as error:
        return _command_failed(error, 400)
    except StaleEpoch as error:
        return _command_failed(error, 409, epoch=error.seen)
    except PeerTransferRefused as error:
        return web.json_response(error_of(str(error), 404), status=404)
    except CannotTell as error:
        return _command_failed(error, 501)
    except EngineUnavailable as error:
        return web.json_response({**error_of(error.reason, 503), "unavailable": type(error).__name__}, status=503)
    except EngineError as error:
        return web.json_response(error_of(str(error), 500), status=500)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        log.exception("request failed path=%s", request.path)
        return web.json_response(error_of(repr(error), 500), status=500)


def _command_failed(error: EngineError, status: int, **fields: object) -> web.Response:
    body = {"success": False, "message": str(error), **error_of(str(error), status), **fields}
    return web.json_response(body, status=status)


def body_of(request: web.Request) -> Mapping[str, object]:
    """Return the body as a map; empty without one. Raises BadRequest unless it is a JSON map."""
    raw = body_in(request)
    return json_map(raw) if raw else {}


def json_map(raw: bytes) -> JsonObject:
    """Return a body as a map. Raises BadRequest unless it is a JSON map. Halves of surrogate pairs are replaced here,
    for all texts of programs and their tools: they end no episode.
    """
    try:
        body = json_in(raw)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if not isinstance(body, dict):
        raise BadRequest(f"body: want a JSON map, got {type(body).__name__}")
    return with_whole_characters(body) if SURROGATE.search(raw) else body


def done(message: str, **fields: object) -> web.Response:
    """Return HTTP 200 with SGLang's ``success`` and ``message``, and further fields."""
    return web.json_response({"success": True, "message": message, **fields})


def error_of(message: str, code: int) -> dict[str, object]:
    """Return SGLang's JSON of an error. ``code``: the HTTP status."""
    return {"error": {"message": message, "code": code}}
