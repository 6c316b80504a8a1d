"""``tidemill router``: one address for many engines (``tidemill.actors.router``)."""

import argparse

from tidemill.launch.cli.arguments import bus_url
from tidemill.launch.cli.inputs import bus_address, process_id
from tidemill.launch.settings.extras import require

DRAIN_S = 30.0
"""Seconds that a router has to finish its requests."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("--bus", default="", type=bus_url, metavar="URL", help="bus with the engines of a run")
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")
    parser.add_argument("--id", default="", help="its name on the bus")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; auto = of the route to the bus")
    parser.add_argument("--advertise", default="", metavar="HOST", help="address for others, if not --host")
    parser.add_argument("--insecure", action="store_true", help="serve other machines without the run's key")
    parser.add_argument("--port", type=int, default=8001, help="0 = any free port")
    parser.add_argument("--worker", action="append", default=[], metavar="URL", help="an engine not on the bus")
    parser.add_argument("--exact", default="", metavar="MODEL_DIR", help="keep text clients token-exact")
    parser.add_argument(
        "--middleware", action="append", default=[], metavar="PACKAGE.MODULE:FACTORY", help="around requests"
    )
    parser.add_argument("--path", action="append", default=[], metavar="PATH", help="forward this path, too")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds for a request, at most")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="seconds to wait for an engine")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="more attempts, where repeating is safe")


def run(args: argparse.Namespace) -> int:
    """Run a router until drained. Returns the exit code of ``process.run``. Raises ValueError."""
    from tidemill.actors.config import RouterConfig, check_url
    from tidemill.bus.client.addresses import AUTO
    from tidemill.launch.run import process, workers

    if args.exact:
        require("router")
    exact = ["tidemill.actors.router.token_history:TokenHistory"] if args.exact else []
    config = RouterConfig(
        host=args.host,
        advertise=args.advertise,
        insecure=args.insecure,
        port=args.port,
        workers=tuple(check_url(url) for url in args.worker),
        middleware=(*args.middleware, *exact),
        paths=tuple(args.path),
        model=args.exact,
        timeout_s=args.timeout,
        wait_s=args.wait,
        retries=args.retries,
    )
    if not args.bus and not args.worker:
        raise ValueError("want --bus URL, --worker URL, or both")
    if args.host == AUTO and not args.bus:
        raise ValueError("--host: auto needs --bus; want an address")
    router_id = process_id(args)
    process.set_up_logging("router", router_id)
    address = bus_address(args, None, router_id) if args.bus else ""

    return process.run_refusing(
        lambda draining: workers.run_router(config, args.run, address, router_id, draining, drain_s=DRAIN_S),
        drain_s=DRAIN_S + 5,
    )
