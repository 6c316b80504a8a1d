"""Rendezvous of node agents: from the rows that an agent reads to its next action. Pure: no clock, no bus, no process.

Every agent offers itself under a nonce. The leader (node 0) forms an attempt from the offers of all nodes, by
compare-and-set on the row ``attempt``, and only when none of these offers belongs to the attempt before it. An agent
runs ranks only under an attempt that names its nonce, and takes a new nonce only after its ranks have ended. So no two
attempts have ranks at the same time. The leader waits until all agents have reached each other (``reached``): ranks
that cannot connect would wait for gloo's timeouts. An agent reads the rows of the nodes first and the attempt
afterwards: an agent that leaves has recorded the end before. A wait names the nodes or the event that ends it.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.bus import exit_codes
from tidemill.bus.config import is_loopback
from tidemill.bus.wire.rows import Attempt, NodeRow, Phase, State
from tidemill.learner.errors import NodeRefused

LEADER = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's row, and the seconds for which it has not changed."""

    row: NodeRow
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until a row changes. ``missing``: nodes are not there, or do not reach each other."""

    waits_for: str = ""
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """Leader: form the next attempt from these offers."""

    offers: tuple[NodeRow, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Leader: write this state of the attempt."""

    state: State
    reason: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Start the ranks of this node."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the ranks finish their step and end."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """End the ranks at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Offer again, under a new nonce; no rank of this node is alive."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the agent; no rank of this node is alive, or its ranks end by themselves after the last step."""

    exit_code: int = 0
    reason: str = ""


Action = Wait | Form | Record | Start | Drain | End | Renew | Leave


def decide(me: NodeRow, rows: Mapping[int, Seen], attempt: Attempt | None, *, silence_s: float) -> Action:
    """Return an agent's next action. ``rows``: of all nodes; ``silence_s``: maximum silence of a live one."""
    mine = attempt if attempt is not None and attempt.has(me) else None
    if me.phase is Phase.READY:
        return _ready(me, rows, attempt, mine, silence_s)
    if mine is None:
        reason = "another attempt has begun" if attempt is not None else "the row of the attempt is gone"
        return Renew(reason) if me.phase is Phase.FINISHED else End(reason)
    if mine.state is State.DONE:
        return Leave()
    if mine.state in (State.FAILED, State.ENDING):
        if me.phase is not Phase.FINISHED:
            return End(mine.reason)
        return Leave(mine.exit_code, mine.reason) if mine.state is State.FAILED else Renew(mine.reason)
    if me.node == LEADER and me.phase is Phase.FINISHED and mine.state is not State.DRAINING:
        return Record(State.DONE)  # all that counts is stored, even if another node fails while it leaves
    if (trouble := _trouble(me, rows, mine, silence_s)) is not None:
        return trouble if me.node == LEADER else End(trouble.reason)
    return _drained(me, rows, mine) if mine.state is State.DRAINING else _running(me, rows, mine)


def _ready(
    me: NodeRow, seen: Mapping[int, Seen], attempt: Attempt | None, mine: Attempt | None, silence_s: float
) -> Action:
    if mine is not None:
        if mine.state is State.FORMING:
            return Start(mine)
        if mine.state is State.FAILED:
            return Leave(mine.exit_code or exit_codes.CRASHED, mine.reason)
        return Renew(mine.reason)
    if attempt is not None and attempt.epoch == me.epoch and attempt.state in (State.DONE, State.FAILED):
        return Leave(attempt.exit_code, attempt.reason)  # this agent had left the attempt before its end was recorded
    missing = _missing(me, seen, silence_s)
    if missing:
        return Wait(f"{', '.join(missing)}", missing=True)
    rows = [seen[node].row for node in range(me.nodes)]
    busy = [row for row in rows if row.phase is not Phase.READY or (attempt is not None and attempt.has(row))]
    if busy:
        return Wait(f"the ranks of the last attempt to end: {', '.join(row.name for row in busy)}")
    if (apart := _apart(rows)) and fit(rows):  # nodes that do not fit together are refused at once
        return Wait("; ".join(apart), missing=True)
    if me.node != LEADER:
        return Wait(f"{seen[LEADER].row.name} to form an attempt")
    if seen[me.node].row.nonce != me.nonce:
        return Wait("its own row to be stored")  # a node would compare the attempt with the old one
    return Form(tuple(rows))


def _missing(me: NodeRow, rows: Mapping[int, Seen], silence_s: float) -> list[str]:
    missing = []
    for node in range(me.nodes):
        seen_row = rows.get(node)
        if seen_row is None:
            missing.append(
                f"node {node} (never seen, or it has left)" if node != me.node else "its own row to be stored"
            )
        elif node != me.node and seen_row.silent_s > silence_s:
            missing.append(f"{seen_row.row.name} (silent for {seen_row.silent_s:.0f} s)")
        elif node != me.node and seen_row.row.phase is Phase.FAILED:
            missing.append(f"{seen_row.row.name} (given up: {seen_row.row.reason or 'no reason'})")
    return missing


