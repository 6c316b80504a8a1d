"""One episode: its task, clock, recorded turns, budget, messages and end. Knows no HTTP and no process."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.responses import EngineResponse, seeded
from tidemill.actors.episodes.recorder import TurnOutput, TurnRecorder
from tidemill.actors.episodes.turn_log import StoredTurn, TurnLog, digest
from tidemill.actors.errors import BadRequest
from tidemill.actors.http_api import json_map
from tidemill.actors.router.dialects import DIALECTS
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.invariants import MAX_REWARD
from tidemill.bus.wire.json_object import JsonMapping, JsonObject, is_integer, is_number
from tidemill.bus.wire.messages import Sampling, Task
from tidemill.bus.wire.task_settings import RUN_NAME, Budget


class Clock:
    """Seconds since its making, without those in which it was stopped."""

    def __init__(self) -> None:
        self._ran_s, self._since_s, self.num_stops = 0.0, time.monotonic(), 0
        self._runs = asyncio.Event()
        self._runs.set()

    @property
    def seconds(self) -> float:
        """Seconds that it ran."""
        return self._ran_s + (0.0 if self.num_stops else time.monotonic() - self._since_s)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still inside the block; blocks may overlap."""
        if not self.num_stops:
            self._ran_s = self.seconds
            self._runs.clear()
        self.num_stops += 1
        try:
            yield
        finally:
            self.num_stops -= 1
            if not self.num_stops:
                self._since_s = time.monotonic()
                self._runs.set()

    async def reaches(self, seconds: float) -> None:
        """Return when it has run for ``seconds``; never for 0, which is no limit."""
        if not seconds:
            await asyncio.Event().wait()
        while (left_s := seconds - self.seconds) > 0:
            await asyncio.sleep(left_s)
            await self._runs.wait()


MAX_BYTES = 256_000
"""Size limit of a transcript as JSON, in bytes. A longer one is cut in the middle."""


def messages_of(body: bytes, path: str, answer: str) -> tuple[JsonObject, ...]:
    """Return the messages of an answered request, and the answer; without messages the prompt, if it is text."""
    request: JsonMapping = json_map(body) if body else {}
    if path in DIALECTS:
        request = DIALECTS[path].chat_of(request)
    messages = request.get("messages") if path in DIALECTS or path.endswith("/chat/completions") else None
    if not isinstance(messages, list):
        texts = [request[name] for name in ("prompt", "text", "input") if isinstance(request.get(name), str)]
        messages = [{"role": "user", "content": text} for text in texts[:1]]
    return bounded([*(chat_messages(messages) if messages else []), {"role": "assistant", "content": answer}])


def bounded(messages: list[JsonObject], max_bytes: int = MAX_BYTES) -> tuple[JsonObject, ...]:
    """Return the messages; those in the middle give way to a remark where all are longer than ``max_bytes``."""
    sizes = [len(json.dumps(message)) for message in messages]
    if sum(sizes) <= max_bytes:
        return tuple(messages)
    head, tail = 0, len(messages)
    room = max_bytes
    while head < tail:
        take_head = head <= len(messages) - tail
        place = head if take_head else tail - 1
        if sizes[place] > room:
            break
        room -= sizes[place]
        head, tail = (head + 1, tail) if take_head else (head, tail - 1)
    remark: JsonObject = {"role": "note", "content": f"{tail - head} messages left out: longer than {max_bytes} bytes"}
    return (*messages[:head], remark, *messages[tail:])


SEEDS = 2**31
"""Number of different seeds: every engine takes those below."""
NO_LIMIT = 2**31 - 1
LENGTH = "length"
"""Finish reason of a response that ran into its limit of tokens."""


class Spent(BadRequest):
    """A limit of the episode's budget leaves no room for a model call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedCall:
    """Room for one model call."""

    max_new_tokens: int
    limit: str
    """Limit of the budget, or of the model's context, that leaves no more than ``max_new_tokens``; empty = none."""
    seed: int | None
    begin_s: float
    """Seconds of the episode at its begin."""


@dataclass(slots=True)
class _Reserved:
    """Budget that the calls under way may use up."""

    calls: int = 0
    tokens: int = 0
    total_tokens: int = 0


