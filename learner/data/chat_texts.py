"""Answers of a conversation as tokens behind those of their prompts, as an engine samples them. Knows a tokenizer as functions.

Where the tokens of prompt and answer together do not begin with those of the prompt, because the last of these merges with the first
characters of the answer (``\\n`` before an answer that begins with ``\\n\\n``), each text is tokenized by itself. An engine has the tokens
of the prompt, too, when it samples the answer.
"""

from collections.abc import Sequence
from typing import Protocol

from tidemill.bus.wire.json_object import JsonObject

_ANCHORS = ("", "\n", "a")
"""Texts before the one that is tokenized, whose tokens are removed: a tokenizer that puts a blank before every text puts it before them."""


class ChatTexts(Protocol):
    """Tokenizer and chat template of a model, as texts."""

    def render(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), *, whole: bool = False) -> str:
        """Return the text of a conversation, with a generation prompt unless it is ``whole``."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without special tokens before or behind it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...


def tokens_behind(texts: ChatTexts, before: Sequence[int], text: str) -> list[int] | None:
    """Return tokens of ``text`` that decode to it behind the tokens ``before``; None if the tokenizer has none."""
    head = texts.decode(before)
    for anchor in _ANCHORS if text else ():
        start, whole = list(texts.encode(anchor)) if anchor else [], list(texts.encode(anchor + text))
        ids = whole[len(start) :]
        if whole[: len(start)] == start and texts.decode([*before, *ids]) == head + text:
            return ids
    return None if text else []


def answers_by_parts(
    texts: ChatTexts, turns: Sequence[JsonObject], answers: Sequence[int], tools: Sequence[JsonObject] = ()
) -> tuple[list[int], list[tuple[int, int]]] | None:
    """Return the tokens of a conversation up to the last of ``answers`` (numbers of turns), and the bounds of each answer in them.

    None if the template writes a turn in the middle of a conversation otherwise than at its end.
    """
    ids: list[int] = []
    bounds: list[tuple[int, int]] = []
    done = ""
    for at in answers:
        prompt, answered = texts.render(turns[:at], tools), texts.render(turns[: at + 1], tools, whole=True)
        if not prompt.startswith(done) or not answered.startswith(prompt) or answered == prompt:
            return None
        between = tokens_behind(texts, ids, prompt[len(done) :]) if ids else list(texts.encode(prompt))
        if between is None:
            return None
        ids += between
        answer = tokens_behind(texts, ids, answered[len(prompt) :])
        if answer is None:
            return None
        bounds.append((len(ids), len(ids) + len(answer)))
        ids, done = ids + answer, answered
    return ids, bounds
