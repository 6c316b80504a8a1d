"""Conversion of one token history's chats to prompts, and of responses to messages: by the model's chat template, or by
a renderer.

messages -> ask -> pieces of token ids -> engine -> answer -> reader -> message
             ^                                        |
             +---------------- remember --------------+

Original texts of responses with tool calls are kept: clients send back parsed calls, which a chat template would render
differently.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tidemill.actors.errors import BadRequest
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_api import ParsedRequest, ReadReply
from tidemill.actors.router.tree import TokenPiece, ids_of, sampled_piece
from tidemill.actors.text.rendering import Renderer
from tidemill.actors.text.text import beside_loop, size_of
from tidemill.actors.text.tool_calls import ChatTemplate, ParsedReply
from tidemill.bus.wire.json_object import JsonMapping


class ToolCallCache:
    """Original texts by call id, at most ``max_text`` characters; the oldest are evicted first."""

    def __init__(self, max_text: int) -> None:
        self._max_text, self._size = max_text, 0
        self._by_id: OrderedDict[str, tuple[object, str]] = OrderedDict()
        """Id of the first call -> the message sent to the client, normalised, and the text it was parsed from."""

    def remember(self, message: JsonMapping, text: str) -> None:
        """Remember a finished response; one without calls is ignored."""
        if not message.get("tool_calls"):
            return
        self._by_id[message["tool_calls"][0]["id"]] = (comparable(message), text)
        self._size += len(text)
        while self._size > self._max_text and len(self._by_id) > 1:
            _, (_, oldest) = self._by_id.popitem(last=False)
            self._size -= len(oldest)

    def with_original_text(self, messages: Sequence[Mapping[str, object]]) -> tuple[Mapping[str, object], ...]:
        """Return the messages. One that came back unchanged gets its original text, without ``tool_calls``."""
        return tuple(map(self._original, messages))

    def _original(self, message: JsonMapping) -> Mapping[str, object]:
        calls = message.get("tool_calls")
        sent, text = self._by_id.get(str(calls[0].get("id")), (None, "")) if calls else (None, "")
        if sent is None or sent != comparable(message):
            return message
        return {"role": message["role"], "content": text}


def comparable(message: JsonMapping) -> object:
    """Return the parts of a message that must be equal; formatting of JSON and other fields may differ."""
    calls = [
        (call.get("id"), call["function"]["name"], _map(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("role"), message.get("content") or "", calls


def _map(arguments: object) -> object:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat:
    """A chat and its prompt."""

    parsed: ParsedRequest
    pieces: Sequence[TokenPiece]
    """The prompt, with the very ids of the responses that are part of it."""
    key: bytes = b""
    """Digest of session, arguments and messages, for a renderer."""
    num_known: int = 0
    """Number of tokens at the beginning of the prompt that an earlier turn has, for a renderer."""

    @property
    def ids(self) -> list[int]:
        return ids_of(self.pieces)


class Chats(Protocol):
    """The chats of one token history."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a response, besides the request's."""
        ...

    async def ask(self, parsed: ParsedRequest, session: str) -> AskedChat:
        """Return a chat with its prompt. Raises BadRequest."""
        ...

    def reader(self, chat: AskedChat) -> ReadReply | None:
        """Return the function that reads the responses; None = all of them is content."""
        ...

    def remember(self, chat: AskedChat, answer: JsonMapping, message: JsonMapping) -> None:
        """Remember a finished response. ``message``: as it is sent to the client."""
        ...


