"""Middleware that keeps multi-turn clients token-exact: text that an engine has sampled is sent back to it as the very
ids it sampled.

A client that works with text puts an earlier response into its next prompt. Tokenised again, that text seldom has the
sampled ids: the model then reads tokens that it never generated, and training uses other tokens than were sampled. Here
the prompt is made of the remembered ids (``tidemill.actors.router.tree``), and only the rest of it is tokenised. Chats
are rendered here too, so that all engines receive token ids.

``/retrieve_from_text`` returns the token ids, log-probs and versions of a text, for training.
"""

import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from tidemill.actors.config import RouterConfig
from tidemill.actors.errors import BadRequest, EngineError
from tidemill.actors.openai import openai_api
from tidemill.actors.openai.openai_answers import ResponseBuilder
from tidemill.actors.router.chats import AskedChat, Chats, TemplateChats
from tidemill.actors.router.dialects import DIALECTS
from tidemill.actors.router.exchange import Answer, Handler, Request, SentStates, state_in, states_in
from tidemill.actors.router.tree import TokenPiece, TokenTree, columns, ids_of, sampled_piece
from tidemill.actors.text.text import Text
from tidemill.actors.text.tool_calls import ChatTemplate
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import language_values

MAX_CONTEXT = 1 << 15
"""Context length in tokens, where neither the engine nor the model's config states one."""
MAX_RESPONSES = 1 << 16
"""Responses to a request whose prompts are remembered; more than an engine makes (``engine.max_waiting``)."""
CONTEXT_S = 60.0
"""Seconds for which the context length reported by an engine is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The parts of a model directory for text. One for any number of histories."""

    name: str
    text: Text
    template: ChatTemplate | None
    max_context: int
    """Context length in tokens, by the model's config."""

    @classmethod
    def read(cls, model: str, where: str) -> "ModelText":
        """Raises ValueError for a directory without a tokenizer.json; ``where``: the setting that names it."""
        directory = Path(model)
        text = Text.read(directory) if model else None
        if text is None:
            raise ValueError(f"{where}: want a directory with a tokenizer.json, got {model!r}")
        template, context = ChatTemplate.read(directory), _max_context(directory)
        return cls(name=directory.resolve().name, text=text.bounded(context), template=template, max_context=context)


