"""`tidemill metrics` on a real bus: each step once, in order, over a sink that fails, a restart of the learner and the
end of the run.
"""

import argparse
import asyncio
import json
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.bus_fixtures import BusOpener
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.launch.cli.main import main
from tidemill.launch.cli.metrics import export
from tidemill.launch.metrics.sinks import SINK, Jsonl, StepMetrics, WeightsAndBiases
from tidemill.rewards.registry import Bound

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0


async def steps(bus: Bus, first: int, last: int, *, epoch: int = 1) -> None:
    for step in range(first, last + 1):
        await bus.plans.append(Done(epoch=epoch, step=step, metrics={"train/loss": step / 4, "data/reward_mean": 1.0}))


async def scores(bus: Bus, step: int) -> None:
    await bus.plans.append(Evaluated(epoch=1, version=step, step=step, dataset="held_out", metrics={"mean": 0.5}))


def arguments(*, from_step: int = 1, until_end: bool = True) -> argparse.Namespace:
    return argparse.Namespace(from_step=from_step, until_end=until_end, ended=False)


class Collected:
    """A sink that keeps its arguments; with ``fails`` its first calls raise. ``seen`` is set with every call that
    returns.
    """

    def __init__(self, fails: int = 0) -> None:
        self.of: list[StepMetrics] = []
        self.fails, self.calls, self.closed = fails, 0, 0
        self.seen = asyncio.Event()

    async def __call__(self, one: StepMetrics) -> None:
        self.calls += 1
        if self.calls <= self.fails:
            raise OSError("no route to the tracker")
        self.of.append(one)
        self.seen.set()

    def close(self) -> None:
        self.closed += 1

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                self.seen.clear()
                await self.seen.wait()

    @property
    def bound(self) -> Bound:
        return Bound("collected", self, {}, SINK)


async def test_each_step_is_given_once_in_order_with_the_scores(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    sink = Collected()
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 4)
        await scores(bus, 2)
        await bus.plans.fence(2)  # a learner that has restarted executes steps 3 and 4 again
        await steps(bus, 3, 6, epoch=2)
        done = await export(nats_server.url, bus.run, sink.bound, arguments(), asyncio.Event())
        assert [(one.step, one.epoch) for one in sink.of if not one.evaluation] == [
            (1, 1),
            (2, 1),
            (3, 1),
            (4, 1),
            (5, 2),
            (6, 2),
        ]
        (held_out,) = (one for one in sink.of if one.evaluation)
        assert (held_out.step, held_out.metrics, held_out.run) == (2, {"eval/held_out/mean": 0.5}, bus.run)
        assert sink.of[0].metrics == {"train/loss": 0.25, "data/reward_mean": 1.0}
        assert (done.steps, done.evaluations, done.failures, sink.closed) == (6, 1, 0, 1)
        later = Collected()
        await export(nats_server.url, bus.run, later.bound, arguments(from_step=5), asyncio.Event())
        assert [one.step for one in later.of] == [5, 6]


async def test_a_sink_that_fails_is_called_again_and_new_steps_follow(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    sink, draining = Collected(fails=3), asyncio.Event()
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 2)
        args = arguments(until_end=False)
        running = asyncio.create_task(export(nats_server.url, bus.run, sink.bound, args, draining, first_pause_s=0.01))
        await sink.until(lambda: len(sink.of) == 2)
        await steps(bus, 3, 4)
        await sink.until(lambda: len(sink.of) == 4)
        draining.set()
        done = await running
        assert [one.step for one in sink.of] == [1, 2, 3, 4], "nothing is lost or given twice"
        assert (done.failures, sink.closed) == (3, 1)


class Having(Collected):
    """A sink that has two steps and an evaluation already."""

    def has(self, one: StepMetrics) -> bool:
        return one.step <= (2 if one.evaluation else 3)


async def test_what_a_sink_has_is_not_given_to_it_again(open_bus: BusOpener, nats_server: EmbeddedServer) -> None:
    sink = Having()
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 5)
        for step in (2, 4):
            await scores(bus, step)
        done = await export(nats_server.url, bus.run, sink.bound, arguments(), asyncio.Event())
    assert [(one.step, one.evaluation) for one in sink.of] == [(4, False), (5, False), (4, True)]
    assert (done.steps, done.evaluations, done.had) == (2, 1, 4)


class FakeRun:
    """A run of W&B, whose summary has the last value of each name."""

    def __init__(self, summary: dict[str, float], *, resumed: bool) -> None:
        self.summary, self.resumed, self.logged = summary, resumed, list[dict[str, float]]()

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)
        self.summary.update(values)


