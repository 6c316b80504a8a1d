"""Continuous batching: one thread that owns the batch (``batch.py``) and the served weights.

            calls (submit, abort, pause, flip, ...)
                 |                 consumes  calls and waiting sequences
                 v                 produces  tokens, delivered to each sequence's sink in the loop's thread
    loop:  take calls -> admit (prefill) -> decode one token for all running -> score given tokens -> deliver -> again
                                   waits for a call when nothing runs and nothing waits, or while paused

Where learner and engine share an accelerator, the memory of the weights, and of keys and values, can be released: then
nothing is computed until both are there again, and the running sequences continue after that.

All other code uses it by ``call``: a function run by the thread between two steps. That is why a flip of the weights is
an assignment, and why nothing here needs a lock. Knows no HTTP, no tokenizer, no transport.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from torch import inference_mode, set_num_threads

from tidemill.actors.errors import EngineFailed, UpdateRefused
from tidemill.actors.serving.builtin.batch import Batch, Event
from tidemill.actors.serving.builtin.input_scores import Scoring, take_scorings
from tidemill.actors.serving.builtin.lora import Adapter
from tidemill.actors.serving.builtin.runner import ModelRunner
from tidemill.actors.serving.builtin.sequence import CLOSING, Counters, Sequence
from tidemill.actors.serving.builtin.weights import WeightSet
from tidemill.actors.serving.port import Result
from tidemill.actors.serving.updates import KV_CACHE, WEIGHTS
from tidemill.bus.system.functions import settle

log = logging.getLogger(__name__)

Args = ParamSpec("Args")
OTHER_WEIGHTS = "The weights of its adapter are not served any more"
"""Reason for the end of a response whose adapter belonged to weights that a push has replaced."""


Call = tuple[Callable[[], Any], "Future[Any]"]


class CallQueue(queue.SimpleQueue[Call]):
    """Queue of calls from any thread to the decoding thread."""

    is_closed = False

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Queue a function. Returns the future of its result, which is cancelled if the queue is closed."""
        future: Future[Result] = Future()
        self.put((function, future))
        if self.is_closed:  # looked at after the put: a close in between may have missed this call
            self.close()
        return future

    def close(self) -> None:
        """Cancel the calls that are queued, and all later ones."""
        self.is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self.get_nowait()[1].cancel()


