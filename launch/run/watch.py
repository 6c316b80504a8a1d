"""The observed state of a run, collected from the bus alone; no process is queried.

Consumes PLAN (outcomes), live rows, stream states, the newest sample; produces the fields of ``RunWatch``, which views
read at any time. Waits for the bus; a value that is not known yet is None. A bus that does not answer, a process
without heartbeats and a disk without room are events.
"""

import asyncio
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from types import MappingProxyType

from tidemill.bus.client.jetstream import StreamState
from tidemill.bus.errors import BusError
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import all_of
from tidemill.bus.wire.messages import Done, Evaluated, Sample
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.run import summary
from tidemill.launch.run.run_facts import Pace
from tidemill.launch.run.summary import count_in

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
UNANSWERED_S = 3.0  # Seconds without an answer of the bus after which it counts as silent
SILENT_S = 4.0  # Seconds without a change of its live row after which a process counts as silent
# Counter in the live row of a bus: restarts of nats-server by its keeper; the row's trouble is the last one.
SERVER_RESTARTS = "server_restarts"
NUM_EVENTS = 20  # Number of events kept for the view


class RunLines:
    """The lines of metrics.jsonl and evaluations.jsonl, written at once, and again in order at the end."""

    def __init__(self, metrics_file: Path | None, on_event: Callable[[str], None]) -> None:
        """Without a file nothing is written. ``on_event``: called when the disk has no room, and has some again."""
        files = () if metrics_file is None else (metrics_file, metrics_file.with_name(summary.EVALUATIONS_FILE))
        self._files, self._on_event = [GrowingFile(file) for file in files], on_event
        self._unwritten = ""  # Reason why lines wait to be written; empty while none do

    def add_step(self, line: Mapping[str, object]) -> None:
        """Add a line of metrics."""
        self._add(0, line)

    def add_scores(self, line: Mapping[str, object]) -> None:
        """Add a line of evaluations."""
        self._add(1, line)

    def _add(self, file: int, line: Mapping[str, object]) -> None:
        if self._files:
            self._files[file].append(line)
            self.write()

    def write(self) -> None:
        """Write the lines that wait. A disk without room is an event, and so is the first line written after that."""
        late = sum(file.num_waiting for file in self._files)
        try:
            for file in self._files:
                file.write()
        except OSError as error:
            if not self._unwritten:
                self._unwritten = f"{self._files[0].file}: cannot be written: {error.strerror}"
                self._on_event(f"{self._unwritten}; its lines wait in memory until they can be")
        else:
            if self._unwritten:
                self._on_event(f"{self._files[0].file}: written again, with {late} lines that waited")
            self._unwritten = ""


