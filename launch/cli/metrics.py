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
from tidemill.launch.metrics import dictionary, monitoring, prometheus
from tidemill.launch.metrics.export import export, open_sink
from tidemill.launch.run.access import VIEWER

PROMETHEUS = "prometheus"
TOKEN_VARIABLE = "TIDEMILL_METRICS_TOKEN"
_SERVED = ("host", "port")
PRINTED: dict[str, Callable[[], str]] = {
    "dictionary": dictionary.page,
    "rules": monitoring.rules,
    "grafana": monitoring.board,
}


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    names = "tensorboard, wandb, jsonl, prometheus, or module:function (docs/looking.md)"
    parser.add_argument("to", metavar="SINK", nargs="?", default="", help=names)
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
        raise ValueError("SINK: want tensorboard, wandb, jsonl, prometheus, or module:function, got none")
    read_secrets(args, [Path()])
    if args.to == PROMETHEUS:
        return _serve(args)
    sink = open_sink(args.to, given_options(args.option))

    async def exported(url: str, run: str, draining: asyncio.Event) -> None:
        done = await export(url, run, sink, args, draining)
        had = f", which had {done.had} from before" if done.had else ""
        print(
            f"{done.steps} steps and {done.evaluations} evaluations given to {args.to}{had}, {done.failures} "
            "calls failed"
        )

    return read_until_drained(args, exported, name=args.to, user=VIEWER)


def _serve(args: argparse.Namespace) -> int:
    options = given_options(args.option)
    if unknown := sorted(options.keys() - set(_SERVED)):
        raise ValueError(f"--option: want {' or '.join(_SERVED)} for prometheus, got {unknown[0]!r}")
    host, port = options.get("host", "127.0.0.1"), options.get("port", prometheus.PORT)
    if type(port) is not int or not 0 <= port <= 65535:
        raise ValueError(f"--option port: want 0 (any free one) to 65535, got {port!r}")
    place = {"host": str(host), "port": port, "token": os.environ.get(TOKEN_VARIABLE, "")}

    async def served(url: str, run: str, draining: asyncio.Event) -> None:
        await prometheus.serve(url, run, draining, **place)

    return read_until_drained(args, served, name=PROMETHEUS, user=VIEWER)
