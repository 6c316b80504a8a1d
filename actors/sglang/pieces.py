"""Responses that go on across updates at a server that does not say which weights made which token: they are asked for in pieces.

    asked for -> piece, until an update begins -> (new weights) -> piece, for the rest -> one answer, with its spans

Before an update every piece is ended (aborted); it has its tokens and log-probs so far, all of one version, which the server says. After
it the rest is asked for, with the prompt and the tokens so far as the prompt. The client sees one response. What is computed again is the
keys and values, with the new weights. Knows the server's /generate and /abort_request, and nothing of weights.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from actors.builtin.text import StopStrings, Text
from actors.errors import BadRequest, EngineError, EngineFailed
from actors.http_api import error_of
from actors.sglang.api import Aborted, Api

log = logging.getLogger(__name__)

PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
OF_PROMPT = ("prompt_tokens", "cached_tokens", "cached_tokens_details", "input_token_logprobs", "input_top_logprobs")
REFUSED_SAMPLING = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
REFUSED_SAMPLING_NUMBERS = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
NOT_SHARED = ("text", "input_ids", "stream")
REFUSED = ("session_params", "custom_logit_processor", "return_hidden_states", "return_routed_experts", "return_entropy", "input_embeds")
"""What depends on where a response began, which such a server is not told."""
LIMIT_TOKENS = 8
"""SGLang takes no prompt that is so near to the longest one."""
BROKEN = "\ufffd"
"""What a character that is not whole yet is decoded to."""
ABORT_S = 60.0
ABORT_AGAIN_S = 0.2
ABORT_AGAIN_MOST_S = 2.0
ABORTS = 5
"""Then SGLang's own pause has the rest of them ended, once a second."""
ABORTS_BY_NAME = 5
"""SGLang hears of a name once: if the request was not with its scheduler yet, in vain. What ends everything is heard, but in a pause."""


