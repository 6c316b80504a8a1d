"""Rows of node agents in the bucket ``run``: ``node.<R>``, written by the agent of node R, and ``attempt``, written by
the leader.

They are input like any other: a row of another shape is refused (``bus/wire/rows.py``), and so is one with values that
contradict each other. Knows no bus.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import MOST_RANKS, row_of

NODE_KEY = "node"
"""Rows ``node.<R>``."""
ATTEMPT_KEY = "attempt"
MOST_TEXT = 2_000
"""Characters of a text in a row; a reason is cut to them."""
_Text = Annotated[str, msgspec.Meta(max_length=2 * MOST_TEXT)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_NumRanks = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
_Nonce = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
"""Letters of a CURVE public key. Source: ZeroMQ RFC 32."""
_Key = Annotated[str, msgspec.Meta(pattern=rf"^{_Z85}\Z")]
_KeyOrNone = Annotated[str, msgspec.Meta(pattern=rf"^({_Z85})?\Z")]


class Phase(StrEnum):
    """State of an agent. From RUNNING on, it keeps the nonce of the attempt; READY comes with a new one."""

    READY = "ready"
    """It has no ranks, and offers to run some under its nonce."""
    RUNNING = "running"
    FINISHED = "finished"
    """The agent's ranks have ended with success."""
    DRAINING = "draining"
    """It was stopped: its ranks finish their step."""
    FAILED = "failed"
    """It has given up, and its process ends."""


class State(StrEnum):
    """State of an attempt."""

    FORMING = "forming"
    RUNNING = "running"
    """The ranks of all nodes were started."""
    DRAINING = "draining"
    """An agent was stopped: all ranks finish their step."""
    ENDING = "ending"
    """It has failed or was drained: all ranks end, and the next attempt follows."""
    FAILED = "failed"
    """It has failed, and no next one follows: the agents end."""
    DONE = "done"
    """The last step is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """An agent and its node."""

    node: _Natural
    nodes: _NumRanks
    """Number of nodes, as this agent was started."""
    nonce: _Nonce
    """Nonce of this offer: new at the start of the agent and after each attempt."""
    phase: Phase = Phase.READY
    agent: _Text = ""
    """Nonce of the process."""
    host: _Text = ""
    epoch: _Natural = 0
    """Epoch of the last attempt that this agent was part of; 0 = none."""
    place: _Text = ""
    """Boot id and process-id namespace: agents with equal ones see each other's process ids."""
    pid: _Natural = 0
    address: _Text = ""
    """Advertised address of the node, without a port."""
    key: _KeyOrNone = ""
    """CURVE public key of its ranks, for one attempt."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions and settings that must be equal on all nodes, by name."""
    devices: tuple[str, ...] = ()
    """UUIDs of the devices that ranks may have; empty = they run on the CPU."""
    device_memory_bytes: _Natural = 0
    probe_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Port under ``address`` at which this agent answers calls of the others; 0 = it does not listen."""
    reached: Annotated[Mapping[_Text, _Text], msgspec.Meta(max_length=MOST_RANKS)] = field(default_factory=dict)
    """Results of its calls to the other nodes, by the nonce of their offer: empty = reached, else why not."""
    checkpoint_url: _Text = ""
    """Where the node serves its checkpoint files; empty = it does not."""
    reason: _Text = ""
    """Why its last attempt ended, or why it has given up."""
    exit_code: _Natural = 0
    """Exit code of an agent that has given up."""
    waits_for: _Text = ""
    beats: _Natural = 0
    """Increases with every heartbeat."""

    @property
    def name(self) -> str:
        """Name for messages: ``node 1 (host)``."""
        return f"node {self.node} ({self.host or '?'})"

    @property
    def name_with_address(self) -> str:
        """Name for messages about the network: ``node 1 (host, 10.0.0.2)``."""
        return f"node {self.node} ({self.host or '?'}, {self.address or '?'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the whole learner."""

    epoch: _Natural
    nonces: Annotated[tuple[_Nonce, ...], msgspec.Meta(min_length=1, max_length=MOST_RANKS)]
    """Nonces of the offers that it runs under, by node."""
    ranks: tuple[_NumRanks, ...]
    """Number of ranks of each node; they are numbered through."""
    master: Annotated[str, msgspec.Meta(pattern=r"^.+:[0-9]{1,5}\Z", max_length=2 * MOST_TEXT)]
    """host:port of torch's store."""
    feeder: Annotated[str, msgspec.Meta(pattern="^tcp://", max_length=2 * MOST_TEXT)]
    """URL of the feeder, tcp://host:port."""
    feeder_key: _Key
    """CURVE public key of the feeder."""
    proof: _Text = ""
    """Content of the file that shows that all nodes share the directory of the checkpoints; empty = they need not."""
    state: State = State.FORMING
    reason: _Text = ""
    exit_code: _Natural = 0

    def has(self, row: NodeRow) -> bool:
        """Return whether this row's offer is part of the attempt."""
        return row.node < len(self.nonces) and self.nonces[row.node] == row.nonce

    def first_rank(self, node: int) -> int:
        """Return the number of the first rank of a node."""
        return sum(self.ranks[:node])


def cut(text: str) -> str:
    """Return a text as a row can carry it: bounded, printable."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text[:MOST_TEXT])


def bracketed(host: str) -> str:
    """Return a host as an URL has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def node_of(key: str, value: JsonObject) -> NodeRow:
    """Return the row of a node. Raises WireError naming the field that does not fit."""
    row = row_of(NodeRow, value)
    if key != f"{NODE_KEY}.{row.node}":
        raise WireError("node", f"that of the key {key}", row.node)
    if row.node >= row.nodes:
        raise WireError("node, nodes", "node < nodes", (row.node, row.nodes))
    return row


def attempt_of(value: JsonObject) -> Attempt:
    """Return the attempt. Raises WireError naming the field that does not fit."""
    attempt = row_of(Attempt, value)
    if len(set(attempt.nonces)) < len(attempt.nonces):
        raise WireError("nonces", "each once", attempt.nonces[:4])
    if len(attempt.ranks) != len(attempt.nonces):
        raise WireError("ranks", "a number of ranks for each nonce", attempt.ranks[:4])
    if not 0 < int(attempt.master.rpartition(":")[2]) < 65_536:
        raise WireError("master", "host:port", attempt.master[:60])
    return attempt


def row_value(row: NodeRow | Attempt) -> JsonObject:
    """Return a row as JSON has it."""
    value: JsonObject = json.loads(msgspec.json.encode(row))
    return value
