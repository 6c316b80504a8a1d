"""The listener through which programs of episodes ask the model: OpenAI's paths and SGLang's, a key for each episode.

    http://127.0.0.1:PORT/e/KEY/v1/chat/completions      or without /e/KEY, and the key as Authorization: Bearer KEY,
                                                         as x-api-key, or as the user: http://KEY@127.0.0.1:PORT/...

A turn is recorded before the last byte of its answer is sent. The answer to a client that has gone is kept for its next
identical request. Where a client cuts a stream, the tokens that were sent are a turn.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import BasicAuth, web

from tidemill.actors.engines.responses import GenerationFailed, Interrupted, Responses
from tidemill.actors.episodes.calls import INFERENCE_PATH, inference_answer, remember_restored
from tidemill.actors.episodes.episode import Episode, Spent, messages_of
from tidemill.actors.episodes.model_calls import ModelCalls
from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import DATA, json_map
from tidemill.actors.openai import openai_api
from tidemill.actors.router.chats import Chats, RenderedChats
from tidemill.actors.router.dialects import DIALECTS
from tidemill.actors.router.exchange import EVENTS, JSON, SESSION_HEADERS, Request
from tidemill.actors.router.token_history import ModelText, TokenHistory
from tidemill.actors.text.rendering import Renderer
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.http.access import Route, Rule
from tidemill.bus.http.listener import Listener, body_in
from tidemill.bus.streams.episode_turns import NotStored, Superseded
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Timings

logger = logging.getLogger(__name__)

TRAIN_HEADER = "X-Tidemill-Train"
"""0: the call is served with the sampling that it asks for, and is context only. So are calls of ``untrained_models``.
"""
ENDED_KEYS = 10_000
"""Maximum number of keys of ended episodes that are remembered, to be answered with 410."""
HISTORY_TEXT = 1 << 24
"""Maximum number of characters and tokens that the history of one episode remembers."""
KEY_PATH = "/e/"
_NO_RETRY = {"x-should-retry": "false"}
"""Clients of OpenAI repeat some errors by themselves, unless an answer forbids it."""
_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_PREFIX |= {path: dialect.id for path, dialect in DIALECTS.items()}
"""Beginning of an answer's id by path."""


@dataclass(slots=True)
class _WholeAnswer:
    """A whole answer, and its turns."""

    status: int
    content_type: str
    content: bytes
    calls: ModelCalls


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    """An episode whose key is valid."""

    episode: Episode
    history: TokenHistory
    slots: asyncio.Semaphore
    prefix: str = field(default_factory=lambda: secrets.token_hex(8))
    """Beginning of the ids of its answers."""
    num_answers: int = 0
    running: set[asyncio.Task[_WholeAnswer]] = field(default_factory=set)
    abandoned: defaultdict[bytes, list[asyncio.Task[_WholeAnswer]]] = field(default_factory=lambda: defaultdict(list))
    """Answers to clients that have gone, by request."""
    streams: set[asyncio.Task[web.StreamResponse]] = field(default_factory=set)

    def next_id(self) -> str:
        self.num_answers += 1
        return f"{self.prefix}{self.num_answers:08x}"


