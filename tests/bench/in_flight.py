"""``actor.max_samples_in_flight: auto`` against the best fixed number, in a simulation of the loop by events.

python -m tests.bench in_flight [--shapes tiny late ...] [--curves flat steep ...] [--seeds 1]
python -m tests.bench in_flight --runs launch/configs/digits.yaml ... [--steps 60] [--fixed 64 256 1024] [--rounds 1]
    [--set KEY=VALUE ...]

Actors (with the real ``SampleLimit``), engines, feeder and learner are simulated: an engine decodes one token for all
of its rows in a time that grows with them, responses beyond its rows wait, its figures reach the actors a second late,
tasks are admitted up to ``max_lag`` steps ahead, and a step is trained when all of its groups are there. Printed: the
seconds until all steps are trained, with each fixed number and with auto, and the ratio of auto to the best of them.

``--runs``: shipped configurations as they are (by file, since ``digits`` names a bench, too), in turn: steps a second
of wall time and of processor time, from the tenth step to the last. Beside other work only the second counts.
``--set``: settings of these runs. Responses of very different lengths: digits with ``sampling.max_new_tokens=400``,
``prepare.model.max_position_embeddings=512``, whose untrained model ends at each token with a probability of 1/16.
"""

import argparse
import heapq
import itertools
import random
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.bench.meter import metered
from tests.tree import ROOT
from tidemill.actors.engines.sample_limit import EngineLoad, SampleLimit
from tidemill.bus.section import AUTO

FIXED = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
ROW_EVERY_S = 1.0
"""Interval of the engines' rows and of the actors' observations."""
LIMIT_S = 1e6
FIRST_STEP = 10
"""Step of a real run from which on it is measured: the limit of the samples has settled by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A run."""

    steps: int
    groups: int
    group_size: int = 8
    max_lag: int = 2
    train_s: float
    actors: int = 1
    engines: int = 1
    rows: int = 64
    """Responses that an engine decodes at once."""
    pass_s: tuple[float, float] = (0.004, 0.00025)
    """Seconds of a pass, which gives each row a token, and for each row."""
    joins_s: float = 0.0
    """Time at which the last engine joins."""
    tokens: Callable[[random.Random], int]
    """Tokens of one model call."""
    turns: int = 1
    tools_s: Callable[[random.Random], float] = lambda _: 0.0
    """Seconds of tools behind each turn but the last."""
    reward_s: float = 0.002


def tail(chance: random.Random) -> int:
    """Return the tokens of a response, of which few are very long."""
    return min(8192, int(chance.lognormvariate(5.5, 1.2)) + 1)


SHAPES = {
    "tiny": Shape(steps=150, groups=32, train_s=0.3, rows=128, tokens=lambda chance: chance.randint(3, 6)),
    "tail": Shape(steps=30, groups=32, train_s=8.0, engines=2, actors=2, tokens=tail),
    "episodes": Shape(
        steps=25,
        groups=32,
        train_s=10.0,
        rows=32,
        actors=2,
        turns=6,
        tokens=lambda chance: chance.randint(50, 250),
        tools_s=lambda chance: chance.uniform(5.0, 40.0),
    ),
    "late": Shape(
        steps=30, groups=64, train_s=5.0, engines=2, actors=2, joins_s=120.0, tokens=lambda chance: 100 + tail(chance)
    ),
}


CURVES = {"default": (0.004, 0.00025), "flat": (0.02, 0.00002), "steep": (0.0005, 0.0008)}
"""``Shape.pass_s`` by name: flat as on a GPU that reads its weights for each pass, steep as on a CPU that computes."""


@dataclass(slots=True, eq=False)
class Engine:
    """Decodes one token for all of its rows in each pass."""

    rows: int
    serving: bool
    passes: int = 0
    running: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    """(pass at whose end it is done, number, what follows), as a heap."""
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    busy: bool = False
    reported: tuple[int, int] = (0, 0)
    """Running and waiting responses of its last row."""


