"""Settings of rollouts: programs that make samples of any number of model calls."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.section import NotNegative, NotNegativeFloat, OneOf, Positive, refusal, section
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.task_settings import Budget

PROGRAM = "agent:"
"""Beginning of ``use`` for a program by import path."""
OF_SLIME, SLIME = "slime:", "tidemill.actors.episodes.programs.slime_generate:Slime"
"""Beginning of ``use`` for a generate function of slime by import path, and the program that calls it."""
SLIME_FILE = f"{Path(__file__).parent / 'episodes/programs/slime_generate.py'}:Slime"
"""That program for an interpreter that lacks our packages."""
OF_OPENENV = "openenv:"
"""Beginning of ``use`` for ``multi_turn`` with an environment on a server of OpenEnv, by its URL."""
OF_VERIFIERS = "verifiers:"
"""Beginning of ``use`` for a taskset of verifiers, by its id."""
VERIFIERS = f"{Path(__file__).parent / 'episodes/programs/verifiers_taskset.py'}:Taskset"
"""The program that plays it: a file, because its interpreter may have nothing of ours."""
DATASET = "dataset"
"""``use`` of a rollout that takes the recorded responses of the rows as samples: the learner's feeder makes them, and
no actor does.
"""
MULTI_TURN = "multi_turn"
BUILT_IN = {MULTI_TURN: "tidemill.actors.episodes.programs.multi_turn:MultiTurn"}
"""Rollouts that ship, by name."""
MULTI_TURN_FILE = f"{Path(__file__).parent / 'episodes/programs/multi_turn_file.py'}:MultiTurn"
"""The rollout ``multi_turn`` for an interpreter that lacks our packages."""
_USE = re.compile(
    rf"(?:{PROGRAM}|{OF_SLIME})[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|{OF_VERIFIERS}[A-Za-z_][\w.@/-]*|{OF_OPENENV}(?:http|ws)s?://\S+"
)
USES = f"{', '.join([*BUILT_IN, DATASET])}, agent:MODULE:NAME, slime:MODULE:NAME, verifiers:TASKSET or openenv:URL"
AGAIN = RESTART, REPLAY, RESUME = "restart", "replay", "resume"
"""Ways in which an actor continues an episode that another actor began."""
MEMORY_MB = 4096
"""Limit of a child where none is set, as that of a reward's process."""


def _program(use: str) -> str:
    if use not in BUILT_IN and use != DATASET and not _USE.fullmatch(use):
        raise refusal(USES)
    return use


Limit = Annotated[int, Field(ge=0, lt=2**31)]