class Gateway:
    """The listener of an actor. ``start``, and ``close`` at the end."""

    def __init__(
        self,
        model: ModelText,
        responses: Responses,
        renderer: Renderer | None = None,
        untrained_models: Collection[str] = (),
    ) -> None:
        """``renderer``: None = the model's chat template. ``untrained_models``: calls for these are context."""
        self.model, self._responses = model, responses
        self._renderer, self._untrained_models = renderer, untrained_models
        self.open_episodes: dict[str, _OpenEpisode] = {}
        """Open episodes by key."""
        self._ended_keys: OrderedDict[str, None] = OrderedDict()
        routes = {"* /{path:.*}": Route.request(self._handle)}
        self.listener = Listener(routes, _EpisodeKeys(self._admit), shutdown_s=1.0)
        self.url = ""

    async def start(self, reach: Reach = HERE) -> str:
        """Listen, and return the URL. Raises OSError."""
        self.url = await self.listener.start(reach.bind, 0, advertise=reach.advertised, name="actor.gateway.host")
        return self.url

    async def close(self) -> None:
        await self.listener.close()

    @asynccontextmanager
    async def opened(self, episode: Episode, max_calls_in_flight: int) -> AsyncIterator[str]:
        """Yield the key of an episode. Afterwards its calls are ended, its streams recorded, and the key refused."""
        key = secrets.token_hex(16)
        history = TokenHistory(self.model, HISTORY_TEXT, self._chats(episode), episode.task.chat_template_args)
        episode.restore(lambda ids: self.model.text.decode(ids.tolist(), skip_special=False))
        remember_restored(history, self.model, episode.log.restored)
        open_episode = _OpenEpisode(episode, history, asyncio.Semaphore(max_calls_in_flight))
        self.open_episodes[key] = open_episode
        try:
            yield key
        finally:
            del self.open_episodes[key]
            self._ended_keys[key] = None
            if len(self._ended_keys) > ENDED_KEYS:
                self._ended_keys.popitem(last=False)
            for call in open_episode.running:
                call.cancel()
            for stream in open_episode.streams:
                _cut(stream)
            await asyncio.gather(*open_episode.streams, return_exceptions=True)

    def _chats(self, episode: Episode) -> Chats | None:
        """Return the chats of an episode; None = the model's chat template writes them."""
        if self._renderer is None:
            return None
        stops = episode.sampling.stop_token_ids
        return RenderedChats(self._renderer, HISTORY_TEXT, stop_token_ids=stops, malformed=episode.note_malformed)

    def _admit(self, http_request: web.Request) -> tuple[_OpenEpisode, str]:
        """Return the episode of a request's key, and the path behind it. Raises HTTPUnauthorized, HTTPGone."""
        key, path = _key(http_request)
        if key in self.open_episodes:
            return self.open_episodes[key], path
        if key in self._ended_keys:
            raise _refusal(web.HTTPGone, "this episode has ended")
        raise _refusal(web.HTTPUnauthorized, "want the key of an episode: /e/KEY/... or Authorization: Bearer KEY")

    async def _handle(self, http_request: web.Request) -> web.StreamResponse:
        opened, path = self._admit(http_request)  # again: the episode may have ended while the body arrived
        episode, body = opened.episode, body_in(http_request)
        try:
            if path in ("/reward", "/truncated", "/state"):
                return await _note(episode, path, json_map(body))
            if _streams(episode, path, body):
                return await self._stream(opened, http_request, path, body)
            answer = await self._answer(opened, http_request, path, body)
            if answer.status == HTTPStatus.OK:
                delivery = _deliver(episode, answer, body, path)
                # To the end, also when the client goes: a stored answer must be recorded. Where nothing is stored,
                # nothing is waited for.
                await (asyncio.shield(delivery) if episode.log.stores else delivery)
            else:
                episode.refused = answer.content[:500].decode(errors="replace")
        except _ENDS as error:
            return _refused(episode, error)
        answer.calls.room.close()
        headers = {"Content-Type": answer.content_type, **_NO_RETRY}
        return web.Response(body=answer.content, status=answer.status, headers=headers)

    async def _stream(
        self, opened: _OpenEpisode, http_request: web.Request, path: str, body: bytes
    ) -> web.StreamResponse:
        """Answer with a stream, which is cut when its client hangs up or the episode ends."""
        streaming = asyncio.ensure_future(self._send_events(opened, http_request, path, body))
        opened.streams.add(streaming)
        streaming.add_done_callback(opened.streams.discard)
        streaming.add_done_callback(_log_error)
        try:
            return await asyncio.shield(streaming)
        except asyncio.CancelledError:
            _cut(streaming)
            raise

    async def _send_events(
        self, opened: _OpenEpisode, http_request: web.Request, path: str, body: bytes
    ) -> web.StreamResponse:
        """Send the events as they are made. Raises as ``_new_answer`` before the first one; later errors are events."""
        response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-cache", **_NO_RETRY})
        episode = opened.episode
        request, calls = self._calls_of(opened, http_request, path, body, streams=True)
        try:
            async with opened.slots, await opened.history(request, calls) as answer:
                if calls.stream is None:
                    content = await answer.read()
                    if answer.status != HTTPStatus.OK:
                        episode.refused = content[:500].decode(errors="replace")
                    return web.Response(body=content, status=answer.status, headers={"Content-Type": JSON, **_NO_RETRY})
                episode.refused = ""
                await response.prepare(http_request)
                async for chunk in answer.chunks:
                    await response.write(chunk)
                    calls.stream.sent()
        except _ENDS as error:
            refusal = _refused(episode, error)
            if not response.prepared:
                return refusal
            assert isinstance(refusal.body, bytes)
            await response.write((b"event: error\n" if path in DIALECTS else b"") + DATA + refusal.body + b"\n\n")
        finally:
            if calls.stream is not None:
                await calls.stream.end()
                if calls.stream.recorded and calls.answers_for(episode):
                    episode.show = partial(messages_of, body, path, episode.text)
            calls.room.close()
        return response

    async def _answer(self, opened: _OpenEpisode, http_request: web.Request, path: str, body: bytes) -> _WholeAnswer:
        """Return the answer that an earlier client of the same request abandoned, or else a new one."""
        session = http_request.headers.get(SESSION_HEADERS[0], "")
        digest = hashlib.blake2b(repr((path, session)).encode() + body).digest()
        if opened.abandoned.get(digest):
            call = opened.abandoned[digest].pop()
        else:
            call = asyncio.ensure_future(self._new_answer(opened, http_request, path, body))
        opened.running.add(call)
        call.add_done_callback(opened.running.discard)
        call.add_done_callback(_log_error)
        try:
            answer = await asyncio.shield(call)
            if http_request.transport is None or http_request.transport.is_closing():
                raise ConnectionResetError("the program has hung up")
        except (asyncio.CancelledError, ConnectionResetError):
            if call.cancelled():
                raise Interrupted("the episode has ended", None, Timings()) from None
            opened.abandoned[digest].append(call)
            raise
        return answer

    async def _new_answer(
        self, opened: _OpenEpisode, http_request: web.Request, path: str, body: bytes
    ) -> _WholeAnswer:
        """Return a new answer. Raises BadRequest, GenerationFailed, Interrupted."""
        request, calls = self._calls_of(opened, http_request, path, body, streams=False)
        answer_request = inference_answer if path == INFERENCE_PATH else opened.history
        try:
            async with opened.slots, await answer_request(request, calls) as answer:
                return _WholeAnswer(answer.status, answer.headers.get("Content-Type", JSON), await answer.read(), calls)
        except BaseException:
            calls.room.close()
            raise

    def _calls_of(
        self, opened: _OpenEpisode, http_request: web.Request, path: str, body: bytes, *, streams: bool
    ) -> tuple[Request, ModelCalls]:
        """Return a request with the handler of its model calls. Raises BadRequest."""
        request_id, headers = opened.next_id(), http_request.headers
        names_model = bool(self._untrained_models) and b'"model"' in body
        is_untrained = names_model and json_map(body).get("model") in self._untrained_models
        calls = ModelCalls(
            opened.episode,
            self._responses,
            max_context=self.model.max_context,
            name=_PREFIX.get(path, "") + request_id,
            model=self.model.name,
            agent=next((headers[name] for name in SESSION_HEADERS if name in headers), "")[:64],
            trained=headers.get(TRAIN_HEADER, "1").strip() != "0" and not is_untrained,
            streams=streams,
        )
        return Request(method=http_request.method, path=path, headers={}, body=body, id=request_id), calls


