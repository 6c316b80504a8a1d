"""Continuous batching: one thread that owns the batch, the keys and values, and the served weights.

            calls (submit, abort, pause, flip, ...)
                 |                 consumes  calls and waiting sequences
                 v                 produces  tokens, delivered to each sequence's sink in the loop's thread
    loop:  take calls -> admit (prefill) -> decode one token for all running -> deliver -> again
                                   waits for a call when nothing runs and nothing waits, or while paused

Where learner and engine share an accelerator, the memory of the weights, and of keys and values, can be released: then nothing is computed
until both are there again, and the running sequences continue after that.

All other code uses it by ``call``: a function run by the thread between two steps. That is why a flip of the weights is an
assignment, and why nothing here needs a lock. Knows no HTTP, no tokenizer, no transport.

Shape letters: N = running rows, U = different prompts of a prefill, T = tokens per prompt (padded), R = rows of a prefill, V = vocabulary.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.errors import EngineFailed, UpdateRefused
from actors.serving.builtin import decoder
from actors.serving.builtin.sampler import Sampler
from actors.serving.builtin.sequence import Sequence
from actors.serving.builtin.slots import KVSlots
from actors.serving.builtin.weights import Weights

log = logging.getLogger(__name__)

PREFILL_TOKENS = 8192
"""Most padded tokens that are prefilled between two decoding steps (one longer prompt is prefilled whole)."""
MAX_PADDING = 1.5
"""A prefill batch has at most this many times the tokens of its prompts."""

CLIENT_GONE, CLOSING, ABORTED_BY_ID = "The client has gone", "The engine is closing", "Aborted"
KV_CACHE, WEIGHTS = "kv_cache", "weights"
"""Kinds of memory that can be released, under SGLang's names."""
UNRELATED = (CLIENT_GONE, CLOSING, ABORTED_BY_ID)
"""Reasons of an abort that are not caused by a weight update."""

Result = TypeVar("Result")
Event = tuple[Sequence, int, bool]
"""A sequence, the number of its tokens that may be read, and whether it has ended."""


@dataclass(slots=True)
class Counters:
    """Counters of the thread, which alone writes them; any thread may read them."""

    tokens_generated: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed; shared prefixes have saved the difference to ``prompt_tokens``."""
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_aborted_by_pushes: int = 0
    """Number of aborted requests that were ended by a pause of mode ``abort``, or while a weight update was open by
    anything but their client or the engine's end."""
    requests_failed: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    idle_s: float = 0.0
    """Seconds spent waiting for requests."""
    decode_cpu_s: float = 0.0
    """CPU time of the decoding thread."""
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Donor:
    """A running sequence, from which others with the same prompt copy keys, values and the scores of the first token."""

    sequence: Sequence
    scores_V: Tensor


