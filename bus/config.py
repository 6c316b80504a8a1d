"""Settings of the bus."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.errors import Unquotable
from tidemill.bus.section import (
    Derived,
    Name,
    NotNegative,
    NotNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    ShortName,
    section,
)

SINGLE_TURN = "single_turn"  # Name of the rollout that is none: an engine is asked once
# Control characters, and bytes of a file's name that are no UTF-8: the configuration of nats-server cannot hold them
UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_SHARDS = 64
MAX_REPLICAS = 5  # Copies of a stream that nats-server keeps at most
# Share of a disk's free room that an embedded server takes for its store, beside what the store holds already
STORE_SHARE = 0.75
# Least room for tasks, plans, partials, reports of failures and rows: 4 MB for each bucket of rows
MIN_RECORDS_BYTES = 100_000_000
LEAF_CURE = "set default_js_domain of the leaf node to the domain of its hub's jetstream (docs/scaling.md)"
# Oldest version of nats-server. Older ones silently ignore settings we need (several filter subjects, stream metadata).
OLDEST_SERVER = (2, 10)


@section
@dataclass(frozen=True, kw_only=True)
class BusConfig:
    """Where the bus is and how its streams are kept."""

    url: str = ""
    """NATS URL of a running server (``nats://host:4222``, or several, with commas); empty = an embedded nats-server
    child.
    """
    host: str = "127.0.0.1"
    """Address the embedded server listens on; others than this machine's own want ``auth``."""
    port: Annotated[int, Field(ge=-1, le=65535)] = -1
    """Port of the embedded server; -1 = any free one."""
    max_payload_bytes: Annotated[int, Field(ge=4096)] = 8_000_000
    """Largest message of the embedded server; larger samples are split."""
    samples_max_bytes: Positive = 4_000_000_000
    """Bound of the stream SAMPLES; publishers wait when it is full."""
    sample_shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """Streams among which SAMPLES is divided, each with its share of ``samples_max_bytes`` and, with two or more, a
    reader process in the learner.
    """
    turns_max_bytes: Positive = 1_000_000_000
    """Bound of the stream TURNS, which runs with rollouts have; when it is full, episodes go on without a log."""
    trained_max_bytes: Positive = 256_000_000
    """Bound of the stream TRAINED, which loses its oldest values of trained tokens (``learner.record``) beyond it."""
    quota_bytes: NotNegative = 0
    """Bound of all streams and rows of the run together, for a bus with several runs: tasks, plans, partials, reports
    of failures and rows share what the three bounds above leave, which must be 100 MB; 0 = these have no bound.
    """
    tasks_per_s: NotNegativeFloat = 0.0
    """Tasks that the learner issues per second at most, of training and evaluation: all that a run sends follows from
    its tasks; 0 = no bound.
    """
    history_samples: NotNegative = 100_000
    """Messages kept behind the oldest kept checkpoint, for tails and replays."""
    history_steps: Annotated[int, Field(ge=100)] = 100_000
    """Steps behind the oldest kept checkpoint whose records and versions are kept at least, for curves, audits and
    replays; at most twice as many are there (4.6 KB each with 32 samples a step).
    """
    duplicate_window_s: PositiveFloat = 600.0
    """A message id seen within this time is stored once."""
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Copies of every stream; at least as many as ``cluster``."""
    lease_s: PositiveFloat = 30.0
    """Seconds without renewal of its lease after which a task goes to another actor."""
    max_attempts: Positive = 3
    """Failures reported by actors after which a task is dead."""
    sync_always: bool = False
    """fsync every message: survives power loss, 4 to 13 times slower."""
    rollouts: Annotated[tuple[Name, ...], Derived("rollouts"), SkipJsonSchema()] = ()
    """Rollouts, each with a queue of its own."""
    auth: bool = False
    """The embedded server lets in only the users it made, each of them only to the subjects that its role needs
    (docs/security.md).
    """
    auth_dir: str = ""
    """Directory of the users' passwords; derived: <directory>/auth."""
    auth_users: NotNegative = 16
    """Users made for each of the roles actor, engine and host: ``actor-0``, ``actor-1``, ..."""
    auth_shadows: tuple[ShortName, ...] = ()
    """Shadow learners that get a user each, ``shadow-NAME``, which only reads the run (docs/shadow.md)."""
    insecure: bool = False
    """Listen on addresses that other machines reach, without users: any client may do everything there."""
    tls_cert: str = ""
    """PEM file: certificate of the embedded server; with it, the server accepts TLS only."""
    tls_key: str = ""
    """PEM file: its key."""
    tls_ca: str = ""
    """PEM file: certificate authority of the server's certificate, for clients; empty = the system's."""
    tls_verify: bool = False
    """The server requires a certificate of every client, too, signed by ``tls_ca``; clients of this configuration show
    ``tls_cert``.
    """
    monitoring: Annotated[str, Field(pattern=r"^(\S+:[0-9]{1,5})?$")] = ""
    """host:port at which the embedded server shows its monitoring pages (``/jsz``, ``/varz``) to any client, for KEDA
    and exporters: counts, addresses and names of users, no messages. Empty = to ``tidemill bus`` alone.
    """
    cluster: Annotated[int, OneOf((1, 3))] = 1
    """Servers of the embedded bus on this machine: 1 or 3."""
    server_name: str = ""
    """Name of the one server of a cluster that this machine has; empty = not part of one."""
    cluster_listen: str = ""
    """host:port at which this server accepts the others of its cluster."""
    cluster_routes: tuple[str, ...] = ()
    """host:port of every server of the cluster."""

    def __post_init__(self) -> None:
        if self.port == 0:
            raise ValueError("port: want 1..65535, or -1 for any free one, got 0")
        self._check_quota()
        self._check_secrets()
        self._check_cluster()

    @property
    def copies(self) -> int:
        """Number of copies of every stream."""
        return max(self.replicas, self.cluster)

    @property
    def records_bytes(self) -> int:
        """Share of ``quota_bytes`` for all that has no bound of its own; 0 or less = there is no quota."""
        turns_bytes = self.turns_max_bytes if self.rollouts else 0
        return self.quota_bytes - self.samples_max_bytes - turns_bytes - self.trained_max_bytes

    def _check_quota(self) -> None:
        if self.quota_bytes and self.records_bytes < MIN_RECORDS_BYTES:
            least = self.quota_bytes - self.records_bytes + MIN_RECORDS_BYTES
            raise ValueError(
                f"quota_bytes: want >= {least:,}: samples_max_bytes, trained_max_bytes, with rollouts turns_max_bytes, "
                f"and {MIN_RECORDS_BYTES:,} for all else; got {self.quota_bytes:,}"
            )

    def _check_secrets(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_ca"):
            refuse_odd(name, getattr(self, name))
        if "@" in self.url:
            want = "no user and password in it (other users can read this file)"
            raise ValueError(f"url: want {want}; set TIDEMILL_BUS_CREDENTIALS")
        if not self.url:
            self._check_open("host", self.host)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert, tls_key: want both or none, got {self.tls_cert!r} and {self.tls_key!r}")
        if self.tls_verify and not (self.tls_ca and self.tls_cert):
            raise ValueError("tls_verify: want tls_ca and tls_cert, too")

    def _check_cluster(self) -> None:
        if bool(self.server_name) != bool(self.cluster_listen) or bool(self.server_name) != bool(self.cluster_routes):
            raise ValueError("server_name, cluster_listen, cluster_routes: want all or none")
        if self.replicas > self.cluster and not (self.url or self.server_name):
            want = f"at most cluster = {self.cluster}, the servers of the embedded bus"
            raise ValueError(f"replicas: want {want}, got {self.replicas}; set bus.cluster: 3")
        if self.server_name and self.cluster != 1:
            raise ValueError("cluster: want 1 with server_name: this machine has one server of the cluster")
        if self.monitoring and self.cluster != 1:
            raise ValueError("monitoring: want cluster: 1, because several servers cannot share a port")
        if self.server_name:
            self._check_open("cluster_listen", self.cluster_listen, self.cluster_listen.rpartition(":")[0])

    def _check_open(self, name: str, address: str, host: str = "") -> None:
        if not (is_loopback(host or address) or self.auth or self.insecure):
            raise ValueError(f"{name}: {address} is open to other machines; want auth: true, or insecure: true")


def refuse_odd(name: str, text: str) -> None:
    """Raise ValueError for a setting, by its name, that cannot be written."""
    if (odd := UNQUOTABLE.search(text)) is not None:
        got = f"{odd[0]!r} in {text!r}"
        raise ValueError(f"{name}: want a name without control characters, in UTF-8, got {got}; use another name")


def quoted(text: str) -> str:
    """Return the text as a string of nats-server's configuration, which knows no ``\\uXXXX``. Raises Unquotable."""
    if (odd := UNQUOTABLE.search(text)) is not None:
        raise Unquotable(text, odd[0])
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def quoted_list(texts: Iterable[str]) -> str:
    """Return the texts as a list of strings, on one line."""
    return f"[{', '.join(map(quoted, texts))}]"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_MESSAGES = 4  # Number of the largest messages for which a disk must have room before a server is started on it


def needed_bytes(config: BusConfig) -> int:
    """Return the free room that a server is started with."""
    return _MESSAGES * config.max_payload_bytes
