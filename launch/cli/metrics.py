"""``tidemill metrics``: gives the metrics of each step to a sink, from the first one that the bus has, or serves them
to Prometheus (``tidemill.launch.metrics``).

    PLAN (outcomes, scores) --read--> sink

Consumes PLAN from its beginning; waits for new records and for a sink that fails; ends with SIGTERM, or with
``--until-end`` at the last record. A plain sink runs in a thread of its own: one that hangs delays the end by at most
CLOSE_S. Nothing waits for it: an outage of the sink reaches neither learner nor bus. Started again it begins anew, at
``--from-step``, without what the sink says it has (``has``).
"""

import argparse
import asyncio
import concurrent.futures
import inspect
import logging
import os
import queue
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.functions import errors_as
from tidemill.bus.system.output import FailureLog
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import read_until_drained
from tidemill.launch.cli.inputs import given_options, read_secrets
from tidemill.launch.metrics import dictionary, monitoring, prometheus, traces
from tidemill.launch.metrics.sinks import SINK, StepMetrics
from tidemill.launch.run.access import VIEWER
from tidemill.rewards.errors import BadRewardOption, UnknownReward
from tidemill.rewards.registry import Bound, bind

log = logging.getLogger(__name__)


PROMETHEUS, TRACES = "prometheus", "traces"
SINKS = f"{', '.join(SINK.table)}, {PROMETHEUS}, {TRACES}, or module:function"
PRINTED: dict[str, Callable[[], str]] = {
    "dictionary": dictionary.page,
    "rules": monitoring.rules,
    "grafana": monitoring.board,
}
CONNECT_S = 60.0
CLOSE_S = 30.0  # Longest wait in seconds for a call of the sink that is under way, and for its `close`
LONGEST_PAUSE_S = 60.0  # Longest pause in seconds before a sink that has raised is called again


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("to", metavar="SINK", nargs="?", default="", help=f"{SINKS} (docs/looking.md)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the sink")
    parser.add_argument("--from-step", type=int, default=1, metavar="N", help="first step (default 1)")
    parser.add_argument("--until-end", action="store_true", help="end at the present end of the log")
    text = "print the dictionary of metrics, rules of alerts for Prometheus, or a board for Grafana"
    parser.add_argument("--print", choices=PRINTED, help=text)


def run(args: argparse.Namespace) -> int:
    """Give the metrics of a run to a sink until drained. Returns and raises as ``archive``."""
    if args.print:
        print(PRINTED[args.print](), end="")
        return 0
    if not args.to:
        raise ValueError(f"SINK: want {SINKS}, got none")
    read_secrets(args, [Path()])
    if args.to == PROMETHEUS:
        return _serve(args)
    if args.to == TRACES:
        return _trace(args)
    sink = open_sink(args.to, given_options(args.option))

    async def exported(url: str, run: str, draining: asyncio.Event) -> None:
        done = await export(url, run, sink, args, draining)
        had = f", which had {done.had} from before" if done.had else ""
        print(
            f"{done.steps} steps and {done.evaluations} evaluations given to {args.to}{had}, {done.failures} "
            "calls failed"
        )

    return read_until_drained(args, exported, name=args.to, user=VIEWER)


def _options(args: argparse.Namespace, *names: str) -> dict[str, object]:
    options = given_options(args.option)
    if unknown := sorted(options.keys() - set(names)):
        raise ValueError(f"--option: want {' or '.join(names)} for {args.to}, got {unknown[0]!r}")
    return options


