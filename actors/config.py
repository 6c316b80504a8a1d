"""Settings of actors, engines, teachers and routers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.section import (
    BASIC,
    Derived,
    NotNegative,
    NotNegativeFloat,
    OrAuto,
    Positive,
    PositiveFloat,
    Sections,
    refusal,
    section,
    short,
)
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.rewards.part_settings import SCORE, RewardParts, fits

OF_RANKS = (
    ("tp_size", "tensor_parallel_size", "tp"),
    ("pp_size", "pipeline_parallel_size", "pp"),
    ("dp_size", "data_parallel_size", "dp"),
)
"""Arguments of SGLang, each with its other names; their product is the number of its devices."""


def _server(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise refusal("http://HOST:PORT")
    return url.rstrip("/")


Server = Annotated[str, AfterValidator(_server)]


@section
@dataclass(frozen=True, kw_only=True)
class SglangConfig:
    """A real SGLang server behind the engine process (``engine.kind: sglang``)."""

    url: str = ""
    """A server that is running, with the model's weights and ``--weight-version 0``; empty = one is started."""
    python: str = "python3"
    """Interpreter that has SGLang, usually of an environment of its own."""
    arguments: JsonObject = field(default_factory=dict)
    """Arguments of the server that have been tried: ``{tp_size: 2, mem_fraction_static: 0.8}`` (docs/sglang.md)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set for the server besides the variables of this process."""
    start_timeout_s: PositiveFloat = 900.0
    """Loading a large model takes minutes."""
    silent_s: PositiveFloat = 60.0
    """Seconds without an answer after which a server counts as dead; must be longer than its longest step."""
    pause: Literal["in_place", "retract"] = "in_place"
    """Running requests during an update: in_place (their KV cache is kept) | retract (it is computed again)."""
    log: str = ""
    """File for the server's output; empty = one in the directory for temporary files."""

    def argument(self, *names: str) -> object:
        """Return an argument under any of its names, with hyphens or underscores; None if it is not given."""
        arguments = {name.replace("-", "_"): value for name, value in self.arguments.items()}
        return next((arguments[name] for name in names if name in arguments), None)

    def int_argument(self, name: str, setting: int) -> int:
        """Return the number in an argument, which takes precedence over a setting of the engine; 0 = none."""
        value = self.argument(name)
        return int(value) if isinstance(value, int | str) and str(value).isdecimal() else setting