class TokenHistory:
    """A ``Middleware``; one for all requests of a router. Texts of different sessions are kept apart."""

    def __init__(
        self,
        model: "ModelText | RouterConfig",
        max_text: int = RouterConfig.max_text,
        chats: Chats | None = None,
        template_args: JsonMapping | None = None,
    ) -> None:
        """``max_text``: unless it is a router's. ``chats``: None = by the model's chat template. ``template_args``: of
        requests that do not name them. Raises ValueError for a model directory without a tokenizer.json.
        """
        if isinstance(model, RouterConfig):
            max_text, model = model.max_text, ModelText.read(model.model, "router.model")
        self._text, self._model, self._max_context = model.text, model.name, model.max_context
        self._engine_context, self._engine_context_until_s = 0, float("-inf")
        self.tree = TokenTree(max_text)
        self._chats = chats or TemplateChats(model.template, self.pieces, max_text)
        self._template_args = dict(template_args or {})

    async def __call__(self, request: Request, handler: Handler) -> Answer:
        paths = {
            "/generate": self._generate,
            "/v1/chat/completions": self._openai,
            "/v1/completions": self._openai,
            **dict.fromkeys(DIALECTS, self._translated),
            "/retrieve_from_text": self._retrieve,
        }
        answer = paths.get(request.path)
        return await handler(request) if request.method != "POST" or answer is None else await answer(request, handler)

    async def pieces(self, text: str, session: str = "", *, add_special: bool = True) -> list[TokenPiece]:
        """Return a text as its remembered pieces and, tokenised, the rest. Raises BadRequest."""
        remembered, end = self.tree.find(text, session)
        if end == len(text) and remembered:
            return remembered
        try:
            ids = await self._text.encoded(text[end:], add_special=add_special and end == 0)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return [*remembered, TokenPiece(text=text[end:], tokens=tuple(ids))]

    # -- /generate

    async def _generate(self, request: Request, handler: Handler) -> Answer:
        body = request.json()
        text = body.pop("text", None)
        if text is None:
            return await handler(replace(request, value=body))
        texts = text if isinstance(text, list) else [text]
        if not texts or not all(isinstance(prompt, str) for prompt in texts):
            raise BadRequest(f"text: want a string or a list of strings, got {text!r}")
        prompts = [await self.pieces(prompt, request.session) for prompt in texts]
        owners = _by_response(prompts, body.get("sampling_params"))
        ids = [ids_of(prompt) for prompt in prompts]
        # The log-probs are remembered with the tokens, so they are requested even if the client does not want them.
        body |= {"input_ids": ids if isinstance(text, list) else ids[0], "return_logprob": True}
        answer = await handler(request.with_body(body))
        async with answer:
            if answer.status != 200:
                return answer.with_(answer.chunks)
            if answer.states is not None:
                return answer.with_states(self._noted(answer.states, owners, request.session))
            if answer.streamed:
                return answer.with_(self._remember_stream(answer.chunks, owners, request.session))
            reply = await answer.json()
            self._note(reply, owners, request.session)
            return answer.with_content(reply)

    async def _noted(
        self, states: AsyncGenerator[JsonMapping, None], owners: Sequence[list[TokenPiece]], session: str
    ) -> AsyncGenerator[JsonMapping, None]:
        """Yield the states unchanged, and remember the last one of each response, also of one that its client cuts."""
        sent = self._sent(owners, session)
        try:
            async with aclosing(states):
                async for state in states:
                    sent.take(state)
                    yield state
                    sent.seen(state, str(state.get("text") or ""))
        finally:
            sent.note_cut()

    def _sent(self, owners: Sequence[list[TokenPiece]], session: str) -> SentStates:
        return SentStates(lambda place, state: self._note_one(place, state, owners, session), self._text.decode)

    async def _remember_stream(
        self, chunks: AsyncIterator[bytes], owners: Sequence[list[TokenPiece]], session: str
    ) -> AsyncIterator[bytes]:
        """Yield the chunks unchanged, and remember the last state of each response."""
        unended = b""
        async for chunk in chunks:
            *events, unended = (unended + chunk).split(b"\n\n")
            for state in map(state_in, events):
                if state is not None and state["meta_info"].get("finish_reason") is not None:
                    self._note_one(state.get("index", 0), state, owners, session)
            yield chunk

    def _note(self, answers: object, owners: Sequence[list[TokenPiece]], session: str) -> None:
        for place, answer in enumerate(answers if isinstance(answers, list) else [answers]):
            self._note_one(place, answer, owners, session)

    def _note_one(self, place: int, answer: JsonMapping, owners: Sequence[list[TokenPiece]], session: str) -> None:
        prompt = owners[place] if place < len(owners) else []  # none for a place that was not requested
        if prompt and all(piece.text for piece in prompt):  # a prompt of ids has no text to be found by
            self.remember(prompt, answer, session)

    def remember(
        self, prompt: Sequence[TokenPiece], answer: Mapping[str, object], session: str = ""
    ) -> list[TokenPiece]:
        """Remember a prompt with its finished response, unless that lacks ids or log-probs. Returns their pieces."""
        pieces = [*prompt, *self._sampled(answer)]
        self.tree.remember(pieces, session)
        return pieces

    def _sampled(self, answer: JsonMapping) -> list[TokenPiece]:
        """Return up to two pieces: the visible text, and the ending that the client may append (a stop string)."""
        if (sampled := sampled_piece(answer)) is None:
            return []
        ids, matched = list(sampled.tokens), (answer["meta_info"].get("finish_reason") or {}).get("matched")
        cut, visible, tail = self._cut(ids, str(answer.get("text") or ""), matched)
        if cut and not visible:  # ids without visible text belong to the text that is visible
            cut, visible, tail = len(ids), tail, ""
        pieces = [_part(sampled, visible, slice(cut))] if cut else []
        return [*pieces, _part(sampled, tail, slice(cut, None))] if cut < len(ids) else pieces

    def _cut(self, ids: list[int], visible: str, matched: object) -> tuple[int, str, str]:
        """Return (number of visible tokens, their text, the text of the others)."""
        if isinstance(matched, int) and ids[-1] == matched:
            return len(ids) - 1, visible, self._text.decode(ids[-1:], skip_special=False)
        text = self._text.decode(ids)
        if not isinstance(matched, str) or text == visible:
            return len(ids), visible, ""
        cut = len(ids)
        while cut and not visible.startswith(self._text.decode(ids[:cut])):
            cut -= 1
        shown = self._text.decode(ids[:cut])
        return cut, shown, text[len(shown) :]

    # -- OpenAI's paths

    async def _openai(self, request: Request, handler: Handler) -> Answer:
        chat = None
        try:
            parsed = openai_api.parse(request.json(), chat=request.path == "/v1/chat/completions")
            if parsed.chat:
                parsed = parsed.stopping_at(self._chats.stop_token_ids)
                chat = await self._ask(parsed, request.session)
                prompts = [list(chat.pieces)]
            else:
                prompts = [await self._prompt(prompt, request.session) for prompt in parsed.prompts]
        except BadRequest as error:
            return Answer.of(400, openai_api.error(str(error), 400))
        owners = _by_response(prompts, parsed.sampling)
        context: int | Answer = self._max_context
        if parsed.chat and "max_new_tokens" not in parsed.sampling:
            context = await self._context(request, handler)
        if isinstance(context, Answer):
            return context
        generate = parsed.generate([ids_of(prompt) for prompt in prompts], max_context=context)
        builder = ResponseBuilder(
            parsed,
            chat_id=request.id or secrets.token_hex(12),
            model=self._model,
            created=int(time.time()),
            piece=lambda token: self._text.decode([token], skip_special=False),
            read=None if chat is None else self._chats.reader(chat),
        )
        answer = await handler(request.with_body(generate, "/generate"))
        async with answer:
            if answer.status != 200:
                return await _refused(answer)
            if answer.streamed:
                states = answer.states if answer.states is not None else states_in(answer.chunks)
                return answer.with_states(self._openai_events(states, builder, owners, request.session, chat))
            reply = await answer.json()
            replies = reply if isinstance(reply, list) else [reply]
            self._note(replies, owners, request.session)
            for place, reply in enumerate(replies):
                self._note_chat(chat, {**reply, "index": place}, builder)
            prompt_ids = {"prompt_token_ids": ids_of(prompts[0])} if parsed.token_ids else {}
            return answer.with_content(builder.whole(replies) | prompt_ids)

    async def _ask(self, parsed: openai_api.ParsedRequest, session: str) -> AskedChat:
        return await self._chats.ask(replace(parsed, template={**self._template_args, **parsed.template}), session)

    async def _translated(self, request: Request, handler: Handler) -> Answer:
        dialect, body = DIALECTS[request.path], request.json()
        try:
            chat = dialect.chat_of(body)
        except BadRequest as error:
            return Answer.of(400, dialect.error(openai_api.error(str(error), 400)))
        answer = await self._openai(request.with_body(chat, "/v1/chat/completions"), handler)
        async with answer:
            if answer.states is not None:
                return answer.with_(dialect.stream(answer.states, body))
            reply = await answer.json()
            return answer.with_content(dialect.whole_of(reply, body) if answer.status == 200 else dialect.error(reply))

    async def _context(self, request: Request, handler: Handler) -> int | Answer:
        """Return the context length of an engine, maybe less than its model's; an Answer when no engine serves."""
        if time.monotonic() < self._engine_context_until_s:
            return self._engine_context
        answer = await handler(replace(request, method="GET", path="/v1/models", query="", body=b"", value=None))
        async with answer:
            if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return await _refused(answer)
            try:
                length = json.loads(await answer.read())["data"][0]["max_model_len"]
            except (EngineError, ValueError, LookupError, TypeError):
                length = None
        if not isinstance(length, int) or length < 1:
            return self._max_context
        self._engine_context, self._engine_context_until_s = length, time.monotonic() + CONTEXT_S
        return length

    async def _prompt(self, prompt: str | list[int], session: str) -> list[TokenPiece]:
        if isinstance(prompt, str):
            return await self.pieces(prompt, session)
        return [TokenPiece(text="", tokens=tuple(prompt))]

    async def _openai_events(
        self,
        states: AsyncGenerator[JsonMapping, None],
        builder: ResponseBuilder,
        owners: Sequence[list[TokenPiece]],
        session: str,
        chat: AskedChat | None,
    ) -> AsyncGenerator[JsonMapping, None]:
        """Yield the chunks. Raises EngineError when the states end before each response has its last one."""
        sent, unfinished = self._sent(owners, session), set(range(len(owners)))
        try:
            async with aclosing(states):
                async for state in states:
                    if "error" in state:
                        unfinished.clear()
                        yield state
                        continue
                    if sent.take(state):
                        unfinished.discard(state.get("index", 0))
                        self._note_chat(chat, state, builder)
                    for part in builder.parts(state):
                        yield part
                        sent.seen(state, builder.shown(state))
        finally:
            sent.note_cut()
        if unfinished:
            raise EngineError(f"the engine's stream ended, and {len(unfinished)} of its responses had not")
        for part in builder.last():
            yield part

    def _note_chat(self, chat: AskedChat | None, answer: JsonMapping, builder: ResponseBuilder) -> None:
        if chat is not None:
            self._chats.remember(chat, answer, builder.message(answer))

    # -- /retrieve_from_text

    async def _retrieve(self, request: Request, handler: Handler) -> Answer:
        """Return tokens, log-probs and versions of ``text``, or of ``messages`` as the template renders them."""
        body = request.json()
        text = body.get("text")
        if text is None and "messages" in body:
            body.setdefault("add_generation_prompt", False)
            pieces = list((await self._ask(openai_api.parse(body, chat=True), request.session)).pieces)
            if all(piece.text for piece in pieces):
                text = "".join(piece.text for piece in pieces)
            else:  # a renderer makes ids, not text
                text = self._text.decode(ids_of(pieces), skip_special=False)
        elif not isinstance(text, str):
            raise BadRequest(f"text: want a string, got {text!r}")
        else:
            pieces = await self.pieces(text, request.session) if text else []
        rows = list(columns(pieces))
        tokens, log_probs, versions, mask = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        content = {"tokens": tokens, "response": text, "loss_mask": mask, "token_length": len(tokens)}
        content |= {"loss_mask_length": len(mask), "rollout_logp": log_probs, "versions": versions}
        return Answer.of(200, content)


