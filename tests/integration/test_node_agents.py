"""Node agents on a real bus, with ranks that end when the test ends them: attempts, ends, drains, refusals, and an
outage of the bus.
"""

import asyncio
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from tests.bus_fixtures import BusOpener
from tests.refusals import refusal
from tests.waits import until
from tidemill.bus import exit_codes
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, current_epoch
from tidemill.bus.wire.rows import NodeRow, Phase, State
from tidemill.learner.errors import LearnerEnded, NodeRefused, NodeReplaced
from tidemill.learner.nodes import own_row
from tidemill.learner.nodes.agent import Agent, Limits
from tidemill.learner.nodes.own_row import REACHED, OwnRow, answering, call, here
from tidemill.learner.nodes.rows import ATTEMPT_KEY, attempt_of, node_of, row_value
from tidemill.learner.ranks.process import ChildFailed, NodePart

WITHIN_S = 60.0
ROW = NodeRow(node=0, nodes=2, nonce="", address="127.0.0.1", host="h", place=here(), pid=os.getpid())


@dataclass
class Ranks:
    """Ranks of one node: each start is in ``parts``; they end with the next of ``ends``, or when they are drained or
    cancelled.
    """

    parts: "asyncio.Queue[NodePart]" = field(default_factory=asyncio.Queue)
    ends: "asyncio.Queue[ChildFailed | None]" = field(default_factory=asyncio.Queue)
    alive: int = 0
    refusal: NodeRefused | None = None
    steps: Callable[[], None] = lambda: None

    def layout(self, offers: Sequence[NodeRow]) -> tuple[int, ...]:
        if self.refusal is not None:
            raise self.refusal
        return tuple(2 for _ in offers)

    @asynccontextmanager
    async def opened(self, bus: Bus) -> AsyncIterator[None]:
        yield

    async def prove(self, proof: str) -> None: ...

    async def check(self, proof: str) -> None: ...

    async def run(self, part: NodePart, draining: asyncio.Event, on_step: Callable[[], None]) -> None:
        self.alive, self.steps = self.alive + 1, on_step
        self.parts.put_nowait(part)
        drained, ended = asyncio.create_task(draining.wait()), asyncio.create_task(self.ends.get())
        try:
            await asyncio.wait({drained, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and (error := ended.result()) is not None:
                raise error
        finally:
            self.alive -= 1
            for one in (drained, ended):
                one.cancel()
            await asyncio.gather(drained, ended, return_exceptions=True)


@dataclass
class Node:
    """One agent, and the event that ends it."""

    ranks: Ranks
    agent: Agent
    stop: asyncio.Event
    running: "asyncio.Task[None]"
    shown: list[NodeRow]
    """Rows of the agent as ``tidemill status`` gets them."""

    async def started(self) -> NodePart:
        async with asyncio.timeout(WITHIN_S):
            return await self.ranks.parts.get()

    async def ended(self) -> None:
        """Wait for the end of the agent. Raises its error."""
        async with asyncio.timeout(WITHIN_S):
            await self.running


@asynccontextmanager
async def node(bus: Bus, rank: int, limits: Limits | None = None, **changes: object) -> AsyncIterator[Node]:
    ranks, stop = Ranks(), asyncio.Event()
    shown: list[NodeRow] = []
    row = replace(ROW, node=rank, **changes)  # type: ignore[arg-type]
    agent = Agent(bus, row, ranks, bind="127.0.0.1", limits=limits or Limits(), on_change=shown.append)
    running = asyncio.create_task(agent.run(stop))
    try:
        yield Node(ranks, agent, stop, running, shown)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert ranks.alive == 0


def killed(code: int = -9, reason: str = "") -> ChildFailed:
    return ChildFailed("rank 2", code, (f"{exit_codes.LINE}{reason}",) if reason else ())


async def test_two_agents_run_one_attempt_after_the_other_to_the_last_step(open_bus: BusOpener) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 0) as leader, node(two, 1) as other:
        first, second = await leader.started(), await other.started()
        assert (first.first_rank, second.first_rank, first.world, second.world) == (0, 2, 4, 4)
        assert (
            first.listen
            and not second.listen
            and first.feeder_url == second.feeder_url
            and first.master == second.master
        )
        assert first.epoch == second.epoch == await current_epoch(one)
        assert (
            first.keys.others_public == (second.keys.ranks_public,)
            and second.keys.feeder_public == first.keys.feeder_public
        )
        assert second.keys.ranks_public != first.keys.ranks_public

        other.ranks.ends.put_nowait(killed())
        again, also = await leader.started(), await other.started()
        assert again.epoch == also.epoch == first.epoch + 1
        assert (
            again.keys.feeder_public != first.keys.feeder_public and also.keys.ranks_public != second.keys.ranks_public
        )
        assert leader.agent.row.reason == "" and leader.ranks.alive == other.ranks.alive == 1

        for one_node in (other, leader):
            one_node.ranks.ends.put_nowait(None)
        await leader.ended()
        await other.ended()
        row = await one.rows("run").get(ATTEMPT_KEY)
        assert row is not None and attempt_of(row[0]).state is State.DONE
        assert await one.rows("run").keys("node") == []
        waits = [(row.phase, row.waits_for, row.reason) for row in leader.shown]
        assert (Phase.RUNNING, "", "") in waits and waits[-1][0] is not Phase.READY
        assert any("rank 2 killed by signal 9" in reason for _, _, reason in waits)


async def test_a_stopped_agent_drains_all_and_the_others_wait_for_its_successor(open_bus: BusOpener) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 0) as leader:
        async with node(two, 1) as other:
            await leader.started()
            await other.started()
            other.stop.set()
            await other.ended()
            assert not leader.running.done() and leader.ranks.alive == 0
        async with node(two, 1) as other:
            assert (await leader.started()).epoch == (await other.started()).epoch == 2
            leader.stop.set()
            other.stop.set()
            await leader.ended()
            await other.ended()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_failure_that_no_restart_cures_ends_all_agents_with_its_code(open_bus: BusOpener, rank: int) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 0) as leader, node(two, 1) as other:
        nodes = (leader, other)
        for one_node in nodes:
            await one_node.started()
        nodes[rank].ranks.ends.put_nowait(killed(78, "model.path: none"))
        for one_node in nodes:
            with refusal(
                LearnerEnded, reason=re.compile(r"\bmodel\.path: none$"), exit_code=exit_codes.CONFIG
            ) as caught:
                await one_node.ended()
            assert caught.value.exit_code == 78
        row = await one.rows("run").get(f"node.{rank}")
        assert row is not None and node_of(f"node.{rank}", row[0]).phase is Phase.FAILED


