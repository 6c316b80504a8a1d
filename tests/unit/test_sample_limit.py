"""The limit of samples in flight: against the best fixed number in the simulated loop, and its decisions."""

from dataclasses import replace

import pytest

from tests.bench.in_flight import CURVES, SHAPES, Simulation, compare, ratio
from tests.refusals import refusal
from tidemill.actors.config import ActorConfig
from tidemill.actors.engines.sample_limit import DOUBTS, FALLBACK, HIGHEST, LOWEST, EngineLoad, SampleLimit
from tidemill.bus.section import AUTO

FULL = EngineLoad(running=64, waiting=0, rows=64, requests=64)
"""An engine whose rows are all in use."""


@pytest.mark.parametrize(("name", "curve", "steps", "fixed"), [
    ("tiny", "default", 40, (32, 64, 128, 256)),
    ("tiny", "flat", 75, (32, 256)),
    ("tail", "default", 8, (32, 64, 128, 1024)),
    ("episodes", "default", 12, (64, 192, 512)),
    ("episodes", "flat", 12, (64, 512)),
    ("late", "default", 8, (32, 128, 256, 2048)),
])  # fmt: skip
def test_auto_is_within_five_per_cent_of_the_best_fixed_number(
    name: str, curve: str, steps: int, fixed: tuple[int, ...]
) -> None:
    shape = SHAPES[name]
    joins_s = shape.joins_s * steps / shape.steps
    seconds = compare(replace(shape, steps=steps, joins_s=joins_s, pass_s=CURVES[curve]), fixed)
    assert ratio(seconds) <= 1.05, seconds
    assert max(seconds.values()) > 1.02 * seconds[AUTO], "the shape has to tell numbers apart"


def test_actors_that_share_an_engine_get_equal_shares_wherever_they_begin() -> None:
    running = Simulation(replace(SHAPES["tail"], engines=1, actors=3, groups=256, steps=10**6), AUTO)
    running.limits[0].value, running.limits[1].value, running.limits[2].value = 512, 64, 8
    running.run(until_s=600.0)
    values = sorted(limit.value for limit in running.limits)
    assert values[-1] <= 1.3 * values[0], values
    assert 64 <= sum(running.in_flight) <= 64 * 2, running.in_flight


def test_an_engine_that_leaves_shortens_the_limit_again() -> None:
    running = Simulation(replace(SHAPES["tail"], actors=1, groups=256, steps=10**6), AUTO)
    running.run(until_s=200.0)
    both = running.limits[0].value
    running.engines[1].serving = False
    running.run(until_s=600.0)
    assert running.limits[0].value <= 0.7 * both, (both, running.limits[0].value)


class Lying(Simulation):
    """An engine reports other figures than its own."""

    figures = EngineLoad()

    def load(self, engine: object, actor: int) -> EngineLoad:
        return self.figures


@pytest.mark.parametrize("figures", [
    EngineLoad(requests=64),
    EngineLoad(running=-5, waiting=3, rows=64, requests=64),
    EngineLoad(running=float("nan"), waiting=0, rows=64, requests=64),
    EngineLoad(running=64, waiting=0, rows=float("inf"), requests=64),
    EngineLoad(running=0, waiting=0, rows=64, requests=64),
])  # fmt: skip
def test_without_figures_that_can_be_right_each_engine_has_the_fallback(figures: EngineLoad) -> None:
    limit = SampleLimit(AUTO)
    for _ in range(DOUBTS + 1):
        assert not limit.admits(10**6)
        limit.observe([figures, figures], in_flight=10**6)
    assert limit.value == 2 * FALLBACK


@pytest.mark.parametrize("figures", [
    EngineLoad(running=64, waiting=1e300, rows=64),
    EngineLoad(running=0, waiting=0, rows=1e6),
])  # fmt: skip
def test_lies_leave_the_limit_within_its_bounds_and_the_run_goes_on(figures: EngineLoad) -> None:
    running = Lying(replace(SHAPES["tail"], steps=2, groups=8), AUTO)
    running.figures = figures
    assert running.run(until_s=1e5) < 1e5
    assert all(LOWEST <= limit.value <= HIGHEST for limit in running.limits)


def test_an_actor_that_was_stopped_goes_on_where_it_was() -> None:
    """Its clock jumps: the limit takes one step for an observation, whatever the time between two of them."""
    limit = SampleLimit(AUTO)
    assert not limit.admits(FALLBACK)
    limit.observe([FULL], in_flight=FALLBACK)
    assert limit.value == FALLBACK + 4


def test_it_grows_only_where_it_holds_tasks_back_and_rewards_keep_up() -> None:
    limit, idle = SampleLimit(AUTO), EngineLoad(running=8, waiting=0, rows=64, requests=8)
    limit.observe([idle], in_flight=8)
    assert limit.value == FALLBACK, "tasks are missing, not room"
    limit.observe([idle], in_flight=FALLBACK, scoring=40)
    assert limit.value == FALLBACK, "the rewards are the bottleneck"
    limit.observe([idle], in_flight=FALLBACK, scoring=10)
    assert limit.value == 2 * FALLBACK


def test_one_queue_is_cut_once_until_the_cut_has_had_its_effect() -> None:
    limit, long = SampleLimit(AUTO), EngineLoad(running=64, waiting=100, rows=64, requests=64)
    for _ in range(5):
        assert not limit.admits(FALLBACK)
        limit.observe([long], in_flight=FALLBACK)
    assert limit.value == 48
    assert limit.admits(40)
    limit.observe([long], in_flight=47)
    limit.observe([long], in_flight=47)
    assert limit.value == 36


def test_a_number_stays_as_it_is_and_others_are_refused() -> None:
    limit = SampleLimit(ActorConfig(max_samples_in_flight=7).max_samples_in_flight)
    for engines in ([EngineLoad(running=64, waiting=500, rows=64)], []):
        limit.observe(engines, in_flight=7)
    assert (limit.value, limit.admits(6), limit.admits(7)) == (7, True, False)
    for wrong in (0, -1, True, 2.5, "many"):
        with refusal(ValueError, place="max_samples_in_flight"):
            ActorConfig(max_samples_in_flight=wrong)  # type: ignore[arg-type]
