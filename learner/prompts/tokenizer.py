"""Tokenizer and chat template of a model directory, for prompts and for recorded responses. Knows no row."""

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.errors import CannotRender, TemplateLacks, TextTooLong
from tidemill.rewards.model_text import MessageTemplate, ToolsLeftOut


def saved_tokenizer(directory: Path) -> Any:
    """Return the tokenizer. Raises OSError or ValueError for a directory without one.

    AutoTokenizer would make the tokenizer of some classes anew, by the rules of the class and not by tokenizer.json,
    which the engines read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    reader = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    return reader.from_pretrained(directory)


Tokenize = Callable[..., Sequence[int]]
"""Function from a prompt, and ``tools`` for a row that has some, to the model's input ids. With ``whole=True``: of a
whole conversation without a generation prompt, or of a response's text without special tokens.
"""


class PromptTokenizer:
    """Tokenizer and chat template of a model. A ``Tokenize`` and ``ChatTexts``."""

    def __init__(
        self,
        encode: Callable[[str, bool], Sequence[int]],
        decode: Callable[[list[int]], str],
        template: MessageTemplate | None,
        *,
        chat: bool,
        template_args: JsonMapping,
        longest_token_bytes: int = 0,
    ) -> None:
        """``encode``: from a text, and whether it gets the tokens that begin every text, to ids. ``decode``: back,
        special tokens included.

        ``chat``: prompts of text go through the chat template, too. ``longest_token_bytes``: 0 = not known, then no
        text is too long.
        """
        self._encode, self._decode, self._template = encode, decode, template
        self._chat, self._template_args = chat, dict(template_args)
        self._longest_token_bytes, self._max_tokens = longest_token_bytes, 0

    def bounded(self, max_tokens: int) -> "PromptTokenizer":
        """Return a tokenizer that raises TextTooLong for a text with too many bytes for ``max_tokens``."""
        tokenizer = copy(self)
        tokenizer._max_tokens = max_tokens
        return tokenizer

    def __call__(self, prompt: Prompt, tools: Sequence[JsonObject] = (), *, whole: bool = False) -> Sequence[int]:
        """Return the input ids of a prompt: text as it is, unless the chat template is wanted for it, or renders its
        tools.

        Raises CannotRender, TemplateLacks.
        """
        if isinstance(prompt, str) and whole:
            return self.encode(prompt)
        if isinstance(prompt, str) and not self._chat and not tools:
            return self._encoded(prompt, add_special=True)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode(self.render(messages, tools, whole=whole))

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), *, whole: bool = False) -> str:
        """Return a conversation as text; ``whole``: without a generation prompt. Raises CannotRender, TemplateLacks."""
        if self._template is None:
            raise TemplateLacks(f"{'tools' if tools else 'chat messages'}, and the model has no chat template")
        try:
            return self._template.render(
                messages, tools=list(tools), add_generation_prompt=not whole, **self._template_args
            )
        except ToolsLeftOut as error:
            raise TemplateLacks(str(error)) from None
        except ValueError as error:
            raise CannotRender(str(error)) from None

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special tokens before or behind it. Raises CannotRender."""
        return self._encoded(text, add_special=False)

    def _encoded(self, text: str, *, add_special: bool) -> Sequence[int]:
        max_bytes = self._max_tokens * self._longest_token_bytes
        # A character has at most four bytes: most texts need not be encoded to be counted.
        if max_bytes and 4 * len(text) > max_bytes and (num_bytes := len(text.encode(errors="replace"))) > max_bytes:
            raise TextTooLong(self._max_tokens, num_bytes)
        try:
            return self._encode(text, add_special)
        except ValueError as error:
            raise CannotRender(f"rejected by the tokenizer: {error}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(list(ids))


def model_tokenizer(
    model: str, *, apply_chat_template: bool = False, template_args: JsonMapping | None = None
) -> PromptTokenizer:
    """Return the tokenizer of a Hugging Face model directory; chat messages always go through its template.

    ``template_args``: further variables of the template, such as ``enable_thinking``.
    """
    tokenizer = saved_tokenizer(Path(model))
    return PromptTokenizer(
        lambda text, add_special: list(tokenizer.encode(text, add_special_tokens=add_special)),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        MessageTemplate.read(Path(model)),
        chat=apply_chat_template,
        template_args=template_args or {},
        longest_token_bytes=max((len(token.encode(errors="replace")) for token in tokenizer.get_vocab()), default=0),
    )
