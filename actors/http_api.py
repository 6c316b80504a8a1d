"""Parts shared by the HTTP servers of engines and routers, and by their clients: bodies as JSON maps and as structs of
msgspec, errors in SGLang's JSON, and server-sent events.

A struct is the one description of a body: types and bounds are checked by ``decode`` alone, rules between fields in its
``__post_init__``. An error names the path of a value, the values accepted there and the value received.

400 = the request is wrong (the message states why), 401 = a key of the run is required, 403 = a command where there is
no run, 404 = no such path or snapshot, 409 = the learner's epoch is stale, 500 = the engine failed, 501 = not supported
by this engine, 503 = not serving now. ``tidemill.bus.http.listener`` has those of bodies.
"""

import difflib
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import TypeVar

import aiohttp
import msgspec
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
from tidemill.bus.http.listener import body_in, json_in
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


DATA = b"data: "
"""Prefix of the data of each event."""
END = b"[DONE]"
"""Data of the last event of a complete stream."""
DONE = DATA + END + b"\n\n"
"""The last event, encoded."""
MAX_LINE_BYTES = 1 << 26
"""Maximum number of bytes of one event: each state of a stream has the whole response so far."""


def event(content: Mapping[str, object]) -> bytes:
    """Return one event, encoded."""
    return DATA + json.dumps(content).encode() + b"\n\n"


def named_event(content: Mapping[str, object]) -> bytes:
    """Return one event that is named by its ``type``, encoded."""
    return f"event: {content['type']}\n".encode() + event(content)


def data_of(line: bytes) -> bytes | None:
    """Return the data of one line of a stream, JSON or END; None for a line without data."""
    return line.removeprefix(DATA) if line.startswith(DATA) else None


async def data_in(chunks: AsyncIterator[bytes], *, max_line_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream, END included. (aiohttp's own reader refuses lines longer than its
    buffer.) Raises ClientPayloadError at a line of more than ``max_line_bytes``, as if the connection had broken.
    """
    unended = b""
    async for chunk in chunks:
        *lines, unended = (unended + chunk).split(b"\n")
        for line in lines:
            if (data := data_of(line)) is not None:
                yield data
        if len(unended) > max_line_bytes:
            raise aiohttp.ClientPayloadError(f"a line of more than {max_line_bytes} bytes")


Shape = TypeVar("Shape")

_PLACED = re.compile(r"(?s)(?P<reason>.*) - at (?:`key` in )?`\$(?P<path>.*)`")
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`(?P<bound>.*?)(?:, got `\w+`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
"""Errors of msgspec, which has their parts in no other form."""
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a map",
}
"""Type of msgspec -> the words for it. ``null`` has none: an absent field says the same."""
MAX_SHOWN = 80
"""Maximum number of characters of a refused value that an error shows."""

MAX_NAMES = 20
"""Maximum number of fields that an error about an unknown one lists."""


def decode(body: object, shape: type[Shape], where: str = "") -> Shape:
    """Return ``body``, decoded JSON, as a ``shape``. ``where``: path of ``body`` in errors. Raises BadRequest."""
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise BadRequest(_reason(str(error), body, where)) from None
    except UnicodeEncodeError:  # msgspec reads a text as UTF-8 where another type is wanted, too
        raise BadRequest(f"{where or 'body'}: want text of whole characters, got half of a surrogate pair") from None


def need(body: Mapping[str, object], name: str, shape: type[Shape]) -> Shape:
    """Return the field ``name``. Raises BadRequest when it is absent or of another type."""
    return decode(body.get(name), shape, name)


def known_fields(
    body: Mapping[str, object],
    known: Collection[str],
    neutral: Mapping[str, tuple[object, ...]],
    where: str = "",
) -> JsonObject:
    """Return the ``known`` fields that are not null, which means absent. Raises BadRequest for any other field, unless
    it has one of the values at which it has no effect (``neutral``).
    """
    for name, value in body.items():
        if name in known:
            continue
        if name not in neutral:
            raise BadRequest(f"{_joined(where, str(name))}: unknown parameter{_nearest(name, [*known, *neutral])}")
        if value not in neutral[name]:
            want = f"not supported; want {neutral[name][-1]!r}"
            raise BadRequest(f"{_joined(where, name)}: {want}, got {shortened(value)}")
    return {name: value for name, value in body.items() if name in known and value is not None}


def shortened(value: object) -> str:
    """Return a value as an error shows it."""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def _nearest(name: object, names: Sequence[str]) -> str:
    """Return the end of an error, which proposes the nearest name, or shows the names unless they are many."""
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    return f"; known: {', '.join(sorted(names))}" if len(names) <= MAX_NAMES else ""


def _reason(message: str, body: object, where: str) -> str:
    """Return msgspec's message as path, values accepted and value received."""
    placed = _PLACED.fullmatch(message)
    reason, path = (placed["reason"], placed["path"]) if placed else (message, "")
    place = _joined(where, path.replace("[...]", "").lstrip("." if not where else ""))
    if expected := _EXPECTED.fullmatch(reason):
        words = [_WORDS.get(name, name) for name in expected["types"].split(" | ") if name != "null"]
        bound = re.sub(r"(\d)\.0\b", r"\1", expected["bound"])
        return f"{place or 'body'}: want {' or '.join(words)}{bound}, got {shortened(_value_at(body, path))}"
    if missing := _MISSING.fullmatch(reason):
        return f"{_joined(place, missing['name'])}: want a value, got none"
    if reason == "Number out of range":
        return f"{place}: want a number that 64 bits can hold, got {shortened(_value_at(body, path))}"
    return _joined(place, reason)  # of a __post_init__, whose errors begin with the name of a field


def _joined(place: str, name: str) -> str:
    return f"{place}{'' if not place or not name or name[0] in '.[' else '.'}{name}"


def _value_at(body: object, path: str) -> object:
    """Return the value that msgspec's path leads to, or the map in which the path does not name the key."""
    value = body
    for name, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[name] if name else value[int(place)]  # type: ignore[index]
    return value
