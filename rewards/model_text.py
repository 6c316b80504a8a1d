"""Texts of a model directory: the chat template, and the tokens that end a response. Loads no transformers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.bus.wire.json_object import JsonMapping

# Names of a model's templates: for chats without tools, and for chats with some
DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Errors that a template can cause with the messages of a client.
_REJECTIONS = (TemplateError, TypeError, LookupError, ValueError, ArithmeticError, AttributeError, RecursionError)


class _GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's messages; here its content is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tag and ``{% endgeneration %}``, as if there were no tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ToolsLeftOut(ValueError):
    """The chat template writes no tools, whatever the messages."""


class MessageTemplate:
    """The chat template of a model, rendered as by transformers but without importing it. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str], *, tool_use: str = "") -> None:
        """``special``: tokens by name (``eos_token``, ...). ``tool_use``: template of chats with tools."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._special, self.source = dict(special), source
        self._template = environment.from_string(source)
        self._tool_template = environment.from_string(tool_use) if tool_use else self._template
        self._call_forms: dict[jinja2.Template, CallForm | None] = {}
        self._renders_tools = False  # True once a text with tools differed from the text without them

    @classmethod
    def read(cls, model_dir: Path) -> Self | None:
        """Return the template of a model directory; None when it has none. Raises ValueError for wrong syntax."""
        config, tokens = (_json_map(model_dir / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
        written = config.get("chat_template") or ""
        named = written if isinstance(written, list) else [{"name": DEFAULT, "template": written}]
        sources = {entry["name"]: entry["template"] for entry in named}
        for name, file in ((DEFAULT, "chat_template.jinja"), (TOOL_USE, f"additional_chat_templates/{TOOL_USE}.jinja")):
            if (model_dir / file).exists():
                sources[name] = (model_dir / file).read_text(encoding="utf-8")
        if not sources.get(DEFAULT):
            return None
        values = {name: config.get(name) or tokens.get(name) for name in SPECIAL}
        named_tokens = {name: token for name, token in values.items() if token}
        special = {name: token["content"] if isinstance(token, dict) else token for name, token in named_tokens.items()}
        try:
            return cls(sources[DEFAULT], special, tool_use=sources.get(TOOL_USE, ""))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{model_dir}: chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[JsonMapping],
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        **template_args: object,
    ) -> str:
        """Return messages in the form of ``tidemill.bus.wire.chat_messages`` as text.

        Raises ValueError when the template refuses them, and for tools, or calls of tools, that it does not write.
        """
        template = self._tool_template if tools else self._template
        arguments = {"add_generation_prompt": add_generation_prompt, **template_args}
        written = self._with_calls(template, messages)
        text = self._text(template, written, tools=tools or None, **arguments)
        if tools and not self._renders_tools:
            self._renders_tools = text != self._text_without_tools(written, arguments)
            if not self._renders_tools:
                raise ToolsLeftOut(NO_TOOLS)
        return text

    def _text(self, template: jinja2.Template, messages: Sequence[JsonMapping], **arguments: object) -> str:
        try:
            return template.render(messages=messages, documents=None, **{**self._special, **arguments})
        except _REJECTIONS as error:
            raise ValueError(f"messages: rejected by the model's chat template: {error}") from error

    def _text_without_tools(self, messages: Sequence[JsonMapping], arguments: JsonMapping) -> str | None:
        """Return the text; None where the template wants tools."""
        try:
            return self._text(self._template, messages, tools=None, **arguments)
        except ValueError:
            return None

    def _with_calls(self, template: jinja2.Template, messages: Sequence[JsonMapping]) -> Sequence[JsonMapping]:
        """Return the messages, calls of tools as the template reads them. Raises ValueError where it writes none."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if template not in self._call_forms:
            self._call_forms[template] = self._call_form(template)
        form = self._call_forms[template]
        if form is None or (
            not form.beside_content
            and any(message.get("tool_calls") and message.get("content") for message in messages)
        ):
            raise ValueError(NO_CALLS if form is None else NO_CALLS_BESIDE_CONTENT)
        return [form.of(message) if message.get("tool_calls") else message for message in messages]

    def _call_form(self, template: jinja2.Template) -> "CallForm | None":
        """Return the first form of a call that the template writes; None for a template that leaves calls out."""
        shown = [self._shows(template, form, "") for form in CALL_FORMS]
        if True not in shown:
            return None if False in shown else CALL_FORMS[0]  # a template that refuses this chat may take others
        form = CALL_FORMS[shown.index(True)]
        return replace(form, beside_content=self._shows(template, form, "tried_content") is not False)

    def _shows(self, template: jinja2.Template, form: "CallForm", content: str) -> bool | None:
        """Return whether the template writes a call in this form, beside a content; None where it refuses the chat."""
        chat = [TRIED_QUESTION, form.of({"role": "assistant", "content": content, "tool_calls": [TRIED_CALL]})]
        try:
            text = self._text(template, chat, tools=None, add_generation_prompt=False)
        except ValueError:
            return None
        return all(part in text for part in TRIED_PARTS) and not any(part in text for part in MISREAD_PARTS)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template reads an assistant's calls of tools."""

    as_text: bool
    """True = arguments are JSON text, as in OpenAI's API; False = they are maps."""
    empty: str | None
    """Content of a message with calls alone."""
    beside_content: bool = True
    """False for a template that leaves out the calls of a message with content."""

    def of(self, message: JsonMapping) -> JsonMapping:
        """Return a message with calls in this form."""
        calls = message["tool_calls"]
        if self.as_text:
            calls = [
                {**call, "function": {**call["function"], "arguments": _tojson(call["function"]["arguments"])}}
                for call in calls
            ]
        return {**message, "content": message.get("content") or self.empty, "tool_calls": calls}


