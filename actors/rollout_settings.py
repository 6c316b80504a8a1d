"""Settings of rollouts: programs that make samples of any number of model calls."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.config import RUN_NAME, SINGLE_TURN
from tidemill.bus.wire.episode_limits import Budget
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

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
"""``use`` of a rollout that takes the recorded responses of the rows as samples: the learner's feeder makes them, and no actor does."""
MULTI_TURN = "multi_turn"
BUILT_IN = {MULTI_TURN: "tidemill.actors.episodes.programs.multi_turn:MultiTurn"}
"""Rollouts that ship, by name."""
MULTI_TURN_FILE = f"{Path(__file__).parent / 'episodes/programs/multi_turn_file.py'}:MultiTurn"
"""The rollout ``multi_turn`` for an interpreter that lacks our packages."""
_USE = re.compile(
    rf"(?:{PROGRAM}|{OF_SLIME})[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|{OF_VERIFIERS}[A-Za-z_][\w.@/-]*|{OF_OPENENV}(?:http|ws)s?://\S+"
)
USES = f"{', '.join([*BUILT_IN, DATASET])}, agent:MODULE:NAME, slime:MODULE:NAME, verifiers:TASKSET or openenv:URL"
AGAIN = ("restart", "replay", "resume")
"""Ways in which an actor continues an episode that another actor began."""
UNLOGGED = ("continue", "fail")
"""What becomes of an episode with a record that is not stored."""
TURNS, SECONDS = 64, 1800.0
"""Budget of an episode where none is set: model calls and seconds."""
MEMORY_MB = 4096
"""Limit of a child where none is set, as that of a reward's process."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """One rollout, an entry of ``rollouts``."""

    use: str
    """``multi_turn``, ``agent:MODULE:NAME`` (a class with ``run(data, **extra)``, or a function), ``slime:MODULE:NAME``,
    ``verifiers:TASKSET``, ``openenv:URL``, or ``dataset`` (the recorded responses of the rows: docs/sft.md)."""
    options: JsonObject = field(default_factory=dict)
    """Passed to the class, or to every call of the function."""
    python: str = ""
    """Interpreter of the program, which needs nothing of Tidemill (``multi_turn``, ``slime:`` and ``openenv:`` need aiohttp); empty = the
    actor's own."""
    processes: int = 4
    """Child processes of an actor; they are started when there is work."""
    episodes_per_child: int = 8
    """Episodes that one child runs at once; 1 = each has OPENAI_BASE_URL and OPENAI_API_KEY in its environment."""
    memory_mb: int = MEMORY_MB
    """Private memory of a child, and of each process that it starts; 0 = no limit."""
    cpu_s: int = 0
    """Processor seconds of a child over its life, and of each process that it starts; the kernel ends one that needs more. 0 = no limit."""
    open_files: int = 0
    """Open files of a child, and of each process that it starts; 0 = no limit."""
    file_mb: int = 0
    """Size of the largest file that they may write; 0 = no limit."""
    max_calls_in_flight: int = 16
    """Model calls of one episode at once; others wait."""
    drain_s: float | None = None
    """Time that an actor which drains gives running episodes before it hands them back; null = ``actor.drain_finish_s``."""
    again: str = "restart"
    """Way to continue an episode after its actor was killed: restart | replay | resume (docs/rollouts.md)."""
    unlogged: str | None = None
    """With ``again: replay`` or ``resume``, an episode with an answer that cannot be stored: continue (it goes on without its log) | fail
    (the answer is not delivered, and the episode ends); null = fail with resume, continue with replay."""
    budget: Budget = field(default_factory=lambda: Budget(turns=TURNS, seconds=SECONDS))
    """Limits of an episode: turns, tokens, context, total_tokens, seconds; 0 = none."""

    @property
    def recorded(self) -> bool:
        """True if its samples are the recorded responses of the rows; then it has no program."""
        return self.use == DATASET

    @property
    def needs_log(self) -> bool:
        """True if an episode ends when its log cannot be written."""
        return self.again == "resume" if self.unlogged is None else self.unlogged == "fail"

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

    def arguments(self, model: str) -> JsonObject:
        """Return the arguments of the program. ``model``: directory of the model."""
        if self.taskset:
            return {"id": self.taskset, "model": str(Path(model).absolute()) if model else "", **self.options}
        if self.use.startswith(OF_OPENENV):
            given = {"url": self.use.removeprefix(OF_OPENENV), **self.options.get("environment_options", {})}
            return {**self.options, "environment": "openenv", "environment_options": given}
        return {"generate": self.use.removeprefix(OF_SLIME), **self.options} if self.use.startswith(OF_SLIME) else self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPrograms:
    """The rollouts of an actor, and the model that they ask."""

    rollouts: Mapping[str, RolloutConfig]
    model: str
    """Directory of the model, with its tokenizer and chat template."""

    @property
    def programs(self) -> dict[str, RolloutConfig]:
        """Those that an actor runs."""
        return {name: one for name, one in self.rollouts.items() if not one.recorded}

    def only(self, names: Collection[str]) -> "RolloutPrograms":
        """Return those with these names."""
        return dataclasses.replace(self, rollouts={name: one for name, one in self.rollouts.items() if name in names})


