"""Starts `tidemill up`, watches it over the bus, kills processes of it, and reads the files it leaves.

`up` itself is forked from a process that has imported its modules; its children are started as everywhere.
"""

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import Forked
from tests.launched import tidemill
from tests.waits import LIMIT_S, until
from tests.whole.prepared import put_prepared
from tidemill.bus.errors import BusUnavailable, NotFound
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Plan
from tidemill.bus.wire.rows import LiveRow

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "launch/configs/smoke.yaml"
UP_LIMIT_S = 300.0


@dataclass
class Up:
    """A running `tidemill up` and its run directory."""

    process: Forked
    directory: Path
    run: str

    @property
    def log(self) -> str:
        return (self.directory.parent / "up.log").read_text()

    def wait(self, limit_s: float = UP_LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except TimeoutError:
            raise AssertionError(
                f"`tidemill up` did not end within {limit_s:.0f} s; its last words:\n{self.log[-3000:]}"
            ) from None

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    async def bus_url(self) -> str:
        """Return the address of its bus, once it is in the run directory."""
        address = self.directory / "bus.url"
        await until(lambda: address.exists() or self.process.returncode is not None, timeout_s=UP_LIMIT_S)
        assert address.exists(), f"no bus came up:\n{self.log[-3000:]}"
        return address.read_text().strip()

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """Connect to its bus, once it is there."""
        async with connect(await self.bus_url(), self.run, name="test") as bus:
            yield bus


def start(tmp_path: Path, *settings: str, config: Path | Sequence[Path] = SMOKE, flags: tuple[str, ...] = ()) -> Up:
    """Start `tidemill up` with its run directory under ``tmp_path``; the caller ends it.

    Without ``flags`` (--fresh, --resume) the run finds its model and prompts prepared.
    """
    directory = tmp_path / "run"
    files = [config] if isinstance(config, Path) else config
    if not flags:
        put_prepared(files[0], directory)
    chosen = [word for setting in (f"directory={directory}", *settings) for word in ("--set", setting)]
    process = tidemill("up", *map(str, files), *flags, *chosen, output=tmp_path / "up.log")
    return Up(process, directory, run="smoke")


@contextlib.contextmanager
def up(
    tmp_path: Path, *settings: str, config: Path | Sequence[Path] = SMOKE, flags: tuple[str, ...] = ()
) -> Iterator[Up]:
    """Start `tidemill up` likewise; it ends with all its children when the block is left."""
    run = start(tmp_path, *settings, config=config, flags=flags)
    try:
        yield run
    finally:
        if run.process.returncode is None:
            run.process.send_signal(signal.SIGTERM)
            try:
                run.process.wait(60)
            except TimeoutError:
                run.process.kill()
                run.process.wait()


async def steps_done(bus: Bus) -> AsyncIterator[Done]:
    """Yield the outcomes of steps in the log PLAN, present and future ones."""
    async for _, record in bus.plans.follow():
        if isinstance(record, Done):
            yield record


async def until_step(bus: Bus, step: int) -> None:
    """Wait until a step is done. (Bounded by the test's own limit.)"""
    async for done in steps_done(bus):
        if done.step >= step:
            return


async def limit_records(bus: Bus, number: int) -> None:
    """Let the log of plans have no more records, once it has any: a learner with more of them waits. -1 = no limit.

    Not earlier: a learner that starts refuses a bus with other limits than its own.
    """
    stream = subjects.stream(bus.run, subjects.PLAN)

    async def filled_stream() -> dict[str, Any] | None:
        with contextlib.suppress(NotFound):
            info: dict[str, Any] = await bus.jet.call(f"STREAM.INFO.{stream}")
            return info if info["state"]["last_seq"] else None
        return None

    info = await until(filled_stream)
    assert number < 0 or info["state"]["last_seq"] < number, f"this test came too late: {info['state']}"
    await bus.jet.call(f"STREAM.UPDATE.{stream}", {**info["config"], "max_msgs": number})


async def live(bus: Bus, role: str) -> LiveRow:
    """Return the row of a living process of this role; waits while the bus is away."""
    return await row_of(bus, role, lambda row: _alive(row.pid))


async def row_of(bus: Bus, role: str, is_wanted: Callable[[LiveRow], object], *, timeout_s: float = LIMIT_S) -> LiveRow:
    """Return the row of a live process of the role, once ``is_wanted`` is true of it; waits while the bus is away."""
    view = LiveView(bus)

    async def wanted_row() -> LiveRow | None:
        with contextlib.suppress(BusUnavailable):
            return next((row for row in await view.alive(role) if is_wanted(row)), None)
        return None

    row: LiveRow = await until(wanted_row, timeout_s=timeout_s)
    return row


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def records(bus: Bus) -> tuple[list[Plan], list[Done]]:
    found = [record async for _, record in bus.plans.scan()]
    return [r for r in found if isinstance(r, Plan)], [r for r in found if isinstance(r, Done)]


def assert_books_balance(summary: dict[str, Any], *, max_lag: int) -> None:
    """Assert the guarantees that hold for every run, with any process killed in it."""
    assert summary["samples_lost"] == 0, summary
    assert summary["samples_trained_twice"] == 0, summary
    assert summary["requests_aborted_by_pushes"] == 0, summary
    assert summary["max_lag_trained"] <= max_lag, summary
