"""One sample for a page: messages, tokens and facts, each text made safe and cut. Knows no bus."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sample, Turns
from tidemill.bus.wire.trained_values import TrainedValues
from tidemill.launch.page.columns import rounded
from tidemill.launch.page.texts import cut, made_safe, safe, shortened
from tidemill.launch.samples.filters import Headline
from tidemill.launch.samples.text import Vocabulary, turns_in
from tidemill.launch.samples.text import to_json as json_text

TOKENS, MAX_TOKENS = 2000, 4000
MAX_MESSAGES = 400
_MAX_PARTS = 100  # Parts of a reward
_DIGITS = 10  # Fewer are in the number of a message
_CONTEXT = 8  # Tokens before the first one shown, which its text depends on
_SMALL = 4096  # Characters of a label, of metadata and of further fields of a message
_TEXTS = ("reasoning_content", "content")


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sample, or the error that prevents its decoding, with its headers."""

    line: Headline
    sample: Sample | WireError
    vocabulary: Vocabulary
    trained: TrainedValues | None = None
    """Values of its trained tokens; None = not trained, or not recorded."""

    def as_map(self) -> JsonObject:
        """Return everything but the outcome and the group."""
        if isinstance(self.sample, WireError):
            return {"error": safe(f"broken: {self.sample}"), "messages": [], "tokens": None, "response": None}
        sample = self.sample
        response, left = cut(sample.response)
        sampling = {name: getattr(sample.sampling, name) for name in ("temperature", "top_p", "top_k", "seed")}
        timings = ("queued_s", "generating_s", "tools_s", "reward_s")
        return {
            "error": None,
            "attempt": safe(shortened(sample.attempt)),
            "group": sample.group_size,
            "finish_reason": safe(shortened(sample.finish_reason)),
            "parts": _parts(sample.reward),
            "label": None if sample.label is None else cut(_text(sample.label), size=_SMALL)[0],
            "sampling": sampling | {"max_new_tokens": sample.sampling.max_new_tokens},
            "timings": {name: getattr(sample.timings, name) for name in timings},
            "rollout": safe(shortened(sample.rollout)),
            "environment": safe(shortened(str(sample.metadata.get("environment", sample.rollout)))),
            "messages": self._messages(sample),
            "response": {"text": response, "cut": left, "field": "response"},
            "turns": [] if sample.turns is None else _turns(sample.turns),
            "spans": [[span.version, span.num_tokens] for span in sample.spans[:MAX_TOKENS]],
            "num_tokens": sample.response_length,
            "prompt_tokens": len(sample.tokens) - sample.response_length,
            "tokens": self.tokens(0, TOKENS),
            "metadata": cut(json_text(sample.metadata), size=_SMALL)[0],
        }

    def _messages(self, sample: Sample) -> list[JsonObject]:
        messages = []
        for number, message in enumerate(_conversation(sample)[:MAX_MESSAGES]):
            text, left = cut(_content(message))
            fields = {name: value for name, value in message.items() if name not in ("role", *_TEXTS) and value}
            reasoning, reasoning_left = cut(_reasoning(message))
            messages.append(
                {
                    "role": safe(str(message.get("role", "?"))[:40]),
                    "text": text,
                    "cut": left,
                    "field": f"messages/{number}",
                    "reasoning": reasoning,
                    "reasoning_cut": reasoning_left,
                    "reasoning_field": f"reasoning/{number}",
                    "fields": cut(json_text(fields), size=_SMALL)[0] if fields else "",
                }
            )
        return messages

    def text(self, field: str, start: int) -> JsonObject:
        """Return the next characters of a text. Raises ValueError for a field that the sample does not have."""
        sample = self._decoded()
        messages = _conversation(sample)
        kind, _, number = field.partition("/")
        if field == "response":
            whole = sample.response
        elif kind in _TEXT_OF and len(number) < _DIGITS and number.isdecimal() and int(number) < len(messages):
            whole = _TEXT_OF[kind](messages[int(number)])
        else:
            raise ValueError(f"field: want response, messages/N or reasoning/N, got {field[:40]!r}")
        text, left = cut(whole, start)
        return {"text": text, "from": start, "cut": left}

    def tokens(self, start: int, count: int) -> JsonObject:
        """Return columns of the response's tokens from ``start`` on. Columns of an invalid sample may be shorter."""
        sample = self._decoded()
        ids, sequences = _response_tokens(sample)
        end = min(len(ids), start + min(count, MAX_TOKENS))
        context = max(0, start - _CONTEXT)
        chosen = ids[context:end].tolist()
        log_probs = sample.rollout_log_probs[start:end].tolist()
        mask = sample.loss_mask[start:end].tolist()
        sampled = zip(log_probs, mask, strict=False)
        return {
            "from": start,
            "total": len(ids),
            "id": chosen[start - context :],
            "text": [safe(piece) for piece in self.vocabulary.pieces(chosen, start - context)],
            "logprob": [rounded(log_prob) if masked else None for log_prob, masked in sampled],
            "version": _versions(sample, len(ids))[start:end].tolist(),
            "mask": mask,
            "sequence": sequences[start:end].tolist(),
            **self._trained(start, end),
        }

    def _trained(self, start: int, end: int) -> dict[str, list[float | None]]:
        """Return the columns of trained tokens: null where one was not trained, empty without a record."""
        if self.trained is None:
            return {name: [] for name in ("train_logprob", "advantage", "weight", "entropy")}
        values = self.trained
        chosen = (values.places >= start) & (values.places < end)
        places = values.places[chosen] - start
        arrays = {"train_logprob": values.log_probs, "advantage": values.advantages}
        arrays |= {"weight": values.weights, "entropy": values.entropies}
        columns: dict[str, list[float | None]] = {}
        for name, array in arrays.items():
            column: list[float | None] = [None] * max(0, end - start)
            for place, value in zip(places.tolist(), array[chosen].tolist(), strict=True):
                column[place] = rounded(value)
            columns[name] = column
        return columns

    def _decoded(self) -> Sample:
        if isinstance(self.sample, WireError):
            raise ValueError(f"sample {self.line.seq}: cannot be read: {self.sample}")
        return self.sample