class Simulation:
    """One run, up to its last step."""

    def __init__(self, shape: Shape, setting: int | str, seed: int = 0) -> None:
        self.shape, self.now_s, self._chance = shape, 0.0, random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        late = shape.engines - 1 if shape.joins_s else shape.engines
        self.engines = [Engine(rows=shape.rows, serving=number < late) for number in range(shape.engines)]
        self.limits = [SampleLimit(setting) for _ in range(shape.actors)]
        self.in_flight = [0] * shape.actors
        self._requests = [[0] * shape.engines for _ in range(shape.actors)]
        self.trained = self._issued = self._finished = 0
        self._training = False
        self._at(self.shape.joins_s, self._join)
        self._at(0.0, self._look)

    def run(self, until_s: float = LIMIT_S) -> float:
        """Return the seconds until the last step is trained, ``until_s`` at most; called again it goes on."""
        while self._events and self.trained < self.shape.steps and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.now_s

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def _join(self) -> None:
        self.engines[-1].serving = True

    def _look(self) -> None:
        """Have all actors observe the engines' last rows, and the engines write new ones."""
        for actor, limit in enumerate(self.limits):
            limit.observe(
                [self.load(engine, actor) for engine in self.engines if engine.serving], self.in_flight[actor]
            )
        for engine in self.engines:
            engine.reported = (len(engine.running), len(engine.waiting))
        self._lease()
        self._at(ROW_EVERY_S, self._look)

    def load(self, engine: Engine, actor: int) -> EngineLoad:
        """Return the figures of an engine as an actor knows them. (Tests replace it.)"""
        running, waiting = engine.reported
        requests = self._requests[actor][self.engines.index(engine)]
        return EngineLoad(running=running, waiting=waiting, rows=engine.rows, requests=requests)

    def _lease(self) -> None:
        """Give each actor tasks in turn, while its limit admits them."""
        asking = True
        while asking:
            asking = False
            for actor, limit in enumerate(self.limits):
                is_issued = self._issued < (self.trained + 1 + self.shape.max_lag) * self.shape.groups
                if is_issued and limit.admits(self.in_flight[actor]):
                    self._begin(actor)
                    asking = True

    def _begin(self, actor: int) -> None:
        self._issued += 1
        size = self.shape.group_size
        left = [size]
        self.in_flight[actor] += size
        for _ in range(size):
            self._turn(actor, self.shape.turns, left)

    def _turn(self, actor: int, turns: int, left: list[int]) -> None:
        """Send one model call to the engine with the fewest requests of this actor."""
        requests = self._requests[actor]
        place = min((p for p, engine in enumerate(self.engines) if engine.serving), key=lambda p: requests[p])
        requests[place] += 1

        def answered() -> None:
            requests[place] -= 1
            if turns > 1:
                self._at(self.shape.tools_s(self._chance), lambda: self._turn(actor, turns - 1, left))
            else:
                self._at(self.shape.reward_s, lambda: self._end(actor, left))

        engine = self.engines[place]
        engine.waiting.append((self.shape.tokens(self._chance), answered))
        if not engine.busy:
            self._pass(engine)

    def _pass(self, engine: Engine) -> None:
        while engine.waiting and len(engine.running) < engine.rows:
            tokens, answered = engine.waiting.popleft()
            heapq.heappush(engine.running, (engine.passes + tokens, next(self._numbers), answered))
        engine.busy = bool(engine.running)
        if engine.busy:
            # Passes in which nothing ends or begins are one event.
            passes = max(1, engine.running[0][0] - engine.passes) if len(engine.running) == engine.rows else 1
            pass_s, row_s = self.shape.pass_s
            self._at(passes * (pass_s + row_s * len(engine.running)), lambda: self._passed(engine, passes))

    def _passed(self, engine: Engine, passes: int) -> None:
        engine.passes += passes
        while engine.running and engine.running[0][0] <= engine.passes:
            heapq.heappop(engine.running)[2]()
        self._pass(engine)

    def _end(self, actor: int, left: list[int]) -> None:
        left[0] -= 1
        self.in_flight[actor] -= 1
        self._finished += not left[0]
        self._train()
        self._lease()

    def _train(self) -> None:
        if not self._training and self._finished >= self.shape.groups:
            self._training = True
            self._finished -= self.shape.groups
            self._at(self.shape.train_s, self._trained)

    def _trained(self) -> None:
        self.trained, self._training = self.trained + 1, False
        self._train()
        self._lease()


