"""Translation of OpenAI's requests into bodies of /generate. Pure: knows no HTTP and no engine.

    {"messages": [...], "max_tokens": 9}  ->  ParsedRequest    ->  {"input_ids": [...], "sampling_params": {...}}
    {"choices": [...], "usage": {...}}    <-  ResponseBuilder  <-  {"output_ids": [...], "meta_info": {...}}

Besides OpenAI's own fields it takes those common among inference servers: top_k, min_tokens, stop_token_ids,
ignore_eos, rid, min_version, chat_template_kwargs, add_generation_prompt, return_token_ids (token ids, log-probs and
versions with each choice), and return_tokens_as_token_ids.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct

from tidemill.actors.errors import BadRequest
from tidemill.actors.generate_body import Positive
from tidemill.actors.generate_body import Text as NonEmpty
from tidemill.actors.http_api import decode, known_fields
from tidemill.actors.text import tool_calls
from tidemill.actors.text.text import Text
from tidemill.actors.text.tool_calls import ChatTemplate, ParsedReply
from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import TEXTS, chat_messages, chat_tools, text_of
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.task_settings import OF_TEMPLATE

ReadReply = Callable[[JsonMapping, str, bool], ParsedReply]
"""Function from SGLang's JSON of a response, the text to read of it, and whether it has ended, to content and calls."""

COMPLETION_TOKENS = 16
"""OpenAI's default ``max_tokens`` of a completion."""
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "stop": "stop",
    "seed": "sampling_seed",
    "n": "n",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    **{
        name: name
        for name in (
            *("top_k", "stop_token_ids", "ignore_eos", "skip_special_tokens", "frequency_penalty", "presence_penalty"),
            *("min_p", "repetition_penalty", "logit_bias", "no_stop_trim", "regex", "ebnf", "stop_regex"),
        )
    },
}
"""Name in OpenAI's API, or the common one -> SGLang's name."""
OPENAIS = {"json_schema": "response_format"} | {theirs: name for name, theirs in reversed(SAMPLING.items())}
"""SGLang's name -> the name in OpenAI's API, for messages; of several names the first in ``SAMPLING``."""
PASSED_ON = ("rid", "min_version", "min_version_timeout_s")
"""Fields of /generate that are copied unchanged."""
COMMON = {
    *SAMPLING,
    *PASSED_ON,
    *("model", "stream", "stream_options", "logprobs", "response_format"),
    *("return_token_ids", "return_tokens_as_token_ids"),
}
OF_CHAT = {"messages", "tools", "tool_choice", "top_logprobs", "chat_template_kwargs", "add_generation_prompt"}
OF_COMPLETION = {"prompt", "echo", "suffix", "best_of"}
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity"),
}
"""Fields that are accepted and ignored: clients send them, and they have no effect here."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
}
"""Unsupported fields, with the values at which they have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A validated request."""

    chat: bool
    model: str
    messages: tuple[JsonMapping, ...] = ()
    template: JsonMapping = field(default_factory=dict)
    """Further arguments of the chat template."""
    prompts: tuple[str | list[int], ...] = ()
    """Prompts of a completion, as texts or token ids."""
    sampling: JsonMapping
    passed_on: JsonMapping
    stream: bool
    usage: bool
    """True when a streamed answer ends with the token counts."""
    logprobs: bool
    token_ids: bool
    """True when each choice has token ids, log-probs and versions; a whole answer also has the prompt's ids."""
    tokens_as_ids: bool
    """True when tokens with log-probs are named ``token_id:ID``, not by their text."""

    @property
    def n(self) -> int:
        """Number of responses to each prompt."""
        return int(self.sampling.get("n", 1))

    def stopping_at(self, token_ids: Sequence[int]) -> "ParsedRequest":
        """Return the request with further ``stop_token_ids``."""
        stop_ids = self.sampling.get("stop_token_ids") or []
        if not token_ids or not isinstance(stop_ids, list):  # the engine refuses a value that is no list
            return self
        added = [token for token in token_ids if token not in stop_ids]
        return replace(self, sampling={**self.sampling, "stop_token_ids": [*stop_ids, *added]})

    def generate(self, prompts: Sequence[Sequence[int]], *, max_context: int) -> JsonObject:
        """Return the body of /generate; a chat without ``max_tokens`` may fill the model's ``max_context``."""
        params = dict(self.sampling)
        if params.get("max_new_tokens") is None:
            longest = max(map(len, prompts))
            params["max_new_tokens"] = max(1, max_context - longest) if self.chat else COMPLETION_TOKENS
        ids, samplings = [list(prompt) for prompt in prompts], None
        seed = params.get("sampling_seed")
        if self.n > 1 and isinstance(seed, int):  # else a server might return one response n times
            samplings = [{**params, "n": 1, "sampling_seed": seed + place} for _ in ids for place in range(self.n)]
            ids = [prompt for prompt in ids for _ in range(self.n)]
        return {
            "input_ids": ids if len(ids) > 1 else ids[0],
            "sampling_params": samplings or params,
            "return_logprob": True,
            "stream": self.stream,
            **self.passed_on,
        }


class _OwnFields(Struct, kw_only=True):
    """OpenAI's own fields, without nulls; the engine validates the fields that become SGLang's."""

    model: str = ""
    n: Positive = 1
    max_tokens: Positive = 1
    max_completion_tokens: Positive = 1
    stop: NonEmpty | list[NonEmpty] = []
    stream: bool = False
    stream_options: dict[str, Any] = {}
    response_format: Any = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _ChatFields(_OwnFields, kw_only=True):
    messages: Any = None
    logprobs: bool = False
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True


