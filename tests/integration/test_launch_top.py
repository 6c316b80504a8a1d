"""`tidemill top`: hosts summed up, rates, and the processes that need a look."""

import argparse
import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.bus_fixtures import BusOpener
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.wire.messages import Done
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli import top
from tidemill.launch.cli.top import Rates, hosts_picture, lines_of, show_top
from tidemill.launch.run.watch import SILENT_S, RunWatch

ENGINE = LiveRow(role="engine", id="e-0", host="gpu-1", pid=1, phase="serving", version=7)
ACTOR = LiveRow(role="actor", id="a-0", host="cpu-1", pid=2, phase="working", load={"waiting_share": 0.25})
OLD = SILENT_S + 1


def generated(tokens: float, engine: LiveRow = ENGINE) -> tuple[LiveRow, float]:
    return replace(engine, load={"tokens_generated": tokens, "waiting_share": 0.75}), 0.0


def test_hosts_with_a_problem_come_first_and_the_others_are_summed_up() -> None:
    rows = [
        generated(5),
        generated(6, replace(ENGINE, id="e-1", version=8)),
        (ACTOR, 0.0),
        (replace(ACTOR, id="a-1", host="cpu-2", trouble="3 of 4 samples failed"), 0.0),
        (replace(ACTOR, id="a-2", host="cpu-3"), OLD),
    ]
    lines = lines_of(rows)
    assert [line.host for line in lines] == ["cpu-3", "cpu-2", "cpu-1", "gpu-1"]
    gpu = lines[3]
    assert (gpu.roles["engine"], gpu.versions, sum(gpu.tokens.values())) == (2, {7, 8}, 11)


def test_the_rate_of_a_host_is_of_its_engines_and_survives_a_restart_of_one() -> None:
    rates = Rates()
    assert rates.of(lines_of([generated(100)]), 50.0) == {}
    assert rates.of(lines_of([generated(300)]), 54.0) == {"gpu-1": 50.0}
    again = generated(10, replace(ENGINE, pid=9))
    rates.of(lines_of([again]), 55.0)
    assert rates.of(lines_of([generated(30, replace(ENGINE, pid=9))]), 57.0) == {"gpu-1": 10.0}


def test_a_hundred_hosts_fit_a_small_terminal() -> None:
    watch = RunWatch(None, steps=9)  # type: ignore[arg-type]  # rows alone
    watch.rows = [(replace(ACTOR, id=f"a-{number}", host=f"h-{number:03}"), 0.0) for number in range(100)]
    watch.rows.append((replace(ACTOR, id="silent", host="z"), OLD))
    shown = Console(file=io.StringIO(), width=80, height=24, color_system=None)
    shown.print(hosts_picture(watch, Rates(), "tidemill r", width=80, height=24))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "actor silent on z: silent for 5 s" in text and "more hosts" in text
    assert len(text.splitlines()) <= 24
    assert text.index(" z ") < text.index("h-000"), "the host that needs a look is the first one"


async def test_one_picture_of_a_run_on_the_bus(
    open_bus: BusOpener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the rows and the newest outcome, not for a time."""
    monkeypatch.setattr(top, "_FIRST_S", 300.0)
    monkeypatch.setattr(top, "_SETTLE_S", 0.0)
    async with open_bus() as bus, HeartbeatPublisher(bus, ENGINE) as engine, HeartbeatPublisher(bus, ACTOR) as actor:
        await engine.stored()
        await actor.stored()
        await bus.plans.fence(1)
        await bus.rows("run").put("config", {"learner": {"steps": 9}})
        await bus.plans.append(Done(epoch=1, step=4, metrics={"data/reward_mean": 0.5}))
        assert await show_top(bus, argparse.Namespace(once=True, ended=False)) == 0
    text = capsys.readouterr().out
    assert "step 4/9" in text and "gpu-1" in text and "cpu-1" in text and "reward 0.500" in text
