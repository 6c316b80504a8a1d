"""Rendezvous of node agents: single decisions, and random schedules with crashes, cuts and stale readings, judged by
two invariants.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tests.examples import examples
from tidemill.bus.wire.rows import Attempt, NodeRow, Phase, State
from tidemill.learner.nodes.rendezvous import (
    Action,
    Drain,
    End,
    Form,
    Leave,
    Record,
    Renew,
    Seen,
    Start,
    Wait,
    decide,
)

KEY = "k" * 40
SILENCE_S = 30.0


def nonce(number: int) -> str:
    return f"{number:012x}"


def node(rank: int, number: int, phase: Phase = Phase.READY, *, nodes: int = 2, **changes: object) -> NodeRow:
    return replace(NodeRow(node=rank, nodes=nodes, nonce=nonce(number), host=f"h{rank}", phase=phase), **changes)  # type: ignore[arg-type]


def attempt(*numbers: int, state: State = State.FORMING, epoch: int = 1, **changes: object) -> Attempt:
    one = Attempt(
        epoch=epoch,
        nonces=tuple(map(nonce, numbers)),
        ranks=tuple(1 for _ in numbers),
        master="h:1",
        feeder="tcp://h:2",
        feeder_key=KEY,
        state=state,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def decided(
    me: NodeRow, others: list[NodeRow], found: Attempt | None, silent: dict[int, float] | None = None
) -> Action:
    rows = [me, *others]
    rows = [replace(row, reached=row.reached or {other.nonce: "" for other in rows}) for row in rows]
    me = rows[0]
    seen = {row.node: Seen(row, (silent or {}).get(row.node, 0.0)) for row in rows}
    return decide(me, seen, found, silence_s=SILENCE_S)


def test_the_leader_forms_an_attempt_from_fresh_offers_only() -> None:
    me, other = node(0, 1), node(1, 2)
    formed = decided(me, [other], None)
    assert isinstance(formed, Form) and [row.nonce for row in formed.offers] == [me.nonce, other.nonce]
    assert decided(other, [me], None) == Wait("node 0 (h0) to form an attempt")
    missing = decided(me, [], None)
    assert isinstance(missing, Wait) and missing.missing and "node 1 (never seen" in missing.waits_for
    silent = decided(me, [other], None, {1: 31.0})
    assert isinstance(silent, Wait) and silent.missing and silent.waits_for == "node 1 (h1) (silent for 31 s)"
    given_up = decided(me, [replace(other, phase=Phase.FAILED, reason="no disk")], None)
    assert isinstance(given_up, Wait) and given_up.missing and "given up: no disk" in given_up.waits_for


def test_no_attempt_is_formed_before_all_nodes_have_reached_each_other() -> None:
    me, other, third = (
        node(0, 1, nodes=3, address="10.0.0.1"),
        node(1, 2, nodes=3, address="10.0.0.2"),
        node(2, 3, nodes=3),
    )
    refused = replace(other, reached={me.nonce: "refused", third.nonce: ""})
    waits = "node 1 (h1, 10.0.0.2) to reach node 0 (h0, 10.0.0.1): refused"
    for asked, others in ((me, [refused, third]), (third, [me, refused])):
        assert decided(asked, others, None) == Wait(waits, missing=True)
    uncalled = replace(other, reached={me.nonce: "", nonce(9): ""})
    assert decided(me, [uncalled, third], None) == Wait("the nodes to call each other", missing=True)
    unlike = replace(refused, versions={"torch": "3"})
    assert isinstance(decided(me, [unlike, third], None), Form), "the attempt that refuses them needs no connection"


@pytest.mark.parametrize("state", [State.FORMING, State.RUNNING, State.ENDING, State.FAILED])
def test_no_attempt_is_formed_while_an_offer_of_the_last_one_stands(state: State) -> None:
    """Node 1 may have ranks of it, until its row has another nonce."""
    waits = decided(node(0, 3), [node(1, 2)], attempt(1, 2, state=state))
    assert isinstance(waits, Wait) and waits.waits_for == "the ranks of the last attempt to end: node 1 (h1)"
    assert isinstance(decided(node(0, 3), [node(1, 4)], attempt(1, 2, state=state)), Form)
    assert isinstance(decided(node(0, 3), [node(1, 4, Phase.RUNNING)], attempt(1, 2, state=state)), Wait)


def test_an_agent_starts_under_its_own_nonce_only() -> None:
    assert isinstance(decided(node(1, 2), [node(0, 1)], attempt(1, 2)), Start)
    assert not isinstance(decided(node(1, 5), [node(0, 1)], attempt(1, 2)), Start)
    assert not isinstance(decided(node(1, 1), [node(0, 1)], attempt(1, 2)), Start), "the nonce of another node"
    assert isinstance(decided(node(1, 2), [node(0, 1)], attempt(1, 2, state=State.ENDING)), Renew)
    assert decided(node(1, 2), [node(0, 1)], attempt(1, 2, state=State.FAILED, reason="r", exit_code=78)) == Leave(
        78, "r"
    )


@pytest.mark.parametrize(
    ("other", "silent_s", "why"),
    [
        (None, 0.0, "node 1 has left"),
        (node(1, 9, reason="rank 1 killed"), 0.0, "node 1 (h1): rank 1 killed"),
        (node(1, 2, Phase.RUNNING), 31.0, "node 1 (h1) is silent for 31 s"),
    ],
)
def test_a_node_that_is_gone_ends_the_attempt_everywhere(other: NodeRow | None, silent_s: float, why: str) -> None:
    others = [] if other is None else [other]
    running = attempt(1, 2, 3, state=State.RUNNING)
    third = node(2, 3, Phase.RUNNING)
    assert decided(node(0, 1, Phase.RUNNING), [*others, third], running, {1: silent_s}) == Record(State.ENDING, why)
    assert decided(third, [node(0, 1, Phase.RUNNING), *others], running, {1: silent_s}) == End(why)
    assert decided(
        third, [node(0, 1, Phase.RUNNING), node(1, 2, Phase.RUNNING)], replace(running, state=State.ENDING, reason="x")
    ) == End("x")


def test_a_final_failure_of_one_node_is_that_of_all() -> None:
    failed = node(1, 2, Phase.FAILED, reason="model.path: none", exit_code=78)
    running = attempt(1, 2, state=State.RUNNING)
    assert decided(node(0, 1, Phase.RUNNING), [failed], running) == Record(
        State.FAILED, "node 1 (h1): model.path: none", 78
    )
    told = replace(running, state=State.FAILED, reason="r", exit_code=78)
    assert decided(node(0, 1, Phase.RUNNING), [failed], told) == End("r")
    assert decided(node(0, 7, epoch=1), [failed], told) == Leave(78, "r"), "it had ended its ranks before"
    assert isinstance(decided(node(0, 8), [node(1, 9)], told), Form), "agents started anew owe it nothing"


def test_drained_means_all_nodes_and_the_leader_ends_last() -> None:
    stopped = node(1, 2, Phase.DRAINING)
    running = attempt(1, 2, state=State.RUNNING)
    assert decided(node(0, 1, Phase.RUNNING), [stopped], running) == Record(State.DRAINING, "node 1 (h1) was stopped")
    assert isinstance(decided(stopped, [node(0, 1, Phase.RUNNING)], running), Wait), (
        "alone its ranks would leave their peers"
    )
    draining = replace(running, state=State.DRAINING, reason="node 1 (h1) was stopped")
    for me, other in ((node(0, 1, Phase.RUNNING), stopped), (stopped, node(0, 1, Phase.RUNNING))):
        assert isinstance(decided(me, [other], draining), Drain)
    assert isinstance(decided(node(0, 1, Phase.FINISHED), [stopped], draining), Wait)
    assert decided(node(0, 1, Phase.FINISHED), [node(1, 2, Phase.FINISHED)], draining) == Record(
        State.ENDING, draining.reason
    )


def test_the_last_step_is_the_end_of_all() -> None:
    running = attempt(1, 2, state=State.RUNNING)
    finished = node(0, 1, Phase.FINISHED)
    assert decided(finished, [node(1, 2, Phase.RUNNING)], running) == Record(State.DONE)
    assert decided(finished, [node(1, 7, reason="crash at its end")], running) == Record(State.DONE)
    assert isinstance(decided(node(1, 2, Phase.FINISHED), [node(0, 1, Phase.RUNNING)], running), Wait)
    done = replace(running, state=State.DONE)
    assert decided(node(1, 2, Phase.RUNNING), [], done) == Leave()
    assert decided(node(1, 7, epoch=1), [], done) == Leave()
    assert isinstance(decided(node(1, 7), [node(0, 8)], done), Wait), "a new start on a finished run"


# ---- random schedules


@dataclass
class Sim:
    """An agent process: its row, the rows that it has read, and the epoch of its ranks."""

    row: NodeRow
    ranks: int = 0
    """Epoch of its ranks; 0 = none is alive."""
    alive: bool = True
    cut: bool = False
    rows: dict[int, Seen] | None = None
    found: tuple[Attempt | None, int] = (None, 0)


@dataclass
class World:
    """Rows as the bus has them, and agents that read and write them in any order. A crash may come between any two
    events.
    """

    nodes: int
    chance: random.Random
    agents: dict[int, Sim] = field(default_factory=dict)
    zombies: list[Sim] = field(default_factory=list)
    rows: dict[int, NodeRow] = field(default_factory=dict)
    attempt: Attempt | None = None
    revision: int = 0
    nonces: int = 0
    epochs: int = 0
    formed: int = 0

    def fresh(self) -> str:
        self.nonces += 1
        return nonce(self.nonces)

    def start(self, rank: int) -> None:
        """Start an agent, which takes the place of one that is dead, or silent because it is cut off."""
        old = self.agents.get(rank)
        if old is not None and old.alive and not old.cut:
            return
        if old is not None and old.alive:
            self.zombies.append(old)
        new = self.fresh()
        self.agents[rank] = Sim(NodeRow(node=rank, nodes=self.nodes, nonce=new, agent=new))
        self.rows[rank] = self.agents[rank].row

    def crash(self, rank: int) -> None:
        if (one := self.agents.get(rank)) is not None:
            one.alive, one.ranks = False, 0

    def cut(self, rank: int) -> None:
        if (one := self.agents.get(rank)) is not None:
            one.cut = not one.cut

    def fail(self, rank: int) -> None:
        """A rank of this node dies."""
        one = self.agents.get(rank)
        if one is not None and one.alive and one.ranks:
            self._renew(one)

    def store(self, rank: int) -> None:
        if (one := self._able(rank)) is not None:
            self.rows[rank] = one.row

    def call(self) -> None:
        """Have agents without ranks call the others and store the results, beside all else that they do."""
        for rank in range(self.nodes):
            one = self._able(rank)
            if one is not None and one.row.phase is Phase.READY and self.chance.random() < 0.7:
                one.row = replace(one.row, reached={row.nonce: "" for row in self.rows.values()})
                if self.rows[rank].nonce == one.row.nonce:
                    self.rows[rank] = one.row

    def read(self, rank: int) -> None:
        if (one := self._able(rank)) is not None:
            gone = {number for number, other in self.agents.items() if not other.alive or other.cut}
            silent = {
                number: SILENCE_S + 1 if number in gone and self.chance.random() < 0.5 else 0.0 for number in self.rows
            }
            one.rows = {number: Seen(row, silent[number]) for number, row in self.rows.items()}

    def read_attempt(self, rank: int) -> None:
        if (one := self._able(rank)) is not None and one.rows is not None:
            one.found = (self.attempt, self.revision)

    def act(self, rank: int) -> None:
        """Act on the rows that were read, which others may have overtaken since."""
        one = self._able(rank)
        if one is None or one.rows is None:
            return
        found, revision = one.found
        match decide(one.row, one.rows, found, silence_s=SILENCE_S):
            case Form(offers):
                self.epochs += 1
                self._write(
                    one,
                    revision,
                    attempt(1, epoch=self.epochs, nonces=tuple(row.nonce for row in offers), ranks=(1,) * self.nodes),
                )
            case Record(state, reason, code) if found is not None:
                self._write(one, revision, replace(found, state=state, reason=reason, exit_code=code))
            case Start(mine):
                one.ranks, one.row = mine.epoch, replace(one.row, phase=Phase.RUNNING, epoch=mine.epoch)
            case End() | Renew():
                self._renew(one)

    def _write(self, one: Sim, revision: int, new: Attempt) -> None:
        if revision == self.revision:
            self.formed += new.state is State.FORMING
            self.attempt, self.revision = new, revision + 1
            one.found = (self.attempt, self.revision)

    def _renew(self, one: Sim) -> None:
        one.ranks, one.row = 0, replace(one.row, phase=Phase.READY, nonce=self.fresh(), reached={})

    def _able(self, rank: int) -> Sim | None:
        one = self.agents.get(rank)
        return one if one is not None and one.alive and not one.cut else None

    def check(self) -> None:
        """Assert that all ranks that are alive are of one attempt. (Those of a replaced agent end with its fence.)"""
        epochs = {one.ranks for one in self.agents.values() if one.alive and one.ranks}
        assert len(epochs) <= 1, (epochs, self.attempt, self.rows)

    def settle(self) -> None:
        """Bring all agents back, and let them go on without faults until they run one attempt."""
        for rank in range(self.nodes):
            if (one := self.agents.get(rank)) is not None:
                one.cut = False
            self.start(rank)
        for _ in range(12):
            for rank in range(self.nodes):
                for event in (self.store, self.read, self.read_attempt, self.act, self.store):
                    event(rank)
                    self.call()
                    self.check()
        assert self.attempt is not None and self.attempt.state is State.RUNNING, self.attempt
        assert {one.ranks for one in self.agents.values()} == {self.attempt.epoch}, self.agents


def faults_and_progress(nodes: int, seed: int) -> int:
    """Run a schedule of some hundred random events. Returns the number of attempts formed in it."""
    world = World(nodes, random.Random(seed))
    work: list[Callable[[int], None]] = [world.store, world.read, world.read_attempt, world.act]
    faults: list[Callable[[int], None]] = [world.crash, world.cut, world.fail, world.start]
    for rank in range(nodes):
        world.start(rank)
    for _ in range(400):
        rank = world.chance.randrange(nodes)
        for event in work if world.chance.random() < 0.5 else [world.chance.choice(work)]:
            event(rank)
            world.call()
            world.check()
        if world.chance.random() < 0.12:
            world.chance.choice(faults)(world.chance.randrange(nodes))
            world.check()
    world.settle()
    return world.formed


@pytest.mark.parametrize("nodes", [2, 3])
def test_whatever_fails_ranks_of_two_attempts_never_meet_and_all_run_in_the_end(nodes: int) -> None:
    formed = [faults_and_progress(nodes, seed) for seed in range(examples(150))]
    assert sum(formed) > 3 * len(formed), "the schedules form too few attempts to show anything"