class TemplateChats:
    """Chats by the model's chat template: its text is found again in the token history."""

    stop_token_ids = ()

    def __init__(
        self, template: ChatTemplate | None, pieces: Callable[..., Awaitable[list[TokenPiece]]], max_text: int
    ) -> None:
        """``pieces``: the method of the history. ``max_text``: maximum number of characters kept."""
        self._template, self._pieces = template, pieces
        self._cache = ToolCallCache(max_text)

    async def ask(self, parsed: ParsedRequest, session: str) -> AskedChat:
        original = replace(parsed, messages=self._cache.with_original_text(parsed.messages))
        text = await beside_loop(size_of(original.messages), lambda: openai_api.chat_text(original, self._template))
        return AskedChat(parsed=parsed, pieces=await self._pieces(text, session, add_special=False))

    def reader(self, chat: AskedChat) -> ReadReply | None:
        return openai_api.reader(chat.parsed, self._template)

    def remember(self, chat: AskedChat, answer: JsonMapping, message: JsonMapping) -> None:
        """See ``Chats``: of a response with calls its text, which the template would render differently."""
        self._cache.remember(message, str(answer.get("text") or ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A response with its whole prompt."""

    prompt: Sequence[TokenPiece]
    output: TokenPiece
    reasoning: str
    num_new: int
    """Number of tokens that no earlier turn has."""


class RenderedChats:
    """Chats by a renderer. A chat that begins with one that was answered here begins with its very ids. An answer
    counts as the same with the same content and calls, and the same reasoning or none: many clients drop it.
    """

    def __init__(
        self,
        renderer: Renderer,
        max_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        malformed: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``stop_token_ids``: besides the renderer's. ``malformed`` gets the number of calls that cannot be read."""
        self._renderer, self._max_tokens, self._malformed = renderer, max_tokens, malformed
        self.stop_token_ids = tuple(dict.fromkeys([*stop_token_ids, *renderer.stop_token_ids]))
        self._turns: OrderedDict[bytes, dict[str, _Turn]] = OrderedDict()
        """Turns by digest of their chat without the last reasoning, then by reasoning; the oldest chat first."""
        self._num_tokens = 0

    async def ask(self, parsed: ParsedRequest, session: str) -> AskedChat:
        """See ``Chats``. Where the renderer changes earlier turns, the whole chat is rendered."""
        messages, arguments = parsed.messages, parsed.template
        try:
            count, turn, key = self._longest(parsed, session)
        except RecursionError:
            raise BadRequest("messages: want values that are less deep") from None
        if turn is not None:
            last_turn, following = turn, messages[count:]
            pieces = await beside_loop(size_of(following), lambda: self._continued(last_turn, following, arguments))
            if pieces is not None:
                num_known = len(ids_of([*turn.prompt, turn.output]))
                return AskedChat(parsed=parsed, pieces=pieces, key=key, num_known=num_known)
        ids = await beside_loop(size_of(messages), lambda: self._renderer.prompt(messages, arguments))
        return AskedChat(parsed=parsed, pieces=[TokenPiece(text="", tokens=tuple(ids))], key=key)

    def reader(self, chat: AskedChat) -> ReadReply | None:
        """See ``Chats``. A response is read as a whole, when it has ended."""
        prompt, arguments = chat.ids, chat.parsed.template

        def read(answer: JsonMapping, text: str, finished: bool) -> ParsedReply:
            if not finished:
                return ParsedReply("", ())
            reply = self._renderer.read_reply(text, answer["output_ids"], prompt, arguments)
            if reply.malformed:
                self._malformed(reply.malformed)
            stop = (answer["meta_info"].get("finish_reason") or {}).get("matched")
            return _without(reply, stop) if isinstance(stop, str) else reply

        return read

    def remember(self, chat: AskedChat, answer: JsonMapping, message: JsonMapping) -> None:
        """See ``Chats``. A response without log-probs is left out."""
        if (sampled := sampled_piece(answer)) is None:
            return
        bare, reasoning = _digest(chat.key, comparable(message)), str(message.get("reasoning_content") or "")
        num_new = len(chat.ids) + len(sampled.tokens) - chat.num_known
        turns = self._turns.setdefault(bare, {})
        self._turns.move_to_end(bare)
        if reasoning in turns:
            self._num_tokens -= turns.pop(reasoning).num_new
        turns[reasoning] = _Turn(prompt=chat.pieces, output=sampled, reasoning=reasoning, num_new=num_new)
        self._num_tokens += num_new
        while self._num_tokens > self._max_tokens and len(self._turns) > 1:
            _, oldest = self._turns.popitem(last=False)
            self._num_tokens -= sum(turn.num_new for turn in oldest.values())

    def _continued(
        self, turn: _Turn, following: Sequence[JsonMapping], arguments: JsonMapping
    ) -> list[TokenPiece] | None:
        """Return a turn and the messages that follow it as pieces; None where the whole chat is to be rendered."""
        if not arguments["add_generation_prompt"]:
            return None if following else [*turn.prompt, turn.output]
        prompt, output = ids_of(turn.prompt), turn.output.tokens
        ids = self._renderer.next_prompt(prompt, output, following, arguments)
        if ids is None:
            return None
        return [*turn.prompt, turn.output, TokenPiece(text="", tokens=tuple(ids[len(prompt) + len(output) :]))]

    def _longest(self, parsed: ParsedRequest, session: str) -> tuple[int, _Turn | None, bytes]:
        """Return the number of messages up to the last known turn, the turn, and the digest of the whole chat."""
        arguments = {name: value for name, value in parsed.template.items() if name != "add_generation_prompt"}
        count, newest, key = 0, None, _digest(b"", [session, arguments])
        for place, message in enumerate(parsed.messages, 1):
            if message["role"] != "assistant":
                key = _digest(key, message)
                continue
            bare, reasoning = _digest(key, comparable(message)), message.get("reasoning_content")
            turn = self._known(bare, reasoning)
            if turn is not None:
                count, newest, reasoning = place, turn, turn.reasoning
            key = _digest(bare, reasoning or "")
        return count, newest, key

    def _known(self, bare: bytes, reasoning: object) -> _Turn | None:
        """Return the turn of a message with this reasoning; where the client has left it out, the newest."""
        turns = self._turns.get(bare, {})
        if not reasoning:
            return next(reversed(turns.values()), None)
        return turns.get(reasoning) if isinstance(reasoning, str) else None


def _without(reply: ParsedReply, stop: str) -> ParsedReply:
    """Return a reply without the stop string that ended it: its ids are part of the response, its text is not."""
    if stop in reply.content:
        return replace(reply, content=reply.content[: reply.content.rindex(stop)])
    if not reply.content and stop in reply.reasoning:
        return replace(reply, reasoning=reply.reasoning[: reply.reasoning.rindex(stop)])
    return reply


def _digest(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
