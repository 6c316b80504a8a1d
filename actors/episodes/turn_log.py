"""An episode's log: turns stored before they are delivered, and turns of an earlier attempt, given out again.

::

    restart   the program runs from the start, with new answers
    replay    the program runs from the start; a prompt with a stored answer gets that answer, each once
    resume    the program goes on behind its last state; answers behind that state are given out again
"""

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse
from tidemill.actors.episodes.recorder import TurnOutput
from tidemill.actors.rollout_settings import RESTART, RESUME
from tidemill.bus.streams.episode_turns import EpisodeLog
from tidemill.bus.wire.codec import TurnKind, TurnRecord
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Timings

MAX_IDS = 1 << 26
"""Maximum number of token ids of all sequences that are read from a log; an episode begins anew behind those."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn of an earlier attempt. P = tokens of its prompt."""

    prompt: NDArray[np.int32]
    """[P]."""
    record: TurnRecord

    def output(self, turn_id: str) -> TurnOutput:
        record = self.record
        return TurnOutput(
            tokens=record.tokens,
            log_probs=record.log_probs,
            spans=record.spans,
            id=turn_id,
            finish=record.finish,
            agent=record.agent,
            begin_s=record.begin_s,
            seconds=record.seconds,
            trained=record.trained,
        )

    def response(self) -> EngineResponse:
        """Return the answer as an engine's."""
        record = self.record
        generation = Generation(
            id=record.id,
            tokens=record.tokens,
            log_probs=record.log_probs,
            spans=record.spans,
            finish=record.finish,
            matched=record.matched,
            text=record.text,
            prompt_tokens=len(self.prompt),
            cached_tokens=len(self.prompt),
        )
        return EngineResponse(generation=generation, engine=record.engine, timings=Timings())


class TurnLog:
    """The log of one episode under way."""

    def __init__(self, log: EpisodeLog | None, records: Sequence[TurnRecord] = (), *, again: str = RESTART) -> None:
        """``log``: None = nothing is stored. ``records``: of earlier attempts, in order."""
        self._log, self._keeps = log, again != RESTART
        self.resumes = again == RESUME
        self.lock = asyncio.Lock()
        """Held by the caller of ``store_turn`` and ``save`` until a turn is recorded: both have the same order."""
        self.sample_seq = 0
        """Sequence of the sample, where it is stored already."""
        self._count = 0
        self._numbers: dict[int, int] = {}
        """Number of a turn in the log, by its number in the recorder."""
        self.cut_off = False
        """True if the log has more than ``MAX_IDS``, and its last turns are not given out."""
        self.restored: list[StoredTurn] = []
        """Turns in front of the state, in order."""
        self.state: TurnRecord | None = None
        self._pending: defaultdict[bytes, deque[StoredTurn]] = defaultdict(deque)
        self._read(records)

    @property
    def stores(self) -> bool:
        """True if turns are stored before they are delivered."""
        return self._log is not None and self._keeps and self._log.kept

    @property
    def num_stored(self) -> int:
        """Number of the recorded turns that the next attempt finds in the log."""
        return len(self._numbers)

    @property
    def pending(self) -> int:
        """Number of stored answers that are not given out yet."""
        return sum(len(turns) for turns in self._pending.values())

    def _read(self, records: Sequence[TurnRecord]) -> None:
        paths: dict[int, NDArray[np.int32]] = {-1: np.zeros(0, np.int32)}
        turns: dict[int, StoredTurn] = {}
        ids = 0
        for record in records:
            if record.kind is TurnKind.TURN and record.parent in paths:
                ids += len(paths[record.parent]) + len(record.context) + len(record.tokens)
                if ids > MAX_IDS:
                    self.cut_off = True
                    break
                self._count = max(self._count, record.number + 1)
                turn = StoredTurn(np.concatenate([paths[record.parent], record.context]), record)
                paths[record.number] = np.concatenate([turn.prompt, record.tokens])
                turns[record.number] = turn
            elif record.kind is TurnKind.FAILED:
                turns, self.state = {}, None
            elif record.kind is TurnKind.STATE and self.resumes and set(record.ids.values()) <= set(turns):
                self.state = record
            elif record.kind is TurnKind.END:
                self.sample_seq = record.sample_seq
        front = set(self.state.ids.values()) if self.state is not None else set()
        self.restored = [turns[number] for number in sorted(front)]
        if self._keeps:
            for number, turn in turns.items():
                if number not in front:
                    self._pending[digest(turn.prompt)].append(turn)

    def take_stored(self, prompt: NDArray[np.int32], *, at_most: int, trained: bool) -> StoredTurn | None:
        """Take the stored answer to a prompt, [P], of at most so many tokens, once; None = there is none."""
        # By the ids alone, in any order: a program may make its calls in parallel (decision 034).
        waiting = self._pending.get(digest(prompt))
        if waiting and len(waiting[0].record.tokens) <= at_most and waiting[0].record.trained is trained:
            return waiting.popleft()
        return None

    def note_number(self, number: int, turn: StoredTurn) -> None:
        """Note that a stored turn has this number in the recorder."""
        self._numbers[number] = turn.record.number

    async def store_turn(
        self, number: int, parent: int, context: NDArray[np.int32], output: TurnOutput, response: EngineResponse
    ) -> None:
        """Store a turn that the recorder will have as ``number``, behind ``parent``. Raises Superseded, NotStored."""
        if self._log is None or not self.stores:
            return
        generation = response.generation
        await self._log.append(
            TurnKind.TURN,
            number=self._count,
            parent=self._numbers[parent] if parent >= 0 else -1,
            context=context,
            tokens=output.tokens,
            log_probs=generation.log_probs,
            spans=output.spans,
            id=output.id,
            finish=output.finish,
            matched=generation.matched,
            text=generation.text,
            agent=output.agent,
            begin_s=output.begin_s,
            seconds=output.seconds,
            trained=output.trained,
            engine=response.engine,
        )
        self._numbers[number] = self._count
        self._count += 1

    async def save(self, state: JsonObject, ids: Mapping[str, int], rewards: Mapping[int, float]) -> None:
        """Store the program's state behind all recorded turns, by their names. Raises Superseded, NotStored."""
        if self._log is not None and self._log.kept:
            await self._log.append(
                TurnKind.STATE,
                number=self._count,
                state=state,
                ids={name: self._numbers[number] for name, number in ids.items()},
                rewards={self._numbers[number]: reward for number, reward in rewards.items()},
            )

    async def failed(self) -> None:
        """Store that the episode failed, so that the next attempt begins anew. Raises Superseded."""
        if self._log is not None and self._keeps:
            async with self.lock:
                await self._log.append(TurnKind.FAILED)

    async def end(self, sample_seq: int) -> None:
        """Store that the sample is stored. Raises Superseded."""
        if self._log is not None:
            async with self.lock:
                await self._log.append(TurnKind.END, sample_seq=sample_seq)


def digest(prompt: NDArray[np.int32]) -> bytes:
    """Return a digest of the ids of a prompt, [P]."""
    return hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").tobytes(), digest_size=16).digest()
