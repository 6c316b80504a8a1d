"""``tidemill metrics prometheus``: the metrics of a run at ``/metrics``, for Prometheus to scrape.

    PLAN, live rows, stream states --read--> RunState --each scrape--> text

One reader of the bus stands for all processes of the run: none of them needs a port, and a scrape asks none of them.
Names and HELP texts follow from the dictionary (``exported_name``). What an actor or a reward can name (ids, parts,
rules) is bounded in number and length, so no run can fill Prometheus with series.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from tidemill.bus.client.jetstream import StreamState
from tidemill.bus.client.layout import stream_configs
from tidemill.bus.errors import BusError, NotFound
from tidemill.bus.http.access import Route, TokenAccess
from tidemill.bus.http.listener import Listener
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import all_of, first_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.bus.wire.rows import LiveRow, MachineUse
from tidemill.launch.metrics.dictionary import Metric, described, metrics
from tidemill.launch.run.run_facts import RunSettings
from tidemill.launch.settings import extras
from tidemill.learner.algorithms.alarms import thresholds

log = logging.getLogger(__name__)

CONNECT_S = 60.0
PORT = 9464
TOKEN_VARIABLE = "TIDEMILL_METRICS_TOKEN"
LOOPBACK_NAMES = ("localhost",)  # Names in the requests of a scrape without a token; addresses always are
READ_EVERY_S = 2.0
ALIVE_S = 5.0  # Seconds without a change after which a row's process counts as down
MOST_PROCESSES = 1024
MOST_MEMBERS = 64  # Most members of a family of metrics, and of evaluation sets
_LONGEST_LABEL = 64
Sample = tuple[dict[str, str], float]


def exported_name(metric: Metric) -> str:
    """Return the name in Prometheus: ``engine/stall_s`` is ``tidemill_engine_stall_seconds_total``."""
    name = "tidemill_" + metric.base.replace("/", "_")
    if metric.unit == "seconds" and name.endswith("_s"):
        name = f"{name[:-2]}_seconds"
    return f"{name}_total" if metric.counter else name


def label_of(text: str) -> str:
    """Return a text that others chose, fit for a label."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[: _LONGEST_LABEL - 1]}…"


