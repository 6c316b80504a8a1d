"""Streams of states between an engine and a client: read, and noted as far as they were sent."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from tidemill.actors.errors import EngineError
from tidemill.actors.events import data_of
from tidemill.actors.router.tree import TokenPiece
from tidemill.bus.wire.json_object import JsonMapping, JsonObject


class SentStates:
    """The states of a stream as its client was sent them. Each response is remembered once, as far as it was sent."""

    def __init__(self, remember: Callable[[int, JsonMapping], None], decode: Callable[[list[int]], str]) -> None:
        """``remember`` is called with the place of a response and its state."""
        self._remember, self._decode = remember, decode
        self._open: dict[int, JsonMapping] = {}
        """Newest state that was sent of each unfinished response, with its text as it was sent."""

    def take(self, state: JsonMapping) -> bool:
        """Return whether a state is the last one of its response, which is then remembered."""
        place = state.get("index", 0)
        if state["meta_info"].get("finish_reason") is None:
            return False
        self._open.pop(place, None)
        self._remember(place, state)
        return True

    def seen(self, state: JsonMapping, text: str) -> None:
        """Note that the client was sent an unfinished state, as this text."""
        if state["meta_info"].get("finish_reason") is None:
            self._open[state.get("index", 0)] = {**state, "text": text}

    def note_cut(self) -> None:
        """Remember the responses that the client has cut: the responses whose text it has seen to the last token."""
        for place, state in self._open.items():
            if state["text"] and self._decode(list(state["output_ids"])) == state["text"]:
                self._remember(place, state)
        self._open.clear()


def sampled_piece(answer: JsonMapping) -> TokenPiece | None:
    """Return the tokens of a state, without text; None when it has no ids, or not the log-prob of each."""
    ids, meta = tuple(answer.get("output_ids") or ()), answer["meta_info"]
    log_probs = tuple(entry[0] for entry in meta.get("output_token_logprobs") or ())
    if not ids or len(log_probs) != len(ids) or None in log_probs:
        return None
    return TokenPiece(text="", tokens=ids, log_probs=log_probs, versions=tuple(_versions(meta, len(ids))))


def _versions(meta: JsonMapping, num_tokens: int) -> list[int]:
    """Return the version of each token; -1 where it is not reported as a number."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    versions = [-1] * num_tokens
    for span in spans:
        number = int(span["version"]) if str(span["version"]).isdecimal() else -1
        versions[span["start"] : span["end"]] = [number] * (span["end"] - span["start"])
    return versions[:num_tokens]


async def states_in(chunks: AsyncIterator[bytes]) -> AsyncGenerator[JsonMapping, None]:
    """Yield the states and the errors of a stream. Raises EngineError for an event that is neither."""
    unended = b""
    async for chunk in chunks:
        *events, unended = (unended + chunk).split(b"\n\n")
        for line in events:
            if (state := state_in(line)) is not None:
                yield state
            elif b'"error"' in line and (data := data_of(line)) is not None:
                yield _decoded(data)


def state_in(line: bytes) -> JsonObject | None:
    """Return the response state in an event; None without one ([DONE], an error). Raises EngineError for no JSON."""
    if (data := data_of(line)) is None or not data.startswith(b"{"):
        return None
    state = _decoded(data)
    if "meta_info" not in state:
        return None
    if not isinstance(state["meta_info"], Mapping):
        raise EngineError(f"event of a stream: want a map in meta_info, got {state['meta_info']!r:.80}")
    return state


def _decoded(data: bytes) -> JsonObject:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"event of a stream: want JSON, got {data[:80]!r}: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"event of a stream: want a map, got {data[:80]!r}")
    return value