@section
@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Limits of an episode; 0 = none."""

    turns: Limit = 64
    """Model calls."""
    tokens: Limit = 0
    """Sampled tokens."""
    context: Limit = 0
    """Tokens of one sequence."""
    total_tokens: Limit = 0
    """Tokens of all sequences."""
    seconds: NotNegativeFloat = 1800.0
    """Seconds from the beginning of the episode."""


@section
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """One rollout, an entry of ``rollouts``."""

    use: Annotated[str, AfterValidator(_program)]
    """``multi_turn``, ``agent:MODULE:NAME`` (a class with ``run(data, **extra)``, or a function),
    ``slime:MODULE:NAME``,
    ``verifiers:TASKSET``, ``openenv:URL``, or ``dataset`` (the recorded responses of the rows: docs/sft.md).
    """
    options: JsonObject = field(default_factory=dict)
    """Passed to the class, or to every call of the function."""
    python: str = ""
    """Interpreter of the program, which needs nothing of Tidemill (``multi_turn``, ``slime:`` and ``openenv:`` need
    aiohttp); empty = the actor's own.
    """
    processes: Positive = 4
    """Child processes of an actor; they are started when there is work."""
    episodes_per_child: Positive = 8
    """Episodes that one child runs at once; 1 = each has OPENAI_BASE_URL and OPENAI_API_KEY in its environment."""
    memory_mb: NotNegative = MEMORY_MB
    """Private memory of a child, and of each process that it starts; 0 = no limit."""
    cpu_s: NotNegative = 0
    """Processor seconds of a child over its life, and of each process that it starts; the kernel ends one that needs
    more. 0 = no limit.
    """
    open_files: NotNegative = 0
    """Open files of a child, and of each process that it starts; 0 = no limit."""
    file_mb: NotNegative = 0
    """Size of the largest file that they may write; 0 = no limit."""
    max_calls_in_flight: Positive = 16
    """Model calls of one episode at once; others wait."""
    drain_s: NotNegativeFloat | None = None
    """Time that an actor which drains gives running episodes before it hands them back; null =
    ``actor.drain_finish_s``.
    """
    again: Annotated[str, OneOf(AGAIN)] = RESTART
    """Way to continue an episode after its actor was killed: restart | replay | resume (docs/rollouts.md)."""
    unlogged: Literal["continue", "fail"] | None = None
    """With ``again: replay`` or ``resume``, an episode with an answer that cannot be stored: continue (it goes on
    without its log) | fail (the answer is not delivered, and the episode ends); null = fail with resume, continue with
    replay.
    """
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Limits of an episode: turns, tokens, context, total_tokens, seconds; 0 = none."""

    def __post_init__(self) -> None:
        if self.recorded and (changed := _changed_settings(self)):
            raise ValueError(f"{changed[0]}: want use: {DATASET} alone, which has no program and no limits; remove it")
        if self.unlogged == "fail" and self.again == RESTART:
            want = "again: replay or resume with fail"
            raise ValueError(f"unlogged: want {want}, got again: {self.again}, which stores no answers")
        if self.use.startswith(OF_OPENENV) and not isinstance(self.options.get("environment_options", {}), Mapping):
            raise ValueError(f"options.environment_options: want a map, got {self.options['environment_options']!r}")
        if self.taskset:
            self._refuse_for_taskset()

    def _refuse_for_taskset(self) -> None:
        """Raise ValueError for settings that no taskset of verifiers takes."""
        if unknown := sorted(set(self.options) - {"taskset", "agent", "env", "renderer"}):
            options = "there are taskset, agent, env, renderer"
            raise ValueError(f"options.{unknown[0]}: no such option with verifiers:TASKSET; {options}")
        if self.again == RESUME:
            want = "restart or replay with verifiers:TASKSET, whose environments have no state"
            raise ValueError(f"again: want {want}, got 'resume'")

    @property
    def recorded(self) -> bool:
        """True if its samples are the recorded responses of the rows; then it has no program."""
        return self.use == DATASET

    @property
    def needs_log(self) -> bool:
        """True if an episode ends when its log cannot be written."""
        return self.again == RESUME if self.unlogged is None else self.unlogged == "fail"

    @property
    def program(self) -> str:
        """``MODULE:NAME`` of the program."""
        if self.use.startswith(OF_SLIME):
            return SLIME_FILE if self.python else SLIME
        if self.taskset:
            return VERIFIERS
        if self.use == MULTI_TURN or self.use.startswith(OF_OPENENV):
            return MULTI_TURN_FILE if self.python else BUILT_IN[MULTI_TURN]
        return BUILT_IN.get(self.use) or self.use.removeprefix(PROGRAM)

    @property
    def module(self) -> str:
        """Module of the user's function or class, or of the program that plays it."""
        if self.taskset:
            return "verifiers"
        return (self.use.removeprefix(OF_SLIME) if self.use.startswith(OF_SLIME) else self.program).partition(":")[0]

    @property
    def taskset(self) -> str:
        """Id of its taskset of verifiers; empty = it plays none."""
        return self.use.removeprefix(OF_VERIFIERS) if self.use.startswith(OF_VERIFIERS) else ""

    @property
    def limits(self) -> Budget:
        """The budget as a task has it."""
        return Budget(**dataclasses.asdict(self.budget))

    def arguments(self, model: str) -> JsonObject:
        """Return the arguments of the program. ``model``: directory of the model."""
        if self.taskset:
            return {"id": self.taskset, "model": str(Path(model).absolute()) if model else "", **self.options}
        if self.use.startswith(OF_OPENENV):
            arguments = {"url": self.use.removeprefix(OF_OPENENV), **self.options.get("environment_options", {})}
            return {**self.options, "environment": "openenv", "environment_options": arguments}
        generate = {"generate": self.use.removeprefix(OF_SLIME)} if self.use.startswith(OF_SLIME) else {}
        return {**generate, **self.options}


def _changed_settings(config: RolloutConfig) -> list[str]:
    """Return the settings besides ``use`` that differ from their defaults."""
    fields = [field for field in dataclasses.fields(config) if field.name != "use"]
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default for field in fields
    }
    return [name for name, default in defaults.items() if getattr(config, name) != default]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPrograms:
    """The rollouts of an actor, and the model that they ask."""

    rollouts: Mapping[str, RolloutConfig]
    model: str
    """Directory of the model, with its tokenizer and chat template."""

    @property
    def programs(self) -> dict[str, RolloutConfig]:
        """Those that an actor runs."""
        return {name: rollout for name, rollout in self.rollouts.items() if not rollout.recorded}

    def only(self, names: Collection[str]) -> "RolloutPrograms":
        rollouts = {name: rollout for name, rollout in self.rollouts.items() if name in names}
        return dataclasses.replace(self, rollouts=rollouts)


def served(rollouts: Mapping[str, RolloutConfig], names: Sequence[str]) -> tuple[str, ...]:
    """Return the rollouts that an actor with ``actor.rollouts: names`` serves; single turns too. Raises ValueError."""
    able = (SINGLE_TURN, *(name for name, rollout in rollouts.items() if not rollout.recorded))
    for name in names:
        if name not in able:
            reason = "which is none of them"
            if name in rollouts:
                reason = "whose samples are the recorded responses of its rows, and no actor makes them"
            elif nearest := difflib.get_close_matches(str(name), able, n=1, cutoff=0.5):
                reason = f"did you mean {nearest[0]!r}?"
            want = f"names in rollouts, or {SINGLE_TURN} ({', '.join(able)})"
            raise ValueError(f"actor.rollouts: want {want}, got {name!r}, {reason}")
    return tuple(name for name in able if name in names) if names else able


def recorded_in(rollouts: Mapping[str, RolloutConfig]) -> frozenset[str]:
    """Return the names of the rollouts with recorded responses as samples."""
    return frozenset(name for name, rollout in rollouts.items() if rollout.recorded)
