"""Settings of the bus."""

import ipaddress
import re
from dataclasses import dataclass

SINGLE_TURN = "single_turn"
"""Name of the rollout that is none: an engine is asked once."""
RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run's name can be part of a subject and of a stream's name."""
UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and bytes of a file's name that are no UTF-8: the configuration of nats-server cannot hold them."""
MAX_REPLICAS = 5
"""Copies of a stream that nats-server keeps at most."""
STORE_SHARE = 0.75
"""Share of a disk's free room that an embedded server takes for its store, beside what the store holds already."""
OLDEST_SERVER = (2, 10)
"""Oldest version of nats-server. Older ones silently ignore settings we need (several filter subjects, stream metadata)."""


@dataclass(frozen=True, kw_only=True)
class BusConfig:
    """Where the bus is and how its streams are kept."""

    url: str = ""
    """NATS URL of a running server (``nats://host:4222``, or several, with commas); empty = an embedded nats-server child."""
    host: str = "127.0.0.1"
    """Address the embedded server listens on; others than this machine's own want ``auth``."""
    port: int = -1
    """Port of the embedded server; -1 = any free one."""
    max_payload_bytes: int = 8_000_000
    """Largest message of the embedded server; larger samples are split."""
    samples_max_bytes: int = 4_000_000_000
    """Bound of the stream SAMPLES; publishers wait when it is full."""
    turns_max_bytes: int = 1_000_000_000
    """Bound of the stream TURNS, which runs with rollouts have; when it is full, episodes go on without a log."""
    history_samples: int = 100_000
    """Messages kept behind the oldest kept checkpoint, for tails and replays."""
    duplicate_window_s: float = 600.0
    """A message id seen within this time is stored once."""
    replicas: int = 1
    """Copies of every stream; at least as many as ``cluster``."""
    lease_s: float = 30.0
    """Seconds without renewal of its lease after which a task goes to another actor."""
    max_attempts: int = 3
    """Failures reported by actors after which a task is dead."""
    sync_always: bool = False
    """fsync every message: survives power loss, 4 to 13 times slower."""
    rollouts: tuple[str, ...] = ()
    """Rollouts, each with a queue of its own; derived: the names in ``rollouts``."""
    auth: bool = False
    """The embedded server lets in only the users it made, each of them only to the subjects that its role needs (docs/security.md)."""
    auth_dir: str = ""
    """Directory of the users' passwords; derived: <directory>/auth."""
    auth_users: int = 16
    """Users made for each of the roles actor, engine and host: ``actor-0``, ``actor-1``, ..."""
    insecure: bool = False
    """Listen on addresses that other machines reach, without users: any client may do everything there."""
    tls_cert: str = ""
    """PEM file: certificate of the embedded server; with it, the server accepts TLS only."""
    tls_key: str = ""
    """PEM file: its key."""
    tls_ca: str = ""
    """PEM file: certificate authority of the server's certificate, for clients; empty = the system's."""
    tls_verify: bool = False
    """The server requires a certificate of every client, too, signed by ``tls_ca``; clients of this configuration show ``tls_cert``."""
    cluster: int = 1
    """Servers of the embedded bus on this machine: 1 or 3."""
    server_name: str = ""
    """Name of the one server of a cluster that this machine has; empty = not part of one."""
    cluster_listen: str = ""
    """host:port at which this server accepts the others of its cluster."""
    cluster_routes: tuple[str, ...] = ()
    """host:port of every server of the cluster."""

    def __post_init__(self) -> None:
        for name in (
            "max_payload_bytes",
            "samples_max_bytes",
            "turns_max_bytes",
            "duplicate_window_s",
            "replicas",
            "lease_s",
            "max_attempts",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.port != -1 and not 0 < self.port < 65536:
            raise ValueError(f"port: want 1..65535, or -1 for any free one, got {self.port}")
        if self.max_payload_bytes < 4096:
            raise ValueError(f"max_payload_bytes: want >= 4096, got {self.max_payload_bytes}")
        if self.history_samples < 0:
            raise ValueError(f"history_samples: want >= 0, got {self.history_samples}")
        for name in self.rollouts:
            if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
                raise ValueError(f"rollouts: want names of 1 to 64 of A-Z a-z 0-9 _ -, got {name!r}")
        self._check_secrets()
        self._check_cluster()

    @property
    def copies(self) -> int:
        """Number of copies of every stream."""
        return max(self.replicas, self.cluster)

    def _check_secrets(self) -> None:
        for name in ("tls_cert", "tls_key", "tls_ca"):
            refuse_odd(name, getattr(self, name))
        if "@" in self.url:
            raise ValueError("url: want no user and password in it (other users can read this file); set TIDEMILL_BUS_CREDENTIALS")
        if self.auth_users < 0:
            raise ValueError(f"auth_users: want >= 0, got {self.auth_users}")
        if not self.url and not (is_loopback(self.host) or self.auth or self.insecure):
            raise ValueError(f"host: {self.host} is open to other machines; want auth: true, or insecure: true")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"tls_cert, tls_key: want both or none, got {self.tls_cert!r} and {self.tls_key!r}")
        if self.tls_verify and not (self.tls_ca and self.tls_cert):
            raise ValueError("tls_verify: want tls_ca and tls_cert, too")

    def _check_cluster(self) -> None:
        if self.cluster not in (1, 3):
            raise ValueError(f"cluster: want 1 or 3 (two survive the loss of none), got {self.cluster}")
        if bool(self.server_name) != bool(self.cluster_listen) or bool(self.server_name) != bool(self.cluster_routes):
            raise ValueError("server_name, cluster_listen, cluster_routes: want all or none")
        if self.replicas > MAX_REPLICAS:
            raise ValueError(f"replicas: want at most {MAX_REPLICAS}, as nats-server does, got {self.replicas}")
        if self.replicas > self.cluster and not (self.url or self.server_name):
            raise ValueError(
                f"replicas: want at most cluster = {self.cluster}, the servers of the embedded bus, got {self.replicas}; set bus.cluster: 3"
            )
        if self.server_name and self.cluster != 1:
            raise ValueError("cluster: want 1 with server_name: this machine has one server of the cluster")
        if self.server_name and not (is_loopback(self.cluster_listen.rpartition(":")[0]) or self.auth or self.insecure):
            raise ValueError(f"cluster_listen: {self.cluster_listen} is open to other machines; want auth: true, or insecure: true")


def refuse_odd(name: str, text: str) -> None:
    """Raise ValueError for a setting, by its name, that cannot be written."""
    if (odd := UNQUOTABLE.search(text)) is not None:
        raise ValueError(f"{name}: want a name without control characters, in UTF-8, got {odd[0]!r} in {text!r}; use another name")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
