"""Renderers of the library ``renderers`` (extra ``renderers``): chats to token ids, and token ids to content, reasoning
and tool calls.

A renderer is written for one family of models, and has their chat template and format of tool calls as code. This is
the only module that knows the library; it is imported when a renderer is read. The library encodes the chats of gpt-oss
with openai-harmony, which reads the vocabulary from a file (``HarmonyVocabulary``).
"""

import base64
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tidemill.actors.errors import BadRequest, NoRenderer, RendererMissing
from tidemill.actors.text.text import Text
from tidemill.actors.text.tool_calls import ChatTemplate, ParsedReply, ToolCall, call_of
from tidemill.bus.system.functions import errors_as
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

logger = logging.getLogger(__name__)

NAME = "o200k_base.tiktoken"
"""Name of the file that openai-harmony loads: a line for each token, its bytes in base64 and its id."""
SHA_256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Digest of that file, without which openai-harmony refuses it. Source: openai-harmony 0.0.8,
src/tiktoken_ext/public_encodings.rs."""
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable with the directory of the file. Without it openai-harmony downloads the file."""


class HarmonyVocabulary:
    """The vocabulary of a gpt-oss model."""

    def __init__(self, tokenizer: Path) -> None:
        """``tokenizer``: a model's tokenizer.json. Raises OSError, or ValueError where it is of another model."""
        want = f"{tokenizer}: want the vocabulary of gpt-oss"
        try:
            vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"].items()
            of_character = {character: byte for byte, character in enumerate(_characters())}
            pieces = sorted(
                (int(rank), bytes(of_character[character] for character in token)) for token, rank in vocabulary
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{want}, got one that is no byte-level BPE: {error!r}") from None
        self._content = b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in pieces)
        if hashlib.sha256(self._content).hexdigest() != SHA_256:
            raise ValueError(f"{want}, got another one, of {len(pieces)} tokens")

    @contextmanager
    def provided(self) -> Iterator[None]:
        """Let openai-harmony find the vocabulary inside, and nothing to download."""
        before = os.environ.get(VARIABLE)
        with tempfile.TemporaryDirectory(prefix="tidemill-harmony-") as directory:
            (Path(directory) / NAME).write_bytes(self._content)
            os.environ[VARIABLE] = directory
            try:
                yield
            finally:
                del os.environ[VARIABLE]
                os.environ.update({} if before is None else {VARIABLE: before})


def _characters() -> list[str]:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255.

    A byte that is a visible character in Latin-1 is that character; the others are, in their order, the characters from
    256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


AUTO = "auto"
"""The renderer that the library has for the model's public name."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles that every renderer has. Some renderers leave out a message of another role without an error."""
UNSUPPORTED = {"default": "it is the model's own chat template; leave the setting empty"}
"""Renderers of the library that cannot be used here, with the reason."""
HARMONY = "gpt-oss"
"""The renderer that encodes by openai-harmony, with a vocabulary of its own."""
MAX_VARIANTS = 16
"""Renderers that are kept for different ``chat_template_kwargs``."""
OF_REQUEST = ("tools", "add_generation_prompt")
"""Arguments of a chat that are no ``chat_template_kwargs``."""


