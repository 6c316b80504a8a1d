"""The batch: sequences that are decoded together, their blocks of keys and values, and the sequences that wait.

    waiting -> admit (blocks for its context; those that it shares are not computed) -> prefill -> running
    running -> one token for each -> ended (its blocks can be found by later prompts) | preempted: waiting again, first

A sequence waits while there are no blocks for it. When a running one needs a block and none is left, the youngest is
preempted: its tokens and log-probs stay, its keys and values are computed again later. Used by the decoding thread.

Shape letters: N = running rows, U = different prompts of a prefill, T = tokens per prompt (padded), R = rows of a
prefill, V = vocabulary.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from torch import Tensor

from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.builtin.blocks import BLOCK, BlockPool, BlockTable
from tidemill.actors.serving.builtin.runner import ModelRunner
from tidemill.actors.serving.builtin.sampler import Sampler
from tidemill.actors.serving.builtin.sequence import MAX_PADDING, PREFILL_TOKENS, Counters, Sequence

log = logging.getLogger(__name__)

Event = tuple[Sequence, int, bool]
"""A sequence, the number of its tokens that may be read, and whether it has ended."""


class Batch:
    """Running and waiting sequences of one model."""

    def __init__(self, runner: ModelRunner, *, max_running: int, share_prefix: bool, version: int) -> None:
        self.versions = {"": version}
        """Versions of the weights by the name of their adapter; "" = the run's own."""
        self.counters = Counters()
        self.updating = False
        """True while a weight update is open: set by its owner, for the counters."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.events: list[Event] = []
        """What is to be reported, oldest first."""
        self.pool = BlockPool(runner.memory.num_blocks)
        self._runner, self._max_running, self._share_prefix = runner, max_running, share_prefix
        self._find_prefixes = share_prefix and runner.finds_prefixes
        self._sampler: Sampler | None = None
        """None = the batch has changed."""
        self._last_N, self._positions_N = np.zeros(0, np.int64), np.zeros(0, np.int64)

    @property
    def version(self) -> int:
        """Version of the run's weights."""
        return self.versions[""]

    def admit(self) -> None:
        """Fill free rows, oldest request first, up to the token budget of one step, as far as there are blocks."""
        started, budget = time.perf_counter(), PREFILL_TOKENS
        while budget > 0 and (prompts := self._take_prompts(budget)):
            budget -= self._prefill(prompts)
            self.counters.prefill_s += time.perf_counter() - started
            started = time.perf_counter()

    def _take_prompts(self, budget: int) -> list[list[Sequence]]:
        """Take prompts with a similar number of new tokens from the queue's head: at most ``budget`` padded tokens,
        unless the first prompt is longer. Returns the sequences of each prompt, with their blocks.
        """
        prompts: list[list[Sequence]] = []
        by_key: dict[bytes, list[Sequence]] = {}
        count = longest = tokens = 0
        while self.waiting and len(self.running) + count < self._max_running:
            sequence, spare = self.waiting[0], len(self.running) + count
            if (sharers := by_key.get(sequence.key)) is not None:
                owner = sharers[0]
                assert owner.table is not None
                if sequence.experts is not None and owner.experts is None:
                    break  # the experts of the owner's cached blocks may not be known
                sequence.table = self.pool.fork(owner.table, sequence.length, spare=spare)
            else:
                sequence.table = self._admitted(sequence, spare)
            if sequence.table is None:
                break
            if sharers is None:
                num_new = sequence.length - self._num_cached(sequence)
                padded = max(longest, num_new) * (len(prompts) + 1)
                if prompts and (padded > budget or padded > MAX_PADDING * (tokens + num_new)):
                    self._release(sequence)
                    break
                longest, tokens, sharers = max(longest, num_new), tokens + num_new, []
                prompts.append(sharers)
                if self._share_prefix:
                    by_key[sequence.key] = sharers
            sharers.append(self.waiting.popleft())
            count += 1
        return prompts

    def _admitted(self, sequence: Sequence, spare: int) -> BlockTable | None:
        # At least the last token is computed, for the scores of the next one.
        digests = sequence.digests(sequence.length - 1, self._version_of(sequence)) if self._find_prefixes else []
        return self.pool.admit(digests, sequence.length, spare=spare, experts=sequence.experts is not None)

    @staticmethod
    def _num_cached(sequence: Sequence) -> int:
        """Return the number of tokens whose keys and values an admitted sequence has found."""
        assert sequence.table is not None
        return sequence.table.registered * BLOCK

    def _prefill(self, prompts: list[list[Sequence]]) -> int:
        """Prefill prompts and sample their first tokens. Returns the number of padded tokens."""
        admitted = [sequence for sharers in prompts for sequence in sharers]
        prompt_of_R = [prompt for prompt, sharers in enumerate(prompts) for _ in sharers]
        cached = [self._num_cached(sharers[0]) for sharers in prompts]
        first_row = len(self.running)
        for prompt, sharers in enumerate(prompts):
            self._enter(sharers[:1], cached[prompt])
            self._enter(sharers[1:], sharers[0].length)
        self._runner.memory.touch(self.pool.touched)
        self._runner.captures = any(sequence.experts is not None for sequence in admitted)
        scores_RV, num_padded = self._runner.prefill(
            [sharers[0].context() for sharers in prompts],
            cached,
            [sequence.table for sequence in admitted if sequence.table is not None],
            prompt_of_R,
            [sharers[0].adapter for sharers in prompts],
        )
        for prompt, sequence in zip(prompt_of_R, admitted, strict=True):
            if sequence.experts is not None:
                assert self._runner.experts_BTGJ is not None, "they are captured where a sequence needs them"
                owner, num_new = prompts[prompt][0].table, sequence.length - cached[prompt]
                assert owner is not None
                sequence.experts.copy(self.pool.experts_of(owner, cached[prompt] // BLOCK))
                sequence.experts.add(self._runner.experts_BTGJ[prompt, :num_new], cached[prompt])
        for sharers in prompts:
            self._register(sharers[0], sharers[0].length)
        self.counters.prefill_tokens += sum(
            sharers[0].length - num_cached for sharers, num_cached in zip(prompts, cached, strict=True)
        )
        self._sample(admitted, scores_RV, first_row=first_row)
        return num_padded

    def _enter(self, sequences: list[Sequence], num_cached: int) -> None:
        for sequence in sequences:
            sequence.enter(self._version_of(sequence))
            sequence.cached_tokens = min(num_cached, len(sequence.prompt))
            self.counters.prompt_tokens += sequence.length
        self.running.extend(sequences)
        self._sampler = None

    def _version_of(self, sequence: Sequence) -> int:
        return self.versions[sequence.adapter]

    def _register(self, sequence: Sequence, num_computed: int) -> None:
        """Let later prompts find the full blocks of the first tokens."""
        table, experts = sequence.table, sequence.experts
        if self._find_prefixes and table is not None and table.registered < num_computed // BLOCK:
            digests = sequence.digests(num_computed, self._version_of(sequence))
            # After a retraction the first experts are kept, which may be of other weights than the blocks.
            known = experts is not None and not sequence.retractions
            self.pool.register(
                table, digests, experts.first(len(digests) * BLOCK) if experts is not None and known else None
            )

    def decode(self) -> None:
        """Compute and sample a token of every running sequence."""
        started = time.perf_counter()
        if self._sampler is None:
            self._compose()
        if not (self._positions_N % BLOCK).all():
            self._extend()
        scores_NV = self._runner.decode(self._last_N, self._positions_N)
        if self._runner.experts_BTGJ is not None:
            for sequence, experts_1GJ in zip(self.running, self._runner.experts_BTGJ, strict=True):
                if sequence.experts is not None:
                    sequence.experts.add(experts_1GJ, sequence.length - 1)
        self._sample(self.running, scores_NV, first_row=0)
        self.counters.steps += 1
        self.counters.decode_s += time.perf_counter() - started

    def _extend(self) -> None:
        """Give the rows whose blocks are full another one, the oldest first, and preempt the youngest if need be."""
        full = [sequence for sequence in self.running if (sequence.length - 1) % BLOCK == 0]
        for sequence in sorted(full, key=lambda sequence: sequence.arrived_s):
            self._register(sequence, sequence.length - 1)
            while (table := sequence.table) is not None and len(table.blocks) * BLOCK < sequence.length:
                if not self.pool.extend(table):
                    self._preempt(max(self.running, key=lambda running: running.arrived_s))
        self._runner.memory.touch(self.pool.touched)
        if self._sampler is None:
            self._compose()
        else:
            self._set_rows()

    def _preempt(self, sequence: Sequence) -> None:
        log.info("preempted rid=%s tokens=%d: no block of keys and values is free", sequence.rid, sequence.length)
        self._remove(self.running.index(sequence))
        sequence.retract()
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _compose(self) -> None:
        self._sampler = Sampler(
            [sequence.params for sequence in self.running],
            [sequence.seed for sequence in self.running],
            self._runner.device,
        )
        self._runner.captures = any(sequence.experts is not None for sequence in self.running)
        self._last_N = np.array([sequence.tokens[-1] for sequence in self.running], np.int64)
        self._positions_N = np.array([sequence.length - 1 for sequence in self.running], np.int64)
        self._set_rows()

    def _set_rows(self) -> None:
        self._runner.set_rows(
            [sequence.table for sequence in self.running if sequence.table is not None],
            [sequence.adapter for sequence in self.running],
        )

    def _sample(self, sequences: list[Sequence], scores_NV: Tensor, *, first_row: int) -> None:
        """Append a token to each sequence, in the rows from ``first_row`` on. The finished ones leave the batch."""
        for row, sequence in enumerate(sequences):
            if sequence.suppressed and len(sequence.tokens) < sequence.params.min_new_tokens:
                scores_NV[row, sequence.suppressed] = float("-inf")
        sampler, positions_N = self._sampler, self._positions_N + 1
        if sampler is None:
            sampler = Sampler(
                [sequence.params for sequence in sequences],
                [sequence.seed for sequence in sequences],
                self._runner.device,
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
                self.events.append((sequence, len(sequence.tokens), False))
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
                sequence.fail(f"the model's scores are not finite under version {self._version_of(sequence)}")
                if sequence.table is not None:
                    self._runner.memory.wipe(self.pool.discard(sequence.table))
                    self._release(sequence)

    def _leave(self, row: int) -> None:
        """Take a row out and report the end of its sequence."""
        sequence = self.running[row]
        self._remove(row)
        self._report_end(sequence)

    def _remove(self, row: int) -> None:
        """Take a row out; the last row takes its place. Its blocks stay until they are needed."""
        sequence, last = self.running[row], self.running.pop()
        if sequence is not last:
            self.running[row] = last
        self._register(sequence, sequence.length - 1)  # the last token has not been computed
        self._release(sequence)
        self._sampler = None

    def _release(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.pool.release(sequence.table.blocks)
            sequence.table = None

    def _report_end(self, sequence: Sequence) -> None:
        self.counters.count_end(sequence, updating=self.updating)
        self.events.append((sequence, len(sequence.tokens), True))

    def refuse(self, sequence: Sequence, message: str) -> None:
        """End a sequence that is in no queue."""
        sequence.abort(message)
        self._report_end(sequence)

    def abort(self, matches: Callable[[Sequence], bool], message: str) -> int:
        """End matching sequences with their tokens so far. Returns their number."""
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

    def retract(self, *, free: bool) -> None:
        """Queue the running sequences again, first. ``free``: as for ``clear``."""
        for sequence in self.running:
            sequence.retract()
        self.waiting.extendleft(reversed(self.running))
        self.clear(free=free)

    def flip(self, version: int, adapter: str = "") -> None:
        """Begin a version of an adapter: running sequences keep their keys and values, which no other one may use from
        now on.
        """
        self.versions[adapter] = version
        self.pool.forget()
        for sequence in self.running:
            sequence.enter(self._version_of(sequence))

    def clear(self, *, free: bool) -> None:
        """Drop all keys and values, and the rows; ``free``: with their memory."""
        for sequence in self.running:
            sequence.table = None
        self.running.clear()
        self.pool.clear()
        self._sampler = None
        self._runner.clear(free=free)

    def fail_all(self, reason: str, *, free: bool) -> None:
        """End all rows: after a failed step none can be trusted. Waiting sequences are not affected."""
        for sequence in self.running:
            sequence.fail(str(EngineFailed("builtin", reason)))
            self._report_end(sequence)
        self.clear(free=free)
