"""``tidemill top``: a run of many hosts on a terminal, by a reader of the bus; a line for each host."""

import argparse
import asyncio
import sys
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import Waiter, first_of
from tidemill.bus.wire import subjects
from tidemill.bus.wire.codec import decode_record
from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look
from tidemill.launch.cli.status import steps_of
from tidemill.launch.run.hosts_view import Rates, hosts_picture
from tidemill.launch.run.view import REFRESH_S
from tidemill.launch.run.watch import LOOK_EVERY_S, SILENT_S, RunWatch

_FIRST_S = 20.0  # Longest wait in seconds for rows and the newest outcome before a picture
_SETTLE_S = SILENT_S + LOOK_EVERY_S  # Then rows are read so long: a process is silent when its row does not change


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print one picture; also without a terminal")


def run(args: argparse.Namespace) -> int:
    """Show the run until Ctrl-C. Returns 0. Raises ValueError when it cannot be read."""
    with suppress(KeyboardInterrupt):
        return look(args, show_top)
    return 0


async def show_top(bus: Bus, args: argparse.Namespace) -> int:
    """Show a picture every half second, or one."""
    config, _ = await bus.rows("run").read("config")
    newest = await bus.jet.last(subjects.stream(bus.run, subjects.PLAN), subjects.plan(bus.run, "done"))
    step = 0 if newest is None else decode_record(newest.data).step  # type: ignore[union-attr]  # a Done
    # Steps of before are no pace: they are all read at once.
    earlier, waiter = {step: 0.0} if step else {}, Waiter()
    watch = RunWatch(bus, steps=steps_of(config), earlier=earlier, on_record=lambda _: waiter.wake())
    rates, console = Rates(), Console(highlight=False)
    once = args.once or not sys.stdout.isatty()

    def picture() -> object:
        return hosts_picture(watch, rates, f"tidemill {bus.run}", width=console.width, height=console.height)

    async def draw() -> None:
        if once:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    while watch.samples is None or watch.step < step:  # rows are read before SAMPLES
                        await waiter.wait(REFRESH_S)
            picture()  # the rates count from here on
            await asyncio.sleep(_SETTLE_S)
            console.print(picture())
            return
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(picture(), refresh=True)  # type: ignore[arg-type]
                await asyncio.sleep(REFRESH_S)

    await first_of(watch.run(), draw())
    return 0