@dataclass(slots=True, eq=False)
class Episode:
    """Member ``index`` of the group of a task."""

    task: Task
    index: int
    attempt: str
    recorder: TurnRecorder = field(default_factory=TurnRecorder)
    clock: Clock = field(default_factory=Clock)
    log: TurnLog = field(default_factory=lambda: TurnLog(None))
    spent: str = ""
    """Limit of the budget that refused a call or cut an answer, the first one; empty = none."""
    cut: str = ""
    """Limit of the program's own at which it has ended the episode; empty = none."""
    failed: str = ""
    """Reason for which a model call failed for good: no sample comes of this episode."""
    refused: str = ""
    """Reason for which the last of its calls was refused; empty = none was, or one that was answered came later."""
    handed_back: str = ""
    """Reason outside the task for which it cannot go on; empty = none."""
    keeps_turns: bool = False
    """True if its turns are good although it failed."""
    superseded: bool = False
    """True if another actor makes its sample now."""
    engine: str = ""
    """Engine of the last turn."""
    text: str = ""
    """Text of the last answer; untrained calls do not count behind a trained one."""
    answered: bool = False
    """True if a turn that is trained is recorded."""
    cut_by_length: bool = False
    """True if the answer with ``text`` was cut by ``max_new_tokens`` of the task, as a single turn is."""
    show: Callable[[], tuple[JsonObject, ...]] = tuple
    """Returns the messages of the call that gave ``text``, its answer included. Called once, for the last call alone.
    """
    queued_s: float = 0.0
    generating_s: float = 0.0
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Reward by number of the turn in the recorder."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Sampling parameters that a program asked for and the task has otherwise."""
    malformed_calls: int = 0
    """Calls of tools that the gateway's renderer could not read."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it cannot go on."""
    began_s: float = field(default_factory=time.monotonic)
    _reserved: _Reserved = field(default_factory=_Reserved)
    _num_calls: Counter[bytes] = field(default_factory=Counter)
    """Calls by the digest of their prompt."""
    _turns: dict[str, int] = field(default_factory=dict)
    """Number of a turn by its id."""
    sampling: Sampling = field(init=False)
    """Sampling parameters of the task, with the seed of this member."""

    def __post_init__(self) -> None:
        self.sampling = seeded(self.task.sampling, self.index)

    @property
    def name(self) -> str:
        """Task, index and attempt of the episode, for request ids and logs."""
        return f"{self.task.id}.{self.index}.{self.attempt}"

    @property
    def budget(self) -> Budget:
        return self.task.budget or Budget()

    def stop(self, *, failed: str = "", handed_back: str = "", superseded: bool = False) -> None:
        """End it, with the first reason that is given."""
        if not self.stopped.is_set():
            self.failed, self.handed_back, self.superseded = failed, handed_back, superseded
            self.stopped.set()

    @contextmanager
    def call(
        self, prompt: NDArray[np.int32], max_new_tokens: int, *, max_context: int = NO_LIMIT
    ) -> Iterator[ReservedCall]:
        """Reserve room for a model call of at most ``max_new_tokens`` behind ``prompt``, [P]. Raises Spent when there
        is none.

        The room is kept for the block. The output must have been recorded at its end. ``max_context``: the model's.
        """
        limits = replace(self.budget, context=min(self.budget.context or NO_LIMIT, max_context))
        if limits.turns and len(self.recorder) + self._reserved.calls >= limits.turns:
            raise self._refusal("turns", f"{limits.turns} model calls")
        # While other calls are under way, one of them may take the place behind its parent: then this one begins a
        # sequence of its own.
        growth = len(prompt) if self._reserved.calls else self.recorder.growth(prompt)
        room = {
            "tokens": _room(limits.tokens, self.recorder.sampled_tokens + self._reserved.tokens),
            "context": _room(limits.context, len(prompt)),
            "total_tokens": _room(
                limits.total_tokens, self.recorder.total_tokens + self._reserved.total_tokens + growth
            ),
        }
        least = min(room, key=lambda limit: room[limit])
        if room[least] < 1:
            raise self._refusal(least, f"{getattr(limits, least)} {_WHAT[least]}")
        limit, max_new_tokens = (least, room[least]) if room[least] <= max_new_tokens else ("", max_new_tokens)
        self._reserved.calls += 1
        self._reserved.tokens += max_new_tokens
        self._reserved.total_tokens += growth + max_new_tokens
        try:
            begin_s = time.monotonic() - self.began_s
            yield ReservedCall(max_new_tokens=max_new_tokens, limit=limit, seed=self._seed(prompt), begin_s=begin_s)
        finally:
            self._reserved.calls -= 1
            self._reserved.tokens -= max_new_tokens
            self._reserved.total_tokens -= growth + max_new_tokens

    async def record(
        self, prompt: NDArray[np.int32], output: TurnOutput, response: EngineResponse, stored: StoredTurn | None = None
    ) -> None:
        """Store and record a turn that is about to be delivered. ``stored``: it has been stored before. Raises
        Superseded, NotStored.
        """
        async with self.log.lock:
            number = len(self.recorder)
            if stored is not None:
                self.log.note_number(number, stored)
            elif self.log.stores:
                await self.log.store_turn(number, *self.recorder.behind(prompt), output, response)
            self._turns[output.id] = self.recorder.record(prompt, output)
        self.engine = response.engine
        self._answer(output, response.generation.text)
        self.queued_s += response.timings.queued_s
        self.generating_s += response.timings.generating_s

    def _answer(self, output: TurnOutput, text: str) -> bool:
        """Take the text of a recorded turn as the episode's; return False for an untrained one behind a trained one."""
        if self.answered and not output.trained:
            return False
        self.text, self.answered = text, output.trained
        # A program may ask for fewer tokens, as a game does for a move: such an answer is whole.
        self.cut_by_length = output.finish == LENGTH and len(output.tokens) >= self.sampling.max_new_tokens
        return True

    def restore(self, text_of: Callable[[NDArray[np.int32]], str]) -> None:
        """Record the turns in front of the stored state. ``text_of``: the text of token ids, for the transcript."""
        messages: list[JsonObject] = []
        last = -1  # number of the turn that is the last of the messages
        for turn in self.log.restored:
            parent, context = self.recorder.behind(turn.prompt)
            output = turn.output(turn.record.id)
            self.log.note_number(len(self.recorder), turn)
            number = self.recorder.record(turn.prompt, output)
            self._num_calls[digest(turn.prompt)] += 1
            self.engine = turn.record.engine
            self.began_s = min(self.began_s, time.monotonic() - output.begin_s - output.seconds)  # its clock goes on
            if not self._answer(output, turn.record.text):
                continue
            if parent != last:
                messages = []  # another branch
            last = number
            messages += [{"role": "user", "content": text_of(context)}, {"role": "assistant", "content": self.text}]
        self.show = partial(bounded, messages)
        if self.log.state is not None:
            numbers = {turn.record.number: number for number, turn in enumerate(self.log.restored)}
            self._turns = {name: numbers[stored] for name, stored in self.log.state.ids.items()}
            self.turn_rewards = {
                numbers[stored]: reward for stored, reward in self.log.state.rewards.items() if stored in numbers
            }

    async def save(self, state: object) -> None:
        """Store the program's state, behind all turns so far. Raises BadRequest, Superseded, NotStored."""
        if not self.log.resumes:
            raise BadRequest("state: this rollout does not go on behind a state; want rollouts.NAME.again: resume")
        async with self.log.lock:
            await self.log.save({"state": state}, self._turns, self.turn_rewards)

    def end_at(self, limit: object) -> None:
        """Note the limit of the program's own at which it ends the episode. Raises BadRequest unless it is a name."""
        if not isinstance(limit, str) or not RUN_NAME.fullmatch(limit):
            raise BadRequest(f"limit: want a name of 1 to 64 of A-Z a-z 0-9 _ -, got {limit!r:.80}")
        self.cut = self.cut or limit

    def note_malformed(self, count: int) -> None:
        self.malformed_calls += count

    def reward_turn(self, turn: object, reward: object) -> None:
        """Give a turn, by id or number, its reward; null = the last one that is trained. Raises BadRequest."""
        if not is_number(reward) or not abs(reward) <= MAX_REWARD:
            raise BadRequest(f"reward: want a number within +-{MAX_REWARD:g}, got {reward!r}")
        self.turn_rewards[self.turn(turn)] = float(reward)

    def turn(self, turn: object) -> int:
        """Return the number of a turn, by id or number; null = the last trained one. Raises BadRequest without one."""
        count = len(self.recorder)
        if turn is None and self.recorder.last_trained >= 0:
            return self.recorder.last_trained
        if isinstance(turn, str) and turn in self._turns:
            return self._turns[turn]
        if is_integer(turn) and 0 <= turn < count:
            return turn
        raise BadRequest(f"turn: want the id of an answer, or a number below {count}, got {turn!r}")

    def has_turn(self, turn_id: str) -> bool:
        return turn_id in self._turns

    def _refusal(self, limit: str, amount: str) -> Spent:
        self.spent = self.spent or limit
        cure = "a rollout's budget is set by rollouts.NAME.budget"
        return Spent(f"the budget of this episode is spent: {limit} ({amount}); {cure}")

    def _seed(self, prompt: NDArray[np.int32]) -> int | None:
        """Return a digest of the member's seed, the prompt and its number of calls: no order of calls changes it."""
        seed = self.sampling.seed
        if seed is None:
            return None
        ids = digest(prompt)
        self._num_calls[ids] += 1
        mixed = hashlib.blake2b(f"{seed}.{self._num_calls[ids]}.".encode() + ids, digest_size=8).digest()
        return int.from_bytes(mixed, "little") % SEEDS


_WHAT = {"tokens": "sampled tokens", "context": "tokens of one sequence", "total_tokens": "tokens of all sequences"}


def _room(limit: int, used: int) -> int:
    return limit - used if limit else NO_LIMIT
