"""``tidemill metrics``: gives the metrics of each step to a sink, or serves them to Prometheus
(``tidemill.launch.metrics``).
"""

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import read_until_drained
from tidemill.launch.cli.inputs import given_options, read_secrets
from tidemill.launch.metrics import dictionary, monitoring, prometheus, traces
from tidemill.launch.metrics.export import export, open_sink
from tidemill.launch.metrics.sinks import SINK
from tidemill.launch.run.access import VIEWER

PROMETHEUS, TRACES = "prometheus", "traces"
SINKS = f"{', '.join(SINK.table)}, {PROMETHEUS}, {TRACES}, or module:function"
PRINTED: dict[str, Callable[[], str]] = {
    "dictionary": dictionary.page,
    "rules": monitoring.rules,
    "grafana": monitoring.board,
}


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