@dataclass(kw_only=True, eq=False)
class RunWatch:
    """The current state of a run, as far as it is known."""

    bus: Bus = field(kw_only=False)
    steps: int
    metrics_file: InitVar[Path | None] = None
    # Seconds at which earlier starts of this run had done their steps; time continues from there.
    earlier: InitVar[Mapping[int, float]] = MappingProxyType({})
    # Returns why the bus of this machine, while it is away, is not started; empty = for no reason known here.
    room: Callable[[], str] = str
    after_epoch: int = 0  # Scores up to this epoch are of another run
    # Called with each outcome and each evaluation.
    on_record: Callable[[Done | Evaluated], None] = lambda record: None

    outcomes: dict[int, Done] = field(default_factory=dict, init=False)  # Newest outcome of every step
    # Newest scores by version and evaluation set.
    evaluated: dict[tuple[int, str], Evaluated] = field(default_factory=dict, init=False)
    # Seconds since the run began at which a step's outcome was first seen.
    reached_s: dict[int, float] = field(default_factory=dict, init=False)
    pace: Pace = field(default_factory=Pace, init=False)  # Newest outcomes by the same seconds
    rows: list[tuple[LiveRow, float]] = field(default_factory=list, init=False)  # (row, seconds since it changed)
    # Last counters of every process ever seen, by `role.id`.
    loads: dict[str, dict[str, float]] = field(default_factory=dict, init=False)
    # Repeated failure that each process last reported, by id.
    troubles: dict[str, str] = field(default_factory=dict, init=False)
    # Requests aborted by pushes, as every engine process (id, pid) last reported.
    aborted_by_pushes: dict[tuple[str, int], float] = field(default_factory=dict, init=False)
    samples: StreamState | None = field(default=None, init=False)
    backlog: tuple[int, int] | None = field(default=None, init=False)  # Tasks (waiting, leased)
    sample: Sample | None = field(default=None, init=False)  # A recent sample
    events: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS), init=False)
    rate_generated: float = field(default=0.0, init=False)  # Tokens per second, all actors
    full: str = field(default="", init=False)  # Reason for which the bus stores nothing; empty while it does
    # Sentence on a bus that does not answer, with the time; empty while it does.
    bus_silence: str = field(default="", init=False)
    # Set when the processes are drained on purpose, so that their drains are no events.
    ending: bool = field(default=False, init=False)

    def __post_init__(self, metrics_file: Path | None, earlier: Mapping[int, float]) -> None:
        self._lines = RunLines(metrics_file, self.event)
        self.answered_s = self.steady_s = time.monotonic()
        """Times of the bus's last answer, and since which it has answered without a gap."""
        self._resumed_at = max(earlier, default=0)
        self._began_s = time.monotonic() - max(earlier.values(), default=0.0)
        self.reached_s |= earlier
        self._refused: set[str] = set()
        self._restarts: dict[str, float] = {}
        """Restarts of its nats-server that a process last reported, by id."""
        self._beating: dict[str, bool] = {}
        """Whether a row has changed while it was watched: the row of a process killed earlier does not."""
        self._named: dict[str, str] = {}
        """State of a process that was an event last: silent or draining."""
        self._generated: deque[tuple[float, float]] = deque(maxlen=10)

    @property
    def step(self) -> int:
        """Last step with a recorded outcome; 0 before the first."""
        return max(self.outcomes, default=0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began; the time between its starts does not count."""
        return time.monotonic() - self._began_s

    def series(self, name: str) -> list[float]:
        """Return the values of a metric over the steps that have it."""
        metrics = [self.outcomes[step].metrics for step in sorted(self.outcomes)]
        return [values[name] for values in metrics if name in values]

    def newest(self, name: str, otherwise: float = 0.0) -> float:
        """Return a metric of the last step; ``otherwise`` without a step, or if the step has no such metric."""
        return self.outcomes[self.step].metrics.get(name, otherwise) if self.outcomes else otherwise

    @property
    def rate_trained(self) -> float:
        """Trainable tokens per second of the clock, over the last steps: to be compared with ``rate_generated``."""
        recent = list(self.pace.recent)
        if len(recent) < 2:
            return 0.0
        outcomes = [self.outcomes[step] for step, _ in recent[1:] if step in self.outcomes]
        tokens = sum(done.metrics.get("train/tokens", 0.0) for done in outcomes)
        passed_s = max(recent[-1][1], self.elapsed_s) - recent[0][1]
        return tokens / passed_s if passed_s > 0 else 0.0

    def left_s(self) -> float | None:
        """Return the seconds left at the pace of the last steps; None while it is unknown."""
        return self.pace.left_s(self.steps)

    def event(self, text: str) -> None:
        """Log an event and show it in the view."""
        log.warning("%s", text)
        self.events.append(f"{self.elapsed_s:5.0f} s  {text}")

    async def run(self) -> None:
        """Background loop: watch until cancelled."""
        await all_of((self._follow_outcomes(), self._read_state(), self._watch_room(), self.await_answers()))

    async def _follow_outcomes(self) -> None:
        async for _, record in self.bus.plans.follow():
            if isinstance(record, Done | Evaluated):
                self.on_record(record)
            if isinstance(record, Done):
                self.outcomes[record.step] = record
                self.reached_s.setdefault(record.step, self.elapsed_s)
                if record.step > self._resumed_at:  # earlier ones were stored before this watch began
                    self.pace.add(record.epoch, record.step, self.elapsed_s)
                seconds = round(self.reached_s[record.step], 3)
                self._lines.add_step({"step": record.step, "epoch": record.epoch, "seconds": seconds, **record.metrics})
            elif isinstance(record, Evaluated) and record.epoch > self.after_epoch:
                self.note_scores(record)

    def note_scores(self, record: Evaluated) -> None:
        """Register the scores of a set at a version; scores that a restart has recorded again are no news."""
        before = self.evaluated.get((record.version, record.dataset))
        self.evaluated[record.version, record.dataset] = record
        if before is None or before.metrics != record.metrics:
            self._lines.add_scores(summary.scores_line(record))

    async def await_answers(self) -> None:
        """Background loop: the beginning and the end of a time in which the bus does not answer are events."""
        while True:
            silent_s = time.monotonic() - self.answered_s
            silence = f"the bus has not answered for {silent_s:.0f} s" if silent_s > UNANSWERED_S else ""
            if silence and not self.bus_silence:
                self.event(silence)
            elif self.bus_silence and not silence:
                self.event(f"the bus answers again ({self.bus_silence})")
            self.bus_silence = silence
            await asyncio.sleep(LOOK_EVERY_S / 2)

    async def _read_state(self) -> None:
        view = LiveView(self.bus)
        while True:
            self._lines.write()
            try:
                rows, now = await view.refresh(), time.monotonic()
                if now - self.answered_s > UNANSWERED_S:
                    self.steady_s = now
                self.answered_s = now
                self.note_rows(rows)
                self.samples = await self.bus.samples.info()
                self.backlog = await self.bus.tasks.backlog()
                if self.samples.messages:
                    self.sample = await self.bus.samples.fetch(self.samples.last_seq)
            except BusError as error:
                log.info("not read: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    def note_rows(self, rows: list[tuple[LiveRow, float]]) -> None:
        self.rows = rows
        for row, age in rows:
            self.loads[f"{row.role}.{row.id}"] = row.load
            self._note_trouble(row)
            self._note_state(row, age)
            if row.role == "engine":
                self.aborted_by_pushes[row.id, row.pid] = count_in(row.load, "requests_aborted_by_pushes")
        self._note_refused()
        of_actors = [load for name, load in self.loads.items() if name.startswith("actor.")]
        generated = sum(count_in(load, "tokens_generated") for load in of_actors)
        self._generated.append((time.monotonic(), generated))
        (t0, g0), (t1, g1) = self._generated[0], self._generated[-1]
        self.rate_generated = max(0.0, (g1 - g0) / (t1 - t0)) if t1 > t0 else 0.0

    async def _watch_room(self) -> None:
        """Add an event when the bus stops storing, and when it stores again (a full cluster answers no reads)."""
        while True:
            reason = await self.bus.full() if self.bus.connected else await asyncio.to_thread(self.room) or self.full
            if bool(reason) != bool(self.full):
                waits = f"stores nothing, the run waits: {reason}"
                self.event(f"bus: {waits if reason else 'stores again, the run goes on'}")
            self.full = reason
            if reason:  # which is an answer; rows are as old as the first one
                self.answered_s = self.steady_s = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_trouble(self, row: LiveRow) -> None:
        """Record a trouble; the first of a process, and each restart of a server, is an event."""
        restarts = count_in(row.load, SERVER_RESTARTS)
        again, self._restarts[row.id] = restarts > self._restarts.get(row.id, 0), restarts
        if not row.trouble:
            return
        if row.id not in self.troubles or again:
            self.event(f"{row.id}: {row.trouble}")
        self.troubles[row.id] = row.trouble

    def _note_state(self, row: LiveRow, age: float) -> None:
        """Add an event when a process becomes silent, or drains while it is needed."""
        name = row.id if row.id.startswith(row.role) else f"{row.role} {row.id}"
        steady = time.monotonic() - self.steady_s > SILENT_S  # before that, rows are as old as the silence of the bus
        self._beating[name] = self._beating.get(name, False) or (name in self._beating and age < LOOK_EVERY_S / 2)
        state = ""
        if age > SILENT_S and steady and self._beating[name] and not _has_ended_here(row):
            state = "sends no heartbeats, is it stopped or cut off?"
        elif row.phase == "draining" and age <= SILENT_S and not self.ending:
            state = "drains"
        if state and state != self._named.get(name):
            self.event(f"{name} {state}{_cause_of_drain(row)}")
        self._named[name] = state

    def _note_refused(self) -> None:
        """Add an event for every actor that the feeder has begun to refuse."""
        for key in self.load("feeder"):
            kind, _, actor = key.partition("/")
            if kind == "refused" and actor not in self._refused:
                self._refused.add(actor)
                where = "(tidemill status; docs/recovery.md)"
                self.event(f"actor {actor} sends only invalid samples and is refused {where}")

    def share(self, role: str) -> float | None:
        """Return the mean waiting share that processes of a role report; None if none does."""
        shares = [row.load["waiting_share"] for row, _ in self.rows if row.role == role and "waiting_share" in row.load]
        return sum(shares) / len(shares) if shares else None

    def load(self, role: str) -> dict[str, float]:
        """Return the counters of the first process of a role; empty for none."""
        return next((row.load for row, _ in self.rows if row.role == role), {})

    def flat(self) -> dict[str, str]:
        """Return the names and values of a plain line."""
        loss = self.newest("train/sft_loss", -1.0)
        return {
            "step": f"{self.step}/{self.steps}",
            "reward": f"{self.newest('data/reward_mean'):.3f}",
            **({"cross-entropy": f"{loss:.3f}"} if loss >= 0 else {}),
            "lag": f"{self.newest('offpolicy/lag_mean'):.2f} (max {self.newest('offpolicy/lag_max'):.0f})",
            "tokens/s": f"{self.rate_generated:.0f} generated, {self.rate_trained:.0f} trained",
            "learner waits": f"{self.newest('train/wait_share'):.0%}",
            "actors wait": f"{self.share('actor') or 0:.0%}",
        }


def _cause_of_drain(row: LiveRow) -> str:
    return f": waits for {row.waits_for}" if row.phase == "draining" and row.waits_for else ""


def _has_ended_here(row: LiveRow) -> bool:
    """Return whether the process of a row was one of this machine and has ended: its supervisor reports that."""
    if row.host != socket.gethostname():
        return False
    try:
        os.kill(row.pid, 0)
    except (ProcessLookupError, PermissionError) as error:
        return isinstance(error, ProcessLookupError)  # with the other one it is there, and another user's
    return False


class GrowingFile:
    """JSON lines that are appended whole, in order, or not yet."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._waiting: list[bytes] = []

    @property
    def num_waiting(self) -> int:
        """Number of lines that are not written yet."""
        return len(self._waiting)

    def append(self, line: Mapping[str, object]) -> None:
        """Add a line, which ``write`` writes."""
        self._waiting.append(json.dumps(line).encode() + b"\n")

    def write(self) -> None:
        """Write the waiting lines. On OSError they go on waiting, and the file is as it was."""
        if not self._waiting:
            return
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            before = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, b"".join(self._waiting))
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        self._waiting.clear()


def _write_all(descriptor: int, data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]