async def _note(episode: Episode, path: str, fields: JsonMapping) -> web.Response:
    """Note a turn's reward, the limit or the state of an episode. Raises BadRequest, Superseded, NotStored."""
    if path == "/reward":
        episode.reward_turn(fields.get("turn"), fields.get("reward"))
    elif path == "/truncated":
        episode.end_at(fields.get("limit"))
    elif "state" not in fields:
        raise BadRequest('want a map with "state"')
    else:
        await episode.save(fields["state"])
    return web.json_response({"success": True})


class _EpisodeKeys:
    """The key of an open episode, for every request."""

    guarded, is_public = True, False

    def __init__(self, admit: Callable[[web.Request], object]) -> None:
        self._admit = admit

    def key(self, rule: Rule) -> str:
        return "key of an open episode"

    async def check(self, request: web.Request, rule: Rule) -> None:
        """Raise an HTTPError for a request without the key."""
        self._admit(request)


_ENDS = (BadRequest, Interrupted, GenerationFailed, Superseded, NotStored)
"""Errors of model calls."""


def _refused(episode: Episode, error: Exception) -> web.Response:
    """Return the answer to a call that has failed; an error that ends the episode does so here."""
    match error:
        case BadRequest():
            episode.refused = str(error)
            spent = isinstance(error, Spent) or "context length" in str(error)
            if spent:
                episode.spent = episode.spent or "context"
            return _error(str(error), HTTPStatus.BAD_REQUEST, "context_length_exceeded" if spent else None)
        case Interrupted():
            episode.stop(handed_back=error.reason)
            return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        case GenerationFailed():
            episode.stop(failed=str(error))
            return _error(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        case NotStored():
            episode.keeps_turns = True  # the next attempt gives out the stored turns
            episode.stop(failed=str(error) if error.lasting else "", handed_back="" if error.lasting else str(error))
            return _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        case _:
            episode.stop(superseded=True)
            return _error("another actor makes this sample now", HTTPStatus.GONE)


def _streams(episode: Episode, path: str, body: bytes) -> bool:
    """Return whether the answer is sent while tokens are made: a stream, whose turns need not be stored first."""
    if b'"stream"' not in body or path == INFERENCE_PATH or episode.log.stores or episode.log.pending:
        return False
    return json_map(body).get("stream") is True


def _cut(streaming: asyncio.Task[web.StreamResponse]) -> None:
    """End a stream, once: a second cancellation would end the recording of the tokens sent."""
    if not streaming.cancelling():
        streaming.cancel()


async def _deliver(episode: Episode, answer: _WholeAnswer, body: bytes, path: str) -> None:
    """Store and record the turns of an answer, right before it is sent. Raises Superseded, NotStored."""
    episode.refused = ""
    # Not later: an environment may act on the answer, and the next attempt must find the same one (decision 034).
    for call in answer.calls.outputs:
        await episode.record(call.prompt, call.output, call.response, call.stored)
    if answer.calls.outputs and answer.calls.answers_for(episode):
        episode.show = partial(messages_of, body, path, episode.text)


def _key(http_request: web.Request) -> tuple[str, str]:
    """Return the key of a request, empty without one, and the path behind it."""
    if http_request.path.startswith(KEY_PATH):
        key, _, path = http_request.path.removeprefix(KEY_PATH).partition("/")
        return key, f"/{path}"
    authorization, key = http_request.headers.get("Authorization", ""), http_request.headers.get("x-api-key", "")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() == "bearer":
        key = token.strip()
    elif scheme.lower() == "basic":  # the user in http://KEY@HOST:PORT
        try:
            key = BasicAuth.decode(authorization).login
        except ValueError:
            key = ""
    return key, http_request.path


def _error(message: str, status: int, code: str | None = None) -> web.Response:
    return web.json_response(_content(message, status, code), status=int(status), headers=_NO_RETRY)


def _refusal(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    return kind(text=json.dumps(_content(message, kind.status_code)), content_type=JSON, headers=_NO_RETRY)


def _content(message: str, status: int, code: str | None = None) -> JsonObject:
    content = {"type": "error", **openai_api.error(message, int(status))}  # the type is Anthropic's
    if code is not None:
        content["error"]["code"] = code
    return content


def _log_error(call: asyncio.Task[Any]) -> None:
    """Log the error of a call after its client has gone: it has no other receiver."""
    if not call.cancelled() and (error := call.exception()) is not None:
        logger.debug("model call ended error=%s", error)
