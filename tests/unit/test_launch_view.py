"""The terminal view: the curve, and one picture of a run in the middle."""

import asyncio
import io
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from tests import data_kit
from tests.small_disk import small_disk
from tests.waits import until
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run import view
from tidemill.launch.run.learner_process import LearnerRow
from tidemill.launch.run.summary import draw, reward_limits, scores_lines, scores_of, smooth
from tidemill.launch.run.view import evaluations, picture, plot, show_plain, waits
from tidemill.launch.run.watch import SERVER_RESTARTS, SILENT_S, RunLines, RunWatch


class NoBus:
    """A watch that has seen everything needs no bus."""


def watch_of(rewards: list[float], steps: int) -> RunWatch:
    watch = RunWatch(NoBus(), steps=steps)  # type: ignore[arg-type]
    for place, reward in enumerate(rewards):
        metrics = {
            "data/reward_mean": reward,
            "offpolicy/lag_max": 2.0,
            "offpolicy/lag_share/0": 0.25,
            "offpolicy/lag_share/1": 0.75,
        }
        watch.outcomes[place + 1] = Done(epoch=1, step=place + 1, metrics=metrics)
        watch.pace.add(1, place + 1, 2.0 * (place + 1))
    return watch


def dots(lines: list[str]) -> list[tuple[int, int]]:
    """Return (column, level) of every dot, level 0 at the bottom."""
    bits = {
        0x40: (0, 0),
        0x04: (0, 1),
        0x02: (0, 2),
        0x01: (0, 3),
        0x80: (1, 0),
        0x20: (1, 1),
        0x10: (1, 2),
        0x08: (1, 3),
    }
    found = []
    for row, line in enumerate(lines):
        for column, cell in enumerate(line):
            for bit, (right, up) in bits.items():
                if (ord(cell) - 0x2800) & bit:
                    found.append((2 * column + right, 4 * (len(lines) - 1 - row) + up))
    return sorted(found)


def test_a_rising_line_rises() -> None:
    lines = plot(list(np.linspace(0, 1, 20)), width=10, height=4, low=0, high=1, total=20)
    assert dots(lines) == [(column, round(column / 19 * 15)) for column in range(20)]


def test_a_run_that_is_half_done_fills_half_of_the_width() -> None:
    found = dots(plot([0.5] * 30, width=10, height=2, low=0, high=1, total=60))
    assert max(column for column, _ in found) == 9


@pytest.mark.parametrize("count", [1, 7, 500])
def test_any_number_of_values_fits(count: int) -> None:
    lines = plot([0.3] * count, width=12, height=3, low=0, high=1, total=count)
    assert [len(line) for line in lines] == [12, 12, 12]


def test_time_left_follows_the_pace() -> None:
    assert watch_of([0.1] * 10, steps=60).left_s() == pytest.approx(100)
    assert watch_of([0.1] * 2, steps=60).left_s() is None


def test_time_left_after_a_resume_is_by_the_steps_since() -> None:
    """60 steps of 0.1 s each, a pause of 20 s, and four steps that are taken again: 244 are left."""
    watch = RunWatch(NoBus(), steps=304)  # type: ignore[arg-type]
    for step in range(1, 61):
        watch.pace.add(1, step, 0.1 * step)
    for step in range(1, 5):
        watch.pace.add(2, 56 + step, 26.0 + 0.1 * step)
        assert (watch.left_s() is None) == (step < 3), "two steps of this start are no pace"
    assert watch.left_s() == pytest.approx(24.4)