async def test_failures_in_a_row_end_all_agents(open_bus: BusOpener) -> None:
    few = Limits(bad_ends=2)
    async with (
        open_bus(name="0") as one,
        open_bus(name="1") as two,
        node(one, 0, few) as leader,
        node(two, 1, few) as other,
    ):
        for _ in range(2):
            await leader.started()
            await other.started()
            other.ranks.ends.put_nowait(killed())
        for one_node in (leader, other):
            with refusal(LearnerEnded, reason=re.compile(r"^2 .*\b300 s; .*\brank 2 .*\(SIGKILL\)$"), exit_code=1):
                await one_node.ended()


async def test_nodes_that_cannot_work_together_are_refused_everywhere(open_bus: BusOpener) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two:
        async with node(one, 0, versions={"torch": "2"}) as leader, node(two, 1, versions={"torch": "3"}) as other:
            for one_node in (leader, other):
                with refusal(LearnerEnded, place="node 1 (h)", got="3") as caught:
                    await one_node.ended()
                assert caught.value.exit_code == exit_codes.CONFIG


async def test_missing_nodes_are_named(open_bus: BusOpener) -> None:
    async with open_bus() as bus, node(bus, 0, Limits(wait_s=1.5), nodes=3) as leader:
        missing = re.compile(r"\b3 nodes .*: node 1 \(never seen, or it has left\), node 2 \(")
        with refusal(LearnerEnded, reason=missing, exit_code=1):
            await leader.ended()


async def test_nodes_that_do_not_reach_each_other_start_no_ranks_until_they_do(open_bus: BusOpener) -> None:
    """Nothing listens at the address that node 1 advertises first."""
    apart = r"node 0 \(h, 127\.0\.0\.1\) to reach node 1 \(h, 127\.0\.0\.2\): .*refused"
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 0) as leader:
        async with node(two, 1, address="127.0.0.2") as other:
            async with asyncio.timeout(WITHIN_S):
                await until(
                    lambda: all(any(re.search(apart, row.waits_for) for row in each.shown) for each in (leader, other))
                )
            other.agent.limits = Limits(wait_s=0.0)  # it has waited for long enough
            with pytest.raises(LearnerEnded, match=apart):
                await other.ended()
        assert leader.ranks.parts.empty() and leader.ranks.alive == 0
        async with node(two, 1, address="127.0.0.1") as other:
            assert (await leader.started()).epoch == (await other.started()).epoch == 1


