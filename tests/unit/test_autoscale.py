"""The rule of the autoscaler, on a model of a run: it converges, does not flap, and follows a load that changes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.refusals import refusal
from tidemill.launch.deploy.autoscaler import Bounds, Decision, Load, clamped, decide, parse_bounds

BOUNDS = {"engine": Bounds(1, 16), "actor": Bounds(1, 32)}


@dataclass
class Run:
    """Rates in samples per second: what the learner can train, an engine can generate and an actor can handle."""

    learner: float
    engine: float = 1.0
    actor: float = 4.0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def load(self, counts: Mapping[str, int]) -> Load:
        engines, actors = counts["engine"] * self.engine, counts["actor"] * self.actor
        rate = min(engines, actors, self.learner) * (1 + self.noise * (2 * self._random.random() - 1))
        return Load(
            learner_wait=min(1.0, max(0.0, 1 - rate / self.learner)),
            engine_idle=min(1.0, max(0.0, 1 - rate / engines)),
            waiting=8 if min(engines, actors) < self.learner else 0,
        )

    def scaled(self, counts: Mapping[str, int], rounds: int) -> list[dict[str, int]]:
        """Return the numbers after each decision."""
        history = [dict(counts)]
        for _ in range(rounds):
            history.append(dict(decide(self.load(history[-1]), history[-1], BOUNDS).counts))
        return history


@pytest.mark.parametrize("learner", [0.7, 1.0, 2.5, 4.3, 7.9, 13.0, 15.9])
@pytest.mark.parametrize("start", [(1, 1), (3, 8), (16, 32)])
@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_numbers_converge_and_stay(learner: float, start: tuple[int, int], noise: float) -> None:
    run = Run(learner, noise=noise, seed=hash((learner, start)) % 1000)
    history = run.scaled({"engine": start[0], "actor": start[1]}, 200)
    assert history[12:] == [history[12]] * len(history[12:]), history[:20]
    last, exact = history[-1], Run(learner).load(history[-1])
    assert exact.learner_wait <= 0.2 + noise or last["engine"] == BOUNDS["engine"].most
    assert last["engine"] <= max(1, 1.5 * learner + 1), "as few engines as the load needs, and some room"


def test_numbers_change_in_one_direction_on_the_way() -> None:
    for learner, start in ((12.0, 1), (1.5, 16), (6.5, 10)):
        engines = [counts["engine"] for counts in Run(learner).scaled({"engine": start, "actor": 8}, 20)]
        assert engines in (sorted(engines), sorted(engines, reverse=True)), engines


def test_a_load_that_changes_is_followed() -> None:
    run, counts = Run(2.0), {"engine": 1, "actor": 1}
    for learner, least, most in ((2.0, 2, 3), (10.0, 8, 11), (3.0, 3, 5)):
        run.learner = learner
        counts = run.scaled(counts, 12)[-1]
        assert least <= counts["engine"] <= most, (learner, counts)


def test_actors_are_added_where_tasks_wait_and_engines_do_not_work() -> None:
    counts = Run(8.0, actor=0.5).scaled({"engine": 10, "actor": 2}, 12)[-1]
    assert counts["actor"] >= 13


def decided(wait: float, idle: float | None, waiting: int, **counts: int) -> Decision:
    load = Load(learner_wait=wait, engine_idle=idle, waiting=waiting)
    return decide(load, {"engine": 2, "actor": 2, **counts}, BOUNDS)


def test_each_decision_has_its_reason() -> None:
    more = decided(0.5, 0.1, 4)
    assert (more.counts["engine"], more.reason) == (4, "the learner waits 50% for engines")
    assert decided(1.0, 0.0, 4, engine=16).reason == "the learner waits 100% for engines; engines are at their maximum"
    stuck = decided(0.5, 0.9, 0)
    assert stuck.counts == {"engine": 2, "actor": 2} and "no task is waiting" in stuck.reason
    unscaled = decide(Load(learner_wait=0.5, engine_idle=0.0, waiting=1), {"actor": 2}, {"actor": Bounds(1, 4)})
    assert unscaled.counts == {"actor": 2} and "engines, which are not scaled" in unscaled.reason
    assert decided(0.1, 0.1, 0).reason == "the learner waits 10%, engines 10%: in balance"
    assert decided(0.0, None, 0).counts == {"engine": 2, "actor": 2}, "without a gauge nothing shrinks"


def test_bounds() -> None:
    assert parse_bounds(["engines=1..8", "actors=2..16"]) == {"engine": Bounds(1, 8), "actor": Bounds(2, 16)}
    assert clamped({"engine": 9}, {"engine": Bounds(1, 8), "actor": Bounds(2, 16)}) == {"engine": 8, "actor": 2}
    for words in (["engines=8..1"], ["engines=1"], ["scorers=1..2"], ["engines=0..0"], ["actors=0..99999"], []):
        with refusal(ValueError, place="--autoscale"):
            parse_bounds(words)