class Scheduler:
    """The decoding thread. ``post(events)`` passes events to the loop's thread; it must not block."""

    def __init__(
        self,
        weights: Weights,
        version: int,
        *,
        max_running: int,
        max_context: int,
        share_prefix: bool,
        threads: int,
        post: Callable[[list[Event]], None],
    ) -> None:
        shape = weights.shape
        self.version = version
        self.counters = Counters()
        self.paused = False
        self.updating = False
        """True while a weight update is open: set by its owner, for the counters."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.released: frozenset[str] = frozenset()
        """Kinds of memory that are released: some of KV_CACHE, WEIGHTS."""
        self._shape = weights.shape
        self._weights: Weights | None = weights
        """None from the release of their memory until the next flip."""
        self._post, self._threads = post, threads
        self._max_running, self._share_prefix = max_running, share_prefix
        self._device, self._dtype = weights.device, weights.dtype
        self._slots = KVSlots(
            num_layers=shape.num_layers,
            slots=max_running,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_length=max_context,
            dtype=weights.dtype,
            device=weights.device,
        )
        self._rope: decoder.RopeTable | None = None
        self._sampler: Sampler | None = None
        """None = the batch has changed."""
        self._last_N, self._positions_N = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._donors: dict[bytes, Donor] = {}
        self._events: list[Event] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._idle_since: float | None = None
        self._closed = self._over = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    # -- called from anywhere -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Abort all unfinished sequences and end the thread."""
        if self._thread.is_alive():
            self.call(self._close)
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for requests, the present wait included."""
        since = self._idle_since
        return self.counters.idle_s + (0.0 if since is None else time.perf_counter() - since)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run ``function`` in the thread, between two steps."""
        future: Future[Result] = Future()
        self._calls.put((function, future))
        if self._over:
            self._cancel_calls()
        return future

    def submit(self, sequences: list[Sequence]) -> "Future[None]":
        return self.call(lambda: self.waiting.extend(sequences))

    def abort(self, wanted: Callable[[Sequence], bool], message: str = "All aborted") -> "Future[int]":
        """End matching sequences with their tokens so far. Returns their number."""
        return self.call(lambda: self._abort(wanted, message))

    def pause(self, mode: str) -> "Future[None]":
        """Pause decoding: ``in_place`` keeps rows, ``retract`` sends them back to the queue, ``abort`` ends every sequence."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> "Future[None]":
        return self.call(self._resume)

    @property
    def held(self) -> bool:
        """True while nothing is generated, even if sequences wait."""
        return self.paused or bool(self.released) or self._weights is None

    def release(self, tags: frozenset[str]) -> "Future[int]":
        """Release memory. Returns the tokens generated so far. Raises UpdateRefused while sequences run and decoding is not held."""
        return self.call(lambda: self._release(tags))

    def restore(self, tags: frozenset[str]) -> "Future[int]":
        """Take released memory again, and with that of keys and values end a pause. Returns the number of tokens generated so far.

        There are no weights before a ``flip``.
        """
        return self.call(lambda: self._restore(tags))

    def flip(self, weights: Weights, version: int) -> "Future[tuple[Weights | None, float]]":
        """Serve these weights from the next step on. Returns the old ones and the seconds for which decoding was held up."""
        return self.call(lambda: self._flip(weights, version))

    def flush(self) -> "Future[bool]":
        """Forget cached keys and values. Returns False when running sequences need them."""
        return self.call(self._flush)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._closed:
                self._take_calls()
                if not self.held:
                    self._step()
                self._deliver()
                self.counters.decode_cpu_s = time.thread_time()
        self._over = True
        self._cancel_calls()

    def _cancel_calls(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()[1].cancel()

    def _step(self) -> None:
        try:
            self._admit()
            if self.running:
                self._decode()
        except Exception as error:
            log.exception("decoding step failed running=%d", len(self.running))
            self._fail_all(f"decoding step failed: {error!r}")

    def _take_calls(self) -> None:
        """Run the queued calls; wait for one when there is nothing else to do."""
        while not self._closed:
            busy = not self.held and (self.running or self.waiting)
            try:
                function, future = self._calls.get_nowait() if busy else self._wait_for_call()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            self._deliver()

    def _wait_for_call(self) -> tuple[Callable[[], Any], "Future[Any]"]:
        since = time.perf_counter()
        if self.held:
            call = self._calls.get()
            self.counters.paused_s += time.perf_counter() - since
            return call
        self._idle_since = since
        call = self._calls.get()
        self._idle_since = None
        self.counters.idle_s += time.perf_counter() - since
        return call

    def _deliver(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._post(events)

    def _close(self) -> None:
        self._closed = True
        self._abort(lambda sequence: True, CLOSING)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill free rows, oldest request first, up to the token budget of one step."""
        started, budget = time.perf_counter(), PREFILL_TOKENS
        while self.waiting and len(self.running) < self._max_running and budget > 0:
            if self.waiting[0].key in self._donors:
                self._copy_prompt(self.waiting.popleft())
            else:
                budget -= self._prefill(self._next_prompts(budget))
            self.counters.prefill_s += time.perf_counter() - started
            started = time.perf_counter()

    def _copy_prompt(self, sequence: Sequence) -> None:
        """Admit a sequence by copying keys, values and first scores from a running one with the same prompt."""
        donor, row = self._donors[sequence.key], len(self.running)
        self._slots.move(self.running.index(donor.sequence), row, sequence.length)
        self._enter([sequence], cached=True)
        self._sample([sequence], donor.scores_V[None].clone(), first_row=row)

    def _next_prompts(self, budget: int) -> dict[bytes, list[Sequence]]:
        """Take prompts of similar length that fit from the head of the queue, each with all neighbours that have the same one."""
        free, tokens, longest = self._max_running - len(self.running), 0, 0
        prompts: dict[bytes, list[Sequence]] = {}
        while self.waiting and free > 0:
            sequence = self.waiting[0]
            if not (self._share_prefix and sequence.key in prompts):
                length = sequence.length
                padded = max(longest, length) * (len(prompts) + 1)
                if prompts and (padded > budget or padded > MAX_PADDING * (tokens + length) or sequence.key in self._donors):
                    break
                longest, tokens = max(longest, length), tokens + length
            key = sequence.key if self._share_prefix else id(sequence).to_bytes(8)
            prompts.setdefault(key, []).append(self.waiting.popleft())
            free -= 1
        return prompts

    def _prefill(self, prompts: dict[bytes, list[Sequence]]) -> int:
        """Prefill prompts and sample their first tokens. Returns the number of padded tokens."""
        first_row, admitted = len(self.running), [sequence for same in prompts.values() for sequence in same]
        for same in prompts.values():
            self._enter(same[:1], cached=False)
            self._enter(same[1:], cached=True)
        contexts = [same[0].context() for same in prompts.values()]
        lengths_U = np.array([len(context) for context in contexts])
        tokens_UT = np.zeros((len(contexts), lengths_U.max()), np.int64)
        for row, context in enumerate(contexts):
            tokens_UT[row, : len(context)] = context
        prompt_R = torch.tensor([prompt for prompt, same in enumerate(prompts.values()) for _ in same], device=self._device)
        self._slots.reserve(tokens_UT.shape[1])
        assert self._weights is not None
        x_UTE = decoder.forward(
            self._weights,
            torch.from_numpy(tokens_UT).to(self._device),
            self._angles(torch.arange(tokens_UT.shape[1], device=self._device)[None]),
            self._slots.prefilling(first_row, prompt_R),
        )
        last_U = torch.from_numpy(lengths_U - 1).to(self._device)
        scores_UV = decoder.logits(self._weights, x_UTE[torch.arange(len(contexts), device=self._device), last_U])
        if self._share_prefix:
            self._donors.update({key: Donor(same[0], scores_UV[row].clone()) for row, (key, same) in enumerate(prompts.items())})
        self.counters.prefill_tokens += int(lengths_U.sum())
        self._sample(admitted, scores_UV[prompt_R], first_row=first_row)
        return int(tokens_UT.size)

    def _enter(self, sequences: list[Sequence], *, cached: bool) -> None:
        for sequence in sequences:
            sequence.enter(self.version)
            sequence.cached_tokens = len(sequence.prompt) if cached else 0
            self.counters.prompt_tokens += sequence.length
        self.running.extend(sequences)
        self._sampler = None

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Generate one token for every running sequence."""
        started = time.perf_counter()
        if self._sampler is None:
            self._compose()
        length = int(self._positions_N.max()) + 1
        self._slots.reserve(length)
        assert self._weights is not None
        positions_N = torch.from_numpy(self._positions_N).to(self._device)
        x_N1E = decoder.forward(
            self._weights,
            torch.from_numpy(self._last_N).to(self._device)[:, None],
            self._angles(positions_N[:, None]),
            self._slots.decoding(positions_N, length),
        )
        self._sample(self.running, decoder.logits(self._weights, x_N1E[:, 0]), first_row=0)
        self.counters.steps += 1
        self.counters.decode_s += time.perf_counter() - started

    def _compose(self) -> None:
        """Build the sampler and the arrays of last tokens and positions for the next steps."""
        self._sampler = Sampler([each.params for each in self.running], [each.seed for each in self.running], self._device)
        self._last_N = np.array([each.tokens[-1] for each in self.running], np.int64)
        self._positions_N = np.array([each.length - 1 for each in self.running], np.int64)

    def _angles(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope.length < self._slots.length:
            shape = self._shape
            self._rope = decoder.RopeTable(shape.rope, self._slots.length, head_dim=shape.head_dim, dtype=self._dtype, device=self._device)
        return self._rope.at(positions_BT)

    def _sample(self, sequences: list[Sequence], scores_NV: Tensor, *, first_row: int) -> None:
        """Append a token to each of the sequences, which have the rows from ``first_row`` on; the finished ones leave the batch."""
        for row, sequence in enumerate(sequences):
            if sequence.suppressed and len(sequence.tokens) < sequence.params.min_new_tokens:
                scores_NV[row, sequence.suppressed] = float("-inf")
        sampler, positions_N = self._sampler, self._positions_N + 1
        if sampler is None:
            sampler = Sampler([each.params for each in sequences], [each.seed for each in sequences], self._device)
            positions_N = np.array([each.length for each in sequences], np.int64)
        tokens_N, log_probs_N = sampler.draw(scores_NV, positions_N)
        if self._sampler is not None:
            self._last_N, self._positions_N = tokens_N, positions_N
        if not np.isfinite(log_probs_N).all():
            self._fail_broken(sequences, log_probs_N)
        finished = []
        for row, (sequence, token, log_prob) in enumerate(zip(sequences, tokens_N.tolist(), log_probs_N.tolist(), strict=True)):
            if sequence.finish is not None or self._append(sequence, token, log_prob):
                finished.append(first_row + row)
            elif sequence.stream:
                self._events.append((sequence, len(sequence.tokens), False))
        self.counters.tokens_generated += len(sequences)
        for row in reversed(finished):
            self._leave(row)

    def _append(self, sequence: Sequence, token: int, log_prob: float) -> bool:
        """Append a token. Returns True when the sequence ends, also by an error of its own (its text cannot be decoded, for example)."""
        try:
            return sequence.append(token, log_prob)
        except Exception as error:
            log.exception("a response failed rid=%s", sequence.rid)
            sequence.fail(f"looking for its end failed: {error!r}")
            return True

    def _fail_broken(self, sequences: list[Sequence], log_probs_N: np.ndarray) -> None:
        for sequence, log_prob in zip(sequences, log_probs_N, strict=True):
            if not np.isfinite(log_prob):
                sequence.fail(f"the model's scores are not finite under version {self.version}")
                self._slots.wipe(self.running.index(sequence))

    def _leave(self, row: int) -> None:
        """Take a row out and report the end of its sequence; the last row takes its place."""
        sequence, last = self.running[row], len(self.running) - 1
        if row != last:
            self.running[row] = self.running[last]
            self._slots.move(last, row, self.running[row].length)
        self.running.pop()
        self._sampler = None
        if (donor := self._donors.get(sequence.key)) is not None and donor.sequence is sequence:
            del self._donors[sequence.key]
        self._tell_end(sequence)

    def _tell_end(self, sequence: Sequence) -> None:
        if sequence.error is not None:
            self.counters.requests_failed += 1
        elif sequence.finish is not None and sequence.finish["type"] == "abort":
            self.counters.requests_aborted += 1
            self.counters.requests_aborted_by_pushes += self.updating and sequence.finish["message"] not in UNRELATED
        else:
            self.counters.requests_finished += 1
        self._events.append((sequence, len(sequence.tokens), True))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _abort(self, wanted: Callable[[Sequence], bool], message: str) -> int:
        rows = [row for row, sequence in enumerate(self.running) if wanted(sequence)]
        for row in reversed(rows):
            self.running[row].abort(message)
            self._leave(row)
        ended = [sequence for sequence in self.waiting if wanted(sequence)]
        for sequence in ended:
            self.waiting.remove(sequence)
            sequence.abort(message)
            self._tell_end(sequence)
        return len(rows) + len(ended)

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            before, aborted = self.counters.requests_aborted_by_pushes, self._abort(lambda sequence: True, "All aborted")
            self.counters.requests_aborted_by_pushes = before + aborted
        elif mode == "retract":
            self._retract()

    def _retract(self) -> None:
        for sequence in self.running:
            sequence.retract()
        self.waiting.extendleft(reversed(self.running))
        self._clear()

    def _resume(self) -> None:
        self.paused = False

    def _release(self, tags: frozenset[str]) -> int:
        if self.running and not self.held:
            raise UpdateRefused(f"release of {', '.join(sorted(tags))}: {len(self.running)} requests are being decoded; want a pause first")
        self.released |= tags
        if KV_CACHE in tags:
            self._retract()
            self._rope = None
        if WEIGHTS in tags:
            self._weights = None
        return self.counters.tokens_generated

    def _restore(self, tags: frozenset[str]) -> int:
        back = tags & self.released
        self.released -= tags
        if KV_CACHE in back:
            self._slots.reset()
        if KV_CACHE in tags:  # a release may have failed after its pause
            self.paused = False
        return self.counters.tokens_generated

    def _flip(self, weights: Weights, version: int) -> tuple[Weights | None, float]:
        started = time.perf_counter()
        old, self._weights, self.version = self._weights, weights, version
        self._donors.clear()  # their scores are the old version's
        for sequence in self.running:
            sequence.enter(version)
        return old, time.perf_counter() - started

    def _flush(self) -> bool:
        if self.running:
            return False
        self._clear()
        return True

    def _clear(self) -> None:
        self.running.clear()
        self._donors.clear()
        self._sampler = None
        if KV_CACHE in self.released:
            self._slots.free()
        else:
            self._slots.reset()

    def _fail_all(self, reason: str) -> None:
        """End the whole batch: after a failed step none of it can be trusted. Waiting sequences are not affected."""
        for sequence in self.running:
            sequence.fail(str(EngineFailed("builtin", reason)))
            self._tell_end(sequence)
        self._clear()