class Response:
    """One response, in pieces. ``latest`` is the answer as far as it is; ``fresh`` is set whenever it grows."""

    def __init__(self, body: Mapping[str, Any], text: Text | None, *, eos_ids: frozenset[int], max_context: int) -> None:
        self._body, self._text, self._max_context = dict(body), text, max_context
        self.names = tuple(self._body.pop("rid"))
        """By which it can be aborted; the first is its own."""
        self.rid = ""
        """Of its piece at the server: another one each time, as SGLang aborts a name once more 2 s after its stream has ended; all of one
        length, as it takes a name for the beginning of others."""
        self._params = dict(body.get("sampling_params") or {})
        self._prompt: list[int] = list(body["input_ids"])
        self._limit = int(self._params.get("max_new_tokens") or 128)
        named = frozenset(self._params.get("stop_token_ids") or ())
        self._enders = frozenset() if self._params.get("ignore_eos") else eos_ids | named
        stop = self._params.get("stop") or ()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._stops = StopStrings(text, stops) if stops and text is not None else None
        self._begun_s = time.perf_counter()
        self._tokens: list[int] = []
        """Of the pieces that are over."""
        self._lists: dict[str, list[Any]] = {}
        self._spans: list[tuple[str, int]] = []
        self._text_before = ""
        self._of_prompt: dict[str, Any] = {}
        self._pieces = self._retractions = 0
        self.latest: dict[str, Any] | None = None
        self.changed = asyncio.Event()
        self.finished = False
        self.stopped = asyncio.Event()
        """Somebody wants it ended; it is answered with what there is."""
        self.cut = False
        """Its piece is being ended, to go on afterwards."""
        self.insisting: asyncio.Task[None] | None = None

    def next_piece(self) -> dict[str, Any]:
        """The body that asks for what is missing."""
        self.rid, self.cut = secrets.token_hex(16), False
        self._pieces += 1
        made = len(self._tokens)
        params = {**self._params, "max_new_tokens": self._limit - made, "n": 1}
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, int(params["min_new_tokens"]) - made)
        more = {"rid": self.rid, "input_ids": self._prompt + self._tokens, "sampling_params": params, "return_logprob": True}
        return {**self._body, **more, **({"logprob_start_len": -1} if made else {})}

    def take(self, answer: Mapping[str, Any]) -> bool:
        """The piece as far as it is; True = it is over."""
        meta = answer["meta_info"]
        lists = {name: list(meta[name]) for name in PER_TOKEN if meta.get(name) is not None}
        if not self._tokens and meta.get("prompt_tokens") is not None:
            self._of_prompt = {name: meta[name] for name in OF_PROMPT if name in meta}
        entries = lists.get("output_token_logprobs", [])
        finish = meta.get("finish_reason")
        tokens, ended = self._tokens + [entry[1] for entry in entries], None
        if len(entries) or finish:
            tokens, ended = self._end_of(tokens, finish)
        count = len(tokens) - len(self._tokens)
        spans = [*self._spans, (str(meta["weight_version"]), count)] if count else list(self._spans)
        whole = {name: self._lists.get(name, []) + one[:count] for name, one in lists.items()}
        text = self._text_of(str(answer.get("text") or ""), tokens, ended)
        if ended is None and finish is not None:  # cut: the rest comes with the next piece
            self._tokens, self._lists, self._spans, self._text_before = tokens, whole, spans, text
            self._retractions += int(meta.get("num_retractions") or 0)
        self._tell(meta, tokens, whole, spans, text, ended)
        return self.finished or finish is not None

    def end(self, finish: Mapping[str, Any]) -> None:
        """Over, with what there is of the pieces before."""
        self._tell({"id": self.names[0]}, self._tokens, self._lists, self._spans, self._text_before, finish)

    @property
    def full(self) -> bool:
        """No further piece would be taken."""
        return len(self._prompt) + len(self._tokens) >= self._max_context - LIMIT_TOKENS

    def _end_of(self, tokens: list[int], finish: Mapping[str, Any] | None) -> tuple[list[int], Mapping[str, Any] | None]:
        """The response's tokens and why it ends; None when it goes on. What a cut piece has may be whole already."""
        cut = finish is not None and finish.get("type") == "abort" and self.cut and not self.stopped.is_set()
        for length in self._doubtful(len(tokens), cut):
            if (matched := self._matched(tokens[:length])) is not None:
                return tokens[:length], {"type": "stop", "matched": matched}
        if cut:
            return tokens, ({"type": "length", "length": len(tokens)} if len(tokens) >= self._limit else None)
        if finish is not None and finish.get("type") == "length":
            finish = {**finish, "length": len(tokens)}
        return tokens, finish

    def _doubtful(self, length: int, cut: bool) -> Iterator[int]:
        """Lengths at which the server may not have seen the end: stop strings across a seam, and the last token of a cut piece."""
        seam = len(self._tokens)
        if self._stops is not None and seam:
            yield from range(seam + 1, min(seam + self._stops.window, length) + 1)
        if cut and length > seam:
            yield length

    def _matched(self, tokens: Sequence[int]) -> int | str | None:
        if tokens[-1] in self._enders and len(tokens) > int(self._params.get("min_new_tokens") or 0):
            return tokens[-1]
        return self._stops.find(tokens) if self._stops is not None else None

    def _text_of(self, last: str, tokens: Sequence[int], finish: Mapping[str, Any] | None) -> str:
        """Of the whole response: the server has seen its last piece only, and a character may lie across a seam."""
        matched = (finish or {}).get("matched")
        if self._text is None or (not self._tokens and (finish is None or not self.cut)):
            return self._text_before + last
        keep = bool(self._params.get("no_stop_trim"))
        ids = tokens[:-1] if isinstance(matched, int) and not keep else tokens
        found = self._text.decode(list(ids), skip_special=bool(self._params.get("skip_special_tokens", True)))
        if finish is None:
            return found.rstrip(BROKEN)
        return found[: found.find(matched)] if isinstance(matched, str) and not keep and matched in found else found

    def _tell(
        self,
        meta: Mapping[str, Any],
        tokens: list[int],
        lists: Mapping[str, list[Any]],
        spans: Sequence[tuple[str, int]],
        text: str,
        finish: Mapping[str, Any] | None,
    ) -> None:
        told = {**meta, "prompt_tokens": len(self._prompt), "cached_tokens": 0, **self._of_prompt, **lists}
        told |= {"id": self.names[0], "finish_reason": finish, "completion_tokens": len(tokens), "weight_versions": _spans(spans)}
        told["num_retractions"] = self._retractions + int(meta.get("num_retractions") or 0) + max(0, self._pieces - 1)
        told["e2e_latency"] = time.perf_counter() - self._begun_s
        if spans:
            told["weight_version"] = spans[-1][0]
        if self._body.get("return_logprob"):
            told["output_token_logprobs"] = lists.get("output_token_logprobs", [])
            told["output_token_logprobs_length"] = len(tokens)
        else:
            for name in (*PER_TOKEN, "output_token_logprobs_length", "input_token_logprobs"):
                told.pop(name, None)
        self.latest = {"text": text, "output_ids": tokens, "meta_info": told}
        if self._text is None:
            del self.latest["text"]
        self.finished = finish is not None
        self.changed.set()


