"""Rows of node agents in the bucket ``run``: ``node.<R>``, written by the agent of node R, and ``attempt``, written by
the leader.

They are input like any other: a row of another shape is refused (``bus/wire/rows.py``), and so is one with values that
contradict each other. Knows no bus.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.rows import MOST_RANKS

NODE_KEY = "node"
"""Rows ``node.<R>``."""
ATTEMPT_KEY = "attempt"
MOST_TEXT = 2_000
"""Characters of a text in a row; a reason is cut to them."""
_NONCE = re.compile(r"[0-9a-f]{12}")
_CURVE_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""A public key in Z85. Source: ZeroMQ RFC 32."""


class Phase(StrEnum):
    """State of an agent. From RUNNING on, its nonce stays that of the attempt; READY comes with a new one."""

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

    node: int
    nodes: int
    """Number of nodes, as this agent was started."""
    nonce: str
    """Nonce of this offer: new at the start of the agent and after each attempt."""
    phase: Phase = Phase.READY
    agent: str = ""
    """Nonce of the process."""
    host: str = ""
    epoch: int = 0
    """Epoch of the last attempt that this agent was part of; 0 = none."""
    place: str = ""
    """Boot id and process-id namespace: agents with equal ones see each other's process ids."""
    pid: int = 0
    address: str = ""
    """Advertised address of the node, without a port."""
    key: str = ""
    """CURVE public key of its ranks, for one attempt."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions and settings that must be equal on all nodes, by name."""
    devices: tuple[str, ...] = ()
    """UUIDs of the devices that ranks may have; empty = they run on the CPU."""
    device_memory_bytes: int = 0
    probe_port: int = 0
    """Port under ``address`` at which this agent answers calls of the others; 0 = it does not listen."""
    reached: Mapping[str, str] = field(default_factory=dict)
    """Results of its calls to the other nodes, by the nonce of their offer: empty = reached, else why not."""
    checkpoint_url: str = ""
    """Where the node serves its checkpoint files; empty = it does not."""
    reason: str = ""
    """Why its last attempt ended, or why it has given up."""
    exit_code: int = 0
    """Exit code of an agent that has given up."""
    waits_for: str = ""
    beats: int = 0
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

    epoch: int
    nonces: tuple[str, ...]
    """Nonces of the offers that it runs under, by node."""
    ranks: tuple[int, ...]
    """Number of ranks of each node; they are numbered through."""
    master: str
    """host:port of torch's store."""
    feeder: str
    """URL of the feeder, tcp://host:port."""
    feeder_key: str
    """CURVE public key of the feeder."""
    proof: str = ""
    """Content of the file that shows that all nodes share the directory of the checkpoints; empty = they need not."""
    state: State = State.FORMING
    reason: str = ""
    exit_code: int = 0

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


def node_of(key: str, value: JsonMapping) -> NodeRow:
    """Return the row of a node. Raises WireError naming the field that does not fit."""
    _texts(value)
    values = {field.name: value[field.name] for field in fields(NodeRow) if field.name in value}
    values |= {"phase": _word(Phase, "phase", value.get("phase", "ready")), "devices": tuple(value.get("devices", ()))}
    row = NodeRow(**values)
    if key != f"{NODE_KEY}.{row.node}":
        raise WireError("node", f"that of the key {key}", row.node)
    if not 0 <= row.node < row.nodes <= MOST_RANKS:
        raise WireError("node, nodes", f"node < nodes <= {MOST_RANKS}", (row.node, row.nodes))
    _nonce("nonce", row.nonce)
    if row.probe_port > 65_535:
        raise WireError("probe_port", "at most 65535", row.probe_port)
    if len(row.reached) > MOST_RANKS:
        raise WireError("reached", f"at most {MOST_RANKS} results", len(row.reached))
    _texts(row.reached)
    if row.key and not _CURVE_KEY.fullmatch(row.key):
        raise WireError("key", "a CURVE public key of 40 characters (Z85)", row.key[:60])
    return row


def attempt_of(value: JsonMapping) -> Attempt:
    """Return the attempt. Raises WireError naming the field that does not fit."""
    _texts(value)
    values = {field.name: value[field.name] for field in fields(Attempt) if field.name in value}
    values |= {"state": _word(State, "state", value.get("state", "forming")), "nonces": tuple(value["nonces"])}
    attempt = Attempt(**(values | {"ranks": tuple(value["ranks"])}))
    for nonce in attempt.nonces:
        _nonce("nonces", nonce)
    if not 1 <= len(attempt.nonces) <= MOST_RANKS or len(set(attempt.nonces)) < len(attempt.nonces):
        raise WireError("nonces", f"1 to {MOST_RANKS}, each once", attempt.nonces[:4])
    if len(attempt.ranks) != len(attempt.nonces) or not all(
        type(count) is int and 0 < count <= MOST_RANKS for count in attempt.ranks
    ):
        raise WireError("ranks", "a number of ranks for each nonce", attempt.ranks[:4])
    host, colon, port = attempt.master.rpartition(":")
    if not host or not colon or not port.isdecimal() or not 0 < int(port[:6]) < 65_536:
        raise WireError("master", "host:port", attempt.master[:60])
    if not attempt.feeder.startswith("tcp://"):
        raise WireError("feeder", "tcp://host:port", attempt.feeder[:60])
    if not _CURVE_KEY.fullmatch(attempt.feeder_key):
        raise WireError("feeder_key", "a CURVE public key of 40 characters (Z85)", attempt.feeder_key[:60])
    return attempt


def row_value(row: NodeRow | Attempt) -> JsonObject:
    """Return a row as JSON has it."""
    value = asdict(row)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in value.items()}


def _texts(value: JsonMapping) -> None:
    for name, item in value.items():
        if isinstance(item, str) and len(item) > 2 * MOST_TEXT:
            raise WireError(name, f"at most {2 * MOST_TEXT} characters", len(item))


def _nonce(field: str, nonce: object) -> None:
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise WireError(field, "12 hexadecimal digits", repr(nonce)[:60])


def _word(kind: type[StrEnum], field: str, value: object) -> StrEnum:
    try:
        return kind(str(value))
    except ValueError:
        raise WireError(field, f"one of {', '.join(kind)}", repr(value)[:60]) from None