class Renderer:
    """The renderer of a model. Knows nothing of earlier chats."""

    def __init__(
        self,
        text: Text,
        config: Any,
        *,
        public_name: str = "",
        template: str = "",
        vocabulary: HarmonyVocabulary | None = None,
    ) -> None:
        """``config``: the library's, of one renderer. Raises the library's errors when the tokenizer does not fit.

        ``public_name`` and ``template``: of the model, for the renderers of families with small differences among
        models. ``vocabulary``: the model's, for gpt-oss.
        """
        self._text, self._config, self._vocabulary = text, config, vocabulary
        self._tokenizer = _Tokenizer(text, public_name, template)
        self._lock = threading.Lock()
        """Long chats are rendered in threads."""
        self._variants: OrderedDict[str, Any] = OrderedDict()
        """Renderers by ``chat_template_kwargs`` as JSON, the longest unused first."""
        self.name = str(config.name)
        self.stop_token_ids = tuple(dict.fromkeys(map(int, self._variant({}).get_stop_token_ids())))
        """Tokens that end a response."""

    @classmethod
    def read(cls, name: str, options: Mapping[str, object], model_dir: Path, text: Text) -> "Renderer":
        """Return the library's renderer ``name``, or the model's renderer (``auto``). Raises NoRenderer.

        ``options``: fields of its config. Takes seconds when the library is imported first.
        """
        config = config_of(name, options, model_dir)
        want = f"a tokenizer with the special tokens of {config.name}"
        cure = "name the renderer of this model's family, or use the tokenizer that belongs to it"
        cure += f" ({model_dir / 'tokenizer.json'})"
        with errors_as(lambda error: NoRenderer(want=want, got=_first_line(error), cure=cure)):
            template = ChatTemplate.read(model_dir)
            return cls(
                text,
                config,
                public_name=_public_name(model_dir) or "",
                template="" if template is None else template.source,
                vocabulary=HarmonyVocabulary(model_dir / "tokenizer.json") if config.name == HARMONY else None,
            )

    def prompt(self, messages: Sequence[JsonMapping], arguments: JsonMapping) -> list[int]:
        """Return the token ids of a chat. ``arguments``: as of a chat template. Raises BadRequest."""
        _check(messages)
        renderer = self._variant(_template_arguments(arguments))
        with self._rejecting("messages"):
            ids = renderer.render_ids(
                list(messages),
                tools=arguments.get("tools"),
                add_generation_prompt=bool(arguments.get("add_generation_prompt", True)),
            )
        return list(map(int, ids))

    def next_prompt(
        self, prompt: Sequence[int], output: Sequence[int], messages: Sequence[JsonMapping], arguments: JsonMapping
    ) -> list[int] | None:
        """Return ``prompt + output`` and the token ids of the messages that follow; None where only rendering the whole
        chat is right.

        That is where the model's format changes earlier turns, such as a new question of the user, behind which earlier
        reasoning is left out. Raises BadRequest.
        """
        _check(messages)
        renderer, before = self._variant(_template_arguments(arguments)), [*prompt, *output]
        try:
            with self._rejecting("messages"):
                bridged = renderer.bridge_to_next_turn(
                    list(prompt), list(output), list(messages), tools=arguments.get("tools")
                )
        except BadRequest as error:
            logger.debug("renderer cannot extend a chat error=%s", error)
            return None
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return list(map(int, bridged.token_ids))

    def read_reply(
        self, text: str, output: Sequence[int], prompt: Sequence[int], arguments: JsonMapping
    ) -> ParsedReply:
        """Return content, reasoning and calls of a finished response.

        ``text``: the response as text, which is the content where the parser fails. A call that cannot be read is part
        of the content, and counted; without tools in the request every call is part of the content.
        """
        tools = arguments.get("tools")
        try:
            renderer = self._variant(_template_arguments(arguments))
            with self._rejecting("response"):
                parsed = renderer.parse_response(list(output), tools=tools, prompt_ids=list(prompt))
                attempts = [self._attempt(call, output) for call in parsed.tool_calls]
                content, reasoning = str(parsed.content or ""), str(parsed.reasoning_content or "")
        except BadRequest as error:
            logger.debug("renderer cannot read a response error=%s", error)
            return ParsedReply(text, (), malformed=1)
        calls = _with_distinct_ids([call for _, call in attempts if call is not None]) if tools else ()
        unread = [written for written, call in attempts if call is None or not tools]
        return ParsedReply("\n".join(filter(None, [content, *unread])), calls, reasoning, len(unread) if tools else 0)

    def _attempt(self, attempt: Any, output: Sequence[int]) -> tuple[str, ToolCall | None]:
        """Return a call as it was written, and the call; None if it cannot be read."""
        span = attempt.token_span
        written = str(attempt.raw) if span is None else self._text.decode(output[span[0] : span[1]], skip_special=False)
        call = call_of(attempt.name, attempt.arguments) if attempt.status == "ok" else None
        return written, call if call is None else replace(call, id=str(attempt.id or ""))

    def _variant(self, arguments: JsonMapping) -> Any:
        """Return the library's renderer for ``chat_template_kwargs``.

        Raises BadRequest for arguments that it does not have.
        """
        key = json.dumps(arguments, sort_keys=True)
        with self._lock:
            if key not in self._variants:
                self._variants[key] = self._create(arguments)
                if len(self._variants) > MAX_VARIANTS:
                    self._variants.popitem(last=False)
            self._variants.move_to_end(key)
            return self._variants[key]

    def _create(self, arguments: JsonMapping) -> Any:
        import renderers

        with nullcontext() if self._vocabulary is None else self._vocabulary.provided():
            if not arguments:
                return renderers.create_renderer(self._tokenizer, self._config)
            with self._rejecting("chat_template_kwargs"):
                return renderers.create_renderer(self._tokenizer, self._config, chat_template_kwargs=arguments)

    def _rejecting(self, what: str) -> AbstractContextManager[None]:
        """Raise BadRequest for every error of the library, which does not check the texts of programs and models."""
        where = f"{what}: rejected by the renderer {self.name}"
        return errors_as(lambda error: BadRequest(f"{where}: {_first_line(error)}"))