@section
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The inference engine."""

    kind: Annotated[Literal["builtin", "sglang"], BASIC] = "builtin"
    """Adapter by name (see launch/run/workers.py): builtin | sglang."""
    host: str = "auto"
    """Address to listen on; auto = the address of the interface that leads to the bus (127.0.0.1 for a bus on this
    machine). Engines that are started without ``--config`` take ``--host`` instead: an address belongs to a machine,
    not to a run.
    """
    advertise: str = ""
    """Host, or host:port, at which other processes reach it, where that is not ``host`` (containers, NAT)."""
    insecure: bool = False
    """Answer requests of other machines without the run's api key; commands need the admin key even so."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 = any free one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto | cpu | cuda."""
    devices: tuple[str, ...] = ()
    """GPUs of the engines of a machine: numbers of nvidia-smi or UUIDs, as many for each engine as it has ranks; empty
    = those that the learner leaves (docs/devices.md). Engines that are started without ``--config`` take
    ``TIDEMILL_ENGINE__DEVICES`` instead.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto | float32 | bfloat16; auto = bfloat16 on CUDA, float32 on the CPU (``/server_info`` has the one in use)."""
    runner: Literal["auto", "decoder", "transformers"] = "auto"
    """What runs the model in the built-in engine: auto | decoder | transformers; auto = the engine's own decoder for
    the families that it has, and the library transformers for every other one. With transformers a family with
    states (convolutions, linear attention) shares prompts that join together alone, and adapters are merged.
    """
    max_running: Annotated[Positive, BASIC] = 64
    """Sequences decoded together."""
    max_context: NotNegative = 0
    """Tokens of prompt + response; 0 = the model's limit (max_position_embeddings)."""
    kv_tokens: NotNegative = 0
    """Tokens with keys and values in memory, of all sequences together; 0 = ``max_running`` longest contexts, in a
    quarter of the device's memory at most (with SGLang its own choice, see ``max_total_tokens``).
    """
    max_waiting: Positive = 4096
    """Responses that may wait for decoding; a request beyond them gets HTTP 503."""
    threads: Positive = 1
    """Torch threads of the decoding process."""
    share_prefix: bool = True
    """Prompts share keys and values of the tokens that they begin with, which are computed once."""
    colocated: Annotated[bool, Derived("learner.colocated"), SkipJsonSchema()] = False
    """The engine releases its memory for each step. Engines on other machines never do."""
    routed_experts: Annotated[bool, Derived("learner.routing_replay"), SkipJsonSchema()] = False
    """A SGLang server is started with ``--enable-return-routed-experts``."""
    family: Annotated[str, Derived("learner.family"), SkipJsonSchema()] = ""
    """Its module may register the model with transformers."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    """The SGLang server, for ``engine.kind: sglang``."""

    @property
    def context_bounds(self) -> tuple[int, int]:
        """Bounds of the tokens of a sequence by these settings: ``max_context``, and the room for keys and values
        (``kv_tokens``); 0 = none. Arguments of a SGLang server that is started take precedence.
        """
        if self.kind != "sglang" or self.sglang.url:
            return self.max_context, self.kv_tokens
        given = self.sglang.int_argument
        return given("context_length", self.max_context), given("max_total_tokens", self.kv_tokens)

    @property
    def kv_setting(self) -> str:
        """Name of the setting that gives the second of ``context_bounds``."""
        is_started = self.kind == "sglang" and not self.sglang.url
        is_argument = is_started and self.sglang.int_argument("max_total_tokens", 0)
        return "engine.sglang.arguments.max_total_tokens" if is_argument else "engine.kv_tokens"


@section
@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The listener through which programs of episodes ask the model. Every request needs the key of its episode."""

    host: str = "127.0.0.1"
    """Address to listen on; auto = the address of the interface that leads to the bus, 0.0.0.0 = all. Beyond loopback
    it is for agents in containers and on other hosts; their requests are not encrypted (docs/security.md).
    """
    advertise: str = ""
    """Host, or host:port, in the ``base_url`` of programs, where that is not ``host`` (containers, NAT)."""
    renderer: str = ""
    """Renderer of the library ``renderers`` (extra ``renderers``) that makes token ids of chats, and reasoning and
    calls of tools of token ids, in the model's own format (docs/rollouts.md): its name (qwen3, glm-4.5, deepseek-v3,
    ...), or auto = that of the model's public name. Empty = the model's chat template, and calls of two formats.
    """
    renderer_options: JsonObject = field(default_factory=dict)
    """Fields of the renderer's config: ``{enable_thinking: false}``, ``{thinking_retention: all}``."""
    untrained_models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names in ``model`` of a request that is served, but is context only: of a simulated user, a judge."""

    def __post_init__(self) -> None:
        if self.renderer_options and not self.renderer:
            raise ValueError(f"renderer_options: want none without a renderer, got {self.renderer_options!r}")


@section
@dataclass(frozen=True, kw_only=True)
class ScorersConfig:
    """Processes ``tidemill scorer``, which compute the rewards of a run instead of its actors (docs/rewards.md)."""

    enabled: bool = False
    """True = actors send their samples to scorers, which they find on the bus, and load no reward themselves."""
    host: str = "auto"
    """Address on which a scorer of this machine listens; auto = the interface that leads to the bus, 0.0.0.0 = all."""
    advertise: str = ""
    """Host, or host:port, at which actors reach it, where that is not ``host`` (containers, NAT)."""


@section
@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One teacher, an entry of ``actor.teachers``."""

    name: SkipJsonSchema[str] = field(default="", init=False)
    urls: Annotated[
        tuple[Server, ...], Strict(False), BeforeValidator(lambda urls: [urls] if isinstance(urls, str) else urls)
    ] = ()
    """Addresses of its servers with SGLang's HTTP API: SGLang, ``tidemill teacher``, or a router before several."""
    url: Server | None = None
    """One more of these addresses."""
    model: str = ""
    """Directory of its model: ``tidemill up`` serves it on this machine's CPUs (built-in engine), and sets ``urls``."""
    when: JsonObject = field(default_factory=dict)
    """Metadata that a row must have for this teacher to score its samples; empty = any row."""

    def __post_init__(self) -> None:
        if not self.servers and not self.model:
            want = "want urls, of servers that run, or model, a directory that `tidemill up` serves"
            raise ValueError(f"urls: {want}; got neither")

    @property
    def servers(self) -> tuple[str, ...]:
        """All addresses of its servers."""
        return self.urls if self.url is None else (*self.urls, self.url)

    def applies(self, metadata: JsonMapping) -> bool:
        """Return whether this teacher scores the samples of a row with such metadata."""
        return fits(self.when, metadata)


