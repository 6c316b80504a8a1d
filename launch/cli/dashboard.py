"""``tidemill dashboard``: the page of a run, live or ended, in a browser; or the same in one file."""

import argparse
import os
from functools import partial
from pathlib import Path

from tidemill.launch.cli.arguments import add_run
from tidemill.launch.cli.find_run import look, read_until_drained
from tidemill.launch.run.access import OPERATOR, VIEWER

PORT = 8600
TOKEN_VARIABLE, OPERATOR_VARIABLE = "TIDEMILL_PAGE_TOKEN", "TIDEMILL_OPERATOR_TOKEN"
SHORTEST_TOKEN = 16


def add(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback with a token")
    parser.add_argument("--port", type=int, metavar="N", help=f"default {PORT}, or a free one if it is taken; 0 = any")
    parser.add_argument("--name", action="append", default=[], help="another name of this host in a browser's address")
    parser.add_argument("--token", action="store_true", help=f"ask for a token on loopback, too ({TOKEN_VARIABLE})")
    parser.add_argument("--operator", action="store_true", help=f"also scale and decide ({OPERATOR_VARIABLE})")
    parser.add_argument("--compare", action="append", default=[], type=Path, metavar="DIR", help="an ended run")
    parser.add_argument("--renderers", type=Path, metavar="DIR", help="modules ENVIRONMENT.js that draw samples")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one HTML file, and end")
    parser.add_argument("--url-file", type=Path, metavar="FILE", help="also write its address to this file")


def run(args: argparse.Namespace) -> int:
    """Serve the page of a run until drained, or export it. Returns the exit code. Raises ValueError."""
    if args.export is not None:
        from tidemill.launch.page.export import export

        return look(args, export)
    from tidemill.launch.page.serve import serve

    if args.renderers is not None and not args.renderers.is_dir():
        raise ValueError(f"--renderers: want a directory of modules ENVIRONMENT.js, got {args.renderers}")
    args.viewer_token, args.operator_token = _token(TOKEN_VARIABLE), _token(OPERATOR_VARIABLE)
    user = OPERATOR if args.operator else VIEWER
    return read_until_drained(args, partial(serve, args), name=args.command, user=user)


def _token(variable: str) -> str:
    token = os.environ.get(variable, "")
    if token and len(token) < SHORTEST_TOKEN:
        raise ValueError(f"{variable}: want at least {SHORTEST_TOKEN} characters, got {len(token)}")
    return token
