"""Actors that are killed at every instant of an episode: the next one goes on, and no environment gets two answers for
one turn.
"""

import asyncio
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bus_fixtures import BusOpener
from tests.episode_kit import Client, InProcess, Stage, chat, said, stage, task
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.engines.responses import GenerationFailed
from tidemill.actors.episodes.port import AlreadyStored, EpisodeResult, Made, ProgramFailed, Unfinished
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.streams import episode_turns
from tidemill.bus.streams.episode_turns import NotStored, Superseded, TurnStream
from tidemill.bus.system.coroutines import to_the_end
from tidemill.bus.wire.codec import TurnKind, TurnRecord, check_sample

TURNS = 3


@pytest.fixture(autouse=True)
def _slow_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record may wait for a busy machine, and so may the log of an earlier actor; no wait of these tests ends by a
    limit.
    """
    monkeypatch.setattr(episode_turns, "STORE_S", 60.0)
    monkeypatch.setattr(episode_turns, "NEEDED_S", 60.0)
    monkeypatch.setattr(episode_turns, "READ_S", 60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("recovery") / "model", max_position_embeddings=1024)


class Instant:
    """Reached by one attempt, which waits there until ``over`` is set. Then it is cancelled, or, with ``wakes``, goes
    on.
    """

    def __init__(self, name: str = "", *, wakes: bool = False) -> None:
        self.name, self.wakes, self.reached, self.over = name, wakes, asyncio.Event(), asyncio.Event()

    async def __call__(self, name: str) -> None:
        if name == self.name:
            self.name = ""
            self.reached.set()
            await self.over.wait()
            if not self.wakes:
                raise asyncio.CancelledError


class StoppingTurns(TurnStream):
    """TURNS with an instant before and behind each record."""

    instant = Instant()

    async def store(self, record: TurnRecord, message_id: str, last: int, within_s: float) -> int:
        await self.instant(f"{record.kind} {record.number} not stored")
        seq = await super().store(record, message_id, last, within_s)
        await self.instant(f"{record.kind} {record.number} stored")
        return seq


class World:
    """An environment outside of all actors: it gets answers, and keeps them."""

    def __init__(self) -> None:
        self.told: defaultdict[int, list[str]] = defaultdict(list)
        self.instant = Instant()

    async def play(self, client: Client, messages: list[tuple[str, str]], turn: int, *, saves: bool) -> float:
        """Play from a turn to the end."""
        while turn < TURNS:
            said_now = said(await client.chat(*messages))
            await self.instant(f"{turn} delivered")
            self.told[turn].append(said_now)
            await client.post("/reward", {"reward": turn / 2})
            await self.instant(f"{turn} acted")
            messages += [("assistant", said_now), ("user", f"And {turn}?")]
            turn += 1
            if saves:
                assert (await client.post("/state", {"state": {"messages": messages, "turn": turn}}))[0] == 200
        await self.instant("at the end")
        return 1.0

    async def replayed(self, client: Client) -> float:
        return await self.play(client, [("user", "What is three plus four?")], 0, saves=False)

    async def resumed(self, client: Client) -> float:
        state = client.task.get("state") or {"messages": [["user", "What is three plus four?"]], "turn": 0}
        return await self.play(client, [tuple(each) for each in state["messages"]], state["turn"], saves=True)


def counted(scene: Stage, asked: list[str]) -> None:
    """Note each call of an engine."""
    generate = scene.responses.generate

    async def noted(prompt: Any, *more: Any) -> Any:
        asked.append(prompt.name)
        return await generate(prompt, *more)

    scene.responses.generate = noted  # type: ignore[method-assign]


INSTANTS = [
    *(f"turn {turn} {when}" for turn in range(TURNS) for when in ("not stored", "stored")),
    *(f"{turn} {when}" for turn in range(TURNS) for when in ("delivered", "acted")),
    *(f"state {turn + 1} {when}" for turn in range(TURNS) for when in ("not stored", "stored")),
    *("take 0 not stored", "take 0 stored", "at the end", "end 0 not stored", "end 0 stored"),
]


async def attempt(rollout: ProgramRollout, number: int, name: str) -> Made:
    """Make the sample as an actor does, and report it as stored."""
    made = await rollout.sample(replace(task(), id=number), 0, name, first=name == "first")
    check_sample(made.sample)
    assert made.stored is not None
    await made.stored(40 + number)
    return made


@pytest.mark.parametrize("again", ["replay", "resume"])
async def test_killed_at_every_instant_the_next_actor_goes_on(model: Path, open_bus: BusOpener, again: str) -> None:
    world = World()
    async with open_bus(rollouts=("agent",)) as bus:
        turns = StoppingTurns(bus.jet)
        program = world.resumed if again == "resume" else world.replayed
        async with stage(model, program, turns=turns, again=again) as scene:
            asked: list[str] = []
            counted(scene, asked)
            for number, name in enumerate(INSTANTS, 1):
                if name.startswith("state") and again != "resume":
                    continue
                world.told.clear()
                asked.clear()
                instant = Instant(name)
                world.instant = turns.instant = instant
                first = asyncio.create_task(attempt(scene.rollout, number, "first"))
                reached = asyncio.create_task(instant.reached.wait())
                await asyncio.wait([first, reached], return_when=asyncio.FIRST_COMPLETED)
                assert instant.reached.is_set(), (name, first)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                instant.over.set()
                if name == "end 0 stored":
                    with pytest.raises(AlreadyStored) as found:
                        await attempt(scene.rollout, number, "second")
                    assert found.value.seq == 40 + number and len(asked) == TURNS
                    continue
                made = await attempt(scene.rollout, number, "second")
                assert all(len(set(answers)) == 1 for answers in world.told.values()), (name, world.told)
                assert sorted(world.told) == list(range(TURNS)), name
                sizes = made.sample.sizes
                assert len(sizes) == 1 and made.sample.turns is not None and len(made.sample.turns.at) == TURNS, (
                    name,
                    sizes,
                )
                lost = name.startswith("turn") and name.endswith("not stored")
                assert len(asked) == TURNS + lost, (name, asked)
                if again == "resume" and name.startswith("state") and name.endswith(" stored") and "not" not in name:
                    turn = int(name.split()[1]) - 1
                    assert len(world.told[turn]) == 1, "the environment is not told again what is behind its state"


async def test_the_sample_of_an_episode_that_went_on_is_that_of_one_that_did_not_stop(
    model: Path, open_bus: BusOpener
) -> None:
    """Tokens, log-probs, masks and rewards of turns; only the names of attempts and the times differ."""
    world = World()

    async def program(client: Client) -> None:
        await world.resumed(client)
        await client.chat(
            ("user", "What is three plus four?")
        )  # a second answer to the prompt of the first turn: another seed

    async with open_bus(rollouts=("agent",)) as bus:
        turns = StoppingTurns(bus.jet)
        samples = []
        async with stage(model, program, turns=turns, again="resume") as scene:
            for name in ("", "1 acted", "state 3 stored", "at the end"):
                turns.instant = world.instant = instant = Instant(name)
                number = len(samples) + 1
                first = asyncio.create_task(attempt(scene.rollout, number, "first"))
                if name:
                    await instant.reached.wait()
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                    instant.over.set()
                    first = asyncio.create_task(attempt(scene.rollout, number, "second"))
                samples.append((await first).sample)
        whole, *others = samples
        for other in others:
            assert other.tokens.tolist() == whole.tokens.tolist()
            np.testing.assert_allclose(other.rollout_log_probs, whole.rollout_log_probs, atol=1e-5)
            assert other.loss_mask.tolist() == whole.loss_mask.tolist() and other.spans == whole.spans
            assert (
                other.turns is not None
                and whole.turns is not None
                and other.turns.rewards == whole.turns.rewards == ((0, 0.0), (1, 0.5), (2, 1.0))
            )
            begins, ends = other.turns.begin_s, other.turns.begin_s + other.turns.seconds
            assert (begins[1:] >= ends[:-1] - 1e-3).all(), "one clock for all attempts"
            assert other.response == whole.response and other.transcript[-1] == whole.transcript[-1]


async def test_a_frozen_actor_that_wakes_up_tells_its_environment_nothing_more(
    model: Path, open_bus: BusOpener
) -> None:
    world = World()
    async with open_bus(rollouts=("agent",)) as bus:
        turns = StoppingTurns(bus.jet)
        async with stage(model, world.replayed, turns=turns, again="replay") as scene:
            world.instant = asleep = Instant("0 acted", wakes=True)
            frozen = asyncio.create_task(attempt(scene.rollout, 1, "first"))
            await asleep.reached.wait()
            await attempt(scene.rollout, 1, "second")
            told = {turn: list(answers) for turn, answers in world.told.items()}
            asleep.over.set()
            with pytest.raises(Superseded):
                await frozen
            assert {turn: list(answers) for turn, answers in world.told.items()} == told
            assert bus.turns.counters.superseded + turns.counters.superseded == 1


@pytest.mark.parametrize("when", ["not stored", "stored"])
async def test_an_actor_that_leaves_while_it_takes_an_episode_does_not_begin_it(
    model: Path, open_bus: BusOpener, when: str
) -> None:
    world = World()
    async with open_bus(rollouts=("agent",)) as bus:
        turns = StoppingTurns(bus.jet)
        turns.instant = asleep = Instant(f"take 0 {when}", wakes=True)
        async with stage(model, world.replayed, turns=turns, again="replay") as scene:
            begun = asyncio.create_task(attempt(scene.rollout, 1, "first"))
            await asleep.reached.wait()
            scene.rollout.interrupt()
            asleep.over.set()
            with pytest.raises(Unfinished, match="the actor is draining"):
                await begun
            assert not world.told


class BrokenTurns(TurnStream):
    """TURNS that does not answer when a record of this kind and number is to be stored, once; it is stored all the
    same, or it is not.
    """

    broken = ("", 0)
    stores = False
    lasting = False

    async def store(self, record: TurnRecord, message_id: str, last: int, within_s: float) -> int:
        if (str(record.kind), record.number) != self.broken:
            return await super().store(record, message_id, last, within_s)
        self.broken = ("", 0)
        if self.stores:
            await super().store(record, message_id, last, within_s)
        raise NotStored("not stored within 2 s", lasting=self.lasting)


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize(
    ("again", "broken"),
    [("replay", ("turn", 1)), ("resume", ("turn", 1)), ("resume", ("state", 2)), ("replay", ("take", 0))],
)
async def test_an_answer_that_may_not_be_stored_is_not_delivered(
    model: Path, open_bus: BusOpener, again: str, broken: tuple[str, int], stores: bool
) -> None:
    """The episode ends and is handed back; the next attempt goes on with the stored answers, and the environment has
    one for each turn.
    """
    world = World()
    async with open_bus(rollouts=("agent",)) as bus:
        turns = BrokenTurns(bus.jet)
        turns.broken, turns.stores = broken, stores
        program = world.resumed if again == "resume" else world.replayed
        async with stage(model, program, turns=turns, again=again, unlogged="fail") as scene:
            asked: list[str] = []
            counted(scene, asked)
            with refusal(Unfinished, place="the episode's log (TURNS)"):
                await attempt(scene.rollout, 1, "first")
            delivered = {"turn": [0], "state": [0, 1], "take": []}[broken[0]]
            assert sorted(world.told) == delivered, "no answer behind the record that is not stored"
            made = await attempt(scene.rollout, 1, "second")
            assert sorted(world.told) == list(range(TURNS)) and all(
                len(set(answers)) == 1 for answers in world.told.values()
            )
            assert made.sample.turns is not None and len(made.sample.turns.at) == TURNS
            assert len(asked) == TURNS + (broken[0] == "turn" and not stores), (
                "an answer that was stored is not generated again"
            )
            assert (turns.counters.ended, turns.counters.unlogged) == (1, 0)


async def test_a_program_that_asks_on_gets_no_answer_without_a_log(model: Path, open_bus: BusOpener) -> None:
    """It takes the error of its call for one that it may ignore."""
    answers: list[int] = []

    async def program(client: Client) -> float:
        for turn in range(3):
            for path, body in (
                ("/v1/chat/completions", chat(("user", f"{turn}"), stream=turn == 2)),
                ("/state", {"state": turn}),
            ):
                async with client.session.post(client.root + path, json=body) as response:
                    answers.append(response.status)
        return 1.0

    async with open_bus(rollouts=("agent",)) as bus:
        turns = BrokenTurns(bus.jet)
        turns.broken = ("turn", 0)
        async with stage(model, program, turns=turns, again="resume", unlogged="fail") as scene:
            running = scene.programs.run

            async def stubborn(*args: Any, **kwargs: Any) -> EpisodeResult:
                return await to_the_end(running(*args, **kwargs))

            scene.programs.run = stubborn  # type: ignore[method-assign]
            with pytest.raises(Unfinished):
                await attempt(scene.rollout, 1, "first")
    assert answers == [503] * 6, answers


async def test_a_turn_that_can_never_be_stored_fails_the_episode(model: Path, open_bus: BusOpener) -> None:
    """It is reported, so that it does not begin without end; the turns that are stored are kept."""
    world = World()
    async with open_bus(rollouts=("agent",)) as bus:
        turns = BrokenTurns(bus.jet)
        turns.broken, turns.lasting = ("turn", 1), True
        async with stage(model, world.replayed, turns=turns, again="replay", unlogged="fail") as scene:
            with refusal(GenerationFailed, place="the episode's log (TURNS)"):
                await attempt(scene.rollout, 1, "first")
            await attempt(scene.rollout, 1, "second")
            assert sorted(world.told) == list(range(TURNS)) and all(
                len(set(answers)) == 1 for answers in world.told.values()
            )


async def test_an_episode_that_failed_begins_anew(model: Path, open_bus: BusOpener) -> None:
    """The answers of the episode may have made the program fail."""
    fails = [True]

    async def program(client: Client) -> float:
        await client.chat(("user", "What is three plus four?"))
        if fails:
            raise RuntimeError(f"no number {fails.pop()}")
        return 1.0

    async with open_bus(rollouts=("agent",)) as bus, stage(model, program, turns=bus.turns, again="replay") as scene:
        asked: list[str] = []
        counted(scene, asked)
        with refusal(GenerationFailed, reason=re.compile("^RuntimeError"), outside=False):
            await attempt(scene.rollout, 1, "first")
        await attempt(scene.rollout, 1, "second")
        assert len(asked) == 2
        records, _ = await bus.turns.take(1, 0, "reader", first=False)
        assert [record.kind for record in records] == [
            *(TurnKind.TAKE, TurnKind.TURN, TurnKind.FAILED, TurnKind.TAKE, TurnKind.TURN, TurnKind.END)
        ]


async def test_turns_are_kept_where_only_the_process_of_the_program_ended(model: Path, open_bus: BusOpener) -> None:
    world, ends = World(), [True]

    class Ends(InProcess):
        async def run(self, episode: str, *, base_url: str, api_key: str, task: Any) -> EpisodeResult:
            found = await super().run(episode, base_url=base_url, api_key=api_key, task=task)
            if ends:
                raise ProgramFailed(f"its child process ended: {ends.pop()}", ended=True)
            return found

    async with open_bus(rollouts=("agent",)) as bus, stage(model, world.replayed) as scene:
        programs = Ends(scene.session, world.replayed)
        rollout = ProgramRollout(
            scene.gateway, programs, RolloutConfig(use="agent:own:world", again="replay"), bus.turns
        )
        asked: list[str] = []
        counted(scene, asked)
        with pytest.raises(GenerationFailed, match="its child process ended"):
            await attempt(rollout, 1, "first")
        await attempt(rollout, 1, "second")
        assert len(asked) == TURNS and all(len(set(answers)) == 1 for answers in world.told.values())


async def test_restart_stores_no_turn_and_refuses_states(model: Path, open_bus: BusOpener) -> None:
    answers: list[Any] = []

    async def program(client: Client) -> float:
        await client.chat(("user", "What is three plus four?"))
        answers.append(await client.post("/state", {"state": 1}))
        return 1.0

    async with open_bus(rollouts=("agent",)) as bus, stage(model, program, turns=bus.turns) as scene:
        await attempt(scene.rollout, 1, "first")
        records, _ = await bus.turns.take(1, 0, "reader", first=False)
        assert [record.kind for record in records] == [TurnKind.TAKE, TurnKind.END]
    ((status, body),) = answers
    assert status == 400 and "again: resume" in body["error"]["message"]


async def test_each_stored_answer_is_given_once(model: Path, open_bus: BusOpener) -> None:
    """Four requests with one prompt, at once: their four answers come back, each once."""
    seen: list[list[str]] = []
    dies = [True]

    async def program(client: Client) -> float:
        found = await asyncio.gather(*(client.chat(("user", "What?")) for _ in range(4)))
        seen.append(sorted(said(each) for each in found))
        if dies.pop() if dies else False:
            reached.set()
            await asyncio.Event().wait()
        return 1.0

    reached = asyncio.Event()
    async with open_bus(rollouts=("agent",)) as bus, stage(model, program, turns=bus.turns, again="replay") as scene:
        asked: list[str] = []
        counted(scene, asked)
        first = asyncio.create_task(attempt(scene.rollout, 1, "first"))
        await reached.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        made = await attempt(scene.rollout, 1, "second")
        assert seen[0] == seen[1] and len(set(seen[0])) > 1 and len(asked) == 4
        assert made.sample.turns is not None and len(made.sample.turns.at) == 4