class _CompletionFields(_OwnFields, kw_only=True):
    prompt: Any = None
    logprobs: bool | int | None = None
    """Number of alternatives to each token; only 0 is supported, and false, which is none."""
    best_of: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs not in (None, 0) and self.logprobs is not True:
            reason = "only log-probs of the sampled tokens are supported; want 0"
            raise ValueError(f"logprobs: {reason}, got {self.logprobs!r}")
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: not supported; want n ({self.n}), got {self.best_of!r}")


def parse(body: JsonMapping, *, chat: bool) -> ParsedRequest:
    """Return a request with OpenAI's own fields validated; the engine validates the others. Raises BadRequest."""
    names = COMMON | WITHOUT_EFFECT | (OF_CHAT if chat else OF_COMPLETION)
    fields = known_fields(body, names - NEUTRAL.keys(), {name: NEUTRAL[name] for name in names & NEUTRAL.keys()})
    checked = decode(fields, _ChatFields) if chat else decode(fields, _CompletionFields)
    parsed: JsonObject = {
        "chat": chat,
        "model": checked.model,
        "sampling": {theirs: fields[name] for name, theirs in SAMPLING.items() if name in fields}
        | _grammar(checked.response_format),
        "passed_on": {name: fields[name] for name in PASSED_ON if name in fields},
        "stream": checked.stream,
        "usage": bool(checked.stream_options.get("include_usage")),
        "token_ids": checked.return_token_ids,
        "tokens_as_ids": checked.return_tokens_as_token_ids,
    }
    if isinstance(checked, _ChatFields):
        template = _template(checked, body.get("tool_choice"))
        with _wire_errors_refused():
            messages = tuple(chat_messages(checked.messages))
        parsed |= {"messages": messages, "logprobs": checked.logprobs, "template": template}
    else:
        parsed |= {
            "prompts": _prompts(checked.prompt),
            "logprobs": checked.logprobs is not None and checked.logprobs is not False,
        }
    return ParsedRequest(**parsed)


def chat_text(parsed: ParsedRequest, template: ChatTemplate | None) -> str:
    """Return the prompt of a chat as text. Raises BadRequest without a template, or when it rejects the messages."""
    if template is None:
        raise BadRequest("messages: the model directory has no chat template; use /v1/completions")
    return template.render(parsed.messages, **parsed.template)


def reader(parsed: ParsedRequest, template: ChatTemplate | None) -> ReadReply | None:
    """Return the function that reads a response; None = all of it is content (no tools, or an unknown format)."""
    form = template.form_of_calls if template is not None and parsed.template.get("tools") else None
    return None if form is None else lambda _, text, finished: tool_calls.read(text, form, finished=finished)


def prompt_ids(parsed: ParsedRequest, text: Text | None, template: ChatTemplate | None) -> list[list[int]]:
    """Return the prompts as token ids. Raises BadRequest for text or messages that cannot be converted."""
    if parsed.chat:
        if text is None:
            raise BadRequest("messages: the model directory has no tokenizer.json; use /v1/completions with token ids")
        return [text.encode(chat_text(parsed, template), add_special=False)]
    prompts = []
    for prompt in parsed.prompts:
        if isinstance(prompt, str):
            if text is None:
                raise BadRequest("prompt: the model directory has no tokenizer.json; send token ids")
            prompt = text.encode(prompt)
        prompts.append(prompt)
    return prompts


def models(names: Sequence[str], max_context: int) -> JsonObject:
    """Return the answer of /v1/models: model and adapters. ``max_context``: tokens of prompt and response."""
    common = {"object": "model", "created": 0, "owned_by": "tidemill", "max_model_len": max_context}
    return {"object": "list", "data": [{"id": name, **common} for name in names]}


def error(message: str, status: int) -> JsonObject:
    """Return an error in OpenAI's format. Of status 400 a field at the beginning of ``message`` is the ``param``."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    where, colon, what = message.partition(":")
    if where.startswith("sampling_params."):
        where = OPENAIS.get(where.removeprefix("sampling_params."), where)
    where = re.sub(r"^input_ids\b", "prompt", where)
    named = colon and status == 400 and re.fullmatch(r"[\w.\[\]]+", where)
    return {"error": {"message": where + colon + what, "type": kind, "param": where if named else None, "code": status}}


@contextmanager
def _wire_errors_refused() -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise BadRequest(str(error)) from None


def content_text(content: object, where: str, kinds: Mapping[str, str] = TEXTS) -> str:
    """Return the text of a content, which is text or text parts of these kinds. Raises BadRequest."""
    with _wire_errors_refused():
        return text_of(content, where, kinds)


def _template(fields: _ChatFields, tool_choice: object) -> JsonObject:
    if reserved := OF_TEMPLATE & fields.chat_template_kwargs.keys():
        names = ", ".join(sorted(reserved))
        raise BadRequest(f"chat_template_kwargs: want only arguments of the template, got {names}")
    with _wire_errors_refused():
        tools = chat_tools(fields.tools)
    return {
        **fields.chat_template_kwargs,
        "tools": tools if tools and tool_choice != "none" else None,
        "add_generation_prompt": fields.add_generation_prompt,
    }


def _grammar(response_format: object) -> dict[str, str]:
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": '{"type": "object"}'}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": json.dumps(schema)}
    want = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise BadRequest(f"response_format: want {want}, got {response_format!r}")


def _prompts(prompt: object) -> tuple[str | list[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        if all(type(token) is int for token in prompt):
            return (prompt,)
        if all(isinstance(item, list) and item for item in prompt):
            return tuple(prompt)
    raise BadRequest(f"prompt: want text, a list of texts, token ids or lists of token ids, got {prompt!r}")