def _part(piece: TokenPiece, text: str, tokens: slice) -> TokenPiece:
    return TokenPiece(
        text=text, tokens=piece.tokens[tokens], log_probs=piece.log_probs[tokens], versions=piece.versions[tokens]
    )


def _by_response(prompts: Sequence[list[TokenPiece]], params: object) -> list[list[TokenPiece]]:
    """Return the prompt of each response: ``n`` times the first prompt, ``n`` times the second, ..."""
    samplings = params if isinstance(params, list) else [params] * len(prompts)
    counts = [sampling.get("n") or 1 if isinstance(sampling, Mapping) else 1 for sampling in samplings]
    numbers = [count if isinstance(count, int) and count > 0 else 1 for count in counts]
    prompt_of_each = (prompt for prompt, number in zip(prompts, numbers, strict=False) for _ in range(number))
    return list(
        itertools.islice(prompt_of_each, MAX_RESPONSES)
    )  # a client may ask for any number, which an engine refuses


async def _refused(answer: Answer) -> Answer:
    raw = await answer.read()
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:500].decode(errors="replace")
    return answer.with_(json.dumps(openai_api.error(str(message), answer.status)).encode())


def _max_context(directory: Path) -> int:
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return int(language_values(config).get("max_position_embeddings") or MAX_CONTEXT)