Teachers = Sections[Annotated[TeacherConfig, short("url", TeacherConfig)]]
"""The teachers by name, in order: the first that applies to a row scores its samples."""


def chosen(teachers: Iterable[TeacherConfig], metadata: JsonMapping) -> TeacherConfig | None:
    """Return the first teacher that applies to a row with such metadata; None = none does."""
    return next((teacher for teacher in teachers if teacher.applies(metadata)), None)


@section
@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The rollout loop."""

    max_samples_in_flight: Annotated[int | str, OrAuto()] = "auto"
    """Responses an actor has in generation or reward at once; it leases tasks to keep this full. auto = as many as keep
    the engines busy, by their queues; 64 for each engine that reports none.
    """
    engines: tuple[str, ...] = ()
    """Engine URLs; empty = those found on the bus."""
    rollouts: tuple[str, ...] = ()
    """Names of ``rollouts`` that the actor loads, and whose tasks it leases; ``single_turn`` for tasks without one.
    Empty = all, and single turns. For one actor: ``tidemill actor --rollouts a,b``.
    """
    reward: Annotated[str, BASIC] = ""
    """Reward by name (docs/rewards.md) or import path ``module:function``; a run is refused without one."""
    reward_options: JsonObject = field(default_factory=dict)
    """Passed to the reward."""
    reward_parts: RewardParts = field(default_factory=RewardParts)
    """Instead of ``reward``: rewards whose weighted scores are added, ``{NAME: {reward, weight, options, when}}``."""
    group_reward: str = ""
    """Reward of all samples of a task at once, by name or import path, instead of ``reward`` (docs/rewards.md)."""
    group_reward_options: JsonObject = field(default_factory=dict)
    """Passed to the reward of groups."""
    group_reward_when: JsonObject = field(default_factory=dict)
    """Metadata that a row must have for this; samples of other rows keep their reward. Empty = any."""
    reward_timeout_s: PositiveFloat = 30.0
    """Seconds for one call of the reward; the sample is FAILED after it."""
    reward_workers: Positive = 16
    """Child processes of a plain reward by import path, each with one call at a time; they are started on demand."""
    reward_memory_mb: NotNegative = 4096
    """Private memory of each of these processes; 0 = no limit."""
    scorers: ScorersConfig = field(default_factory=ScorersConfig)
    """Processes of their own for the rewards."""
    teachers: Teachers = field(default_factory=Teachers)
    """Teachers for on-policy distillation by name, ``{NAME: {urls, or model, when}}``: the first one with a ``when``
    that fits a row scores its samples (docs/distillation.md).
    """
    teacher_top_k: Annotated[NotNegative, Derived("learner.algorithm.distill.top_k"), SkipJsonSchema()] = 0
    """Tokens that a teacher lists at each position."""
    teacher_timeout_s: PositiveFloat = 120.0
    """Seconds to have a sequence scored, a wait for the teacher included; the sample is FAILED after them."""
    teacher_attempts: Positive = 3
    """Failures of a teacher, or answers that are no scores, after which the sample is FAILED."""
    generate_timeout_s: PositiveFloat = 300.0
    """Bound on one response, waiting for the engine included."""
    join_requests: bool = False
    """Request all responses of a group of single turns at once: cheaper for short ones, but all arrive when the longest
    is done.
    """
    routed_experts: Annotated[bool, Derived("learner.routing_replay"), SkipJsonSchema()] = False
    """Engines return the experts of each token, which become part of samples."""
    retries: Positive = 3
    """Attempts at one response on any engine before its task is reported as failed."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """Where programs of episodes reach the actor."""
    partials: bool = True
    """On a drain, store unfinished responses for another actor to continue. False = finish all of them first."""
    drain_finish_s: NotNegativeFloat = 10.0
    """Seconds to finish responses before that; must be less than ``up.drain_s`` and other drain limits."""

    def __post_init__(self) -> None:
        if self.reward and self.reward_parts:
            raise ValueError(f"reward_parts: want either reward or reward_parts, got both (reward is {self.reward!r})")
        if SCORE in self.reward_parts:
            raise ValueError(f"reward_parts.{SCORE}: want another name; the sum has this one")
        if self.group_reward_when and not (self.group_reward and (self.reward or self.reward_parts)):
            want = "want group_reward, and reward or reward_parts for the rows that it does not fit"
            raise ValueError(f"group_reward_when: {want}, got {self.group_reward_when!r:.200}")


@section
@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """One router."""

    host: str = "127.0.0.1"
    """Address to listen on; auto = the address of the interface that leads to the bus. Any address but loopback
    requires a key of the run, and so a bus.
    """
    advertise: str = ""
    """Host, or host:port, at which other processes reach it, where that is not ``host``."""
    insecure: bool = False
    """Answer other machines without a key; without a bus, obey ``/add_worker`` and ``/remove_worker`` too."""
    port: int = 0
    """0 = any free one."""
    workers: tuple[str, ...] = ()
    """URLs of engines known from the start, besides those on the bus."""
    middleware: tuple[str, ...] = ()
    """``package.module:factory`` each, outermost first; ``factory(config)`` returns a ``exchange.Middleware``."""
    model: str = ""
    """Directory of the model with the tokenizer and the chat template that the middleware uses."""
    timeout_s: PositiveFloat = 3600.0
    """Time limit of a request, from its arrival to the last byte of its answer."""
    idle_s: PositiveFloat = 600.0
    """Time limit between two chunks of an answer, and for a client to accept one."""
    connect_s: PositiveFloat = 5.0
    """Time limit of a connection to an engine."""
    wait_s: PositiveFloat = 60.0
    """Longest wait of a request for an engine that serves."""
    retries: NotNegative = 3
    """Further attempts at a request that can be repeated safely, each at another engine if there is one."""
    health_every_s: PositiveFloat = 1.0
    """Interval of the health checks of an engine."""
    health_timeout_s: PositiveFloat = 5.0
    """Time limit of one health check."""
    health_failures: Positive = 3
    """Health checks in a row without an answer after which an engine gets no requests until it answers again."""
    max_sessions: Positive = 100_000
    """Maximum number of sessions with a remembered engine; the sessions unused for longest are evicted first."""
    max_text: Positive = 64 << 20
    """Maximum number of characters and tokens of prompts and responses that the token-exact middleware remembers."""
    paths: tuple[str, ...] = ()
    """Further paths that are forwarded, for a middleware or other engines; a part in braces stands for any name."""
    max_body_bytes: Positive = 64 << 20
    """Maximum size in bytes of a request's body."""

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.startswith("/"):
                raise ValueError(f"paths: want paths that begin with /, got {path!r}")
        for url in self.workers:
            check_url(url)


def check_url(url: object) -> str:
    """Return an engine's URL without a slash at its end. Raises ValueError unless it is http or https, with a host."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        name = (parts.hostname or "").encode("idna")
        is_valid = parts.scheme in ("http", "https") and name and parts.port != 0
    except ValueError:  # no port, no address in brackets, a part of the name that is empty or too long
        is_valid = False
    if not isinstance(url, str) or not is_valid or not url.isprintable() or " " in url:
        raise ValueError(f"worker: want a URL like http://host:port, got {url!r}")
    return url.rstrip("/")
