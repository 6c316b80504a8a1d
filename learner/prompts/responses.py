"""Recorded responses of a row: text, chat messages or token ids, and the token sequences with masks that are made of
them.

Knows a tokenizer as a function, no file, bus or model. Masks of chat messages follow from the chat template alone: a
turn of the assistant is the text that the template puts between the prompt of that turn and its end. Both must be
prefixes of the whole conversation, token by token, or else as text (``ChatTexts``).

Where the tokens of prompt and answer together do not begin with the tokens of the prompt, because the last one merges
with the first characters of the answer (``\\n`` before an answer that begins with ``\\n\\n``), each text is tokenized
by itself. An engine has the tokens of the prompt, too, when it samples the answer.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import ASSISTANT
from tidemill.bus.wire.invariants import check_log_probs, check_reward
from tidemill.bus.wire.json_object import JsonObject, is_number
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.formats import kind_of, messages_in, refuse_unsendable, value_at
from tidemill.learner.prompts.tokenizer import Tokenize

_ANCHORS = ("", "\n", "a")
"""Texts put before the tokenized one, whose tokens are removed: some tokenizers put a blank before every text."""


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
    """Return the tokens of a conversation up to the last of ``answers`` (numbers of turns), and the bounds of each
    answer in them.

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


WEIGHT = "weight"
"""Key of an assistant's message: 0 = it is not trained, 1 or missing = it is (as in OpenAI's files for fine-tuning)."""
MAX_RESPONSES = 1024
"""Maximum number of responses of one row."""
KNOWN = ("text", "messages", "tokens", "prompt_tokens", "log_probs", "loss_mask", "reward", "truncated", "temperature")
"""Keys of one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResponse:
    """One recorded response of a row: exactly one of text, messages and tokens."""

    text: str | None = None
    messages: tuple[JsonObject, ...] = ()
    """Turns after the prompt; the assistant's turns are trained."""
    tokens: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    """With tokens: the ids before them; empty = the prompt's own."""
    log_probs: tuple[float, ...] = ()
    """With tokens: log-probs of the distribution that they were sampled from; empty = not known."""
    loss_mask: tuple[int, ...] = ()
    """With tokens: 1 = trained; empty = all are."""
    reward: float | dict[str, float] = 0.0
    truncated: bool = False
    temperature: float | None = None
    """Temperature of the log-probs; None = the row's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSequence:
    """The token sequence of a response; L = its tokens, R = those from the first trained one on."""

    tokens: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.uint8]
    """[R]"""
    log_probs: NDArray[np.float32] | None
    """[R], 0 where masked; None = not known."""
    text: str
    reward: float | dict[str, float]
    truncated: bool

    @property
    def prompt_tokens(self) -> NDArray[np.int32]:
        """The tokens before the response, [L - R]."""
        return self.tokens[: len(self.tokens) - len(self.loss_mask)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """The parts of a row that its sequences are made of."""

    prompt: Prompt
    responses: Sequence[RecordedResponse]
    tools: Sequence[JsonObject]
    where: str


def responses_in(values: Mapping[str, object], key: str, *, where: str) -> tuple[RecordedResponse, ...]:
    """Return the responses in column ``key``: one, a list, or JSON text of one; none for null. Raises PromptError."""
    column = value_at(values, key, where=where, setting="data.responses_key") if key else None
    if column is None:
        return ()
    responses = listed(column)
    refuse_unsendable(responses, where=where, key=key)
    if not 0 < len(responses) <= MAX_RESPONSES:
        raise PromptError(where, f"1 to {MAX_RESPONSES} responses in {key!r}", len(responses))
    return tuple(_response(entry, where=where, key=f"{key}[{number}]") for number, entry in enumerate(responses))


def listed(column: object) -> list[Any]:
    """Return the responses of a column as a list: one, several, or a list of maps as JSON text."""
    # JSON text is the usual form in Parquet and Arrow, where a map has the keys of all rows.
    if isinstance(column, str) and column.startswith("[{"):
        with suppress(ValueError, RecursionError):  # a text that begins like that
            column = json.loads(column)
    return column if isinstance(column, list) else [column]


def in_conversation(prompt: Prompt, *, where: str) -> tuple[list[JsonObject], RecordedResponse]:
    """Split a conversation into prompt and response, from the assistant's first message on. Raises PromptError."""
    turns = [] if isinstance(prompt, str) else prompt
    first = next((at for at, turn in enumerate(turns) if turn["role"] == ASSISTANT), 0)
    if not first:
        want = (
            "responses in data.responses_key, or chat messages with one of the user before the first of the assistant"
        )
        raise PromptError(where, want, f"{prompt!r:.80}")
    return list(turns[:first]), RecordedResponse(messages=_messages(turns[first:], where=where, key="messages"))


