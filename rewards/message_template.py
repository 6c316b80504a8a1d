"""The chat template of a model directory: messages to text, rendered as by transformers but without importing it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's messages; here its content is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tag and ``{% endgeneration %}``, as if there were no tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MessageTemplate:
    """The chat template of a model. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """``special``: the template's names of tokens (``eos_token``, ...) to the tokens."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._template, self._special = environment.from_string(source), dict(special)
        self.source = source

    @classmethod
    def read(cls, model_dir: Path) -> Self | None:
        """Return the template of a model directory; None when it has none. Raises ValueError with the line of a syntax error."""
        file = model_dir / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        alone = model_dir / "chat_template.jinja"
        source = alone.read_text(encoding="utf-8") if alone.exists() else config.get("chat_template")
        if isinstance(source, list):  # several templates by name
            source = next((each["template"] for each in source if each["name"] == "default"), None)
        if not source:
            return None
        special = {name: token["content"] if isinstance(token, dict) else token for name in SPECIAL if (token := config.get(name))}
        try:
            return cls(source, special)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{model_dir}: chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: object = None, add_generation_prompt: bool = True, **more: object
    ) -> str:
        """Return the messages as text. Raises ValueError when the template refuses them."""
        given = {**self._special, **more}
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **given
            )
        except (jinja2.TemplateError, TypeError, LookupError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
            raise ValueError(f"messages: rejected by the model's chat template: {error}") from error


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
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