def compare(shape: Shape, fixed: Sequence[int] = FIXED, seed: int = 0) -> dict[int | str, float]:
    """Return the seconds of a run by setting: fixed numbers, and auto."""
    return {setting: Simulation(shape, setting, seed).run() for setting in (*fixed, AUTO)}


def ratio(seconds: dict[int | str, float]) -> float:
    """Return the seconds with auto, divided by those with the best fixed number."""
    return seconds[AUTO] / min(value for setting, value in seconds.items() if setting != AUTO)


def compare_seeds(name: str, curve: str, num_seeds: int) -> None:
    """Print the seconds of a shape by setting, means over the seeds, and the ratio of auto to the best fixed number."""
    shape = replace(SHAPES[name], pass_s=CURVES[curve])
    runs = [compare(shape, seed=seed) for seed in range(num_seeds)]
    seconds = {setting: statistics.mean(run[setting] for run in runs) for setting in runs[0]}
    print(f"{name:9}{curve:8}" + " ".join(f"{setting}:{value:.0f}" for setting, value in seconds.items()))
    best = min(FIXED, key=lambda setting: seconds[setting])
    print(f"RATIO {name} {curve} auto / best fixed ({best}): {ratio(seconds):.3f}", flush=True)


def measure_run(name: str, setting: int | str, steps: int, settings: Sequence[str] = ()) -> tuple[float, float]:
    """Return steps a second of wall time, and of the processor time of all processes, of one run."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        values = (f"directory={directory}", f"learner.steps={steps}", f"actor.max_samples_in_flight={setting}")
        words = [word for value in (*settings, *values, "up.require_reward=0") for word in ("--set", value)]
        command = [sys.executable, "-m", "tidemill", "up", name, "--fresh", *words]
        log = Path(place) / "log"
        run = metered(command, lines_file=directory / "metrics.jsonl", log_file=log, directory=ROOT)
    begin, end = run.at(FIRST_STEP), run.at(steps)
    trained = end.lines - begin.lines
    return trained / (end.wall_s - begin.wall_s), trained / (end.cpu_s - begin.cpu_s)


def compare_runs(
    name: str, settings: Sequence[int | str], *, steps: int, rounds: int, changes: Sequence[str] = ()
) -> None:
    """Print the medians of the settings, and the ratios of auto to the best fixed number. ``changes``: of the runs."""
    rates: dict[int | str, list[tuple[float, float]]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            rates[setting].append(measure_run(name, setting, steps, changes))
    for place, unit in enumerate(("wall", "CPU")):
        median = {setting: statistics.median(rate[place] for rate in rates[setting]) for setting in settings}
        best = max((setting for setting in settings if setting != AUTO), key=lambda setting: median[setting])
        texts = " ".join(f"{setting}:{value:.3f}" for setting, value in median.items())
        ratio = median[AUTO] / median[best]
        print(f"{name} steps per second of {unit} {texts} RATIO auto / best fixed ({best}): {ratio:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--curves", nargs="*", choices=list(CURVES), default=list(CURVES), help="engines")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", nargs="*", default=[], metavar="FILE", help="shipped configurations, run as they are")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of all runs")
    args = parser.parse_args()
    for name in args.runs:
        compare_runs(name, (AUTO, *args.fixed), steps=args.steps, rounds=args.rounds, changes=args.set)
    for name in args.shapes if not args.runs else ():
        for curve in args.curves:
            compare_seeds(name, curve, args.seeds)


if __name__ == "__main__":
    main()