# Forms in order of trial. Templates of DeepSeek write calls only of messages without content, and join texts.
CALL_FORMS = (CallForm(False, ""), CallForm(False, None), CallForm(True, ""), CallForm(True, None))
TRIED_CALL = {
    "id": "triedcall",
    "type": "function",
    "function": {"name": "tried_name", "arguments": {"tried_key": "tried_value"}},
}
# With ``TRIED_CALL``, a chat that shows how a template reads calls. Templates of Mistral want ids of nine letters.
TRIED_QUESTION = {"role": "user", "content": "tried_question"}
TRIED_PARTS = ("tried_name", "tried_key", "tried_value")
# Beginnings of arguments that were written as Python has them, or as JSON of JSON text
MISREAD_PARTS = ("{'tried_key'", '\\"tried_key')
NO_TOOLS = (
    "tools: the model's chat template writes none, which the model would not see; "
    "leave them out, or use another template"
)
NO_CALLS = (
    "messages: the model's chat template writes no tool_calls, which would be lost; "
    "write them as content, or use another template"
)
NO_CALLS_BESIDE_CONTENT = (
    "messages: the model's chat template leaves out the tool_calls of a message that has content; "
    "leave one of the two out, or use another template"
)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As transformers defines it: jinja2's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


# ---- the tokens that end a response

_ANSWER = "tried_answer"  # Content of the message behind which the end of turn is found


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTokens:
    """The tokens that end a response, by where they come from; None = that file names none.

    A model ends its answers with the token that it was tuned on, whichever of the files was kept up to date: the
    eos_token_id of the base often stays in config.json.
    """

    configured: tuple[int, ...] = ()
    """``eos_token_id`` of config.json, then of generation_config.json."""
    tokenizer: int | None = None
    """``eos_token`` of tokenizer_config.json."""
    turn: int | None = None
    """The token that the chat template writes behind an assistant's message."""

    @classmethod
    def read(cls, model_dir: Path) -> Self:
        """Return the tokens of a model directory. Raises ValueError that names the file."""
        files = (model_dir / name for name in ("config.json", "generation_config.json"))
        configured = tuple(dict.fromkeys(token_id for file in files for token_id in _eos_ids(file)))
        vocabulary = _json_map(model_dir / "tokenizer.json")
        if not vocabulary:
            return cls(configured=configured)
        added = {str(token["content"]): int(token["id"]) for token in vocabulary.get("added_tokens") or ()}
        return cls(
            configured=configured,
            tokenizer=_id_of(_eos_token(model_dir), added, vocabulary),
            turn=_end_of_turn(MessageTemplate.read(model_dir), added),
        )

    @property
    def named(self) -> tuple[int, ...]:
        """The ids that the files name, which other programs know too."""
        return tuple(dict.fromkeys(token_id for token_id in (*self.configured, self.tokenizer) if token_id is not None))

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids; the first one is put behind a recorded answer of plain text."""
        return self.named if self.turn is None else tuple(dict.fromkeys((*self.named, self.turn)))


def _eos_ids(file: Path) -> Iterator[int]:
    ids = _json_map(file).get("eos_token_id")
    for token_id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{file}: eos_token_id: want a token id, or a list of some, got {ids!r:.80}")
        yield token_id


def _eos_token(model_dir: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json_map(model_dir / name).get("eos_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str) and token:
            return token
    return None


def _id_of(token: str | None, added: Mapping[str, int], vocabulary: JsonMapping) -> int | None:
    """Return the id of a token by its text; tokens of the vocabulary are a map, or a list of pairs (Unigram)."""
    if token is None or token in added:
        return None if token is None else added[token]
    tokens = (vocabulary.get("model") or {}).get("vocab") or {}
    if isinstance(tokens, list):
        return next((token_id for token_id, pair in enumerate(tokens) if pair[0] == token), None)
    token_id = tokens.get(token)
    return None if token_id is None else int(token_id)


def _end_of_turn(template: MessageTemplate | None, added: Mapping[str, int]) -> int | None:
    if template is None:
        return None
    try:
        text = template.render([TRIED_QUESTION, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    except ValueError:  # a template that refuses this chat; its rows are checked one by one
        return None
    _, written, behind = text.rpartition(_ANSWER)
    matches = [token for token in added if written and behind.lstrip().startswith(token)]
    return added[max(matches, key=len)] if matches else None


def _json_map(file: Path) -> JsonMapping:
    """Return the map in a file; none without the file. Raises ValueError that names the file."""
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: want a JSON map, got {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: want a JSON map, got {values!r:.80}")
    return values
