"""``tidemill metrics``: gives the metrics of each step to a sink (``tidemill.launch.metrics``)."""

import argparse
import asyncio
from pathlib import Path

from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import read_until_drained
from tidemill.launch.cli.inputs import given_options, read_secrets
from tidemill.launch.metrics.export import export, open_sink
from tidemill.launch.run.access import VIEWER


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("to", metavar="SINK", help="tensorboard, wandb, jsonl, or module:function (docs/looking.md)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the sink")
    parser.add_argument("--from-step", type=int, default=1, metavar="N", help="first step (default 1)")
    parser.add_argument("--until-end", action="store_true", help="end at the present end of the log")


def run(args: argparse.Namespace) -> int:
    """Give the metrics of a run to a sink until drained. Returns and raises as ``archive``."""
    read_secrets(args, [Path()])
    sink = open_sink(args.to, given_options(args.option))

    async def exported(url: str, run: str, draining: asyncio.Event) -> None:
        done = await export(url, run, sink, args, draining)
        had = f", which had {done.had} from before" if done.had else ""
        print(
            f"{done.steps} steps and {done.evaluations} evaluations given to {args.to}{had}, {done.failures} "
            "calls failed"
        )

    return read_until_drained(args, exported, name=args.to, user=VIEWER)
