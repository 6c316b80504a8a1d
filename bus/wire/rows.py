"""Rows of the key-value buckets, field by field; a row of another shape is refused as it is read.

Fields without a default are required, further fields are ignored. Rows that other rooms describe in full are here as
far as a process must be able to rely on them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.mismatch import mismatch

_MAX_FLOAT = 1.7976931348623157e308

# Text without halves of surrogate pairs, which no terminal and no file can take
Text = Annotated[str, Meta(pattern="\\A[^\ud800-\udfff]*\\Z", description="text")]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1, description="an integer >= 0")]
Number = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT, description="a finite number")]
Gauge = Number | bool
# A key as it can stand in a header of HTTP
Key = Annotated[str, Meta(pattern=r"\A[!-~]{1,512}\Z", description="1 to 512 visible ASCII characters")]
R = TypeVar("R")


MAX_RANKS = 1024
MAX_TEXT = 2_000  # Characters of a text of a node's row; a reason is cut to them
_Bounded = Annotated[Text, Meta(max_length=2 * MAX_TEXT)]
_NumRanks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
_Nonce = Annotated[str, Meta(pattern=r"^[0-9a-f]{12}\Z")]
# Letters of a CURVE public key. Source: ZeroMQ RFC 32.
_Z85 = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_CurveKey = Annotated[str, Meta(pattern=rf"^{_Z85}\Z")]
_CurveKeyOrNone = Annotated[str, Meta(pattern=rf"^({_Z85})?\Z")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of an engine to receive weights and to serve them to others; of a learner, its devices alone."""

    single_request_push: bool = False
    """It receives a push in one request; else begin, each bucket and the end have a request each."""
    peer_snapshots: bool = False
    """It serves snapshots of the weights it has to engines that catch up."""
    colocated: bool = False
    """It shares an accelerator with the learner, and releases its memory for each step."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS, description=f"an integer from 1 to {MAX_RANKS}")] = 1
    """Number of its processes that receive weights: one for each tensor-parallel rank, 1 to ``MAX_RANKS``."""
    devices: tuple[Text, ...] = ()
    """UUIDs of the accelerators on which it computes (``GPU-...``); empty = none, or not known."""
    visible_devices: tuple[Text, ...] = ()
    """UUIDs of the accelerators with memory that it can open, its own among them; empty = none, or not known."""
    nccl: Text = ""
    """NCCL version of the processes that receive weights (``2.29.7``); empty = not known."""
    device_memory_bytes: Natural = 0
    """Memory of its smallest accelerator; 0 = not known."""
    adapters: bool = False
    """It receives a low-rank adapter without the weights that it is added to, which it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Use of one accelerator, by all processes that compute on it."""

    device: Text
    utilisation: Number | None = None
    """Share of the last second in which it computed anything; None = the driver does not report it."""
    memory_used_bytes: Natural | None = None
    memory_bytes: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Use of the machine by a process and its child processes. That of a host or of ``tidemill up`` is without them:
    its child processes have rows of their own.
    """

    cpu_share: Number | None = None
    """Processor time for each second that passes: 1 = one core all the time. None = not reported."""
    memory_bytes: Natural | None = None
    """Resident memory; None = not reported."""
    devices: tuple[DeviceUse, ...] = ()
    """The accelerators of the process; empty without NVIDIA's driver or the package ``nvidia-ml-py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """Liveness row of a process, written with every heartbeat."""

    role: Text
    """bus | engine | actor | scorer | feeder | learner | host | router | up."""
    id: Text
    host: Text
    pid: Whole
    phase: Text
    """starting | joining | catching up | serving | stale | waiting | working | draining | ..."""
    waits_for: Text = ""
    """Condition that it waits for and since when, in words."""
    trouble: Text = ""
    """Repeated failures, in words: how often, and the last reason; empty = none."""
    version: Whole = -1
    epoch: Whole = 0
    load: dict[Text, Gauge] = field(default_factory=dict)
    """Counters and gauges (tokens_generated, waiting_share, in_flight, ...)."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    taking_memory: bool = False
    """A colocated engine is taking memory by itself; a learner that acquires the accelerator waits for it."""
    address: Text = ""
    pool: Text = ""
    """Group of hosts that a host belongs to."""
    handles: Text = ""
    """Address at which an engine receives handles of weights (``ipc://...``), if it does."""
    place: Text = ""
    """Domain of shared memory of an engine that receives handles; engines with equal ones can share memory."""
    release: Text = ""
    """Version of the package that it runs; empty = one that did not report it."""
    unreadable: Text = ""
    """Messages and rows that it passed over (``bus/client/jetstream.py``); empty = none."""
    rollouts: tuple[Text, ...] = ()
    """Rollouts whose tasks an actor leases, ``single_turn`` for those without one; empty = not reported."""
    nonce: Text = ""
    """Random text of an engine's process, which it answers to a call at its ``address``; empty = it answers none."""
    reached: dict[Text, Text] = field(default_factory=dict)
    """Engines that this process has called at their addresses: nonce -> the error; empty = the nonce came back."""
    use: MachineUse = field(default_factory=MachineUse)
    log: Text = ""
    """File on its host that it writes its log to; empty = another place, such as the output of a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One set of weights. Written as ``pushing`` before its push, then head moves to it."""

    version: Natural
    step: Natural
    epoch: Natural
    state: Text = "pushing"
    """pushing | published | failed."""
    digest: Text = ""
    """Digest of the manifest (names, shapes, dtypes)."""
    snapshot: Text = ""
    """URL or directory of a snapshot of these weights, when there is one."""
    adapter: Text = ""
    """URL of a snapshot of these weights as an adapter alone, when there is one."""
    after: Whole = -1
    """Last sequence of SAMPLES before any engine could have it, so no sample up to there is of it; -1 = not set."""
    afters: tuple[Natural, ...] = ()
    """That of each shard, where there are several; ``after`` is then the smallest."""

    @property
    def position(self) -> tuple[int, ...]:
        """Sequence of each shard up to which no sample is of it."""
        return self.afters or (max(0, self.after),)

    def stored(self) -> JsonObject:
        """Return the row as it is stored: runs with one stream of samples have no ``afters``."""
        fields = dataclasses.asdict(self)
        return fields if self.afters else {name: value for name, value in fields.items() if name != "afters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRow:
    """The row of a registered reader of SAMPLES."""

    created: Text
    floor: Natural
    """Highest sequence up to which all samples are processed."""
    policy: Text = "wait"
    """Whether trimming waits for it: wait | leave."""
    owner: Text = ""
    """Name of the process that reads; a process that starts takes over."""
    given_up: bool = False
    """True when trimming stopped waiting for it, because the stream was too full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleRow:
    """The row of the autoscaler that decides."""

    owner: Text
    """Nonce of its process."""
    reason: Text
    """Reason for the present numbers, or for the last change."""
    counts: dict[Text, Natural] = field(default_factory=dict)
    """Desired numbers of all hosts together that it has written, by role."""
    beats: Natural = 0
    """Increases with every renewal."""


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

    node: Natural
    nodes: _NumRanks
    """Number of nodes, as this agent was started."""
    nonce: _Nonce
    """Nonce of this offer: new at the start of the agent and after each attempt."""
    phase: Phase = Phase.READY
    agent: _Bounded = ""
    """Nonce of the process."""
    host: _Bounded = ""
    epoch: Natural = 0
    """Epoch of the last attempt that this agent was part of; 0 = none."""
    place: _Bounded = ""
    """Boot id and process-id namespace: agents with equal ones see each other's process ids."""
    pid: Natural = 0
    address: _Bounded = ""
    """Advertised address of the node, without a port."""
    key: _CurveKeyOrNone = ""
    """CURVE public key of its ranks, for one attempt."""
    versions: Mapping[Text, Text] = field(default_factory=dict)
    """Versions and settings that must be equal on all nodes, by name."""
    devices: tuple[Text, ...] = ()
    """UUIDs of the devices that ranks may have; empty = they run on the CPU."""
    device_memory_bytes: Natural = 0
    probe_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Port under ``address`` at which this agent answers calls of the others; 0 = it does not listen."""
    reached: Annotated[Mapping[_Bounded, _Bounded], Meta(max_length=MAX_RANKS)] = field(default_factory=dict)
    """Results of its calls to the other nodes, by the nonce of their offer: empty = reached, else why not."""
    reason: _Bounded = ""
    """Why its last attempt ended, or why it has given up."""
    exit_code: Natural = 0
    """Exit code of an agent that has given up."""
    waits_for: _Bounded = ""
    beats: Natural = 0
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

    epoch: Natural
    nonces: Annotated[tuple[_Nonce, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    """Nonces of the offers that it runs under, by node."""
    ranks: tuple[_NumRanks, ...]
    """Number of ranks of each node; they are numbered through."""
    master: Annotated[str, Meta(pattern=r"^.+:[0-9]{1,5}\Z", max_length=2 * MAX_TEXT)]
    """host:port of torch's store."""
    feeder: Annotated[str, Meta(pattern="^tcp://", max_length=2 * MAX_TEXT)]
    """URL of the feeder, tcp://host:port."""
    feeder_key: _CurveKey
    """CURVE public key of the feeder."""
    proof: _Bounded = ""
    """Content of the file that shows that all nodes share the directory of the checkpoints; empty = they need not."""
    state: State = State.FORMING
    reason: _Bounded = ""
    exit_code: Natural = 0

    def has(self, row: NodeRow) -> bool:
        """Return whether this row's offer is part of the attempt."""
        return row.node < len(self.nonces) and self.nonces[row.node] == row.nonce

    def first_rank(self, node: int) -> int:
        """Return the number of the first rank of a node."""
        return sum(self.ranks[:node])


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node's checkpoint files."""

    node: Natural
    url: Text
    """Where the node serves them."""
    held: dict[Text, list[Text]]
    """Files by checkpoint."""
    host: Text = ""
    trouble: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A node's uploads to the store of checkpoints."""

    node: Natural
    files: dict[Text, list[Text]]
    """Files that the node has uploaded, by checkpoint."""
    whole: dict[Text, Text] = field(default_factory=dict)
    """Checkpoints that are complete in the store, with the digests of their manifests; written by node 0."""
    lacking: dict[Text, list[Text]] = field(default_factory=dict)
    """Files that are not in the store, though their nodes have uploaded them, by checkpoint; written by node 0."""
    store: Text = ""
    """The store's URL; empty = not known."""
    host: Text = ""
    trouble: Text = ""


class Outcome(StrEnum):
    """How a run has ended."""

    DONE = "done"
    """Its last step is in the latest checkpoint."""
    FAILED = "failed"
    """Its learner has ended with a code that no restart cures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """The end of a run. A drained learner writes none, and one that starts with steps left to do removes it."""

    outcome: Outcome
    code: Annotated[int, Meta(ge=0, le=255)]
    """Exit code of the learner."""
    reason: _Bounded
    """``learner.steps``, the reason of an earlier end, or the error."""
    step: Natural
    """Last step of the run in a checkpoint."""
    time_s: Number
    """Unix time."""
    epoch: Natural = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMark:
    """A place in PLAN at which a checkpoint was made, with everything that the records up to there have settled."""

    step: Natural
    seq: Natural
    """Sequence of the step's plan."""
    task: Natural
    """Largest settled task."""
    floors: tuple[Natural, ...]
    """Settled samples: all up to these sequences, one for each shard,"""
    settled: tuple[Natural, ...]
    """and these above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """Summary of removed records of PLAN, and of removed dead letters, without which an audit would not balance."""

    removed: PlanMark | None = None
    """Records up to this place are removed, or just about to be; None = none are."""
    next: PlanMark | None = None
    """Place up to which the next ones are removed, once their samples and tasks are trimmed."""
    trained: Natural = 0
    dropped: dict[Text, Natural] = field(default_factory=dict)
    """Samples by drop reason."""
    given_up: dict[Text, Natural] = field(default_factory=dict)
    """Tasks by reason."""
    trained_tasks: Natural = 0
    skipped: Natural = 0
    """Minibatches with a loss or gradients that were not finite."""
    max_lag: Natural = 0
    letters: Natural = 0
    """Number of dead letters that are removed, or just about to be."""
    letters_to: Natural = 0
    """Task up to which they are."""


def row_of(kind: type[R], value: JsonObject) -> R:
    """Return a row of this type from its JSON object. Raises WireError naming the field."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise mismatch(error, value, kind) from None
