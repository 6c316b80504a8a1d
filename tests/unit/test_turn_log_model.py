"""Recovery by turns under random schedules: actors of one episode are killed, frozen and superseded at every operation,
answers lost, and, where the log is needed, records not stored for good.

The log is the real one (``TurnStream``, ``TurnLog``, ``Episode``). The stream is a model of JetStream's rules in
memory: an expected last sequence by subject, and message ids, which a replicated stream compares first and a single one
second. The real server under kills: tests/chaos and tests/integration/test_recovery_by_turns.py.
"""

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.bus_kit import make_task
from tests.examples import THOROUGH
from tests.waits import LIMIT_S, turn, until
from tidemill.actors.engines.port import Generation
from tidemill.actors.engines.responses import EngineResponse
from tidemill.actors.episodes.episode import Episode
from tidemill.actors.episodes.recorder import TurnOutput
from tidemill.actors.episodes.turn_log import TurnLog, digest
from tidemill.actors.rollout_settings import REPLAY, RESTART, RESUME
from tidemill.bus.client.jetstream import Message
from tidemill.bus.client.outbox import WRONG_LAST_SEQUENCE, PublishAck
from tidemill.bus.errors import BusUnavailable, Forbidden, Refused
from tidemill.bus.streams import episode_turns
from tidemill.bus.streams.episode_turns import NotStored, Superseded, TurnStream
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import TurnKind, decode_turn_record
from tidemill.bus.wire.messages import Sampling, Span, Task, Timings

TASK = 7
COUNT = 400 if THOROUGH else 150
"""Schedules of a test: 20,000 in all with those of ``make test-all``."""
MOST_TURNS = 5
ACTORS = 5
"""Actors that may be killed, frozen or fail; the one behind them is left alone, and ends the episode."""
HOLDER: contextvars.ContextVar[int] = contextvars.ContextVar("holder")


class Died(Exception):
    """The program failed."""


@dataclass
class World:
    """The stream, the engine, the environment of the episode, and counts of events."""

    random: random.Random
    again: str
    replicated: bool
    needed: bool
    """The episode ends when its log cannot be written; records may then be refused, stored or not."""
    messages: list[Message] = field(default_factory=list)
    seq: int = 0
    floor: int = 0
    parked: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)
    """Actors that wait to be released, at an operation each."""
    generated: int = 0
    failures: int = 0
    told: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    """The answer to a prompt, by the number of the environment: another one after a failure; with ``restart`` each
    actor has its own.
    """
    samples: list[list[int]] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    async def gate(self) -> None:
        """Wait for the schedule."""
        holder = HOLDER.get()
        future = self.parked[holder] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            self.parked.pop(holder, None)

    # The parts of the bus that TurnStream uses.

    async def attempt(self, subject: str, data: bytes, headers: dict[str, str]) -> PublishAck:
        await self.gate()
        if self.random.random() < 0.1:
            raise BusUnavailable(subject, "not sent")
        breaks = self.needed and HOLDER.get() < ACTORS and self.random.random() < 0.05
        if breaks and self.random.random() < 0.5:
            raise Forbidden(subject, "publish", "actor")
        ack = self._stored(subject, data, headers)
        await self.gate()
        if breaks:
            raise Forbidden(subject, "publish", "actor")
        if self.random.random() < 0.15:
            self.happened["answer lost"] += 1
            raise BusUnavailable(subject, "no answer")
        return ack

    def _stored(self, subject: str, data: bytes, headers: dict[str, str]) -> PublishAck:
        same = [one for one in self.messages if one.headers[subjects.MESSAGE_ID] == headers[subjects.MESSAGE_ID]]
        if same and self.replicated:
            return PublishAck(same[0].seq, duplicate=True)
        last = max((one.seq for one in self.messages if one.subject == subject), default=0)
        if int(headers[subjects.EXPECTED_LAST_ON_SUBJECT]) != last:
            raise Refused(subject, WRONG_LAST_SEQUENCE[0], "wrong last sequence")
        self.seq += 1
        self.messages.append(Message(seq=self.seq, subject=subject, headers=dict(headers), data=data, stored_s=0.0))
        kind = decode_turn_record(data).kind
        self.happened[str(kind)] += 1
        self.failures += kind is TurnKind.FAILED
        return PublishAck(self.seq, duplicate=False)

    async def last(self, stream: str, subject: str) -> Message | None:
        await self.gate()
        return next((message for message in reversed(self.messages) if message.subject == subject), None)

    async def next(self, stream: str, seq: int, subject: str) -> Message | None:
        await self.gate()
        return next((message for message in self.messages if message.seq >= seq and message.subject == subject), None)

    async def read(self, key: str) -> tuple[dict[str, int] | None, int]:
        await self.gate()
        return ({"floor": self.floor}, 1) if self.floor else (None, 0)

    def stream(self) -> TurnStream:
        jet: Any = SimpleNamespace(
            run="r",
            outbox=self,
            last=self.last,
            next=self.next,
            connection=SimpleNamespace(max_payload=1 << 20),
            refusals=SimpleNamespace(read=lambda where, seq, read: read()),
        )
        made = TurnStream(jet)
        made._rows = self  # type: ignore[assignment]
        return made

    # Engine and environment.

    async def generate(self, id: str) -> EngineResponse:
        """Return an answer that no other one equals."""
        await self.gate()
        self.generated += 1
        tokens = np.array(
            [1000 + self.generated, *self.random.choices(range(3, 9), k=self.random.randint(0, 2))], np.int32
        )
        generation = Generation(
            id=id,
            tokens=tokens,
            log_probs=np.full(len(tokens), -0.5, np.float32),
            spans=(Span(version=1, num_tokens=len(tokens)),),
            finish="stop",
        )
        return EngineResponse(generation=generation, engine="e", timings=Timings())

    def tell(self, instance: int, prompt: NDArray[np.int32], answer: list[int]) -> None:
        """Give an answer to the environment. It never gets another one for the same turn."""
        assert self.told.setdefault((instance, digest(prompt)), answer) == answer, "two answers for one turn"

    def found(self, number: int) -> tuple[int, set[bytes]]:
        """Return the number of the environment, and digests of the prompts that had a stored answer, when an actor took
        the episode.
        """
        whole: dict[int, list[int]] = {-1: []}
        prompts: set[bytes] = set()
        instance = 0
        records = [decode_turn_record(one.data) for one in self.messages]
        takes = [
            at for at, record in enumerate(records) if record.kind is TurnKind.TAKE and record.attempt == f"a{number}"
        ]
        for record in records[: takes[-1]]:  # the one that counts, if others came between it and one before
            if record.kind is TurnKind.FAILED:
                prompts, instance = set(), instance + 1
            elif record.kind is TurnKind.TURN:
                prompt = [*whole[record.parent], *record.context.tolist()]
                whole[record.number] = [*prompt, *record.tokens.tolist()]
                prompts.add(digest(np.array(prompt, np.int32)))
        return instance, prompts


