"""The process of ``tidemill dashboard``: connects to a run, and serves its page until drained."""

import argparse
import asyncio
import errno
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from tidemill.bus.client.addresses import parse
from tidemill.bus.config import is_loopback
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import first_of
from tidemill.bus.system.files import write_whole
from tidemill.bus.system.output import STANDARD_OUTPUT, lossy
from tidemill.launch.page.access import PageAccess, new_token
from tidemill.launch.page.answers import RunAnswers
from tidemill.launch.page.commands import commands
from tidemill.launch.page.compared import ComparedRuns
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.samples import SampleAnswers
from tidemill.launch.page.server import PageServer
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_config import CONFIG_FILE

log = logging.getLogger(__name__)

CONNECT_S = 60.0
PORT = 8600


async def serve(args: argparse.Namespace, url: str, run: str, draining: asyncio.Event) -> None:
    """Serve the page of a run. Raises BusError, ValueError, OSError for an address that cannot be listened at."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(url, run, name="dashboard", wait_s=CONNECT_S))
        reader, answers = readers(bus, args)
        stack.push_async_callback(reader.close)
        access = access_of(args, url)
        samples = SampleAnswers(reader, model_dirs(args))
        compared = ComparedRuns(url, run, args.compare)
        routes = commands(bus) if args.operator else None
        server = PageServer(reader, answers, samples, access, compared, routes, args.renderers, logs_of(args))
        address = await _listening(stack, server, args)
        # With a file, the output may be a log that others read: the token is in the file alone.
        tokens = (access.token, access.operator) if args.url_file is None else ("", "")
        lines = [f"page of {run} at {with_token(address, tokens[0])}"]
        if args.operator:
            lines.append(f"operator of {run} at {with_token(address, tokens[1])}")
        print("\n".join(lines), file=lossy(STANDARD_OUTPUT), flush=True)
        if args.url_file is not None:
            write_whole(args.url_file, with_token(address, access.operator or access.token) + "\n", private=True)
            stack.callback(args.url_file.unlink, missing_ok=True)
        await first_of(draining.wait(), reader.run())


def readers(bus: Bus, args: argparse.Namespace) -> tuple[RunReader, RunAnswers]:
    """Return the reader of a run, and its answers."""
    root = Path(args.run_dir) if args.run_dir else None
    checkpoints = None if root is None else root / "checkpoints"
    reader = RunReader(bus, ended=args.ended, checkpoints=checkpoints)
    resume = "" if root is None else f"tidemill up {root / CONFIG_FILE} --resume"
    return reader, RunAnswers(reader, resume=resume, logs=logs_of(args))


def logs_of(args: argparse.Namespace) -> Path | None:
    """Return the directory of the run's logs, if it is on this machine."""
    return Path(args.run_dir) / "logs" if args.run_dir else None


def with_token(address: str, token: str) -> str:
    """Return the address of a page that a user opens."""
    return f"{address}/?token={token}" if token else f"{address}/"


def access_of(args: argparse.Namespace, url: str) -> PageAccess:
    """Return the tokens of a page, from the environment, or new ones where one is needed."""
    # A bus with users admits no other user of this machine: a page on loopback must not either.
    asked = args.token or args.viewer_token or args.operator
    needs = asked or not is_loopback(args.host) or _has_users(args, url)
    token = (args.viewer_token or new_token()) if needs else ""
    operator = (args.operator_token or new_token()) if args.operator else ""
    return PageAccess(token, operator, args.name)


def _has_users(args: argparse.Namespace, url: str) -> bool:
    config = Path(args.run_dir) / CONFIG_FILE
    # The bus of an ended run always has a password, made for this process. A directory of `tidemill bus` has no file.
    if args.run_dir and not args.bus and config.exists():
        return bool(yaml_file.read(config)[0]["bus"].get("auth"))
    return bool(parse(url).password)


def model_dirs(args: argparse.Namespace) -> tuple[Path, ...]:
    """Return the places of the tokenizer in the run's directory, if that is on this machine."""
    return (Path(args.run_dir) / "model",) if args.run_dir else ()


async def _listening(stack: AsyncExitStack, server: PageServer, args: argparse.Namespace) -> str:
    try:
        return await stack.enter_async_context(server.serving(args.host, PORT if args.port is None else args.port))
    except OSError as error:
        if args.port is not None or error.errno != errno.EADDRINUSE:
            raise ValueError(f"--host, --port: {args.host}: {error.strerror}") from None
    print(f"port {PORT} is taken, a free one is used", file=sys.stderr)
    return await stack.enter_async_context(server.serving(args.host, 0))