def _response(value: object, *, where: str, key: str) -> RecordedResponse:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, Mapping):
        raise PromptError(where, f"text or a map with text, messages or tokens in {key}", kind_of(value))
    fields = {name: entry for name, entry in value.items() if entry is not None}
    if unknown := sorted(set(fields) - set(KNOWN)):
        raise PromptError(where, f"only {', '.join(KNOWN)} in {key}", unknown[0])
    if len(kinds := [name for name in KNOWN[:3] if name in fields]) != 1:
        raise PromptError(where, f"one of text, messages and tokens in {key}", ", ".join(kinds) or "none")
    of_tokens = [name for name in ("prompt_tokens", "log_probs", "loss_mask") if name in fields]
    if kinds != ["tokens"] and of_tokens:
        got = f"{kinds[0]}, whose tokens are not known"
        raise PromptError(where, f"tokens with {of_tokens[0]} in {key}, one of each", got)
    if "text" in fields and not (isinstance(fields["text"], str) and fields["text"]):
        raise PromptError(where, f"a text that is not empty in {key}.text", f"{fields['text']!r:.80}")
    temperature = fields.get("temperature")
    response = RecordedResponse(
        text=fields.get("text"),
        messages=_messages(fields["messages"], where=where, key=f"{key}.messages") if "messages" in fields else (),
        tokens=_ids(fields.get("tokens", ()), where=where, key=f"{key}.tokens"),
        prompt_tokens=_ids(fields.get("prompt_tokens", ()), where=where, key=f"{key}.prompt_tokens"),
        log_probs=_numbers(fields.get("log_probs", ()), where=where, key=f"{key}.log_probs"),
        loss_mask=_ids(fields.get("loss_mask", ()), where=where, key=f"{key}.loss_mask", below=2),
        reward=_reward(fields.get("reward", 0.0), where=where, key=f"{key}.reward"),
        truncated=fields.get("truncated", False) is True,
        temperature=None if temperature is None else _number(temperature, where=where, key=f"{key}.temperature"),
    )
    if kinds == ["tokens"]:
        _check_tokens(response, where=where, key=key)
    return response


def _check_tokens(response: RecordedResponse, *, where: str, key: str) -> None:
    """Check the lengths, the mask and the log-probs of a response of token ids. Raises PromptError."""
    count = len(response.tokens)
    for name in ("log_probs", "loss_mask"):
        if (length := len(getattr(response, name))) not in (0, count):
            raise PromptError(where, f"a value for each of {count} tokens in {key}.{name}", length)
    if not count or (response.loss_mask and not any(response.loss_mask)):
        raise PromptError(where, f"a token that is trained in {key}", "none")
    if response.log_probs:
        mask = np.array(response.loss_mask or [1] * count, np.bool_)
        try:
            check_log_probs(np.where(mask, np.array(response.log_probs, np.float32), np.float32(0)))
        except WireError as error:
            raise PromptError(where, f"log-probs of {error.want} in {key}.log_probs", error.got) from None


