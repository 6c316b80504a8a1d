"""``tidemill bus``, ``router``, ``reward-server`` and ``teacher``: servers of a run, or of other clients.
Their bodies are in ``launch/run/bus_process.py`` and ``launch/run/servers.py``.
"""

import argparse
import asyncio
import math
import os
from pathlib import Path

from tidemill.launch.cli.arguments import add_config, add_probes, add_until_end, bus_url, refuse_no_model
from tidemill.launch.cli.inputs import bus_address, given_options, process_id, unprinted_config, with_probes
from tidemill.launch.settings.extras import require

DRAIN_S = 30.0  # seconds that a router or a teacher has to finish its requests


def add_bus(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--auth", action="store_true", help="with users, passwords and permissions: bus.auth=true")
    parser.add_argument("--auth-dir", default="", metavar="DIR", help="directory of their passwords: bus.auth_dir")
    parser.add_argument("--make-users", action="store_true", help="write that directory, and end without a bus")
    add_probes(parser)


def run_bus(args: argparse.Namespace) -> int:
    """Run the embedded nats-server, or a cluster, until it is drained. Returns the exit code of ``process.run``."""
    args.set += ["bus.auth=true"] if args.auth or args.auth_dir or args.make_users else []
    args.set += [f"bus.auth_dir={args.auth_dir}"] if args.auth_dir else []
    config = unprinted_config(args)
    if config is None:
        return 0
    if args.make_users:
        from tidemill.bus.server.auth import make_users
        from tidemill.launch.run.access import auth_dir

        try:
            make_users(auth_dir(config), config.run, config.bus)
        except OSError as error:
            want = f"--make-users: want a directory that can be written, got {auth_dir(config)}"
            raise ValueError(f"{want}: {error.strerror}") from None
        print(f"users of run {config.run} in {auth_dir(config)}")
        return 0
    from tidemill.launch.run import bus_process, process

    process.set_up_logging("bus")
    main = with_probes(args, lambda draining: bus_process.run_bus(config, draining))
    return process.run(main, drain_s=config.up.drain_s, uvloop=False)


def add_router(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bus", default="", type=bus_url, metavar="URL", help="bus with the engines of a run")
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")
    parser.add_argument("--id", default="", help="its name on the bus")
    add_until_end(parser)
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
    add_probes(parser)


def run_router(args: argparse.Namespace) -> int:
    """Run a router until drained. Returns the exit code of ``process.run``. Raises ValueError."""
    from tidemill.actors.config import RouterConfig, check_url
    from tidemill.bus.client.addresses import AUTO
    from tidemill.launch.run import process, run_end, servers

    if args.exact:
        require("router")
    exact = ["tidemill.actors.router.token_history:TokenHistory"] if args.exact else []
    config = RouterConfig(
        **{name: getattr(args, name) for name in ("host", "advertise", "insecure", "port", "retries")},
        workers=tuple(check_url(url) for url in args.worker),
        middleware=(*args.middleware, *exact),
        paths=tuple(args.path),
        model=args.exact,
        timeout_s=args.timeout,
        wait_s=args.wait,
    )
    if not args.bus and not args.worker:
        raise ValueError("want --bus URL, --worker URL, or both")
    if args.host == AUTO and not args.bus:
        raise ValueError("--host: auto needs --bus; want an address")
    if args.until_end and not args.bus:
        raise ValueError("--until-end: want --bus URL with it, got none")
    if args.probes and not args.bus:
        raise ValueError("--probes: want --bus with it, got none; a router without a bus answers GET /health itself")
    router_id = process_id(args)
    process.set_up_logging("router", router_id)
    address = bus_address(args, None, router_id) if args.bus else ""

    async def body(draining: asyncio.Event) -> None:
        waits = {"on": args.until_end, "resume_s": args.resume_wait}
        async with run_end.until_end(address, args.run, draining, name="router", **waits):
            await servers.run_router(config, args.run, address, router_id, draining, drain_s=DRAIN_S)

    return process.run_refusing(with_probes(args, body), drain_s=DRAIN_S + 5)


def add_reward_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reward", metavar="NAME", help="a name, or package.module:function")
    parser.add_argument("--group", action="store_true", help="of groups, for `actor.group_reward: remote`")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the reward")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8002, help="0 = any free port")
    parser.add_argument("--token-env", default="", metavar="VARIABLE", help="variable with the token of requests")
    parser.add_argument("--insecure", action="store_true", help="answer requests of other machines without a token")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for one call of the reward")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="child processes of a plain reward")
    parser.add_argument("--memory-mb", type=int, default=4096, metavar="MB", help="memory of each; 0 = no limit")


def run_reward_server(args: argparse.Namespace) -> int:
    """Host a reward until drained. Returns the exit code of ``process.run``. Raises ValueError, OSError."""
    from tidemill.bus.config import is_loopback
    from tidemill.bus.system.limits import ProcessLimits
    from tidemill.launch.run import process, servers

    token = os.environ.get(args.token_env, "") if args.token_env else ""
    if args.token_env and not token:
        raise ValueError(f"--token-env: want the variable {args.token_env} set")
    if not is_loopback(args.host) and not token and not args.insecure:
        raise ValueError(
            f"--host {args.host}: want --token-env VARIABLE, or --insecure: other machines could use the reward"
        )
    if not 0 < args.timeout < math.inf or args.workers < 1 or args.memory_mb < 0:
        raise ValueError("want --timeout > 0, --workers >= 1 and --memory-mb >= 0")
    limits = ProcessLimits(timeout_s=args.timeout, workers=args.workers, memory_mb=args.memory_mb)
    process.set_up_logging("reward-server", args.reward)
    listen = {"of_groups": args.group, "host": args.host, "port": args.port, "token": token}
    options = given_options(args.option)
    return process.run_refusing(
        lambda draining: servers.run_reward_server(args.reward, options, limits, draining, **listen),
        drain_s=args.timeout + 5,
    )


def add_teacher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="model with the vocabulary of the trained one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=30000, help="0 = any free port")
    parser.add_argument("--insecure", action="store_true", help="let other machines ask, without a key")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where it computes")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on GPUs"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads")
    parser.add_argument("--max-context", type=int, default=0, metavar="N", help="tokens of a sequence; 0 = the model's")


def run_teacher(args: argparse.Namespace) -> int:
    """Serve a fixed model until drained. Returns the exit code of ``process.run``. Raises ValueError."""
    refuse_no_model("MODEL_DIR", args.model)
    if not 0 <= args.port < 65536 or args.max_context < 0:
        raise ValueError(f"want --port 0 to 65535 and --max-context >= 0, got {args.port}, {args.max_context}")
    require("engine")
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.errors import UnsupportedModel
    from tidemill.launch.run import process, servers

    names = ("host", "port", "insecure", "device", "dtype", "threads", "max_context")
    config = EngineConfig(**{name: getattr(args, name) for name in names})
    process.set_up_logging("teacher", args.model.name)
    try:
        return process.run_refusing(
            lambda draining: servers.run_teacher(args.model, config, draining, drain_s=DRAIN_S),
            drain_s=DRAIN_S + 5,
            refusals=(ValueError, UnsupportedModel),
        )
    except UnsupportedModel as error:
        raise ValueError(str(error)) from None