def _conversation(sample: Sample) -> list[Mapping[str, Any]]:
    """Return the messages to show: the transcript of an episode, else the prompt."""
    if sample.transcript:
        return [message for message in sample.transcript if isinstance(message, Mapping)]
    if isinstance(sample.prompt, str):
        return [{"role": "prompt", "content": sample.prompt}]
    return [message for message in sample.prompt if isinstance(message, Mapping)]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return "" if content is None else _text(content)


def _reasoning(message: Mapping[str, Any]) -> str:
    return _text(message.get("reasoning_content") or "")


_TEXT_OF = {"messages": _content, "reasoning": _reasoning}


def _parts(reward: object) -> JsonObject:
    parts = list(reward.items())[:_MAX_PARTS] if isinstance(reward, dict) else []
    return {safe(shortened(str(name))): made_safe(value) for name, value in parts}


def _turns(turns: Turns) -> list[JsonObject]:
    rows = turns_in(turns)[:MAX_MESSAGES]
    return [{name: made_safe(shortened(value)) for name, value in row.items()} for row in rows]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json_text(value)


def _response_tokens(sample: Sample) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    ids, sequences, right = [np.empty(0, np.int32)], [np.empty(0, np.int32)], 0
    for number, size in enumerate(sample.sizes):
        right += size.num_tokens
        part = sample.tokens[max(0, right - size.response_length) : max(0, right)]
        ids.append(part)
        sequences.append(np.full(len(part), number, np.int32))
    return np.concatenate(ids), np.concatenate(sequences)


def _versions(sample: Sample, length: int) -> np.ndarray[Any, Any]:
    versions, place = np.full(length, -1, np.int64), 0
    for span in sample.spans:
        versions[place : place + max(0, span.num_tokens)] = span.version
        place += max(0, span.num_tokens)
    return versions
