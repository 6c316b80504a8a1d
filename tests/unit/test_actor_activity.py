"""Counters, the share of time spent waiting, and the config that a process derives from the run's."""

import time
from typing import Any

import pytest

from tidemill.actors.config import ActorConfig, GatewayConfig
from tidemill.actors.engines.activity import Activity
from tidemill.actors.engines.membership import default_id, first_row, section
from tidemill.bus.config import BusConfig
from tidemill.bus.wire.subjects import token


def test_the_waiting_share_is_one_before_anything_happens_and_falls_with_work() -> None:
    activity = Activity()
    assert activity.waiting_share == pytest.approx(1.0)
    with activity:
        early = activity.waiting_share
        with activity:
            assert activity.busy == 2
        assert activity.busy == 1
        _spend(0.01)
        late = activity.waiting_share
    assert late < early <= 1
    _spend(0.01)
    assert late < activity.waiting_share < 1


def test_an_error_inside_counts_as_an_end() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity:
        raise KeyError
    assert activity.busy == 0


def test_failures_are_described_in_trouble() -> None:
    activity = Activity()
    activity.counters.samples_published = 386
    assert activity.trouble == ""
    for reason in ("reward 'r': ValueError('an earlier one')", "reward 'r': no result within 3 s"):
        activity.failed(reason)
    assert activity.trouble == "2 of 386 samples failed, the last: reward 'r': no result within 3 s"
    assert activity.load()["failures"] == 2
    activity.failed("x" * 1_000_000)
    assert len(activity.trouble) < 400


def test_calls_that_hang_are_trouble_without_a_failed_sample() -> None:
    activity = Activity()
    activity.tool_hung("rollouts.solver: tool 'weather': no result within 2 s")
    assert activity.trouble == "1 calls of tools hung, the last: rollouts.solver: tool 'weather': no result within 2 s"
    activity.failed("x")
    assert activity.trouble.startswith("1 of 0 samples failed, the last: x; 1 calls of tools hung")
    assert activity.load()["tool_calls_hung"] == 1


def test_the_load_has_every_counter() -> None:
    activity = Activity()
    activity.counters.samples_published += 3
    load = activity.load()
    assert load["samples_published"] == 3.0
    assert {
        "tokens_generated",
        "tasks_done",
        "tasks_handed_back",
        "failures",
        "requests_aborted",
        "waiting_share",
    } <= set(load)
    assert all(type(value) is float for value in load.values())


def test_a_section_of_the_config_becomes_its_dataclass() -> None:
    gateway = {"host": "127.0.0.2"}
    told = {
        "actor": {
            "engines": ["http://a", "http://b"],
            "reward_options": {"strip": False},
            "retries": 5,
            "gateway": gateway,
        }
    }
    config = section(told, "actor", ActorConfig)
    wanted = ActorConfig(
        engines=("http://a", "http://b"), reward_options={"strip": False}, retries=5, gateway=GatewayConfig(**gateway)
    )
    assert config == wanted
    assert section(told, "bus", BusConfig) == BusConfig(), "a section that is not there is all defaults"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"retry": 5}, r"actor\.retry: no such setting; did you mean actor\.retries"),
        ({"retries": 0}, "retries: want > 0, got 0"),
        (
            {"gateway": {"hots": "x"}},
            r"actor\.gateway\.hots: no such setting",
        ),
        ({"gateway": 5}, r"actor\.gateway: want a map of settings"),
    ],
)
def test_a_wrong_section_names_the_expected_value(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section({"actor": told}, "actor", ActorConfig)


def test_a_name_of_its_own_that_fits_into_a_subject() -> None:
    row = first_row("actor", default_id())
    assert token(row.id) == row.id
    assert (row.role, row.phase) == ("actor", "starting")


def _spend(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