class Actor:
    """One actor that has leased the task, and its program: a conversation with an environment that reacts to the last
    answer.
    """

    def __init__(self, world: World, number: int, *, first: bool, fails: bool) -> None:
        self.world, self.number, self._first, self._fails = world, number, first, fails

    async def run(self) -> str:
        """Make the sample. Returns how that ended."""
        HOLDER.set(self.number)
        try:
            return await self._made()
        except Superseded:
            return "superseded"
        except NotStored:
            return "not stored"

    async def _made(self) -> str:
        world = self.world
        stream = world.stream()
        records, log = await stream.take(TASK, 0, f"a{self.number}", first=self._first, needed=world.needed)
        assert stream.counters.unlogged == 0
        instance, stored = world.found(self.number) if world.again != RESTART else (self.number, set[bytes]())
        turns = TurnLog(log, records, again=world.again)
        if turns.sample_seq:
            return "already stored"
        episode = Episode(_task(), 0, f"a{self.number}", log=turns)
        episode.restore(str)
        state: Any = turns.state.state["state"] if turns.state is not None else {"history": [1, 2], "turns": 0}
        history, done = list(state["history"]), int(state["turns"])
        asked: set[bytes] = set()
        try:
            while done < MOST_TURNS:
                prompt = np.array(history, np.int32)
                answer = await self._asked(episode, prompt, stored - asked)
                asked.add(digest(prompt))
                await world.gate()
                world.tell(instance, prompt, answer)
                history += [*answer, 2000 + answer[0] % 97]
                done += 1
                if self._fails and done == 2:
                    raise Died
                if world.again == RESUME and answer[0] % 3:
                    await episode.save({"history": history, "turns": done})
        except Died:
            await episode.log.failed()
            return "failed"
        seq = await self._published(episode.recorder.export().tokens.tolist())
        await episode.log.end(seq)
        return "ended"

    async def _asked(self, episode: Episode, prompt: NDArray[np.int32], stored: set[bytes]) -> list[int]:
        """Return the answer to a prompt, as the gateway gives it."""
        with episode.call(prompt, 8) as call:
            found = episode.log.take_stored(prompt, at_most=call.max_new_tokens, trained=True)
            id = f"{episode.name}.{len(episode.recorder)}"
            if found is None:
                assert digest(prompt) not in stored, "a stored turn is generated again"
                response = await self.world.generate(id)
                made = response.generation
                output = TurnOutput(
                    tokens=made.tokens, log_probs=made.log_probs, spans=made.spans, id=id, finish="stop", agent=""
                )
            else:
                assert digest(prompt) in stored, "an answer of before the last failure, or of nobody"
                self.world.happened["given again"] += 1
                response, output = found.response(), found.output(id)
            await episode.record(prompt, output, response, found)
        return [int(token) for token in output.tokens]

    async def _published(self, tokens: list[int]) -> int:
        """Store the sample, once: its message id is that of the episode."""
        await self.world.gate()
        self.world.samples.append(tokens)
        await self.world.gate()
        return 1


