"""Translation of answers of /generate into OpenAI's, whole and in chunks. Pure: knows no HTTP and no engine."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from tidemill.actors.openai.openai_api import ParsedRequest, ReadReply
from tidemill.actors.text.tool_calls import ParsedReply, ToolCall
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

INCOMPLETE = "\ufffd"
"""Character that tokenizers put for bytes which are no complete character."""


class ResponseBuilder:
    """Builder of one answer. Responses are numbered by place: all of the first prompt, then all of the second, ..."""

    def __init__(
        self,
        parsed: ParsedRequest,
        *,
        chat_id: str,
        model: str,
        created: int,
        piece: Callable[[int], str] | None,
        read: ReadReply | None = None,
    ) -> None:
        """``created``: Unix time, s. ``piece``: from a token to its text; None = no tokenizer. ``read``: the result of
        ``reader``, called once for each finished response.
        """
        self._request, self._chat_id, self._piece, self._read = parsed, chat_id, piece, read
        kind = "chat.completion" if parsed.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if parsed.chat else 'cmpl'}-{chat_id}",
            "created": created,
            "model": parsed.model or model,
        }
        self._whole, self._part = kind, f"{kind}.chunk" if parsed.chat else kind
        self._shown: dict[int, int] = {}
        """Place -> number of characters streamed."""
        self._called: dict[int, int] = {}
        """Place -> number of calls streamed."""
        self._counted: dict[int, int] = {}
        """Place -> number of tokens streamed."""
        self._offsets: dict[int, int] = {}
        """Place -> number of characters of the tokens with log-probs sent."""
        self._metas: dict[int, JsonMapping] = {}
        self._replies: dict[int, ParsedReply] = {}
        """Place -> content and calls of a finished response."""

    def whole(self, answers: Sequence[JsonMapping]) -> JsonObject:
        """Return the whole answer of a request that is not streamed, from SGLang's JSON of all responses, by place."""
        choices = []
        for place, answer in enumerate(answers):
            self._metas[place] = answer["meta_info"]
            answer = {**answer, "index": place}
            choice: JsonObject = {"index": place}
            choice |= {"message": self.message(answer)} if self._request.chat else {"text": _text(answer)}
            finish = self._finish(answer, bool(choice.get("message", {}).get("tool_calls")))
            choice |= {
                "logprobs": self._logprobs(answer, 0),
                "finish_reason": finish,
                **_matched(answer),
                **self._extras(answer, 0),
            }
            choices.append(choice)
        return {**self._head, "object": self._whole, "choices": choices, "usage": self._usage()}

    def message(self, answer: JsonMapping) -> JsonObject:
        """Return the assistant's message of a finished chat: content, reasoning and tool calls."""
        reply = self._reply(answer, _text(answer), finished=True)
        message: JsonObject = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                self._call(call, answer.get("index", 0), number) for number, call in enumerate(reply.calls)
            ]
        return message

    def parts(self, answer: JsonMapping) -> Iterator[JsonObject]:
        """Yield the chunks for the new part of a streamed state, which has the whole response so far."""
        place = answer.get("index", 0)
        first = place not in self._shown
        self._metas[place] = answer["meta_info"]
        # OpenAI's first chunk of a message has its role and no text.
        if first and self._request.chat:
            yield self._chunk(place, {"delta": {"role": "assistant", "content": ""}}, None)
        text, has_ended, counted = _text(answer), _finish(answer) is not None, self._counted.get(place, 0)
        reply = self._reply(answer, text if has_ended else text[: _settled(text, self._stops())], finished=has_ended)
        shown, called = self._shown.get(place, 0), self._called.get(place, 0)
        new, calls = reply.content[shown:], reply.calls[called:]
        self._shown[place], self._called[place] = max(shown, len(reply.content)), len(reply.calls)
        if not new and not calls and not has_ended:
            return
        self._counted[place] = len(answer["output_ids"])
        # Reasoning is read at the end of a response alone.
        delta: JsonObject = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        delta |= {"content": new} if new else {}
        if calls:
            delta["tool_calls"] = [
                {"index": number, **self._call(call, place, number)} for number, call in enumerate(calls, called)
            ]
        content = {"delta": delta} if self._request.chat else {"text": new}
        finish = self._finish(answer, bool(reply.calls))
        extras = {**(_matched(answer) if has_ended else {}), **self._extras(answer, counted)}
        yield self._chunk(place, {**content, "logprobs": self._logprobs(answer, counted), **extras}, finish)

    def shown(self, answer: JsonMapping) -> str:
        """Return the text of a streamed state that was sent so far; empty where a call of a tool was sent instead."""
        place = answer.get("index", 0)
        shown = _text(answer)[: self._shown.get(place, 0)]
        return "" if self._called.get(place) or self._reply(answer, shown, finished=False).content != shown else shown

    def last(self) -> Iterator[JsonObject]:
        """Yield the chunks that follow when all responses have ended."""
        if self._request.usage:
            yield {**self._head, "object": self._part, "choices": [], "usage": self._usage()}

    def _chunk(self, place: int, what: JsonObject, finish: str | None) -> JsonObject:
        choice = {"index": place, "logprobs": None, **what, "finish_reason": finish}
        return {**self._head, "object": self._part, "choices": [choice]}

    def _reply(self, answer: JsonMapping, text: str, *, finished: bool) -> ParsedReply:
        if self._read is None:
            return ParsedReply(text, ())
        if not finished:
            return self._read(answer, text, False)
        place = answer.get("index", 0)
        if place not in self._replies:
            self._replies[place] = self._read(answer, text, True)
        return self._replies[place]

    def _call(self, call: ToolCall, place: int, number: int) -> JsonObject:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id or f"call_{self._chat_id}_{place}_{number}", "type": "function", "function": function}

    def _finish(self, answer: JsonMapping, called: bool) -> str | None:
        finish = _finish(answer)
        return "tool_calls" if called and finish == "stop" else finish

    def _stops(self) -> Sequence[str]:
        stop = self._request.sampling.get("stop") or ()
        return (stop,) if isinstance(stop, str) else stop

    def _usage(self) -> JsonObject:
        """Return the token counts. A prompt counts once, however many responses it has."""
        metas, num_responses = self._metas, self._request.n
        prompt = sum(meta.get("prompt_tokens") or 0 for place, meta in metas.items() if place % num_responses == 0)
        completion = sum(meta["completion_tokens"] for meta in metas.values())
        cached = sum(meta.get("cached_tokens") or 0 for meta in metas.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        }

    def _logprobs(self, answer: JsonMapping, since: int) -> JsonObject | None:
        if not self._request.logprobs:
            return None
        place, entries = answer.get("index", 0), answer["meta_info"]["output_token_logprobs"][since:]
        piece = None if self._request.tokens_as_ids else self._piece
        pieces = [piece(entry[1]) if piece is not None else f"token_id:{entry[1]}" for entry in entries]
        values = [entry[0] for entry in entries]
        if self._request.chat:
            named = zip(pieces, values, strict=True)
            return {
                "content": [
                    {"token": piece, "logprob": value, "bytes": _bytes(piece), "top_logprobs": []}
                    for piece, value in named
                ]
            }
        ends = list(itertools.accumulate(map(len, pieces), initial=self._offsets.get(place, 0)))
        self._offsets[place] = ends[-1]
        return {"tokens": pieces, "token_logprobs": values, "top_logprobs": None, "text_offset": ends[:-1]}

    def _extras(self, answer: JsonMapping, since: int) -> JsonObject:
        if not self._request.token_ids:
            return {}
        meta = answer["meta_info"]
        return {
            "token_ids": answer["output_ids"][since:],
            "token_logprobs": [entry[0] for entry in meta["output_token_logprobs"]][since:],
            "weight_versions": meta.get("weight_versions") or [],
        }


def _text(answer: JsonMapping) -> str:
    return str(answer.get("text") or "")


def _finish(answer: JsonMapping) -> str | None:
    finish = answer["meta_info"].get("finish_reason")
    return None if finish is None else str(finish["type"])


def _matched(answer: JsonMapping) -> JsonObject:
    """Return the stop string or token id that ended a response, by SGLang's name for it, if there is one."""
    matched = (answer["meta_info"].get("finish_reason") or {}).get("matched")
    return {} if matched is None else {"matched_stop": matched}


def _bytes(piece: str) -> list[int] | None:
    """Return the bytes of a token's text; None for a token that is a part of a character."""
    return None if INCOMPLETE in piece else list(piece.encode())


def _settled(text: str, stops: Sequence[str]) -> int:
    """Return how many characters of an unfinished text are final: no part of a character or a stop string."""
    text = text.rstrip(INCOMPLETE)
    num_held = 0
    for stop in stops:
        if (start := text.find(stop)) >= 0:
            return start
        sizes = range(min(len(stop) - 1, len(text)), 0, -1)
        num_held = max(num_held, next((size for size in sizes if text.endswith(stop[:size])), 0))
    return len(text) - num_held
