"""Settings of the bus."""

import re
from dataclasses import dataclass

RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""A run's name can be part of a subject and of a stream's name."""


@dataclass(frozen=True, kw_only=True)
class BusConfig:
    """Where the bus is and how its streams are kept."""

    url: str = ""
    """NATS URL of a running server (``nats://host:4222``); empty = an embedded nats-server child."""
    host: str = "127.0.0.1"
    """Address the embedded server listens on."""
    port: int = -1
    """Port of the embedded server; -1 = any free one."""
    max_payload_bytes: int = 8_000_000
    """Largest message of the embedded server; larger samples are split."""
    samples_max_bytes: int = 4_000_000_000
    """Bound of the stream SAMPLES; publishers wait when it is full."""
    history_samples: int = 100_000
    """Messages kept behind the oldest kept checkpoint, for tails and replays."""
    duplicate_window_s: float = 600.0
    """A message id seen within this time is stored once."""
    replicas: int = 1
    """Copies of every stream (3 on a cluster of three)."""
    lease_s: float = 30.0
    """A task not renewed for so long goes to another actor."""
    max_attempts: int = 3
    """Failures reported by actors after which a task is dead."""
    sync_always: bool = False
    """fsync every message: survives power loss, 4 to 13 times slower."""

    def __post_init__(self) -> None:
        for name in ("max_payload_bytes", "samples_max_bytes", "duplicate_window_s", "replicas", "lease_s", "max_attempts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.max_payload_bytes < 4096:
            raise ValueError(f"max_payload_bytes: want >= 4096, got {self.max_payload_bytes}")
        if self.history_samples < 0:
            raise ValueError(f"history_samples: want >= 0, got {self.history_samples}")