def test_a_run_of_wandb_is_resumed_behind_what_it_has_and_never_another_run_s(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, dict[str, float]] = {}
    made: list[FakeRun] = []

    def init(*, name: str, id: str, resume: str, project: str, **options: object) -> FakeRun:
        assert (name, resume, project) == ("digits", "allow", "tide")
        made.append(FakeRun(kept.setdefault(id, {}), resumed=bool(kept[id])))
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = [
        StepMetrics(run="digits", run_id="digits-1", step=step, epoch=1, metrics={"train/loss": 0.5})
        for step in (1, 2, 3)
    ]
    log.insert(
        2, StepMetrics(run="digits", run_id="digits-1", step=1, epoch=1, metrics={"eval/a/mean": 0.5}, evaluation=True)
    )
    log.append(
        StepMetrics(run="digits", run_id="digits-1", step=1, epoch=1, metrics={"eval/b/mean": 0.5}, evaluation=True)
    )
    first = WeightsAndBiases(project="tide")
    for one in log[:3]:
        assert not first.has(one)
        first(one)
    again = WeightsAndBiases(project="tide")
    assert [again.has(one) for one in log] == [True, True, True, False, False]
    other = WeightsAndBiases(project="tide")
    assert not other.has(replace(log[0], run_id="digits-2"))
    assert [run.resumed for run in made] == [False, True, False]
    assert made[0].logged[2] == {"step": 1, "last/eval/a": 1, "eval/a/mean": 0.5}


class Stuck:
    """A plain sink; its first call waits for ``released``."""

    def __init__(self) -> None:
        self.called, self.released, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, one: StepMetrics) -> None:
        self.called.set()
        self.released.wait()

    def close(self) -> None:
        self.closed.set()


async def test_a_sink_that_hangs_does_not_keep_the_command_from_its_end(
    open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    sink, draining = Stuck(), asyncio.Event()
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 2)
        args = arguments(until_end=False)
        running = export(nats_server.url, bus.run, Bound("stuck", sink, {}, SINK), args, draining, close_s=0.01)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            exported = group.create_task(running)
            await asyncio.to_thread(sink.called.wait)
            draining.set()
        assert exported.result().steps == 0
        assert not sink.closed.is_set(), "not beside a call that is under way"
        sink.released.set()
        assert await asyncio.to_thread(sink.closed.wait, LIMIT_S)


def test_a_line_that_does_not_fit_is_written_whole_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = Jsonl(path=str(path))
    one = StepMetrics(run="r", step=1, epoch=1, metrics={"train/loss": 0.5})
    sink(one)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
        with pytest.raises(OSError, match="only a part of the line"):
            sink(one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == before
    sink(one)
    sink.close()
    assert path.read_bytes() == 2 * before


async def test_the_command_writes_lines_and_event_files(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 3)
        await scores(bus, 3)
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "metrics",
            "--bus",
            nats_server.url,
            "--run",
            bus.run,
            "--until-end",
        ]
        for words in (
            ["jsonl", "--option", f"path={tmp_path}/m.jsonl"],
            ["tensorboard", "--option", f"directory={tmp_path}/events"],
        ):
            result = await asyncio.to_thread(
                subprocess.run, [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert result.returncode == 0, result.stderr
            assert f"3 steps and 1 evaluations given to {words[0]}, 0 calls failed" in result.stdout
        lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 3]
        (run_id,) = {line["run_id"] for line in lines}
        assert re.fullmatch(rf"{bus.run}-20\d{{18}}", run_id)
        assert lines[3] == {"step": 3, "epoch": 1, "run_id": run_id, "eval/held_out/mean": 0.5}
        await steps(bus, 4, 5)
        await scores(bus, 4)
        with (tmp_path / "m.jsonl").open("a") as file:
            file.write('["not ours"]\n{"step": 4, "ep')  # a command that was killed as it wrote
        words = ["jsonl", "--option", f"path={tmp_path}/m.jsonl"]
        result = await asyncio.to_thread(
            subprocess.run, [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert "2 steps and 1 evaluations given to jsonl, which had 4 from before, 0 calls failed" in result.stdout
        again = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
        assert again[:5] == [*lines, ["not ours"]] and [line["step"] for line in again[5:]] == [4, 5, 4]
        (file,) = (tmp_path / "events" / bus.run).iterdir()
        scalars = {
            (event.step, value.tag): value.simple_value
            for event in events(file.read_bytes())
            for value in event.summary.value
        }
        assert scalars[2, "train/loss"] == 0.5
        assert scalars[3, "eval/held_out/mean"] == 0.5
        assert len(scalars) == 7


def events(data: bytes) -> list[Event]:
    """Return the records of an event file: length (8 bytes), its checksum (4), content, its checksum (4)."""
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        found.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("tensorbord", [], "nearest: 'tensorboard'"),
        ("jsonl", [], "path: missing, and it has no default"),
        ("jsonl", ["paht=x"], r"paht: no such option \(nearest: 'path'\)"),
        ("jsonl", ["path"], "--option: want KEY=VALUE, got 'path'"),
        ("jsonl", ["path=/no/such/directory/m"], "No such file"),
        ("no_such_module:f", [], "cannot import no_such_module"),
        ("jsonl", ["path=[1"], "--option path: not YAML: "),
    ],
)
def test_a_sink_that_cannot_be_made_is_refused_before_the_bus_is_asked(
    capsys: pytest.CaptureFixture[str], name: str, options: list[str], reason: str
) -> None:
    words = [word for option in options for word in ("--option", option)]
    assert main(["metrics", name, *words, "--bus", "nats://127.0.0.1:1", "--run", "r"]) == 2
    assert re.search(reason, capsys.readouterr().err)