def test_tokens_generated_and_trained_are_both_per_second_of_the_clock() -> None:
    """A step that takes a tenth of the time between steps trains no more tokens than there are."""
    watch = watch_of([0.5] * 5, steps=10)
    for done in watch.outcomes.values():
        done.metrics.update({"train/tokens": 1000.0, "train/tokens_per_second": 5000.0})
    watch.rate_generated = 550.0
    assert watch.rate_trained == pytest.approx(4 * 1000 / 8)
    assert watch.flat()["tokens/s"] == "550 generated, 500 trained"
    console = Console(file=io.StringIO(), width=110, force_terminal=False, color_system=None)
    console.print(picture(watch, "tidemill test"))
    assert "550 generated, 500 trained" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_picture_shows_the_main_numbers() -> None:
    watch = watch_of([0.1, 0.5, 0.9], steps=10)
    row = LiveRow(role="engine", id="e-0", host="h", pid=1, phase="serving", version=7, waits_for="nothing")
    watch.rows = [(row, 0.0), (LiveRow(role="actor", id="a-0", host="h", pid=2, phase="working"), 9.0)]
    watch.sample = data_kit.sample(data_kit.task(1), 0)
    watch.event("engine-0 was started again")
    console = Console(file=io.StringIO(), width=110, force_terminal=False, color_system=None)
    console.print(picture(watch, "tidemill test"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for wanted in (
        "step 3/10",
        "reward 0.900",
        "engine e-0",
        "serving",
        "silent for 9 s",
        "last sample",
        "started again",
        "left",
    ):
        assert wanted in text, text


def test_trouble_is_shown_before_and_after_the_first_step() -> None:
    """If every reward fails there is no step, and only the trouble line shows the cause."""
    row = LiveRow(
        role="actor",
        id="actor-0",
        host="h",
        pid=2,
        phase="working",
        trouble="9 of 9 samples failed, the last: no judge",
    )
    for rewards in ([], [0.5]):
        watch = watch_of(rewards, steps=10)
        watch.note_rows([(row, 0.0)])
        watch.note_rows([(replace(row, trouble="99 of 99 samples failed, the last: no judge"), 0.0)])
        console = Console(file=io.StringIO(), width=120, force_terminal=False, color_system=None)
        console.print(picture(watch, "tidemill test"))
        assert "99 of 99 samples failed" in console.file.getvalue()  # type: ignore[attr-defined]
        stage = "behind step 1: " if rewards else "starting: "
        assert waits(watch).startswith(f"actor-0: 99 of 99 samples failed, the last: no judge; {stage}")
        (event,) = watch.events
        assert "actor-0: 9 of 9 samples failed" in event, "once a process, at the first"
        assert watch.troubles == {"actor-0": "99 of 99 samples failed, the last: no judge"}


def scored(version: int, mean: float, *, later: tuple[int, int] = (0, 0), epoch: int = 1) -> Evaluated:
    metrics = {
        "mean": mean,
        "mean_low": 0.1,
        "mean_high": 0.9,
        "versions_later_min": float(later[0]),
        "versions_later": float(later[1]),
    }
    return Evaluated(epoch=epoch, version=version, step=2 * version, dataset="held", metrics=metrics)


def test_evaluations_are_shown_each_once_with_the_versions_of_their_tokens(tmp_path: Path) -> None:
    watch = RunWatch(NoBus(), steps=10, metrics_file=tmp_path / "metrics.jsonl")  # type: ignore[arg-type]
    for record in (
        scored(0, 0.25),
        scored(2, 0.5, later=(0, 2)),
        scored(2, 0.5, later=(0, 2), epoch=2),
        scored(3, 0.75, later=(1, 1)),
    ):
        watch.note_scores(record)
    assert evaluations(watch) == [
        "evaluation held 0.250 [0.100, 0.900] (version 0)",
        "evaluation held 0.500 [0.100, 0.900] (version 2, tokens of 2 to 4)",
        "evaluation held 0.750 [0.100, 0.900] (version 3, tokens of 4)",
    ]
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 3
    assert scores_of(scores_lines(watch.evaluated)) == {"evaluation held": [(0, 0.25), (4, 0.5), (6, 0.75)]}
    console = Console(file=io.StringIO(), width=110, force_terminal=False, color_system=None)
    console.print(picture(watch, "tidemill test"))
    assert console.file.getvalue().count("evaluation held 0.750 [0.100, 0.900] (version 3") == 1  # type: ignore[attr-defined]


async def test_the_plain_view_prints_an_evaluation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "EVENTS_EVERY_S", 0.01)
    monkeypatch.setattr(view, "PLAIN_EVERY_S", 0.01)
    watch, console = watch_of([0.5], steps=10), Console(file=io.StringIO(), width=200)
    watch.evaluated[0, "held"] = scored(0, 0.25)
    showing = asyncio.create_task(show_plain(watch, console))
    for step, wanted in ((2, "step 2/10"), (3, "step 3/10")):
        watch.outcomes[step] = replace(watch.outcomes[1], step=step)
        await until(lambda wanted=wanted: wanted in console.file.getvalue())  # type: ignore[attr-defined]
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("evaluation held 0.250") == 1 and "eval held" not in text


async def test_the_plain_view_names_what_a_run_waits_for_when_no_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for interval in ("EVENTS_EVERY_S", "PLAIN_EVERY_S", "QUIET_S"):
        monkeypatch.setattr(view, interval, 0.01)
    watch, console = watch_of([0.5], steps=10), Console(file=io.StringIO(), width=200)
    watch.rows = [(LiveRow(role="actor", id="actor-0", host="h", pid=1, phase="waiting", waits_for="an engine"), 0.0)]
    showing = asyncio.create_task(show_plain(watch, console))
    await until(lambda: console.file.getvalue().count("behind step 1: actor waiting (an engine)") >= 2)  # type: ignore[attr-defined]
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    assert console.file.getvalue().count("step 1/10") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [(100, 32), (80, 24), (140, 50)])
@pytest.mark.parametrize("num_actors", [0, 1, 40])
@pytest.mark.parametrize("steps_done", [0, 5])
def test_the_picture_fits_the_terminal(size: tuple[int, int], num_actors: int, steps_done: int) -> None:
    """For any content: no line is wrapped, no block displaces another one, and the view is never higher than the
    screen.
    """
    width, height = size
    watch = watch_of([0.5] * steps_done, steps=10)
    for done in watch.outcomes.values():
        done.metrics.update(
            {"push/version": 1234.0, "push/seconds": 12.3456, "push/stall_seconds_max": 1.2, "train/wait_share": 1.0}
        )
    watch.backlog, watch.rate_generated = (12345, 6789), 123456.0
    watch.rows = [
        (LiveRow(role="actor", id=f"actor-{place}", host="h", pid=1, phase="working", waits_for="an engine " * 20), 0.0)
        for place in range(num_actors)
    ]
    watch.rows += [(LiveRow(role="engine", id="sick", host="h", pid=1, phase="serving"), 60.0)]
    watch.evaluated = {
        (version, name): replace(scored(version, 0.5), dataset=name)
        for version in range(5)
        for name in ("a" * 40, "b", "c")
    }
    watch.sample = replace(data_kit.sample(data_kit.task(1), 0), response="many words\n" * 100)
    for place in range(9):
        watch.event(f"engine-{place} ended with code -9; started again in 0.5 s " * 3)
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(picture(watch, "tidemill test", width=width, height=height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert {len(line) for line in lines} == {width}, text
    assert len(lines) < height, text
    if steps_done:
        assert "v1234, 12.3 s, stall 1.2 s" in text, text
    for wanted in (
        "step",
        "12345 waiting, 6789 leased",
        "engine sick",
        "silent for 60 s",
        "last sample",
        "engine-8 ended",
    ):
        assert wanted in text, text
    if num_actors == 40:
        assert "and more" in text


def test_before_the_first_step_the_wait_of_each_process_is_shown() -> None:
    watch = watch_of([], steps=5)
    assert "no process" in waits(watch)
    watch.rows = [(LiveRow(role="engine", id="e", host="h", pid=1, phase="joining", waits_for="a snapshot"), 0.0)]
    assert "engine joining (a snapshot)" in waits(watch)


def test_an_actor_that_is_refused_is_an_event_once() -> None:
    watch = watch_of([0.5], steps=5)
    row = LiveRow(
        role="feeder", id="feeder", host="h", pid=1, phase="working", load={"invalid": 64.0, "refused/actor-7": 1.0}
    )
    for _ in range(2):
        watch.note_rows([(row, 0.0)])
    (event,) = watch.events
    assert "actor actor-7 sends only invalid samples and is refused" in event


def test_curves_are_drawn_even_from_little(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "curves.png"
    draw([{"step": 1, "data/reward_mean": 0.5}], file, title="one step")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert smooth([1, 2, 3, 4, 5, 6]) == [1, 1.5, 2, 2.5, 3, 4]


def test_rewards_beyond_0_and_1_are_in_the_picture() -> None:
    assert reward_limits([]) == (0.0, 1.02)
    assert reward_limits([0.2, 0.9]) == (0.0, 1.02)
    low, high = reward_limits([-1.0, 0.5])
    assert low < -1.0 and high > 1.0
    assert reward_limits([0.5, 7.0])[1] > 7.0


def test_a_run_of_demonstrations_shows_its_cross_entropy() -> None:
    watch = watch_of([0.0, 0.0, 0.0], steps=10)
    for step, done in watch.outcomes.items():
        done.metrics["train/sft_loss"] = 3.0 - step / 2
    console = Console(file=io.StringIO(), width=110, force_terminal=False, color_system=None)
    console.print(picture(watch, "tidemill sft"))
    assert "cross-entropy 1.500   first 2.500, best 1.500" in console.file.getvalue()  # type: ignore[attr-defined]
    assert watch.flat()["cross-entropy"] == "1.500"
    assert "cross-entropy" not in watch_of([0.5], steps=10).flat()


async def test_a_bus_that_does_not_answer_is_shown_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of its last answer, so no line would follow."""
    monkeypatch.setattr(view, "EVENTS_EVERY_S", 0.01)
    monkeypatch.setattr(view, "PLAIN_EVERY_S", 0.01)
    watch, terminal = watch_of([0.5], steps=9), Console(file=io.StringIO(), width=100)
    watch.bus_silence = "the bus has not answered for 60 s"
    showing = asyncio.create_task(show_plain(watch, terminal))
    # type: ignore[attr-defined]
    await until(lambda: terminal.file.getvalue().count("the bus has not answered for 60 s") >= 2)
    watch.bus_silence = ""
    # type: ignore[attr-defined]
    await until(lambda: "step 1/9" in terminal.file.getvalue())
    watch.event("the last one")
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    assert terminal.file.getvalue().endswith("the last one\n")  # type: ignore[attr-defined]
    watch.bus_silence = "the bus has not answered for 60 s"
    live = Console(file=io.StringIO(), width=100)
    live.print(picture(watch, "a run"))
    assert "the bus has not answered for 60 s" in live.file.getvalue()  # type: ignore[attr-defined]


async def test_the_beginning_and_the_end_of_a_silence_of_the_bus_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.launch.run.watch.LOOK_EVERY_S", 0.01)
    watch = watch_of([0.5], steps=9)
    watching = asyncio.create_task(watch.await_answers())
    for answered_s, text in ((-7.0, "the bus has not answered for 7 s"), (0.0, "the bus answers again (")):
        watch.answered_s = time.monotonic() + answered_s
        await until(lambda text=text: any(text in event for event in watch.events))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert len(watch.events) == 2


HERE, ENDED_PID = socket.gethostname(), 2**22 + 1
"""This machine, and a process id that Linux gives to no process."""


@pytest.mark.parametrize(
    ("row", "age", "steady", "event"),
    [
        ({"role": "actor", "id": "actor-0"}, SILENT_S + 1, True, "actor-0 sends no heartbeats"),
        ({"role": "scorer", "id": "far"}, SILENT_S + 1, True, "scorer far sends no heartbeats"),
        ({"role": "actor", "id": "actor-0", "pid": ENDED_PID}, SILENT_S + 1, True, ""),  # its supervisor has named it
        (
            {"role": "actor", "id": "actor-0", "host": "far", "pid": ENDED_PID},
            SILENT_S + 1,
            True,
            "actor-0 sends no heartbeats",
        ),
        ({"role": "actor", "id": "actor-0"}, SILENT_S + 1, False, ""),  # the bus was silent, and so all rows are
        ({"role": "actor", "id": "actor-0"}, SILENT_S - 1, True, ""),
        ({"role": "actor", "id": "actor-0", "phase": "draining"}, 0.0, True, "actor-0 drains"),
    ],
)
def test_a_process_that_is_silent_or_drains_is_an_event_once(
    row: dict[str, object], age: float, steady: bool, event: str
) -> None:
    watch = watch_of([], steps=9)
    values = {"host": HERE, "pid": os.getpid(), "phase": "working", **row}
    working = LiveRow(**{**values, "phase": "working"})  # type: ignore[arg-type]
    watch.steady_s = time.monotonic() - (2 * SILENT_S if steady else 0.0)
    watch.note_rows([(working, 0.0)])
    watch.note_rows([(working, 0.0)])
    for _ in range(3):
        watch.note_rows([(LiveRow(**values), age)])  # type: ignore[arg-type]
    assert [text for text in watch.events if event not in text] == [] and len(watch.events) == bool(event), watch.events
    watch.ending = True
    watch.note_rows([(working, 0.0)])
    watch.note_rows([(LiveRow(**{**values, "phase": "draining"}), 0.0)])  # type: ignore[arg-type]
    assert len(watch.events) == bool(event), "drained on purpose"


def test_a_rank_that_has_received_sigterm_is_an_event_before_its_step_ends() -> None:
    watch = watch_of([], steps=9)
    heartbeat = HeartbeatPublisher(
        SimpleNamespace(rows=lambda _: None, run="r"),  # type: ignore[arg-type]
        LiveRow(role="learner", id="learner", host="h", pid=2, phase="working"),
    )
    LearnerRow(heartbeat).rank_drains()
    for _ in range(2):
        watch.note_rows([(heartbeat.row, 0.0)])
    (event,) = watch.events
    assert event.endswith("learner drains: waits for a rank that has received SIGTERM to end its step")


def test_every_restart_of_a_server_is_an_event() -> None:
    watch = watch_of([], steps=9)
    row = LiveRow(role="bus", id="bus", host="h", pid=2, phase="serving", load={SERVER_RESTARTS: 0.0})
    for restarts in (0, 1, 1, 2, 0, 1):  # the bus's own process was started again, too
        trouble = f"nats-server ended, {restarts}" if restarts else ""
        watch.note_rows([(replace(row, load={SERVER_RESTARTS: float(restarts)}, trouble=trouble), 0.0)])
    assert [text[-1] for text in watch.events] == ["1", "2", "1"]


def test_the_row_of_an_earlier_start_is_no_silent_process() -> None:
    watch = watch_of([], steps=9)
    watch.steady_s = time.monotonic() - 2 * SILENT_S
    for age in (0.0, 1.0, 2.0, SILENT_S + 1):
        watch.note_rows([(LiveRow(role="actor", id="actor-7", host="far", pid=1, phase="working"), age)])
    assert not watch.events


def test_metrics_outlive_a_full_disk_and_the_terminal_names_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        events: list[str] = []
        lines = RunLines(disk.root / "metrics.jsonl", events.append)
        lines.add_step({"step": 1, "text": "x" * 5000})
        disk.fill(leaving=0)
        for step in (2, 3):
            lines.add_step({"step": step, "text": "x" * 5000})
            lines.add_scores({"version": step})
        (text,) = events
        assert (
            f"{disk.root}/metrics.jsonl: cannot be written: No space left on device; its lines wait in memory" in text
        )
        disk.clear()
        lines.write()
        assert f"{disk.root}/metrics.jsonl: written again, with 4 lines that waited" in events[-1]
        assert [json.loads(line)["step"] for line in (disk.root / "metrics.jsonl").read_text().splitlines()] == [
            1,
            2,
            3,
        ]
        assert (disk.root / "evaluations.jsonl").read_text() == '{"version": 2}\n{"version": 3}\n'
