"""Continuous batching: one thread that owns the batch, the keys and values, and the served weights.

            calls (submit, abort, pause, flip, ...)
                 |                 consumes  calls and waiting sequences
                 v                 produces  tokens, delivered to each sequence's sink in the loop's thread
    loop:  take calls -> admit (prefill) -> decode one token for all running -> score given tokens -> deliver -> again
                                   waits for a call when nothing runs and nothing waits, or while paused

Where learner and engine share an accelerator, the memory of the weights, and of keys and values, can be released: then
nothing is computed until both are there again, and the running sequences continue after that.

All other code uses it by ``call``: a function run by the thread between two steps. That is why a flip of the weights is
an assignment, and why nothing here needs a lock. Knows no HTTP, no tokenizer, no transport.

Shape letters: N = running rows, U = different prompts of a prefill, T = tokens per prompt (padded), R = rows of a
prefill, V = vocabulary.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec

import numpy as np
from torch import Tensor, inference_mode, set_num_threads

from tidemill.actors.errors import EngineFailed, UpdateRefused
from tidemill.actors.serving.builtin.calls import Call, CallQueue, run
from tidemill.actors.serving.builtin.input_scores import Scoring, take_scorings
from tidemill.actors.serving.builtin.runner import ModelRunner
from tidemill.actors.serving.builtin.sampler import Sampler
from tidemill.actors.serving.builtin.sequence import CLOSING, PREFILL_TOKENS, Counters, Sequence, take_prompts
from tidemill.actors.serving.builtin.weights import Weights
from tidemill.actors.serving.port import Result
from tidemill.actors.serving.updates import KV_CACHE, WEIGHTS

log = logging.getLogger(__name__)

Args = ParamSpec("Args")
Event = tuple[Sequence, int, bool]
"""A sequence, the number of its tokens that may be read, and whether it has ended."""


@dataclass(frozen=True, slots=True)
class Donor:
    """A running sequence, from which others with the same prompt copy keys, values and first scores."""

    sequence: Sequence
    scores_V: Tensor


def between_steps(
    method: Callable[Concatenate["Scheduler", Args], Result],
) -> Callable[Concatenate["Scheduler", Args], "Future[Result]"]:
    """Make a method one that any thread may call: the decoding thread runs it between two of its steps."""

    @wraps(method)
    def queued(self: "Scheduler", *args: Args.args, **kwargs: Args.kwargs) -> "Future[Result]":
        return self.call(lambda: method(self, *args, **kwargs))

    return queued


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
        self.version = version
        self.counters = Counters()
        self.paused = False
        self.updating = False
        """True while a weight update is open: set by its owner, for the counters."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.scorings: deque[Scoring] = deque()
        """Sequences with tokens to be scored."""
        self.released: frozenset[str] = frozenset()
        """Kinds of memory that are released: some of KV_CACHE, WEIGHTS."""
        self.device, self.dtype = weights.device, weights.dtype
        self._post, self._threads = post, threads
        self._max_running, self._share_prefix = max_running, share_prefix
        self._runner = ModelRunner(weights, max_running=max_running, max_context=max_context)
        self._sampler: Sampler | None = None
        """None = the batch has changed."""
        self._last_N, self._positions_N = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._donors: dict[bytes, Donor] = {}
        self._events: list[Event] = []
        self._calls = CallQueue()
        self._idle_since: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Abort all unfinished sequences and end the thread."""
        if self._thread.is_alive():
            self.call(self._close)
            self._thread.join(timeout_s)

    def _close(self) -> None:
        self._closed = True
        self._abort(lambda sequence: True, CLOSING)

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def idle_s(self) -> float:
        """Seconds spent waiting for requests, the present wait included."""
        since = self._idle_since
        return self.counters.idle_s + (0.0 if since is None else time.perf_counter() - since)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run ``function`` between two steps. Its future is cancelled if the thread has ended."""
        return self._calls.call(function)

    @between_steps
    def submit(self, sequences: list[Sequence]) -> None:
        """Append sequences to the queue; the future is done once they are in it."""
        self.waiting.extend(sequences)

    @between_steps
    def submit_scorings(self, scorings: list[Scoring]) -> None:
        """Append sequences to score. The results are in the ``done`` of each."""
        self.scorings.extend(scorings)

    def abort(self, matches: Callable[[Sequence], bool], message: str = "All aborted") -> "Future[int]":
        """End matching sequences with their tokens so far. Returns their number."""
        return self.call(lambda: self._abort(matches, message))

    @property
    def held(self) -> bool:
        """True while nothing is generated, even if sequences wait."""
        return self.paused or bool(self.released) or self._runner.weights is None

    def _run(self) -> None:
        set_num_threads(self._threads)
        with inference_mode():
            while not self._closed:
                self._take_calls()
                if not self.held:
                    self._step()
                self._deliver()
                self.counters.decode_cpu_s = time.thread_time()
        self._calls.close()
        for scoring in self.scorings:
            scoring.done.cancel()

    def _step(self) -> None:
        with _surviving("decoding step", self._fail_all):
            self._admit()
            if self.running:
                self._decode()
        self._score()

    def _score(self) -> None:
        if not (batch := take_scorings(self.scorings)):
            return

        def fail(reason: str) -> None:
            for scoring in batch:
                if not scoring.done.done():
                    scoring.done.set_exception(EngineFailed("builtin", reason))

        with _surviving("scoring", fail):
            for scoring, result in zip(batch, self._runner.scores(batch, self.version), strict=True):
                scoring.done.set_result(result)
        self.counters.scored_tokens += sum(len(scoring.tokens) for scoring in batch)

    def _take_calls(self) -> None:
        """Run the queued calls; wait for one when there is nothing else to do."""
        while not self._closed:
            busy = not self.held and (self.running or self.waiting or self.scorings)
            try:
                call = self._calls.get_nowait() if busy else self._wait_for_call()
            except queue.Empty:
                return
            run(call)
            self._deliver()

    def _wait_for_call(self) -> Call:
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

    def _admit(self) -> None:
        """Fill free rows, oldest request first, up to the token budget of one step."""
        started, budget = time.perf_counter(), PREFILL_TOKENS
        shared = self._donors.keys() if self._share_prefix else None
        while self.waiting and len(self.running) < self._max_running and budget > 0:
            if self._can_copy(self.waiting[0]):
                self._copy_prompt(self.waiting.popleft())
            else:
                free = self._max_running - len(self.running)
                budget -= self._prefill(take_prompts(self.waiting, free=free, budget=budget, shared=shared))
            self.counters.prefill_s += time.perf_counter() - started
            started = time.perf_counter()

    def _can_copy(self, sequence: Sequence) -> bool:
        """Return whether a running sequence with the same prompt has all that this one needs of it."""
        donor = self._donors.get(sequence.key)
        return donor is not None and (sequence.experts is None or donor.sequence.experts is not None)

    def _copy_prompt(self, sequence: Sequence) -> None:
        """Admit a sequence by copying keys, values and first scores from a running one with the same prompt."""
        donor, row = self._donors[sequence.key], len(self.running)
        if sequence.experts is not None and donor.sequence.experts is not None:
            sequence.experts.copy(donor.sequence.experts, sequence.length)
        self._runner.slots.move(self.running.index(donor.sequence), row, sequence.length)
        self._enter([sequence], cached=True)
        # A copy, as ``_sample`` writes into the scores; others may need them later.
        self._sample([sequence], donor.scores_V[None].clone(), first_row=row)

    def _prefill(self, prompts: dict[bytes, list[Sequence]]) -> int:
        """Prefill prompts and sample their first tokens. Returns the number of padded tokens."""
        first_row, admitted = len(self.running), [sequence for sharers in prompts.values() for sequence in sharers]
        for sharers in prompts.values():
            self._enter(sharers[:1], cached=False)
            self._enter(sharers[1:], cached=True)
        prompt_of_R = [prompt for prompt, sharers in enumerate(prompts.values()) for _ in sharers]
        self._runner.captures = any(sequence.experts is not None for sequence in admitted)
        scores_RV, num_padded = self._runner.prefill(
            [sharers[0].context() for sharers in prompts.values()], prompt_of_R, first_row=first_row
        )
        for prompt, sequence in zip(prompt_of_R, admitted, strict=True):
            if sequence.experts is not None:
                assert self._runner.experts_BTGJ is not None, "they are captured where a sequence needs them"
                sequence.experts.add(self._runner.experts_BTGJ[prompt, : sequence.length], 0)
        if self._share_prefix:
            for prompt, (key, sharers) in enumerate(prompts.items()):
                self._donors[key] = Donor(sharers[0], scores_RV[prompt_of_R.index(prompt)].clone())
        self.counters.prefill_tokens += sum(sharers[0].length for sharers in prompts.values())
        self._sample(admitted, scores_RV, first_row=first_row)
        return num_padded

    def _enter(self, sequences: list[Sequence], *, cached: bool) -> None:
        for sequence in sequences:
            sequence.enter(self.version)
            sequence.cached_tokens = len(sequence.prompt) if cached else 0
            self.counters.prompt_tokens += sequence.length
        self.running.extend(sequences)
        self._sampler = None

    def _decode(self) -> None:
        started = time.perf_counter()
        if self._sampler is None:
            self._compose()
        scores_NV = self._runner.decode(self._last_N, self._positions_N)
        if self._runner.experts_BTGJ is not None:
            for sequence, experts_1GJ in zip(self.running, self._runner.experts_BTGJ, strict=True):
                if sequence.experts is not None:
                    sequence.experts.add(experts_1GJ, sequence.length - 1)
        self._sample(self.running, scores_NV, first_row=0)
        self.counters.steps += 1
        self.counters.decode_s += time.perf_counter() - started

    def _compose(self) -> None:
        self._sampler = Sampler(
            [sequence.params for sequence in self.running], [sequence.seed for sequence in self.running], self.device
        )
        self._runner.captures = any(sequence.experts is not None for sequence in self.running)
        self._last_N = np.array([sequence.tokens[-1] for sequence in self.running], np.int64)
        self._positions_N = np.array([sequence.length - 1 for sequence in self.running], np.int64)

    def _sample(self, sequences: list[Sequence], scores_NV: Tensor, *, first_row: int) -> None:
        """Append a token to each sequence, in the rows from ``first_row`` on. The finished ones leave the batch."""
        for row, sequence in enumerate(sequences):
            if sequence.suppressed and len(sequence.tokens) < sequence.params.min_new_tokens:
                scores_NV[row, sequence.suppressed] = float("-inf")
        sampler, positions_N = self._sampler, self._positions_N + 1
        if sampler is None:
            sampler = Sampler(
                [sequence.params for sequence in sequences], [sequence.seed for sequence in sequences], self.device
            )
            positions_N = np.array([sequence.length for sequence in sequences], np.int64)
        tokens_N, log_probs_N = sampler.draw(scores_NV, positions_N)
        if self._sampler is not None:
            self._last_N, self._positions_N = tokens_N, positions_N
        if not np.isfinite(log_probs_N).all():
            self._fail_broken(sequences, log_probs_N)
        finished = []
        for row, (sequence, token, log_prob) in enumerate(
            zip(sequences, tokens_N.tolist(), log_probs_N.tolist(), strict=True)
        ):
            if sequence.finish is not None or self._append(sequence, token, log_prob):
                finished.append(first_row + row)
            elif sequence.stream:
                self._events.append((sequence, len(sequence.tokens), False))
        self.counters.tokens_generated += len(sequences)
        for row in reversed(finished):
            self._leave(row)

    def _append(self, sequence: Sequence, token: int, log_prob: float) -> bool:
        """Append a token. Returns True when the sequence ends, also by an error (of its text, for example)."""
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
                self._runner.slots.wipe(self.running.index(sequence))

    def _leave(self, row: int) -> None:
        """Take a row out and report the end of its sequence; the last row takes its place."""
        sequence, last = self.running[row], len(self.running) - 1
        if row != last:
            self.running[row] = self.running[last]
            self._runner.slots.move(last, row, self.running[row].length)
        self.running.pop()
        self._sampler = None
        if (donor := self._donors.get(sequence.key)) is not None and donor.sequence is sequence:
            del self._donors[sequence.key]
        self._report_end(sequence)

    def _report_end(self, sequence: Sequence) -> None:
        self.counters.count_end(sequence, updating=self.updating)
        self._events.append((sequence, len(sequence.tokens), True))

    def _abort(self, matches: Callable[[Sequence], bool], message: str) -> int:
        rows = [row for row, sequence in enumerate(self.running) if matches(sequence)]
        for row in reversed(rows):  # from the end: the last row takes the place of one that leaves
            self.running[row].abort(message)
            self._leave(row)
        sequences = [sequence for sequence in self.waiting if matches(sequence)]
        for sequence in sequences:
            self.waiting.remove(sequence)
            sequence.abort(message)
            self._report_end(sequence)
        return len(rows) + len(sequences)

    @between_steps
    def pause(self, mode: str) -> None:
        """Pause decoding: ``in_place`` keeps rows, ``retract`` queues them again, ``abort`` ends every sequence."""
        self.paused = True
        if mode == "abort":
            before = self.counters.requests_aborted_by_pushes
            # Set, as some were counted already while an update is open.
            self.counters.requests_aborted_by_pushes = before + self._abort(lambda sequence: True, "All aborted")
        elif mode == "retract":
            self._retract()

    def _retract(self) -> None:
        for sequence in self.running:
            sequence.retract()
        self.waiting.extendleft(reversed(self.running))
        self._clear()

    @between_steps
    def resume(self) -> None:
        """End a pause."""
        self.paused = False

    @between_steps
    def release(self, tags: frozenset[str]) -> int:
        """Release memory. Returns the tokens generated so far. Refused while sequences run and decoding is not held."""
        if self.running and not self.held:
            what = ", ".join(sorted(tags))
            raise UpdateRefused(
                f"release of {what}: {len(self.running)} requests are being decoded; pause generation first"
            )
        self.released |= tags
        if KV_CACHE in tags:
            self._retract()
        if WEIGHTS in tags:
            self._runner.weights = None
        return self.counters.tokens_generated

    @between_steps
    def restore(self, tags: frozenset[str]) -> int:
        """Take released memory again; with keys and values a pause ends, but weights need a ``flip``. Returns as
        ``release``.
        """
        back = tags & self.released
        self.released -= tags
        if KV_CACHE in back:
            self._runner.clear(free=False)
        if KV_CACHE in tags:  # a release may have failed after its pause
            self.paused = False
        return self.counters.tokens_generated

    @between_steps
    def flip(self, weights: Weights, version: int) -> tuple[Weights | None, float]:
        """Serve these weights from the next step on. Returns the old ones and the seconds without decoding."""
        started = time.perf_counter()
        old, self._runner.weights, self.version = self._runner.weights, weights, version
        self._donors.clear()  # their scores are the old version's
        for sequence in self.running:
            sequence.enter(version)
        return old, time.perf_counter() - started

    @between_steps
    def flush(self) -> bool:
        """Forget cached keys and values. Returns False when running sequences need them."""
        if self.running:
            return False
        self._clear()
        return True

    def _clear(self) -> None:
        self.running.clear()
        self._donors.clear()
        self._sampler = None
        self._runner.clear(free=KV_CACHE in self.released)

    def _fail_all(self, reason: str) -> None:
        """End the whole batch: after a failed step none of it can be trusted. Waiting sequences are not affected."""
        for sequence in self.running:
            sequence.fail(str(EngineFailed("builtin", reason)))
            self._report_end(sequence)
        self._clear()


@contextmanager
def _surviving(doing: str, fail: Callable[[str], None]) -> Iterator[None]:
    """Log an error in the block, and fail the sequences that it concerns; the decoding thread goes on."""
    try:
        yield
    except Exception as error:
        log.exception("%s failed", doing)
        fail(f"{doing} failed: {error!r}")