class Pieces:
    """All responses of one server."""

    def __init__(
        self,
        api: Api,
        text: Text | None,
        *,
        eos_ids: frozenset[int],
        max_context: int,
        extra_key: Callable[[], str],
        paused: Callable[[], bool],
    ) -> None:
        """``extra_key()``: under which the server may cache what is computed now; ``paused()``: it generates nothing."""
        self._extra_key, self._paused = extra_key, paused
        self._api, self._text, self._eos_ids, self._max_context = api, text, eos_ids, max_context
        self._unfinished: set[Response] = set()
        self._at_server: set[Response] = set()
        self._cutting = asyncio.Lock()
        """Whatever gets to the server meanwhile may be ended, too."""
        self._cuts: set[asyncio.Task[None]] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._open = asyncio.Event()
        self._open.set()

    def split(self, body: Mapping[str, Any]) -> tuple[list[Response], bool]:
        """One for every response that the checked body of /generate asks for; True = the answer is a list. Raises BadRequest."""
        bodies, many = singles(body, self._text)
        for one in bodies:
            _want_continuable(one)
        responses = [Response(one, self._text, eos_ids=self._eos_ids, max_context=self._max_context) for one in bodies]
        self._unfinished.update(responses)
        return responses, many

    def leave(self, responses: Iterable[Response]) -> None:
        """Nobody waits for these any more."""
        for response in responses:
            self._unfinished.discard(response)
            if response.insisting is not None:
                response.insisting.cancel()

    async def run(self, response: Response, *, stream: bool) -> None:
        """See to it that the response comes, piece by piece. Raises as Api does."""
        try:
            while not response.finished:
                await self._until_open(response)
                if response.stopped.is_set():
                    response.end(ABORTED)
                    return
                await self._piece(response, stream=stream)
        finally:
            self.leave([response])

    async def hold(self) -> None:
        """Have every piece ended; none is begun until ``release``."""
        self._open.clear()
        for _ in range(ABORTS):
            if not self._at_server:
                return
            await self._cut_all()
            try:
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._nobody.wait()
            except TimeoutError:
                continue

    def release(self) -> None:
        """Go on."""
        self._open.set()

    def stop(self, rid: str | None = None) -> None:
        """Somebody aborts a request, or all (None): it ends soon, and is not continued."""
        for response in self._unfinished:
            if (rid is None or rid in response.names) and not response.stopped.is_set():
                response.stopped.set()
                response.insisting = asyncio.create_task(self._insist(response))

    async def _insist(self, response: Response) -> None:
        """Have the last piece ended; by the end of all pieces, if need be: the others go on with another one."""
        said, again_s = 0, ABORT_AGAIN_S
        while True:
            if response in self._at_server and (not said or not self._paused()):
                with contextlib.suppress(EngineError):  # the request says the same
                    if said < ABORTS_BY_NAME:
                        await self._api.call("POST", "/abort_request", {"rid": response.rid}, timeout_s=ABORT_S)
                    elif not self._cutting.locked():
                        await self._cut_all()
                        again_s = min(2 * again_s, ABORT_AGAIN_MOST_S)
                said += 1
            await asyncio.sleep(again_s)

    async def _cut_all(self) -> None:
        task = asyncio.create_task(self._cut())
        self._cuts.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)  # once it is said, until it is answered

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._cuts.discard(task)
        if not task.cancelled():
            task.exception()

    async def _cut(self) -> None:
        async with self._cutting:
            for response in self._at_server:
                response.cut = True
            await self._api.call("POST", "/abort_request", {"abort_all": True}, timeout_s=ABORT_S)

    async def _until_open(self, response: Response) -> None:
        if self._open.is_set():
            return
        waits = [asyncio.create_task(self._open.wait()), asyncio.create_task(response.stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _piece(self, response: Response, *, stream: bool) -> None:
        self._at_server.add(response)
        self._nobody.clear()
        try:
            asked = {**keyed(response.next_piece(), self._extra_key()), "stream": stream}
            response.cut = self._cutting.locked()
            async with contextlib.aclosing(self._ask(asked)) as answers:
                async for answer in answers:
                    if response.take(answer):
                        return
            raise EngineFailed(self._api.url, "/generate: the stream ended within a response")
        except Aborted:  # before it began
            if response.stopped.is_set() or not response.cut:
                response.end(ABORTED)
        except BadRequest:
            if not response.full or response.latest is None:
                raise
            response.end({"type": "length", "length": len(response.latest["output_ids"])})
        finally:
            self._at_server.discard(response)
            if not self._at_server:
                self._nobody.set()

    async def _ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        if not body["stream"]:
            yield await self._api.call("POST", "/generate", body)
            return
        async with self._api.open("POST", "/generate", body) as response:
            async for answer in events(response.content.iter_any()):
                if "error" in answer:
                    error = answer["error"]
                    if int(error.get("code") or 500) == 499:
                        raise Aborted(str(error.get("message")))
                    raise (BadRequest if 400 <= int(error.get("code") or 500) < 500 else _failed(self._api.url))(str(error.get("message")))
                yield answer


ABORTED = {"type": "abort", "message": "Aborted"}


def keyed(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The request with this key in SGLang's cache, and behind it its own."""
    own = body.get("extra_key")
    return {**body, "extra_key": [f"{key} {one or ''}" for one in own] if isinstance(own, list) else f"{key} {own or ''}"}


def singles(body: Mapping[str, Any], text: Text | None) -> tuple[list[dict[str, Any]], bool]:
    """Bodies of one response each, with ``input_ids``; True = there may be several."""
    given: Any = body["input_ids"] if body.get("text") is None else body["text"]
    if body.get("text") is None:
        batch = isinstance(given[0], list)
        prompts = given if batch else [given]
    elif text is None:
        raise BadRequest("text: this model directory has no tokenizer.json; send input_ids")
    else:
        batch = isinstance(given, list)
        prompts = [text.encode(one) for one in (given if batch else [given])]
    if not all(prompts):
        raise BadRequest("text: want at least one token, got none")
    bodies = []
    for place, prompt in enumerate(prompts):
        one = {
            name: _share(value, place, len(prompts)) if batch else value for name, value in body.items() if name not in ("text", "stream")
        }
        bodies += [{**one, "input_ids": prompt}] * int((one.get("sampling_params") or {}).get("n") or 1)
    named = Counter(one.get("rid") for one in bodies)
    for place, one in enumerate(bodies):
        rid = one.get("rid") or secrets.token_hex(16)
        several = named[rid] > 1 or (batch and isinstance(body.get("rid"), str))
        bodies[place] = {**one, "rid": (f"{rid}_{place}", rid) if several else (rid,)}
    return bodies, batch or len(bodies) > 1


def _share(value: object, place: int, count: int) -> Any:
    """Of a field that may have one entry for each prompt."""
    return value[place] if isinstance(value, list) and len(value) == count else value


async def growing(responses: list[Response], tasks: "list[asyncio.Task[None]]", *, many: bool) -> AsyncGenerator[dict[str, Any], None]:
    """Every response as far as it is, whenever one has grown; states may be skipped."""
    left = set(range(len(responses)))
    while left:
        waits = [asyncio.create_task(responses[index].changed.wait()) for index in left]
        try:
            await asyncio.wait([*waits, *(tasks[index] for index in left)], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        for index in sorted(left):
            response = responses[index]
            if response.changed.is_set():
                response.changed.clear()
                yield {**(response.latest or {}), **({"index": index} if many else {})}
            if tasks[index].done() and not response.changed.is_set():
                left.discard(index)
                if (error := tasks[index].exception()) is not None:
                    yield error_of(str(error), 400 if isinstance(error, BadRequest) else 500)


def _want_continuable(body: Mapping[str, Any]) -> None:
    params = body.get("sampling_params") or {}
    wrong = [f"sampling_params.{name}" for name in REFUSED_SAMPLING if params.get(name)]
    wrong += [f"sampling_params.{name}" for name, neutral in REFUSED_SAMPLING_NUMBERS.items() if params.get(name) not in (None, neutral)]
    wrong += [name for name in REFUSED if body.get(name)]
    if wrong:
        raise BadRequest(f"{wrong[0]}: this release of SGLang cannot continue it after an update; want it away, or a newer release")


def _spans(spans: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """As SGLang says them; neighbours of one version as one."""
    told: list[dict[str, Any]] = []
    for version, count in spans:
        start = told[-1]["end"] if told else 0
        if told and told[-1]["version"] == version:
            told[-1]["end"] = start + count
        else:
            told.append({"version": version, "start": start, "end": start + count})
    return told


def _failed(engine: str) -> Any:
    return lambda reason: EngineFailed(engine, reason)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """What a stream of server-sent events holds, up to [DONE]."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
