"""``tidemill cursors``: lists the registered readers of a run, and removes one that will not return."""

import argparse

from rich.console import Console

from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import WAIT, Cursors
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import change, look


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_run(parser)
    parser.add_argument("--forget", default="", metavar="NAME", help="remove this reader: trimming waits no longer")


def run(args: argparse.Namespace) -> int:
    """List the registered readers of a run, after --forget removed one. Returns 0. Raises ValueError."""
    return change(args, show_cursors) if args.forget else look(args, show_cursors)


async def show_cursors(bus: Bus, args: argparse.Namespace) -> int:
    """List the registered readers, after removing the reader of --forget; return 0."""
    console = Console(highlight=False, soft_wrap=True)
    if args.forget:
        await Cursors(bus).drop(args.forget)
        console.print(f"{args.forget}: forgotten")
    state, places = await bus.samples.info(), await Cursors(bus).all()
    for name, place in places.items():
        if place.created != state.created:
            kept = "of an earlier stream, which is gone"
        elif place.given_up:
            kept = "given up: the stream was too full to wait for it"
        else:
            kept = "trimming waits for it" if place.policy == WAIT else "trimming does not wait for it"
        console.print(
            (
                f"{name}: at {place.floor}, {max(0, state.last_seq - place.floor)} messages behind; {kept}; read "
                f"by {place.owner}"
            ),
            markup=False,
        )
    if not places:
        console.print("no reader is registered; the learner's own position is in its checkpoint")
    return 0
