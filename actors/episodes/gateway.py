"""The listener through which programs of episodes ask the model: OpenAI's paths and SGLang's, a key for each episode.

    http://127.0.0.1:PORT/e/KEY/v1/chat/completions      or without /e/KEY, and the key as Authorization: Bearer KEY, as x-api-key,
                                                               or as the user: http://KEY@127.0.0.1:PORT/...

A turn is recorded before the last byte of its answer is sent. The answer to a client that has gone is kept for its next
identical request; of a stream that a client has cut the tokens that were sent are a turn.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import BasicAuth, web

from tidemill.actors.engines.responses import GenerationFailed, Interrupted, Responses
from tidemill.actors.episodes.calls import INFERENCE_PATH, AnsweredCall, answer_of, inference_answer
from tidemill.actors.episodes.episode import Episode, Spent, messages_of
from tidemill.actors.episodes.model_calls import ModelCalls
from tidemill.actors.episodes.turn_log import StoredTurn
from tidemill.actors.errors import BadRequest
from tidemill.actors.events import DATA
from tidemill.actors.http_api import json_map
from tidemill.actors.openai import openai_api
from tidemill.actors.router.chats import Chats, RenderedChats
from tidemill.actors.router.dialects import DIALECTS
from tidemill.actors.router.exchange import EVENTS, JSON, SESSION_HEADERS, Request
from tidemill.actors.router.token_history import ModelText, TokenHistory
from tidemill.actors.router.tree import TokenPiece
from tidemill.actors.text.rendering import Renderer
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.http.access import Route, Rule
from tidemill.bus.http.bodies import body_in
from tidemill.bus.http.listener import Listener
from tidemill.bus.streams.episode_turns import NotStored, Superseded
from tidemill.bus.wire.json_object import JsonObject
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
_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"} | {
    path: one.id for path, one in DIALECTS.items()
}
"""Beginning of an answer's id by path."""


@dataclass(slots=True)
class _WholeAnswer:
    """A whole answer, and its turns."""

    status: int
    content_type: str
    content: bytes
    calls: ModelCalls


@dataclass(slots=True, eq=False)
class _Open:
    """An episode that may be asked for."""

    episode: Episode
    history: TokenHistory
    slots: asyncio.Semaphore
    prefix: str = field(default_factory=lambda: secrets.token_hex(8))
    """Beginning of the ids of its answers."""
    answers: int = 0
    """Answers so far."""
    running: set[asyncio.Task[_WholeAnswer]] = field(default_factory=set)
    left: dict[bytes, list[asyncio.Task[_WholeAnswer]]] = field(default_factory=dict)
    """Answers to clients that have gone, by request."""
    streams: set[asyncio.Task[web.StreamResponse]] = field(default_factory=set)

    def next_id(self) -> str:
        """Return an id that no other answer has."""
        self.answers += 1
        return f"{self.prefix}{self.answers:08x}"


