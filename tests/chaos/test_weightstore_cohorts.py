"""Push groups: engines that share a process group, with one of them killed, stopped or refusing in each phase of a
push.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_weightstore_publisher import GOOD, SLACK_S, SOME_HUNG_S, publishing, state
from tests.receiver_app import Behaviour, digest, receivers, tiny_tensors
from tests.refusals import refusal
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.push.publisher import Publisher
from tidemill.weightstore.push.push import PushReport

PHASES = ("join", "begin", "bucket", "checksums", "end")
DEADLINES = 12
"""Number of deadlines that a push may take with an engine lost in any phase: a few, with a margin for a busy machine.
"""


def push(publisher: Publisher, step: int) -> PushReport:
    report = publisher.publish(step, tiny_tensors(step).items(), wait=True).result(0)
    assert report.seconds < DEADLINES * publisher.config.phase_deadline_s + SLACK_S, report
    return report


def test_engines_are_grouped_by_the_setting(bus_url: str, run_id: str, tmp_path: Path) -> None:
    """This includes engines of several ranks; a later engine fills a gap, and one that leaves makes one."""
    with receivers(bus_url, run_id, {"a": GOOD, "b": Behaviour(ranks=2), "c": GOOD, "d": GOOD}) as engines:
        with publishing(bus_url, run_id, tmp_path, group="3", phase_deadline_s=SOME_HUNG_S) as publisher:
            assert push(publisher, 1).engines == ("a", "b", "c", "d")
            assert [state(engines[id][0])["sizes"] for id in "abcd"] == [[5], [5], [5], [2]]
            with receivers(bus_url, run_id, {"e": Behaviour(ranks=2)}) as late:
                assert push(publisher, 2).engines == ("a", "b", "c", "d", "e")
                assert [state(url)["sizes"] for url, _ in (engines["c"], engines["d"], late["e"])] == [[5], [4], [4]]
                assert state(late["e"][0])["digest"] == digest(tiny_tensors(2))
            report = push(publisher, 3)
            assert set(report.evicted) <= {"e"} and report.engines == ("a", "b", "c", "d")
            for id in "abcd":
                told = state(engines[id][0])
                assert (told["digest"], told["ended"]) == (digest(tiny_tensors(3)), [1, 2, 3])


def test_all_in_one_group(bus_url: str, run_id: str, tmp_path: Path) -> None:
    with receivers(bus_url, run_id, {"a": GOOD, "b": GOOD, "c": GOOD}) as engines:
        with publishing(bus_url, run_id, tmp_path, group="all") as publisher:
            push(publisher, 1)
            assert [state(engines[id][0])["sizes"] for id in "abc"] == [[4], [4], [4]]


def test_a_group_with_an_engine_that_cannot_receive_in_one_request_is_pushed_to_in_turn(
    bus_url: str, run_id: str, tmp_path: Path
) -> None:
    with receivers(
        bus_url, run_id, {"a": GOOD, "b": Behaviour(at_once=False), "c": GOOD, "d": Behaviour(at_once=False)}
    ) as engines:
        with publishing(bus_url, run_id, tmp_path, group="all") as publisher:
            assert push(publisher, 1).engines == ("a", "b", "c", "d")
            assert [state(engines[id][0])["sizes"] for id in "abcd"] == [[5], [5], [5], [5]]
            assert {state(engines[id][0])["digest"] for id in "abcd"} == {digest(tiny_tensors(1))}


def _cases() -> Iterator[Any]:
    for number, (how, place, at_once) in enumerate(
        itertools.product(("kill", "stop"), ("relays", "last"), (True, False))
    ):
        marks = [] if number in (0, 7) else [pytest.mark.slow]
        yield pytest.param(
            how, {"relays": "0", "last": "z"}[place], at_once, id=f"{how}-{place}-{_asked(at_once)}", marks=marks
        )


def _asked(at_once: bool) -> str:
    return "asked at once" if at_once else "in turn"


def _named(at: str, at_once: bool, *, alone: bool = False) -> tuple[str, ...]:
    """Return the possible beginnings of the eviction reason of an engine lost at that phase."""
    if at == "checksums":
        return ("verify",)
    if at_once and at != "join":
        return ("transfer", "bucket", "end") if alone else ("end",) if at == "end" else ("transfer", "bucket")
    return (at,)


@pytest.mark.parametrize(("how", "place", "at_once"), list(_cases()))
def test_the_other_members_get_the_version_whichever_member_is_lost(
    bus_url: str, run_id: str, tmp_path: Path, how: str, place: str, at_once: bool
) -> None:
    """Rank 1 of a broadcast hands on to rank 3, so an engine can wait for a dead one without being at fault."""
    good = {id: Behaviour(at_once=at_once) for id in "abc"}
    settings: dict[str, Any] = {
        "group": "all",
        "verify": "always",
        "phase_deadline_s": SOME_HUNG_S,
        "dead_after_s": 5.0,
    }
    with receivers(bus_url, run_id, good) as engines, publishing(bus_url, run_id, tmp_path, **settings) as publisher:
        versions = []
        for number, at in enumerate(PHASES):
            victim = f"{place}-{at}"
            lost = Behaviour(fails=how, at=at, once_served=0 if at == "join" else 1, at_once=at_once)
            with receivers(bus_url, run_id, {victim: lost}):
                if at != "join":
                    versions.append(push(publisher, 2 * number + 1).version)
                report = push(publisher, 2 * number + 2)
            versions.append(report.version)
            assert report.engines == ("a", "b", "c") and report.evicted[victim].startswith(_named(at, at_once)), report
            for url, process in engines.values():
                assert process.returncode is None
                told = state(url)
                assert (told["digest"], told["ended"]) == (digest(tiny_tensors(2 * number + 2)), versions)


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)], ids=_asked)
def test_several_lost_in_several_phases_of_one_push(bus_url: str, run_id: str, tmp_path: Path, at_once: bool) -> None:
    bad = {
        f"{how}-{at}": Behaviour(fails=how, at=at, once_served=1, at_once=at_once)
        for how in ("kill", "stop", "refuse")
        for at in ("begin", "bucket", "end")
    }
    good = Behaviour(at_once=at_once)
    with receivers(bus_url, run_id, {"a": good, "m": good, "z": good, **bad}) as engines:
        with publishing(bus_url, run_id, tmp_path, group="all", phase_deadline_s=SOME_HUNG_S) as publisher:
            assert push(publisher, 1).evicted == {}
            report = push(publisher, 2)
            assert report.engines == ("a", "m", "z") and set(report.evicted) == set(bad)
            for name, why in report.evicted.items():
                assert why.startswith(_named(name.partition("-")[2], at_once, alone=True)), report.evicted
            for id in "amz":
                assert state(engines[id][0])["ended"] == [1, 2]
            for at in ("begin", "bucket", "end"):  # refused, and alive: it serves the earlier version
                assert state(engines[f"refuse-{at}"][0])["digest"] == digest(tiny_tensors(1))


def test_a_member_that_refuses_is_retried_alone_once(bus_url: str, run_id: str, tmp_path: Path) -> None:
    """Over a shared channel an error may be another's fault; alone it may not."""
    behaviours = {
        "a": GOOD,
        "once": Behaviour(fails="refuse", at="bucket", only_once=True),
        "always": Behaviour(fails="refuse", at="bucket"),
    }
    with (
        receivers(bus_url, run_id, behaviours) as engines,
        publishing(bus_url, run_id, tmp_path, group="3") as publisher,
    ):
        report = push(publisher, 1)
        assert report.engines == ("a", "once") and "refused at bucket" in report.evicted["always"]
        for id in report.engines:
            assert state(engines[id][0])["ended"] == [1]


@pytest.mark.parametrize("group", ["0", "-1", "pair", ""])
def test_wrong_group_settings_are_refused(group: str) -> None:
    with refusal(ValueError, place="group", got=repr(group)):
        WeightsConfig(group=group)