async def test_a_call_that_another_process_answers_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, monkeypatch.context() as soon:
        soon.setattr(own_row, "CALL_S", 0.3)
        assert await call(replace(ROW, probe_port=mute.getsockname()[1])) == "no answer within 0 s"
    monkeypatch.setattr(own_row, "CALL_S", WITHIN_S)
    async with answering("a" * 12, "127.0.0.1") as port:
        right = replace(ROW, agent="a" * 12, probe_port=port)
        assert await call(right) == REACHED
        assert await call(replace(right, agent="b" * 12)) == "another process answers there"
    assert "refused" in await call(right)
    assert await call(replace(right, address="::1")) and await call(replace(right, address="no such host."))


async def test_a_second_agent_of_a_node_rank_is_refused_while_the_first_lives(open_bus: BusOpener) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 1) as first:
        async with asyncio.timeout(WITHIN_S):
            await until(lambda: two.rows("run").keys("node"))
        async with node(two, 1, place="elsewhere") as second:
            with refusal(NodeRefused, where="--node-rank 1", got=re.compile(rf"\bh, pid {os.getpid()}$")):
                await second.ended()
        assert not first.running.done()


async def test_the_row_of_a_dead_agent_of_this_machine_is_taken_at_once(open_bus: BusOpener) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220
    ended.wait()
    async with open_bus() as bus:
        rows = bus.rows("run")
        old = replace(ROW, nonce="0" * 12, agent="old", pid=ended.pid)
        await rows.put("node.0", row_value(old))
        own = OwnRow(rows, replace(ROW, nonce="1" * 12, agent="new"))
        async with asyncio.timeout(WITHIN_S):
            await own.claim(silence_s=3600.0)
        await rows.put("node.0", row_value(old) | {"phase": "a word of tomorrow"})
        async with asyncio.timeout(WITHIN_S):
            await OwnRow(rows, replace(ROW, nonce="2" * 12, agent="third")).claim(silence_s=3600.0)


async def test_of_two_agents_that_start_together_one_gets_the_node_rank(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        rows = [OwnRow(bus.rows("run"), replace(ROW, nonce="2" * 12, agent=name, place=name)) for name in ("a", "b")]
        keeping: list[asyncio.Task[None]] = []

        async def claimed(row: OwnRow) -> None:
            """Claim the row, then keep it."""
            await row.claim(silence_s=3600.0)
            keeping.append(asyncio.create_task(row.keep()))

        async with asyncio.timeout(WITHIN_S):
            results = await asyncio.gather(*map(claimed, rows), return_exceptions=True)
        for one in keeping:
            one.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        assert len(keeping) == 1 and results.count(None) == 1
        assert any(isinstance(result, NodeRefused) for result in results)


async def test_an_agent_whose_row_was_taken_over_ends_its_ranks(open_bus: BusOpener) -> None:
    async with open_bus(name="0") as one, open_bus(name="1") as two, node(one, 0) as leader, node(two, 1) as other:
        await leader.started()
        await other.started()
        await one.rows("run").put(
            "node.1", row_value(replace(ROW, node=1, nonce="3" * 12, agent="successor", host="other", pid=7))
        )
        with refusal(NodeReplaced, node=1, by="other pid 7"):
            await other.ended()
        async with asyncio.timeout(WITHIN_S):
            await until(lambda: not leader.ranks.alive)


async def test_without_the_bus_ranks_that_make_steps_go_on_and_others_are_ended(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    short = Limits(fence_s=4.0)
    async with (
        open_bus(name="0") as one,
        open_bus(name="1") as two,
        node(one, 0, short) as leader,
        node(two, 1, short) as other,
    ):
        await leader.started()
        await other.started()
        leader.ranks.steps()
        assert math.isfinite(leader.agent.stepped_s)
        leader.agent.stepped_s = math.inf  # as if it made steps all the time
        nats_server.kill()
        async with asyncio.timeout(WITHIN_S):
            await until(lambda: not other.ranks.alive)
        assert leader.ranks.alive == 1
        nats_server.start()
        assert (await leader.started()).epoch == (await other.started()).epoch == 2


async def test_an_epoch_that_cannot_be_read_ends_the_leader_with_the_code_of_errors_that_no_restart_cures(
    open_bus: BusOpener,
) -> None:
    """The others wait for it, as for one that is not started yet."""
    async with open_bus(name="0") as one, open_bus(name="1") as two:
        await one.js.publish(f"$KV.TM_{one.run}_run.epoch", b"junk")
        async with node(one, 0) as leader, node(two, 1) as other:
            with refusal(
                LearnerEnded, place="row run.epoch, revision 1", got="'Expecting value: line 1 column 1 (char 0)'"
            ) as caught:
                await leader.ended()
            assert caught.value.exit_code == exit_codes.CONFIG
            assert not other.running.done()