def served(rollouts: Mapping[str, RolloutConfig], names: Sequence[str]) -> tuple[str, ...]:
    """Return the rollouts that an actor with ``actor.rollouts: names`` serves, single turns by their name. Raises ValueError."""
    able = (SINGLE_TURN, *(name for name, one in rollouts.items() if not one.recorded))
    for name in names:
        if name not in able:
            recorded = "whose samples are the recorded responses of its rows, and no actor makes them"
            nearest = difflib.get_close_matches(str(name), able, n=1, cutoff=0.5)
            why = recorded if name in rollouts else f"did you mean {nearest[0]!r}?" if nearest else "which is none of them"
            raise ValueError(f"actor.rollouts: want names in rollouts, or {SINGLE_TURN} ({', '.join(able)}), got {name!r}, {why}")
    return tuple(name for name in able if name in names) if names else able


def recorded_in(rollouts: Mapping[str, RolloutConfig]) -> frozenset[str]:
    """Return the names of the rollouts with recorded responses as samples."""
    return frozenset(name for name, one in rollouts.items() if one.recorded)


def parse_rollouts(given: JsonMapping, where: str = "rollouts") -> dict[str, RolloutConfig]:
    """Return the rollouts by name. Raises ValueError that names the setting, the value wanted and the one that came."""
    return {name: _rollout(name, value, f"{where}.{name}") for name, value in given.items()}


COUNTS = (
    ("processes", 4, 1),
    ("episodes_per_child", 8, 1),
    ("memory_mb", MEMORY_MB, 0),
    ("cpu_s", 0, 0),
    ("open_files", 0, 0),
    ("file_mb", 0, 0),
    ("max_calls_in_flight", 16, 1),
)
"""Settings of a rollout that are whole numbers: name, default, least value."""


def _rollout(name: str, value: object, where: str) -> RolloutConfig:
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise ValueError(f"{where}: want a name of 1 to 64 of A-Z a-z 0-9 _ -")
    if name == SINGLE_TURN:
        raise ValueError(f"{where}: want another name; {SINGLE_TURN} is the rollout that asks once")
    if isinstance(value, RolloutConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: want a map with use, got {value!r}")
    known = {one.name for one in dataclasses.fields(RolloutConfig)}
    if unknown := sorted(str(key) for key in value if key not in known):
        raise ValueError(f"{where}.{unknown[0]}: no such setting; there are {', '.join(sorted(known))}")
    use = value.get("use")
    if use == DATASET:
        if more := sorted(set(value) - {"use"}):
            raise ValueError(f"{where}.{more[0]}: want use: {DATASET} alone, which has no program and no limits; remove it")
        return RolloutConfig(use=DATASET)
    if not isinstance(use, str) or (use not in BUILT_IN and not _USE.fullmatch(use)):
        raise ValueError(f"{where}.use: want {USES}, got {use!r}")
    options, python = value.get("options", {}), value.get("python", "")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{where}.options: want a map, got {options!r}")
    if not isinstance(python, str):
        raise ValueError(f"{where}.python: want the path of an interpreter, got {python!r}")
    if use.startswith(OF_OPENENV) and not isinstance(options.get("environment_options", {}), Mapping):
        raise ValueError(f"{where}.options.environment_options: want a map, got {options['environment_options']!r}")
    counts = {one: _count(value.get(one, default), f"{where}.{one}", least=least) for one, default, least in COUNTS}
    budget = _budget(value.get("budget", {}), f"{where}.budget")
    drain_s = value.get("drain_s")
    if drain_s is not None and (isinstance(drain_s, bool) or not isinstance(drain_s, int | float) or not 0 <= drain_s < math.inf):
        raise ValueError(f"{where}.drain_s: want seconds >= 0, or null for actor.drain_finish_s, got {drain_s!r}")
    if (again := value.get("again", AGAIN[0])) not in AGAIN:
        raise ValueError(f"{where}.again: want {', '.join(AGAIN)}, got {again!r}")
    if (unlogged := value.get("unlogged")) is not None and unlogged not in UNLOGGED:
        raise ValueError(f"{where}.unlogged: want {' or '.join(UNLOGGED)}, or null (fail with again: resume), got {unlogged!r}")
    if unlogged == "fail" and again == AGAIN[0]:
        raise ValueError(f"{where}.unlogged: want again: replay or resume with fail, got again: {again}, which stores no answers")
    if use.startswith(OF_VERIFIERS):
        _refuse_for_taskset(options, again, where)
    return RolloutConfig(
        use=use, options=dict(options), python=python, again=again, unlogged=unlogged, budget=budget, drain_s=drain_s, **counts
    )


def _refuse_for_taskset(options: JsonMapping, again: str, where: str) -> None:
    """Raise ValueError for options that no taskset of verifiers takes."""
    if unknown := sorted(set(options) - {"taskset", "agent", "env", "renderer"}):
        raise ValueError(f"{where}.options.{unknown[0]}: no such option with verifiers:TASKSET; there are taskset, agent, env, renderer")
    if again == "resume":
        raise ValueError(f"{where}.again: want restart or replay with verifiers:TASKSET, whose environments have no state, got 'resume'")


def _budget(value: object, where: str) -> Budget:
    if isinstance(value, Budget):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: want a map, got {value!r}")
    known = [one.name for one in dataclasses.fields(Budget)]
    if unknown := sorted(str(key) for key in value if key not in known):
        raise ValueError(f"{where}.{unknown[0]}: no such limit; there are {', '.join(known)}")
    limits = {"turns": TURNS, **{name: value[name] for name in value if name != "seconds"}}
    counts = {name: _count(limit, f"{where}.{name}", least=0) for name, limit in limits.items()}
    seconds = value.get("seconds", SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"{where}.seconds: want a number >= 0 (0 = no limit), got {seconds!r}")
    return Budget(seconds=float(seconds), **counts)


def _count(value: object, where: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{where}: want a whole number >= {least}, got {value!r}")
    return value