def _run(call: Call) -> None:
    """Run a call, unless it was cancelled, and set its result."""
    function, future = call
    if future.set_running_or_notify_cancel():
        settle(future, function)


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
        runner: ModelRunner,
        version: int,
        *,
        max_running: int,
        share_prefix: bool,
        threads: int,
        post: Callable[[list[Event]], None],
    ) -> None:
        self.batch = Batch(runner, max_running=max_running, share_prefix=share_prefix, version=version)
        self.paused = False
        self.scorings: deque[Scoring] = deque()
        """Sequences with tokens to be scored."""
        self.released: frozenset[str] = frozenset()
        """Kinds of memory that are released: some of KV_CACHE, WEIGHTS."""
        self.device, self.dtype = runner.device, runner.weights.dtype
        self._post, self._threads = post, threads
        self.runner = runner
        self.calls = CallQueue()
        """Calls that wait for the end of a step."""
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
        self.batch.abort(lambda sequence: True, CLOSING)

    @property
    def version(self) -> int:
        """Version of the served weights."""
        return self.batch.version

    @property
    def counters(self) -> Counters:
        """Counters since the start."""
        return self.batch.counters

    @property
    def running(self) -> list[Sequence]:
        """Sequences that are decoded."""
        return self.batch.running

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that wait for a row, or for blocks of keys and values."""
        return self.batch.waiting

    @property
    def updating(self) -> bool:
        """True while a weight update is open: set by its owner, for the counters."""
        return self.batch.updating

    @updating.setter
    def updating(self, updating: bool) -> None:
        self.batch.updating = updating

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
        return self.calls.call(function)

    @between_steps
    def submit(self, sequences: list[Sequence]) -> None:
        """Append sequences to the queue; the future is done once they are in it."""
        for sequence in sequences:
            if sequence.adapter in self.batch.versions:
                self.waiting.append(sequence)
            else:  # it was dropped since the request was checked
                self.batch.refuse(sequence, OTHER_WEIGHTS)

    @between_steps
    def submit_scorings(self, scorings: list[Scoring]) -> None:
        """Append sequences to score. The results are in the ``done`` of each."""
        for scoring in scorings:
            if scoring.adapter in self.batch.versions:
                self.scorings.append(scoring)
            else:
                scoring.done.set_exception(EngineFailed("builtin", OTHER_WEIGHTS))

    def abort(self, matches: Callable[[Sequence], bool], message: str = "All aborted") -> "Future[int]":
        """End matching sequences with their tokens so far. Returns their number."""
        return self.call(lambda: self.batch.abort(matches, message))

    @property
    def held(self) -> bool:
        """True while nothing is generated, even if sequences wait."""
        return self.paused or bool(self.released) or self.runner.weights is None

    def _run(self) -> None:
        set_num_threads(self._threads)
        with inference_mode():
            while not self._closed:
                self._take_calls()
                if not self.held:
                    self._step()
                self._deliver()
                self.counters.decode_cpu_s = time.thread_time()
        self.calls.close()
        for scoring in self.scorings:
            scoring.done.cancel()

    def _step(self) -> None:
        with _surviving("decoding step", self._fail_all):
            self.batch.admit()
            if self.running:
                self.batch.decode()
        self._score()

    def _score(self) -> None:
        if not (batch := take_scorings(self.scorings)):
            return

        def fail(reason: str) -> None:
            for scoring in batch:
                if not scoring.done.done():
                    scoring.done.set_exception(EngineFailed("builtin", reason))

        with _surviving("scoring", fail):
            for scoring, result in zip(batch, self.runner.scores(batch, self.version), strict=True):
                scoring.done.set_result(result)
        self.counters.scored_tokens += sum(len(scoring.tokens) for scoring in batch)

    def _take_calls(self) -> None:
        """Run the queued calls; wait for one when there is nothing else to do."""
        while not self._closed:
            busy = not self.held and (self.running or self.waiting or self.scorings)
            try:
                call = self.calls.get_nowait() if busy else self._wait_for_call()
            except queue.Empty:
                return
            _run(call)
            self._deliver()

    def _wait_for_call(self) -> Call:
        since = time.perf_counter()
        if self.held:
            call = self.calls.get()
            self.counters.paused_s += time.perf_counter() - since
            return call
        self._idle_since = since
        call = self.calls.get()
        self._idle_since = None
        self.counters.idle_s += time.perf_counter() - since
        return call

    def _deliver(self) -> None:
        if self.batch.events:
            events, self.batch.events = self.batch.events, []
            self._post(events)

    @between_steps
    def pause(self, mode: str) -> None:
        """Pause decoding: ``in_place`` keeps rows, ``retract`` queues them again, ``abort`` ends every sequence."""
        self.paused = True
        if mode == "abort":
            before = self.counters.requests_aborted_by_pushes
            # Set, as some were counted already while an update is open.
            self.counters.requests_aborted_by_pushes = before + self.batch.abort(lambda sequence: True, "All aborted")
        elif mode == "retract":
            self.batch.retract(free=self._frees)

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
            self.batch.retract(free=self._frees)
        if WEIGHTS in tags:
            self.runner.weights = None
            self.runner.adapters.pop("", None)
        return self.counters.tokens_generated

    @between_steps
    def restore(self, tags: frozenset[str]) -> int:
        """Take released memory again; with keys and values a pause ends, but weights need a ``flip``. Returns as
        ``release``.
        """
        back = tags & self.released
        self.released -= tags
        if KV_CACHE in back:
            self.runner.clear(free=False)
        if KV_CACHE in tags:  # a release may have failed after its pause
            self.paused = False
        return self.counters.tokens_generated

    @between_steps
    def flip(self, weights: WeightSet, version: int, adapter: Adapter | None = None) -> tuple[WeightSet | None, float]:
        """Serve these weights, with the run's adapter, from the next step on. Returns the old ones and the seconds
        without decoding.
        """
        started = time.perf_counter()
        old, self.runner.weights = self.runner.weights, weights
        self.runner.adapters.pop("", None)
        if adapter is not None:
            self.runner.adapters[""] = adapter
        if old is not weights:
            self._drop_adapters(OTHER_WEIGHTS)
        self.batch.flip(version)
        return old, time.perf_counter() - started

    @property
    def adapters(self) -> Collection[str]:
        """Names of the adapters that requests may have; "" = the run's own weights."""
        return tuple(self.batch.versions)

    @between_steps
    def set_adapter(self, name: str, adapter: Adapter, version: int) -> None:
        """Serve an adapter under a name from the next step on, also to the sequences that have one of this name."""
        self.runner.adapters[name] = adapter
        self.batch.flip(version, name)

    @between_steps
    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises UpdateRefused for an unknown one, and while sequences need it."""
        if not name or name not in self.batch.versions:
            raise UpdateRefused(f"lora_name: want a loaded adapter, got {name!r}")
        names = [sequence.adapter for sequence in (*self.running, *self.waiting)]
        names += [scoring.adapter for scoring in self.scorings]
        if users := names.count(name):
            raise UpdateRefused(f"lora_name: {name!r} is in use by {users} requests; wait for them or abort them")
        del self.runner.adapters[name], self.batch.versions[name]

    def _drop_adapters(self, reason: str) -> None:
        """Forget all named adapters, and end the sequences that have one."""
        for scoring in [scoring for scoring in self.scorings if scoring.adapter]:
            self.scorings.remove(scoring)
            scoring.done.set_exception(EngineFailed("builtin", reason))
        self.batch.abort(lambda sequence: bool(sequence.adapter), reason)
        for name in [name for name in self.batch.versions if name]:
            del self.runner.adapters[name], self.batch.versions[name]

    @between_steps
    def flush(self) -> bool:
        """Forget cached keys and values. Returns False when running sequences need them."""
        if self.running:
            return False
        self.batch.clear(free=self._frees)
        return True

    @property
    def _frees(self) -> bool:
        """True while keys and values have no memory."""
        return KV_CACHE in self.released

    def _fail_all(self, reason: str) -> None:
        self.batch.fail_all(reason, free=self._frees)


@contextmanager
def _surviving(doing: str, fail: Callable[[str], None]) -> Iterator[None]:
    """Log an error in the block, and fail the sequences that it concerns; the decoding thread goes on."""
    try:
        yield
    except Exception as error:
        log.exception("%s failed", doing)
        fail(f"{doing} failed: {error!r}")