@dataclass(kw_only=True)
class RunState:
    """The newest numbers of a run."""

    run: str
    settings: RunSettings = field(default_factory=RunSettings)
    step: int = 0
    has_end: bool = False
    """It has ended before its last step."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""
    scores: dict[str, Evaluated] = field(default_factory=dict)
    """Newest scores by evaluation set."""
    rows: list[tuple[LiveRow, float]] = field(default_factory=list)
    streams: dict[str, tuple[StreamState, int]] = field(default_factory=dict)
    """State and bound in bytes by short name."""
    store: tuple[int, int] | None = None
    backlog: tuple[int, int] | None = None
    up: bool = False
    full: str = ""

    def series(self) -> "FoundSeries":
        """Return the samples of each metric."""
        series = FoundSeries(self.run)
        series.add_all({"bus/up": float(self.up), "bus/full": float(bool(self.full)), "run/step": float(self.step)})
        if steps := self.settings.steps:
            ended = self.has_end or self.step >= steps
            series.add_all({"run/steps": float(steps), "run/ended": float(ended)})
        known = thresholds(self.settings.alarms, self.settings.context) if self.settings.row else {}
        for alarm, bounds in known.items():
            for level, bound in zip(("warning", "critical"), bounds, strict=True):
                series.add("run/alarm_threshold", bound, {"alarm": alarm, "level": level})
        for name, value in self.values.items():
            series.add(name, value)
        for dataset, record in list(self.scores.items())[:MOST_MEMBERS]:
            for name, value in record.metrics.items():
                series.add(f"eval/{name}", value, {"set": label_of(dataset)})
            series.add("eval/version", float(record.version), {"set": label_of(dataset)})
        self._add_bus(series)
        for row, age_s in self.rows[:MOST_PROCESSES]:
            series.add_row(row, age_s)
        series.left_out += max(0, len(self.rows) - MOST_PROCESSES) + max(0, len(self.scores) - MOST_MEMBERS)
        series.add("exporter/left_out", float(series.left_out))
        return series

    def _add_bus(self, series: "FoundSeries") -> None:
        for name, (state, bound) in self.streams.items():
            stream = {"stream": name}
            series.add("bus/stream_bytes", float(state.bytes), stream)
            series.add("bus/stream_bytes_limit", float(max(0, bound)), stream)
            series.add("bus/stream_messages", float(state.messages), stream)
        if self.store is not None:
            series.add_all({"bus/store_bytes": float(self.store[0]), "bus/store_bytes_limit": float(self.store[1])})
        if self.backlog is not None:
            series.add_all({"bus/tasks_waiting": float(self.backlog[0]), "bus/tasks_leased": float(self.backlog[1])})


class FoundSeries:
    """Samples by metric, of the dictionary alone, and bounded."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.samples: dict[str, list[Sample]] = {}
        """By the name of the metric in the dictionary; ``run`` is no label of theirs yet."""
        self.left_out = 0
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def add_all(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add(name, value)

    def add_row(self, row: LiveRow, age_s: float) -> None:
        """Add the numbers of a process; ``age_s``: seconds since its row changed."""
        place = {"role": label_of(row.role), "id": label_of(row.id), "host": label_of(row.host)}
        self.add("process/up", float(age_s <= ALIVE_S), place)
        self.add("process/trouble", float(bool(row.trouble)), place)
        if row.role == "engine":
            self.add("process/version", float(row.version), place)
        for name, value in row.load.items():
            self.add(f"{row.role}/{name}", value, {"id": place["id"]})
        self._add_use(row.use, place)

    def _add_use(self, use: MachineUse, place: Mapping[str, str]) -> None:
        def add(labels: Mapping[str, str], **numbers: float | None) -> None:
            for name, value in numbers.items():
                if value is not None:
                    self.add(f"process/{name}", float(value), labels)

        add(place, cpu_share=use.cpu_share, memory_bytes=use.memory_bytes)
        for device in use.devices[:MOST_MEMBERS]:
            sizes = {"device_memory_used_bytes": device.memory_used_bytes, "device_memory_bytes": device.memory_bytes}
            add({**place, "device": label_of(device.device)}, device_utilisation=device.utilisation, **sizes)

    def add(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Add a sample; one that the dictionary does not have, or beyond the bound of its family, is left out."""
        metric = described(name)
        if metric is None:
            self.left_out += name.partition("/")[0] not in ("feeder",)  # its row has counters by actor and by filter
            return
        names = dict(labels or {})
        samples = self.samples.setdefault(metric.name, [])
        if metric.label:
            names[metric.label] = label_of(name.rpartition("_at_" if metric.label == "k" else "/")[2])
            if len(samples) >= MOST_MEMBERS:
                self.left_out += 1
                return
        key = (metric.name, tuple(names.values()))
        if key in self._seen:  # two ids that are one when they are cut
            self.left_out += 1
            return
        self._seen.add(key)
        samples.append((names, value))


class RunCollector:
    """A collector of ``prometheus_client``: the families of one scrape."""

    def __init__(self, series: Callable[[], FoundSeries]) -> None:
        self._series = series

    def collect(self) -> Iterator[Any]:
        """Yield each metric that has a value now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        series = self._series()
        for name, samples in series.samples.items():
            metric = metrics()[name]
            family = CounterMetricFamily if metric.counter else GaugeMetricFamily
            labels = list(dict.fromkeys(label for names, _ in samples for label in names))
            made = family(exported_name(metric), help_of(metric), labels=["run", *labels])
            for names, value in samples:
                made.add_metric([series.run, *(names.get(label, "") for label in labels)], value)
            yield made


def help_of(metric: Metric) -> str:
    """Return the HELP text: meaning, unit and healthy range."""
    unit = f" ({metric.unit})" if metric.unit else ""
    healthy = f". Healthy: {metric.healthy}" if metric.healthy else ""
    return f"{metric.meaning}{unit}{healthy}".replace("`", "")


def exposition(collector: RunCollector, *, of_process: bool = False) -> web.Response:
    """Return the answer to a scrape. ``of_process``: with processor time, memory and open files of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # type: ignore[arg-type]  # it has the method that is asked for
    if of_process:
        ProcessCollector(registry=registry)
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def listener_of(state: RunState, token: str = "") -> Listener:
    """Return the listener with ``/metrics``. ``token``: bearer token of its requests; empty = loopback alone."""
    extras.require("prometheus")

    async def scraped(_: web.Request) -> web.Response:
        return exposition(RunCollector(state.series))

    return Listener({"GET /metrics": Route.request(scraped)}, TokenAccess(token, names=LOOPBACK_NAMES))


async def serve(
    url: str, run: str, draining: asyncio.Event, *, host: str = "127.0.0.1", port: int = PORT, token: str = ""
) -> str:
    """Serve the metrics of a run until drained. Returns the URL. Raises BusError; ValueError for an address."""
    state = RunState(run=run)
    listener = listener_of(state, token)
    async with connect(url, run, name="prometheus", wait_s=CONNECT_S) as bus:
        try:
            address = await listener.start(host, port, name="--option host")
        except OSError as error:
            raise ValueError(f"--option port: want a free port of {host}, got {port}: {error.strerror}") from None
        log.info("serving metrics=%s/metrics", address)
        print(f"{address}/metrics", flush=True)
        try:
            await first_of(all_of((follow_steps(bus, state), read_rows(bus, state))), draining.wait())
        finally:
            await listener.close()
    return address


async def follow_steps(bus: Bus, state: RunState) -> None:
    """Background loop: outcomes and scores, from the first one on."""
    async for _, record in bus.plans.follow():
        if isinstance(record, Done) and record.step >= state.step:
            state.step, state.values = record.step, record.metrics
        elif isinstance(record, Evaluated):
            newest = state.scores.get(record.dataset)
            if newest is None or record.version >= newest.version:
                state.scores[record.dataset] = record


async def read_rows(bus: Bus, state: RunState) -> None:
    """Background loop: live rows and streams, every two seconds; ``bus/up`` is 0 while the bus does not answer."""
    view = LiveView(bus)
    while True:
        began_s = time.monotonic()
        try:
            state.rows = await view.refresh()
            await _read_streams(bus, state)
            state.up = True
        except BusError as error:
            state.up = False
            log.info("not read: %s", error)
        state.full = await bus.full() if bus.connected else state.full
        await asyncio.sleep(max(0.0, READ_EVERY_S - (time.monotonic() - began_s)))


async def _read_streams(bus: Bus, state: RunState) -> None:
    state.settings = RunSettings((await bus.rows("run").read("config"))[0])
    state.has_end = (await bus.rows("run").read(subjects.END_KEY))[1] > 0
    shards = (await bus.jet.shards()).count
    for name in _names_of_streams(bus, shards):
        try:
            stored = await bus.jet.state(name)
        except NotFound:
            continue
        bounds = {"SAMPLES": "samples_max_bytes", "TURNS": "turns_max_bytes", "TRAINED": "trained_max_bytes"}
        short = name.removeprefix(subjects.stream(bus.run, ""))
        bound = state.settings.get(f"bus.{bounds.get(short.partition('-')[0], '')}", int, 0)
        state.streams[short] = (stored, bound // shards if "-" in short else bound)
    state.store = await bus.jet.store_use()
    state.backlog = await bus.tasks.backlog()


def _names_of_streams(bus: Bus, shards: int) -> Iterable[str]:
    prefix, settings = subjects.stream(bus.run, ""), replace(bus.config, sample_shards=shards)
    return (name for config in stream_configs(bus.run, settings) if (name := config["name"]).startswith(prefix))