def _trace(args: argparse.Namespace) -> int:
    options = _options(args, "endpoint", "every")
    endpoint = str(options.get("endpoint") or os.environ.get(traces.ENDPOINT_VARIABLE) or traces.ENDPOINT)
    every = options.get("every", traces.EVERY)
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--option endpoint: want the URL of a collector (http://HOST:4318), got {endpoint!r}")
    if type(every) is not int or every < 1:
        raise ValueError(f"--option every: want 1 or more (1 in N samples), got {every!r}")
    traces.headers_in(os.environ.get(traces.HEADERS_VARIABLE, ""))
    start = {"from_step": args.from_step, "endpoint": endpoint, "every": every}

    async def sent(url: str, run: str, draining: asyncio.Event) -> None:
        counts = await traces.export_traces(url, run, draining, until_end=args.until_end or args.ended, **start)
        lost = f", {counts.dropped} spans dropped" if counts.dropped else ""
        gone = f", {counts.gone} samples are no longer there" if counts.gone else ""
        print(f"{counts.samples} samples traced in {counts.spans} spans{lost}{gone}")

    return read_until_drained(args, sent, name=TRACES, user=VIEWER)


def _serve(args: argparse.Namespace) -> int:
    options = _options(args, "host", "port")
    host, port = options.get("host", "127.0.0.1"), options.get("port", prometheus.PORT)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ValueError(f"--option port: want 0 (any free one) to 65535, got {port!r}")
    token = os.environ.get(prometheus.TOKEN_VARIABLE, "")

    async def served(url: str, run: str, draining: asyncio.Event) -> None:
        await prometheus.serve(url, run, draining, host=str(host), port=port, token=token)

    return read_until_drained(args, served, name=PROMETHEUS, user=VIEWER)


class _SinkFailed(Exception):
    """The sink, which is the user's, has raised its cause."""


@dataclass(slots=True)
class Exported:
    """Counts of one command."""

    steps: int = 0
    evaluations: int = 0
    failures: int = 0  # Calls of the sink that raised
    had: int = 0  # Steps and evaluations that the sink had from an earlier command


def open_sink(name: str, options: Mapping[str, object]) -> Bound:
    """Return the sink with its options. Raises ValueError with the reason for one that cannot be made."""
    try:
        return bind(name, options, SINK)
    except (UnknownReward, BadRewardOption) as error:
        raise ValueError(str(error)) from None


async def export(
    url: str,
    run: str,
    sink: Bound,
    args: argparse.Namespace,
    draining: asyncio.Event,
    *,
    first_pause_s: float = 1.0,
    close_s: float = CLOSE_S,
) -> Exported:
    """Call ``sink`` for every step until drained or, with ``args.until_end``, at the end. Raises BusError."""
    thread = _Thread()
    call = partial(_call, sink, thread, first_pause_s=first_pause_s)
    counts = Exported()
    async with connect(url, run, name="metrics", wait_s=CONNECT_S) as bus:
        try:
            await first_of(_feed(bus, call, args, counts), draining.wait())
        finally:
            await _close(sink, thread, close_s)
    return counts


async def _feed(
    bus: Bus, call: Callable[[StepMetrics, Exported], Awaitable[bool]], args: argparse.Namespace, counts: Exported
) -> None:
    # The digits of the time at which the run was created, to the microsecond: 20261128153000123456
    done, created = args.from_step - 1, re.sub(r"\D", "", await bus.plans.created())[:20]
    of_run = partial(StepMetrics, run=bus.run, run_id=f"{bus.run}-{created}")
    async for _, record in bus.plans.scan() if args.until_end or args.ended else bus.plans.follow():
        # A step that is executed again after a restart has the same numbers.
        if isinstance(record, Done) and record.step > done:
            done = record.step
            metrics = of_run(step=record.step, epoch=record.epoch, metrics=record.metrics)
            counts.steps += await call(metrics, counts)
        elif isinstance(record, Evaluated) and record.step >= args.from_step:
            scores = {f"eval/{record.dataset}/{name}": value for name, value in record.metrics.items()}
            metrics = of_run(step=record.step, epoch=record.epoch, metrics=scores, evaluation=True)
            counts.evaluations += await call(metrics, counts)


async def _call(
    sink: Bound, thread: "_Thread", metrics: StepMetrics, counts: Exported, *, first_pause_s: float
) -> bool:
    """Call the sink until it returns: no metrics are lost or given twice. Returns False if it has them."""
    has: Any = getattr(sink.function, "has", None)
    pause_s, failed = first_pause_s, FailureLog(log)
    while True:
        try:
            with errors_as(_SinkFailed):
                if callable(has) and await thread.run(partial(has, metrics)):
                    counts.had += 1
                    return False
                result: Any = sink(metrics) if sink.is_async else await thread.run(partial(sink, metrics))
                if inspect.isawaitable(result):
                    await result
            return True
        except _SinkFailed as error:
            counts.failures += 1
            reason = f"step={metrics.step} error={error.__cause__!r}, called again in {pause_s:g} s"
            failed(f"sink {sink.name} failed", reason, error=error.__cause__)
        await asyncio.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


async def _close(sink: Bound, thread: "_Thread", wait_s: float) -> None:
    close = getattr(sink.function, "close", None)
    if not callable(close):
        return
    try:
        async with asyncio.timeout(wait_s):
            with errors_as(_SinkFailed):
                await thread.run(close)
    except TimeoutError:
        log.warning("sink %s: has not returned in %g s, the command ends without it", sink.name, wait_s)
    except _SinkFailed as error:  # the metrics are delivered
        log.warning("sink %s: close failed error=%r", sink.name, error.__cause__)


class _Thread:
    """Runs calls one after the other in a daemon thread, which the exit does not wait for (of a pool it would)."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sink", daemon=True).start()

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, or raise its exception. Cancelled, it no longer waits for it."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # so that no cancelled waiter takes the call back: a sink is closed
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as raised:  # SystemExit and StopIteration, too: the caller would wait without end
                is_plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                future.set_exception(raised if is_plain else RuntimeError(repr(raised)))