class Gateway:
    """The listener of an actor. ``start``, and ``close`` at the end."""

    def __init__(
        self,
        model: ModelText,
        responses: Responses,
        renderer: Renderer | None = None,
        untrained_models: Collection[str] = (),
    ) -> None:
        """``renderer``: None = chats are written by the model's chat template. ``untrained_models``: calls for these
        are context.
        """
        self._model, self._responses, self._renderer, self._untrained_models = (
            model,
            responses,
            renderer,
            untrained_models,
        )
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.listener = Listener(
            {"* /{path:.*}": Route.request(self._handle)}, _EpisodeKeys(self._admitted), shutdown_s=1.0
        )
        self.url = ""

    async def start(self, at: Reach = HERE) -> str:
        """Listen, and return the URL. Raises OSError."""
        self.url = await self.listener.start(at.bind, 0, advertise=at.advertised, name="actor.gateway.host")
        return self.url

    async def close(self) -> None:
        """Stop listening."""
        await self.listener.close()

    @asynccontextmanager
    async def opened(self, episode: Episode, *, max_calls_in_flight: int) -> AsyncIterator[str]:
        """Yield the key of an episode. Behind the block its calls are ended, its streams are recorded, and the key is
        refused.
        """
        key = secrets.token_hex(16)
        history = TokenHistory(self._model, HISTORY_TEXT, self._chats(episode), episode.task.chat_template_args)
        episode.restore(lambda ids: self._model.text.decode(ids.tolist(), skip_special=False))
        remember_restored(history, self._model, episode.log.restored)
        open = _Open(episode, history, asyncio.Semaphore(max_calls_in_flight))
        self._open[key] = open
        try:
            yield key
        finally:
            del self._open[key]
            self._ended[key] = None
            if len(self._ended) > ENDED_KEYS:
                self._ended.popitem(last=False)
            for call in open.running:
                call.cancel()
            for stream in open.streams:
                _cut(stream)
            await asyncio.gather(*open.streams, return_exceptions=True)

    def _chats(self, episode: Episode) -> Chats | None:
        """Return the chats of an episode; None = the model's chat template writes them."""
        if self._renderer is None:
            return None
        stops = episode.sampling.stop_token_ids
        return RenderedChats(self._renderer, HISTORY_TEXT, stop_token_ids=stops, malformed=episode.note_malformed)

    def _admitted(self, http_request: web.Request) -> tuple[_Open, str]:
        """Return the episode whose key a request has, and the path behind the key. Raises HTTPUnauthorized, or HTTPGone
        behind its end.
        """
        key, path = _key(http_request)
        open = self._open.get(key)
        if open is not None:
            return open, path
        if key in self._ended:
            raise _refusal(web.HTTPGone, "this episode has ended")
        raise _refusal(web.HTTPUnauthorized, "want the key of an episode: /e/KEY/... or Authorization: Bearer KEY")

    async def _handle(self, http_request: web.Request) -> web.StreamResponse:
        open, path = self._admitted(http_request)  # again: the episode may have ended while the body arrived
        body = body_in(http_request)
        try:
            if path == "/reward":
                return self._reward(open.episode, body)
            if path == "/truncated":
                open.episode.end_at(json_map(body).get("limit"))
                return web.json_response({"success": True})
            if path == "/state":
                return await self._state(open.episode, body)
            if _streams(open.episode, path, body):
                return await self._stream(open, http_request, path, body)
            made = await self._made(open, http_request, path, body)
            if made.status == HTTPStatus.OK:
                delivering = _deliver(open.episode, made, body, path)
                # To the end, also when the client goes: a stored answer must be recorded. Where nothing is stored,
                # nothing is waited for.
                await (asyncio.shield(delivering) if open.episode.log.stores else delivering)
            else:
                open.episode.refused = made.content[:500].decode(errors="replace")
        except _ENDS as error:
            return _refused(open.episode, error)
        made.calls.held.close()
        return web.Response(
            body=made.content, status=made.status, headers={"Content-Type": made.content_type, **_NO_RETRY}
        )

    async def _stream(self, open: _Open, http_request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Answer with a stream, which is cut when its client hangs up or the episode ends."""
        streaming = asyncio.get_running_loop().create_task(self._streaming(open, http_request, path, body))
        open.streams.add(streaming)
        streaming.add_done_callback(open.streams.discard)
        streaming.add_done_callback(_seen)
        try:
            return await asyncio.shield(streaming)
        except asyncio.CancelledError:
            _cut(streaming)
            raise

    async def _streaming(self, open: _Open, http_request: web.Request, path: str, body: bytes) -> web.StreamResponse:
        """Send the events as they are made. Raises as ``_answer`` does, before the first one; later errors are
        events.
        """
        response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-cache", **_NO_RETRY})
        request, calls = self._asked(open, http_request, path, body, streams=True)
        try:
            async with open.slots, await open.history(request, calls) as answer:
                if calls.stream is None:
                    content = await answer.read()
                    if answer.status != HTTPStatus.OK:
                        open.episode.refused = content[:500].decode(errors="replace")
                    return web.Response(body=content, status=answer.status, headers={"Content-Type": JSON, **_NO_RETRY})
                open.episode.refused = ""
                await response.prepare(http_request)
                async for chunk in answer.chunks:
                    await response.write(chunk)
                    calls.stream.sent()
        except _ENDS as error:
            refusal = _refused(open.episode, error)
            if not response.prepared:
                return refusal
            await response.write(
                (b"event: error\n" if path in DIALECTS else b"") + DATA + bytes(refusal.body or b"") + b"\n\n"
            )  # type: ignore[arg-type]
        finally:
            if calls.stream is not None:
                await calls.stream.end()
                if calls.stream.recorded and calls.answers_for(open.episode):
                    open.episode.show = partial(messages_of, body, path, open.episode.text)
            calls.held.close()
        return response

    async def _made(self, open: _Open, http_request: web.Request, path: str, body: bytes) -> _WholeAnswer:
        """Return the answer: one that the same request left behind, or a new one, which goes on without its client."""
        digest = hashlib.blake2b(
            repr((path, http_request.headers.get(SESSION_HEADERS[0], ""))).encode() + body
        ).digest()
        left = open.left.get(digest, [])
        call = (
            left.pop() if left else asyncio.get_running_loop().create_task(self._answer(open, http_request, path, body))
        )
        open.running.add(call)
        call.add_done_callback(open.running.discard)
        call.add_done_callback(_seen)
        try:
            made = await asyncio.shield(call)
            if http_request.transport is None or http_request.transport.is_closing():
                raise ConnectionResetError("the program has hung up")
        except asyncio.CancelledError:
            if call.cancelled():
                raise Interrupted("the episode has ended", None, Timings()) from None
            open.left.setdefault(digest, []).append(call)
            raise
        except ConnectionResetError:
            open.left.setdefault(digest, []).append(call)
            raise
        return made

    async def _answer(self, open: _Open, http_request: web.Request, path: str, body: bytes) -> _WholeAnswer:
        """Return a new answer. Raises BadRequest, GenerationFailed, Interrupted."""
        request, calls = self._asked(open, http_request, path, body, streams=False)
        try:
            async with open.slots:
                if path == INFERENCE_PATH:
                    answer = await inference_answer(request, calls)
                else:
                    answer = await open.history(request, calls)
                async with answer:
                    return _WholeAnswer(
                        answer.status,
                        answer.headers.get("Content-Type", "application/json"),
                        await answer.read(),
                        calls,
                    )
        except BaseException:
            calls.held.close()
            raise

    def _asked(
        self, open: _Open, http_request: web.Request, path: str, body: bytes, *, streams: bool
    ) -> tuple[Request, ModelCalls]:
        """Return a request with the handler of its model calls."""
        id = open.next_id()
        calls = ModelCalls(
            open.episode,
            self._responses,
            max_context=self._model.max_context,
            name=_PREFIX.get(path, "") + id,
            model=self._model.name,
            agent=next((http_request.headers[name] for name in SESSION_HEADERS if name in http_request.headers), "")[
                :64
            ],
            trained=http_request.headers.get(TRAIN_HEADER, "1").strip() != "0" and not self._names_untrained(body),
            streams=streams,
        )
        return Request(method=http_request.method, path=path, headers={}, body=body, id=id), calls

    def _names_untrained(self, body: bytes) -> bool:
        """Return whether a request names one of ``untrained_models``. Raises BadRequest."""
        return (
            bool(self._untrained_models)
            and b'"model"' in body
            and json_map(body).get("model") in self._untrained_models
        )

    def _reward(self, episode: Episode, body: bytes) -> web.Response:
        fields = json_map(body)
        episode.reward_turn(fields.get("turn"), fields.get("reward"))
        return web.json_response({"success": True})

    async def _state(self, episode: Episode, body: bytes) -> web.Response:
        fields = json_map(body)
        if "state" not in fields:
            raise BadRequest('want a map with "state"')
        await episode.save(fields["state"])
        return web.json_response({"success": True})


class _EpisodeKeys:
    """The key of an open episode, for every request."""

    guarded, is_public = True, False

    def __init__(self, admitted: Callable[[web.Request], object]) -> None:
        self._admitted = admitted

    def key(self, rule: Rule) -> str:
        """Return the key in words."""
        return "key of an open episode"

    async def check(self, request: web.Request, rule: Rule) -> None:
        """Raise an HTTPError for a request without the key."""
        self._admitted(request)


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
    """Return whether a request is answered as the tokens are made: it asks for a stream, and its turns need not be
    stored before.
    """
    if b'"stream"' not in body or path == INFERENCE_PATH or episode.log.stores or episode.log.pending:
        return False
    return json_map(body).get("stream") is True


def _cut(streaming: asyncio.Task[web.StreamResponse]) -> None:
    """End a stream, once: a second cancellation would end the recording of the tokens sent."""
    if not streaming.cancelling():
        streaming.cancel()


async def _deliver(episode: Episode, made: _WholeAnswer, body: bytes, path: str) -> None:
    """Store and record the turns of an answer, right before it is sent. Raises Superseded, NotStored."""
    episode.refused = ""
    for called in made.calls.outputs:
        await episode.record(called.prompt, called.output, called.response, called.stored)
    if made.calls.outputs and made.calls.answers_for(episode):
        episode.show = partial(messages_of, body, path, episode.text)


def remember_restored(history: TokenHistory, model: ModelText, turns: Sequence[StoredTurn]) -> None:
    """Remember turns of an earlier life, in order, as the pieces that it had, so that their texts give the very ids
    again.

    A prompt need not begin with the ids of the turn before: the end token that closed a response is not in its text.
    """
    known: defaultdict[str, list[list[TokenPiece]]] = defaultdict(list)
    for turn in turns:
        made = turn.record
        pieces, behind = _begun(turn.prompt.tolist(), known[made.agent])
        if behind:
            pieces.append(TokenPiece(text=model.text.decode(behind, skip_special=False), tokens=tuple(behind)))
        called = AnsweredCall(turn.prompt, turn.output(made.id), turn.response(), turn)
        known[made.agent].append(history.remember(pieces, answer_of(called, made.id), made.agent))


def _begun(ids: list[int], known: list[list[TokenPiece]]) -> tuple[list[TokenPiece], list[int]]:
    """Return the longest beginning of ``ids`` that is the beginning of a known text in whole pieces, and the ids behind
    it.
    """
    best, longest = list[TokenPiece](), 0
    for pieces in reversed(known):
        end, count = 0, 0
        while count < len(pieces) and ids[end : end + len(pieces[count].tokens)] == [*pieces[count].tokens]:
            end, count = end + len(pieces[count].tokens), count + 1
        if end > longest:
            best, longest = pieces[:count], end
        if count == len(pieces):  # the usual case: behind the newest turn
            break
    return [*best], ids[longest:]


def _key(http_request: web.Request) -> tuple[str, str]:
    """Return the key of a request, empty without one, and the path behind it."""
    if http_request.path.startswith(KEY_PATH):
        key, _, path = http_request.path.removeprefix(KEY_PATH).partition("/")
        return key, f"/{path}"
    scheme, _, token = http_request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":  # the user in http://KEY@HOST:PORT
        try:
            return BasicAuth.decode(http_request.headers["Authorization"]).login, http_request.path
        except ValueError:
            return "", http_request.path
    return (
        token.strip() if scheme.lower() == "bearer" else http_request.headers.get("x-api-key", "")
    ), http_request.path


def _error(message: str, status: int, code: str | None = None) -> web.Response:
    return web.json_response(_content(message, status, code), status=int(status), headers=_NO_RETRY)


def _refusal(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    return kind(text=json.dumps(_content(message, kind.status_code)), content_type=JSON, headers=_NO_RETRY)


def _content(message: str, status: int, code: str | None = None) -> JsonObject:
    content = {"type": "error", **openai_api.error(message, int(status))}  # the type is Anthropic's
    if code is not None:
        content["error"]["code"] = code
    return content


def _seen(call: asyncio.Task[Any]) -> None:
    """Log the error of a call after its client has gone: it has no other receiver."""
    if not call.cancelled() and (error := call.exception()) is not None:
        logger.debug("model call ended error=%s", error)