class _Tokenizer:
    """The tokenizer of a model as the library calls it."""

    unk_token_id = None

    def __init__(self, text: Text, public_name: str, template: str) -> None:
        self._text, self.name_or_path, self.chat_template = text, public_name, template
        self.eos_token_id = next(iter(text.eos_ids), None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._text.encode(text, add_special=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        return self._text.decode(list(ids), skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        return self._text.id_of(tokens) if isinstance(tokens, str) else [self._text.id_of(token) for token in tokens]


def config_of(name: str, options: Mapping[str, object], model_dir: Path | None) -> Any:
    """Return the library's config of a renderer; None for ``auto`` without a ``model_dir``, which may not exist yet.

    Raises NoRenderer.
    """
    if missing := [package for package in ("renderers", "httpx") if find_spec(package) is None]:
        want, got = "the packages of tidemill[renderers]", f"none of the name {', '.join(missing)}"
        raise RendererMissing(want=want, got=got, cure="pip install 'tidemill[renderers]'")
    import renderers
    from renderers.base import MODEL_RENDERER_MAP

    names = sorted({AUTO, *MODEL_RENDERER_MAP.values()} - set(UNSUPPORTED))
    family = name
    if name == AUTO:
        if model_dir is None:
            return None
        public_name = _public_name(model_dir)
        if public_name is None:
            want = "a model directory OWNER/NAME with the public name of a model that the library knows"
            cure = f"name the renderer of the model's family: {', '.join(names)}"
            raise NoRenderer(want=want, got=str(model_dir), cure=cure)
        family = MODEL_RENDERER_MAP[public_name]
    if family in UNSUPPORTED:
        got = f"{family}: {UNSUPPORTED[family]}"
        raise NoRenderer(want=f"one of {', '.join(names)}", got=got, cure="name another one")
    try:
        empty = renderers.config_from_name(family)
    except ValueError:
        raise NoRenderer(want=f"one of {', '.join(names)}", got=repr(name), cure="fix the name") from None
    try:
        return type(empty)(**options)
    except (ValueError, TypeError) as error:
        want, got = f"fields of renderers.{type(empty).__name__}", " ".join(str(error).split())
        raise NoRenderer(setting="renderer_options", want=want, got=got, cure="fix or remove them") from None


def _public_name(model_dir: Path) -> str | None:
    """Return the name by which the library knows a model: its directory, or one in a cache of Hugging Face; or None."""
    from renderers.base import MODEL_RENDERER_MAP

    parts = model_dir.resolve().parts
    cached = [part.removeprefix("models--").replace("--", "/", 1) for part in parts if part.startswith("models--")]
    names = ["/".join(model_dir.parts[-2:]), "/".join(parts[-2:]), *cached]
    return next((name for name in names if name in MODEL_RENDERER_MAP), None)


def _with_distinct_ids(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return the calls, without the model's id where an earlier one has the same: results are matched by ids."""
    return tuple(
        replace(call, id="") if call.id in [earlier.id for earlier in calls[:place]] else call
        for place, call in enumerate(calls)
    )


def _check(messages: Sequence[JsonMapping]) -> None:
    """Refuse roles that some renderers would leave out without an error. Raises BadRequest."""
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRequest(f"messages[{place}].role: want {', '.join(ROLES)}, got {message['role']!r}")


def _template_arguments(arguments: JsonMapping) -> JsonObject:
    return {name: value for name, value in arguments.items() if name not in OF_REQUEST}


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
