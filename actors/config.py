"""Settings of actors and engines."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SglangConfig:
    """A real SGLang server behind the engine process (``engine.kind: sglang``)."""

    url: str = ""
    """A server that is running, with the model's weights and ``--weight-version 0``; empty = one is started."""
    python: str = "python3"
    """Interpreter that has SGLang: that of an environment of its own, usually."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the server, by name: ``{tp_size: 2, mem_fraction_static: 0.8}``. A list is several words of the command line, a map JSON."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set for the server besides those of this process."""
    start_timeout_s: float = 900.0
    """Loading a large model takes minutes."""
    silent_s: float = 60.0
    """A server whose scheduler has not answered for so long is given up, frozen or out of reach; longer than any step of it takes."""
    pause: str = "in_place"
    """Of running requests during an update: in_place (keys and values are kept) | retract (computed again with the new weights)."""
    log: str = ""
    """File for the server's output; empty = one in the directory for temporary files."""

    def __post_init__(self) -> None:
        if self.pause not in ("in_place", "retract"):
            raise ValueError(f"pause: want in_place or retract, got {self.pause!r}")
        for name in ("start_timeout_s", "silent_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The inference engine."""

    kind: str = "builtin"
    """Adapter by name (see launch/wiring.py): builtin | sglang."""
    host: str = "auto"
    """Address to listen on; auto = that of the way to the bus (a bus on this machine: 127.0.0.1). Of engines that are started with nothing
    but the bus, ``--host`` instead: an address is a fact of a machine, not of a run."""
    advertise: str = ""
    """Host, or host:port, under which others find it, where that is not ``host`` (containers, NAT)."""
    insecure: bool = False
    """Answer requests of other machines without the run's api key; commands want the admin key even so."""
    port: int = 0
    """0 = any free one."""
    device: str = "auto"
    """auto | cpu | cuda."""
    dtype: str = "float32"
    """float32 | bfloat16."""
    max_running: int = 64
    """Sequences decoded together."""
    max_context: int = 0
    """Tokens of prompt + response; 0 = what the model allows (max_position_embeddings)."""
    max_waiting: int = 4096
    """Responses that may wait besides those that are decoded; a request beyond them gets HTTP 503."""
    threads: int = 1
    """Torch threads of the decoding process."""
    share_prefix: bool = True
    """Requests that wait together with the same prompt share one prefill."""
    colocated: bool = False
    """Derived from ``learner.colocated``: gives its memory to the learner for each step. Engines on other machines never do."""
    sglang: SglangConfig = field(default_factory=SglangConfig)

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: want float32 or bfloat16, got {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device: want auto, cpu or cuda, got {self.device!r}")


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The rollout loop."""

    max_samples_in_flight: int = 64
    """Responses an actor has in generation or reward at once; it leases tasks to keep this full."""
    engines: tuple[str, ...] = ()
    """Engine URLs; empty = those found on the bus."""
    reward: str = ""
    """Reward by name (digits | exact | math_answer) or import path ``module:function``; a run is refused without one."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """Passed to the reward."""
    reward_timeout_s: float = 30.0
    generate_timeout_s: float = 300.0
    """Bound on one response, waiting for the engine included."""
    join_requests: bool = False
    """The responses of a group are asked for in one HTTP request: much cheaper for short ones; they all come when the longest is done."""
    retries: int = 3
    """Attempts at one response on any engine before its task is reported as failed."""
    partials: bool = True
    """When this actor is told to leave: store what is unfinished for whoever goes on with it. False = finish everything first."""
    drain_finish_s: float = 10.0
    """Time to finish responses before that; less than ``up.drain_s`` and what else gives this process time to drain."""

    def __post_init__(self) -> None:
        for name in ("max_samples_in_flight", "reward_timeout_s", "generate_timeout_s", "retries"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: want > 0, got {getattr(self, name)!r}")
        if self.drain_finish_s < 0:
            raise ValueError(f"drain_finish_s: want >= 0, got {self.drain_finish_s!r}")