def _messages(value: Any, *, where: str, key: str) -> tuple[JsonObject, ...]:
    messages = messages_in(value, where=where, key=key)
    if not any(turn["role"] == ASSISTANT and turn.get(WEIGHT) != 0 for turn in messages):
        want = f"chat messages with role and content, one at least of the assistant with a weight of 1, in {key}"
        raise PromptError(where, want, f"{value!r:.80}")
    for turn in messages:
        weight = turn.get(WEIGHT)
        if weight not in (None, 0, 1) or (turn["role"] != ASSISTANT and weight):
            raise PromptError(where, f"{WEIGHT} 0 or 1, of messages of the assistant, in {key}", f"{weight!r:.80}")
    return tuple(messages)


def _ids(value: Any, *, where: str, key: str, below: int = 2**31) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(token) is int and 0 <= token < below for token in value):
        raise PromptError(where, f"a list of whole numbers from 0 to {below - 1} in {key}", f"{value!r:.80}")
    return tuple(value)


def _number(value: Any, *, where: str, key: str) -> float:
    if not is_number(value):
        raise PromptError(where, f"a number in {key}", f"{value!r:.80}")
    return float(value)


def _numbers(value: Any, *, where: str, key: str) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise PromptError(where, f"a list of numbers in {key}", kind_of(value))
    return tuple(
        _number(0.0 if number is None else number, where=where, key=f"{key}[{at}]") for at, number in enumerate(value)
    )


def _reward(value: Any, *, where: str, key: str) -> float | dict[str, float]:
    reward: float | dict[str, float]
    if isinstance(value, Mapping):
        parts = {str(name): part for name, part in value.items() if part is not None}
        reward = {name: _number(part, where=where, key=f"{key}.{name}") for name, part in parts.items()}
    else:
        reward = _number(value, where=where, key=key)
    try:
        check_reward(reward)
    except WireError as error:
        raise PromptError(where, f"{error.want} in {key}", error.got) from None
    return reward