def _apart(rows: Sequence[NodeRow]) -> list[str]:
    """Return the failed calls between nodes, for a message, or that some are not made yet; [] = all reach all."""
    pairs = [(row, peer, row.reached.get(peer.nonce)) for row in rows for peer in rows if row is not peer]
    failed = [
        f"{row.name_with_address} to reach {peer.name_with_address}: {result}" for row, peer, result in pairs if result
    ]
    remainder = [f"{len(failed) - 4} more"] if len(failed) > 4 else []
    return [*failed[:4], *remainder] or ["the nodes to call each other"] * any(result is None for _, _, result in pairs)


def _trouble(me: NodeRow, rows: Mapping[int, Seen], mine: Attempt, silence_s: float) -> Record | None:
    """Return the record of the reason to end the attempt, from the rows of the other nodes; None = there is none."""
    for node, nonce in enumerate(mine.nonces):
        if node == me.node:
            continue
        seen_row = rows.get(node)
        if seen_row is None:
            return Record(State.ENDING, f"node {node} has left")
        row = seen_row.row
        if row.phase is Phase.FAILED and row.nonce == nonce:
            return Record(State.FAILED, f"{row.name}: {row.reason}", row.exit_code or exit_codes.CRASHED)
        if row.nonce != nonce:
            why = row.reason or (
                "another agent has its node rank" if mine.state is not State.FORMING else "it has offered again"
            )
            return Record(State.ENDING, f"{row.name}: {why}")
        if seen_row.silent_s > silence_s:
            return Record(State.ENDING, f"{row.name} is silent for {seen_row.silent_s:.0f} s")
    return None


def _drained(me: NodeRow, rows: Mapping[int, Seen], mine: Attempt) -> Action:
    if me.phase is not Phase.FINISHED:
        return Drain(mine.reason)
    peers = [seen_row.row for seen_row in rows.values() if mine.has(seen_row.row) and seen_row.row.node != me.node]
    if me.node == LEADER and all(row.phase is Phase.FINISHED for row in peers):
        return Record(State.ENDING, mine.reason)
    return Wait("the ranks to finish their step")


def _running(me: NodeRow, seen: Mapping[int, Seen], mine: Attempt) -> Action:
    if me.node != LEADER:
        return Wait()
    rows = [there.row for there in seen.values() if mine.has(there.row)]
    draining = [row for row in rows if row.phase is Phase.DRAINING]
    if draining or me.phase is Phase.DRAINING:
        return Record(State.DRAINING, f"{(draining or [me])[0].name} was stopped")
    if mine.state is State.FORMING and all(row.phase in (Phase.RUNNING, Phase.FINISHED) for row in rows):
        return Record(State.RUNNING)
    return Wait()


def refuse_unlike(offers: Sequence[NodeRow]) -> None:
    """Raise NodeRefused for nodes with other versions, settings or sizes, and addresses that cannot connect them."""
    leader = offers[0]
    for row in offers[1:]:
        if row.nodes != leader.nodes:
            raise NodeRefused(
                row.name,
                f"--nodes {leader.nodes}, as {leader.name}",
                f"{row.nodes}",
                "start all agents with the same number",
            )
        if bool(row.devices) != bool(leader.devices):
            got = "devices" if row.devices else "none"
            raise NodeRefused(
                row.name,
                f"{'devices' if leader.devices else 'no devices'}, as {leader.name}",
                got,
                "learner.device: cpu",
            )
        for name in sorted({*leader.versions, *row.versions}):
            want, got = leader.versions.get(name, "none"), row.versions.get(name, "none")
            if want != got:
                cure = (
                    "use the same configuration on all nodes"
                    if name == "settings"
                    else "install the same versions on all nodes"
                )
                raise NodeRefused(row.name, f"{name} {want}, as {leader.name}", got, cure)
    if len({row.place for row in offers}) > 1 or not leader.place:
        for row in offers:
            if is_loopback(row.address):
                cure = (
                    f"--host ADDRESS, or a --bus address of the network; {row.name} is reached under "
                    f"{row.address} by itself only"
                )
                raise NodeRefused(row.name, "an address that the other nodes reach", row.address, cure)


def fit(offers: Sequence[NodeRow]) -> bool:
    """Return whether ``refuse_unlike`` accepts these nodes."""
    try:
        refuse_unlike(offers)
    except NodeRefused:
        return False
    return True


def refuse_public(address: str, *, insecure: bool) -> None:
    """Raise NodeRefused for an address of the internet: torch's store, gloo and NCCL have no authentication."""
    try:
        public = ipaddress.ip_address(address.strip("[]")).is_global
    except ValueError:
        return  # a name: its owner knows the network
    if public and not insecure:
        want = "an address of a private network: the ranks' own connections have no authentication"
        raise NodeRefused(
            "learner: address of this node",
            want,
            f"{address}, which is public",
            "--host ADDRESS, or learner.insecure_network: true",
        )
