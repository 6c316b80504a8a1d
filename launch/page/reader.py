"""The one reader of the bus of a page: everything that its viewers see, collected once for all of them.

    PLAN (outcomes, dispositions) --+
    SAMPLES (headers only) ---------+--> columns, ledger, held samples, lanes, alarms --> answers, changes
    live rows, states of streams ---+

Consumes the bus as a viewer; produces the fields of ``RunReader`` and ``RunChanges``; waits for the bus, over its
restarts. No process of the run is queried, and nothing is written.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.bus.client.jetstream import StreamState
from tidemill.bus.errors import BusError, StreamReplaced
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import History
from tidemill.bus.system.coroutines import all_of
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Done, Evaluated, Plan, PlanRecord, Settle
from tidemill.bus.wire.rows import LiveRow
from tidemill.bus.wire.subjects import END_KEY
from tidemill.launch.page.alarms import RunAlarms
from tidemill.launch.page.columns import MetricColumns
from tidemill.launch.page.held import DROPPED, HELD, TRAINED, Disposition, HeldSamples
from tidemill.launch.page.lanes import Lanes
from tidemill.launch.page.ledger import RunLedger
from tidemill.launch.page.texts import made_safe, safe
from tidemill.launch.run import audit as accounting
from tidemill.launch.run import desired
from tidemill.launch.run.checkpoint_cursor import read_cursor
from tidemill.launch.run.desired import DesiredRoles
from tidemill.launch.run.run_facts import Pace, RunSettings, RunTime
from tidemill.launch.run.summary import scores_line
from tidemill.launch.samples.filters import headline

log = logging.getLogger(__name__)

LOOK_S = 1.0
ROWS_PER_S = 50  # Live rows read in a second: each is a request, and 200 processes must not cost the bus more
SLOW_LOOK_S = 5.0  # Interval of reads that change rarely: the run's settings, its end, the keys of its rows
MAX_PUSHES = 2000
PAUSE_S, PAUSE_EVERY = 0.02, 250  # Pause in reading old headers, and number of sequences between two
NEWEST = 500  # Samples whose headers are read before all earlier ones
UNANSWERED_S = 3.0
MAX_AUDIT_BYTES = 4 << 30  # Largest stream SAMPLES that the page reads whole for the accounting
AUDIT_EVERY_S = 60.0


@dataclass(slots=True)
class RunChanges:
    """Changes since the last event to the viewers."""

    steps: set[int] = field(default_factory=set)
    pushes: list[JsonObject] = field(default_factory=list)
    evaluations: list[JsonObject] = field(default_factory=list)
    samples: int = 0


class RunReader:
    """The state of a run, for its page."""

    def __init__(self, bus: Bus, *, ended: bool = False, held: int = HELD, checkpoints: Path | None = None) -> None:
        """``ended``: no message will follow. ``checkpoints``: of this run, if they are on this machine."""
        self.bus, self.ended, self.history, self._checkpoints = bus, ended, History(bus.jet), checkpoints
        self.metrics, self.ledger, self.held = MetricColumns(), RunLedger(), HeldSamples(held)
        self.lanes, self.alarms, self.settings = Lanes(), RunAlarms(), RunSettings()
        self.evaluations: dict[tuple[int, str], JsonObject] = {}
        self.pushes: deque[JsonObject] = deque(maxlen=MAX_PUSHES)
        self.plan_seqs: dict[int, int] = {}  # Sequence in PLAN of the plan of each step
        self.rows: list[tuple[LiveRow, float]] = []
        self.samples: StreamState | None = None
        self.full, self.end = "", dict[str, object]()
        self.pace, self.ran = Pace(), RunTime()
        self.desired = DesiredRoles({})
        self.planned = self.last_seq = 0
        self.answered_s = time.monotonic()
        self.loaded = asyncio.Event()  # Set when the records that were there at the start are read
        self.watched = asyncio.Event()  # Cleared while there is no viewer: each header costs the bus 20 us
        self.watched.set()
        self.audit_ended = asyncio.Event()
        self.headers_read, self.looked = asyncio.Event(), asyncio.Event()  # The same for headers, and for rows
        self.changes = RunChanges()
        self._clock_s = (
            time.time() - time.monotonic()
        )  # Added to the monotonic clock: Unix time, as this machine has it
        self._created = ""  # Creation time of SAMPLES, which tells runs of one name apart
        self._audit_s = float("-inf")
        self._auditing: asyncio.Task[None] | None = None

    @property
    def now_s(self) -> float:
        """Unix time of this machine, which never jumps."""
        return self._clock_s + time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the bus answered last."""
        return time.monotonic() - self.answered_s

    @property
    def newest_s(self) -> float:
        """Unix time of the newest record; 0 before the first."""
        return self.ran.newest_s

    async def run(self) -> None:
        """Background loop: read until cancelled. Raises StreamReplaced when another run takes this one's name."""
        await all_of((self._follow_plans(), self._follow_samples(), self._look_for_ever()))

    # ---- PLAN

    async def _follow_plans(self) -> None:
        await self.bus.retry(self._read_settings)  # first, because the alarms of each step depend on them
        state = await self.bus.retry(self.bus.plans.state)
        if not state.messages:
            self.loaded.set()
        async for seq, stored_s, record in self.bus.plans.stamped():
            self.note_record(seq, stored_s, record)
            if seq >= state.last_seq:
                self.loaded.set()

    async def plan(self, step: int) -> Plan | None:
        """Return the plan of a step; None if it is not kept. Raises BusError."""
        if (seq := self.plan_seqs.get(step)) is not None:
            async with aclosing(self.bus.plans.scan(seq)) as records:  # type: ignore[type-var]
                async for _, record in records:
                    return record if isinstance(record, Plan) and record.step == step else None
        return None

    def note_record(self, seq: int, stored_s: float, record: PlanRecord) -> None:
        self.ran.add(record.epoch, stored_s)
        self.ledger.add(record)
        if isinstance(record, Done):
            self._note_done(record, stored_s)
        elif isinstance(record, Plan):
            self.planned, self.plan_seqs[record.step] = record.step, seq
            self.held.decide(record.seqs, Disposition(TRAINED, step=record.step))
        elif isinstance(record, Settle):
            self.held.decide(record.seqs, Disposition(DROPPED, reason=safe(record.reason)))
        elif isinstance(record, Evaluated):
            line = made_safe({**scores_line(record), "time_s": stored_s})
            self.evaluations[record.version, record.dataset] = line
            self.changes.evaluations.append(line)

    def _note_done(self, record: Done, stored_s: float) -> None:
        metrics = {safe(name): value for name, value in record.metrics.items()}
        self.metrics.add(record.step, metrics, stored_s)
        self.pace.add(record.epoch, record.step, stored_s)
        self.changes.steps.add(record.step)
        self.alarms.step(record.step, metrics, stored_s, self.settings)
        version = metrics.get("push/version", -1.0)
        if version > 0 and (not self.pushes or version > self.pushes[-1]["version"]):
            names = {"seconds": "push/seconds", "stall_seconds": "push/stall_seconds_max"}
            names |= {"bytes": "push/bytes", "engines": "push/engines"}
            push: JsonObject = {"version": int(version), "step": record.step, "time_s": stored_s}
            push |= {name: metrics.get(metric) for name, metric in names.items()}
            self.pushes.append(push)
            self.changes.pushes.append(push)

    # ---- SAMPLES

    async def _follow_samples(self) -> None:
        state = await self.bus.retry(self.history.state)
        self.samples = state
        # The newest first, so that a page of a run with millions of samples has its list at once.
        begin, last = max(1, state.first_seq, state.last_seq - self.held.size + 1), state.last_seq
        newest = max(begin, last - NEWEST + 1)
        self.last_seq = last
        await self._read_headers(newest, last)
        await all_of((self._read_past_headers(begin, newest - 1), self._follow_headers(last + 1)))

    async def _read_past_headers(self, first: int, last: int) -> None:
        if last >= first:
            await self._read_headers(first, last)
        self.headers_read.set()

    async def _follow_headers(self, first: int) -> None:
        """Register new headers while the page is watched; after a time without viewers, the missed headers."""
        while True:
            await self.watched.wait()
            newest = (await self.bus.retry(self.history.state)).last_seq
            await self._read_headers(max(first, newest - self.held.size + 1), None)
            first = self.last_seq + 1

    async def _read_headers(self, first: int, last: int | None) -> None:
        """Register headers, to the end or until the page is no longer watched.

        Of many at once, a part of the time is left to requests of viewers, and to the bus.
        """
        async for glimpse in self.history.glimpses(first, last):
            self.held.add(headline(glimpse))
            if glimpse.pending > PAUSE_EVERY and not glimpse.seq % PAUSE_EVERY:
                await asyncio.sleep(PAUSE_S)
            if glimpse.seq > self.last_seq:
                self.last_seq = glimpse.seq
                self.changes.samples += 1
            if last is None and not self.watched.is_set():
                return

    # ---- rows and states

    async def _look_for_ever(self) -> None:
        view, slow_s, rows_s = LiveView(self.bus), float("-inf"), float("-inf")
        while True:
            try:
                if time.monotonic() >= slow_s + SLOW_LOOK_S:
                    slow_s = time.monotonic()
                    await self._look_slowly()
                if time.monotonic() >= rows_s + len(self.rows) / ROWS_PER_S:
                    rows_s = time.monotonic()
                    self._note_rows([] if self.ended else await view.refresh())
                self.samples = await self.bus.samples.info()
                self.ledger.backlog = await self.bus.tasks.backlog()
                self.answered_s = time.monotonic()
                self.ledger.remember(self.now_s)
                self.looked.set()
            except BusError as error:
                log.info("not read: %s", error)
            self._refuse_another_run()
            await asyncio.sleep(LOOK_S)

    def _refuse_another_run(self) -> None:
        created = "" if self.samples is None else self.samples.created
        self._created = self._created or created
        if created != self._created:
            raise StreamReplaced(f"samples of {self.bus.run}", self._created, created)

    async def _look_slowly(self) -> None:
        await self._read_settings()
        self.end = (await self.bus.rows("run").read(END_KEY))[0] or {}
        self.desired = await desired.read(self.bus)
        self.full = safe(await self.bus.full())
        if self.ended and self.loaded.is_set() and self.ledger.audited["state"] == "not yet":
            self.begin_audit()

    async def _read_settings(self) -> None:
        config, _ = await self.bus.rows("run").read("config")
        if config is not None and config != self.settings.row:
            self.settings = RunSettings(config)

    def _note_rows(self, rows: Sequence[tuple[LiveRow, float]]) -> None:
        self.rows = list(rows)
        self.lanes.note(rows, self.now_s)
        for row, _ in rows:
            if row.role == "feeder":
                self.ledger.note_feeder(row.load)
        troubles = {f"the bus stores nothing: {self.full}": "make room on its disk"} if self.full else {}
        self.alarms.processes(rows, self.now_s, troubles)

    # ---- audit

    def begin_audit(self) -> None:
        """Start the audit of the streams unless one runs, or ended within a minute. It reads every sample once."""
        running = self._auditing is not None and not self._auditing.done()
        if running or time.monotonic() < self._audit_s + AUDIT_EVERY_S or self.samples is None:
            return
        if self.samples.bytes > MAX_AUDIT_BYTES:
            words = "too many samples to read here; summary.json of the run has it"
            self.ledger.audited = {"state": "too large", "words": words}
            self.audit_ended.set()
            return
        self._audit_s, self.ledger.audited = time.monotonic(), {"state": "running"}
        self._auditing = asyncio.create_task(self._audit(), name="audit")

    async def _audit(self) -> None:
        try:
            cursor = None
            if self._checkpoints is not None and self._checkpoints.is_dir():
                cursor = await asyncio.to_thread(read_cursor, self._checkpoints)
            last_seq = self.last_seq
            result, _ = await accounting.audit(self.bus, cursor)
        except Exception as error:  # of a checkpoint of another release, or the bus: the page goes on without it
            log.warning("audit failed", exc_info=error)
            self.ledger.audited = {"state": "failed", "words": safe(str(error))}
            return
        finally:
            self._audit_s = time.monotonic()
            self.audit_ended.set()
        if self.ended:
            self.ledger.accounting = result
        self.ledger.audited = {
            "state": "checked",
            "at_seq": last_seq,
            "time_s": self.now_s,
            "lost": result.lost,
            "twice": result.trained_twice,
            "balance": result.balance(),
            "problems": made_safe(result.problems),
        }

    async def close(self) -> None:
        """End the audit that may run."""
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.wait({self._auditing})