class Recordings:
    """The recorded responses of rows, as token sequences of one model."""

    def __init__(
        self,
        tokenize: Tokenize,
        *,
        rollouts: Collection[str],
        end_ids: Sequence[int],
        max_tokens: int,
        chat: bool = False,
        texts: ChatTexts | None = None,
    ) -> None:
        """``rollouts``: names of the rollouts with recorded responses. ``end_ids``: the tokens that end a response; the
        first of them is put behind a response of text. ``max_tokens``: the longest sequence. ``chat``: prompts and
        responses of text go through the chat template. ``texts``: tokenizer and template as texts; None = answers whose
        tokens merge with the tokens before them are refused.
        """
        self._tokenize, self._end_ids, self._chat, self._texts = tokenize, end_ids, chat, texts
        self.rollouts, self.max_tokens = frozenset(rollouts), max_tokens

    def sequences(self, row: RecordedRow) -> tuple[RecordedSequence, ...]:
        """Return the sequence of each response. Raises PromptError for a template that changes its earlier text."""
        return tuple(self._sequence(row, response) for response in row.responses)

    def _sequence(self, row: RecordedRow, response: RecordedResponse) -> RecordedSequence:
        if response.tokens:
            return self._of_tokens(row, response)
        answers = [turn["content"] for turn in response.messages if turn["role"] == ASSISTANT]
        text = response.text if response.text is not None else answers[-1]
        if response.text is None or self._chat or row.tools or not isinstance(row.prompt, str):
            before = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
            after = response.messages or ({"role": ASSISTANT, "content": response.text},)
            tokens, mask = self._of_messages(before, after, row)
        else:
            ids = [*self._tokenize(response.text, whole=True)]
            if self._end_ids and not response.truncated and ids[-1:] != [self._end_ids[0]]:
                ids.append(self._end_ids[0])
            prompt = list(self._tokenize(row.prompt))
            tokens, mask = prompt + ids, [0] * len(prompt) + [1] * len(ids)
        return _made(tokens, mask, None, response, text=text, where=row.where)

    def _of_tokens(self, row: RecordedRow, response: RecordedResponse) -> RecordedSequence:
        prompt = response.prompt_tokens or tuple(prompt_tokens(self._tokenize, row.prompt, row.tools))
        mask = response.loss_mask or (1,) * len(response.tokens)
        log_probs = (0.0,) * len(prompt) + response.log_probs if response.log_probs else None
        tokens, masks = [*prompt, *response.tokens], [0] * len(prompt) + [*mask]
        return _made(tokens, masks, log_probs, response, text="", where=row.where)

    def _of_messages(
        self, before: Sequence[JsonObject], after: Sequence[JsonObject], row: RecordedRow
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and 1 for each that the assistant is trained to write."""
        turns = [{name: value for name, value in turn.items() if name != WEIGHT} for turn in (*before, *after)]
        trained = [
            at for at, turn in enumerate(after, len(before)) if turn["role"] == ASSISTANT and turn.get(WEIGHT) != 0
        ]
        tokens, bounds = self._answers(turns, trained, row)
        mask = [0] * len(tokens)
        for start, end in bounds:
            # A response ends with its end token; text of the template behind that token is not trained.
            ends = [place for place in range(start, end) if tokens[place] in self._end_ids]
            stop = ends[-1] + 1 if ends else end
            mask[start:stop] = [1] * (stop - start)
        return tokens, mask

    def _answers(
        self, turns: Sequence[JsonObject], trained: Sequence[int], row: RecordedRow
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a conversation up to its last answer, and the bounds of each. Raises PromptError."""
        tools: JsonObject = {"tools": row.tools} if row.tools else {}
        tokens = list(self._tokenize(turns[: trained[-1] + 1], whole=True, **tools))
        bounds: list[tuple[int, int]] = []
        for at in trained:
            start = list(self._tokenize(turns[:at], **tools))
            end = list(self._tokenize(turns[: at + 1], whole=True, **tools))
            if tokens[: len(start)] != start or tokens[: len(end)] != end or len(end) <= len(start):
                by_parts = None if self._texts is None else answers_by_parts(self._texts, turns, trained, row.tools)
                if by_parts is None:
                    raise _unstable(row.where, at, turns)
                return by_parts
            bounds.append((len(start), len(end)))
        return tokens, bounds


def prompt_tokens(tokenize: Tokenize, prompt: Prompt, tools: Sequence[JsonObject]) -> Sequence[int]:
    """Return the input ids of a prompt and its tools."""
    return tokenize(prompt, tools=tools) if tools else tokenize(prompt)


def _unstable(where: str, at: int, turns: Sequence[JsonObject]) -> PromptError:
    want = (
        f"a chat template that writes message {at + 1} in the middle of a conversation as at its end; give the "
        "assistant's messages rows of their own, with weight: 0 in those before"
    )
    return PromptError(where, want, f"other tokens for {turns[at]['content']!r:.80}")


def _made(
    tokens: Sequence[int],
    mask: Sequence[int],
    log_probs: Sequence[float] | None,
    response: RecordedResponse,
    *,
    text: str,
    where: str,
) -> RecordedSequence:
    """Return the sequence up to its last trained token; ``mask`` and ``log_probs`` are of all tokens."""
    trained = np.flatnonzero(mask)
    if not len(trained) or not trained[0]:
        want = "a prompt before the response, and a response with a token"
        raise PromptError(where, want, f"{len(tokens)} tokens, {len(trained)} trained")
    first, end = int(trained[0]), int(trained[-1]) + 1
    mask_R = np.array(mask[first:end], np.uint8)
    log_probs_R = None
    if log_probs is not None:
        log_probs_R = np.where(mask_R == 1, np.array(log_probs[first:end], np.float32), np.float32(0))
    return RecordedSequence(
        tokens=np.array(tokens[:end], np.int32),
        loss_mask=mask_R,
        log_probs=log_probs_R,
        text=text,
        reward=response.reward,
        truncated=response.truncated,
    )