def _task() -> Task:
    return make_task("r", id=TASK, sampling=Sampling(max_new_tokens=8))


async def play(seed: int) -> World:
    """Run one schedule; the last actor ends the episode, and one to which the settled task is delivered again does
    nothing.
    """
    choose = random.Random(seed)
    again = choose.choice((RESTART, REPLAY, RESUME))
    world = World(
        random=choose, again=again, replicated=choose.random() < 0.5, needed=again != RESTART and choose.random() < 0.5
    )
    actors: dict[int, asyncio.Task[str]] = {}

    def leased(*, fails: bool) -> None:
        number = len(actors)
        first = number == 0 or choose.random() < 0.1  # a killed server may count a delivery as the first
        actors[number] = asyncio.create_task(Actor(world, number, first=first, fails=fails).run())

    async def step(number: int) -> None:
        """Let one actor go on to its next operation."""
        if number in world.parked:
            world.parked[number].set_result(None)
            await turn()
        await until(
            lambda: actors[number].done() or (number in world.parked and not world.parked[number].done()),
            every_s=0,
        )
        if actors[number].done() and not actors[number].cancelled():
            actors[number].result()

    async def until_over(work: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    async def troubled() -> None:
        leased(fails=choose.random() < 0.2)
        current = 0
        while current < ACTORS:
            alive = [number for number, actor in actors.items() if not actor.done()]
            if current not in alive or choose.random() < 0.06:  # its lease runs out: killed, frozen, or merely slow
                if current in alive and choose.random() < 0.6:
                    actors[current].cancel()
                    await asyncio.gather(actors[current], return_exceptions=True)
                current += 1
                leased(fails=choose.random() < 0.2 and current < ACTORS)
                continue
            others = [number for number in alive if number != current]
            await step(choose.choice(others) if others and choose.random() < 0.3 else current)
        while not actors[ACTORS].done():  # those that were frozen wake up beside it
            alive = [number for number, actor in actors.items() if not actor.done()]
            await step(choose.choice(alive))

    async def settled() -> None:
        world.floor = TASK
        world.messages.clear()
        generated = world.generated
        leased(fails=False)
        while waiting := [number for number, actor in actors.items() if not actor.done()]:
            await step(choose.choice(waiting))
        assert actors[len(actors) - 1].result() == "superseded", "a settled task is made again"
        if world.again != RESTART:  # which stores no turns, so that others learn of it at the end
            assert world.generated <= generated + len(actors) - 2, "but for answers that were under way"

    try:
        await until_over(troubled())
        while (
            not world.samples
        ):  # it was superseded by one that woke up, and took the episode late: that one ends it, or fails
            world.happened["ended by another"] += 1
            waiting = [number for number, actor in actors.items() if not actor.done()]
            if waiting:
                await step(choose.choice(waiting))
            else:
                leased(fails=False)
                await step(len(actors) - 1)
        if world.again != RESTART and world.failures == 0:
            assert all(sample == world.samples[0] for sample in world.samples), "two samples of one episode"
        await until_over(settled())
    finally:
        for actor in actors.values():
            actor.cancel()
        await asyncio.gather(*actors.values(), return_exceptions=True)
    world.happened.update(actor.result() for actor in actors.values() if not actor.cancelled())
    return world


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(COUNT, 50 * COUNT, COUNT))]
)
async def test_no_environment_gets_two_answers_and_no_stored_turn_is_made_again(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_turns, "_PAUSE_S", 0.0)
    for limit in ("STORE_S", "NEEDED_S", "READ_S"):  # only the schedule decides which records are not stored
        monkeypatch.setattr(episode_turns, limit, 1e6)
    happened: Counter[str] = Counter()
    for seed in range(first, first + COUNT):
        try:
            happened.update((await play(seed)).happened)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    print(dict(happened))
    wanted = (
        "answer lost",
        "given again",
        "superseded",
        "failed",
        "ended",
        "already stored",
        "not stored",
        "take",
        "turn",
        "state",
        "end",
    )
    assert all(happened[name] > COUNT / 50 for name in wanted), happened
