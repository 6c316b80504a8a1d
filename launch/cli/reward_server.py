"""``tidemill reward-server``: hosts a reward over HTTP (``tidemill.actors.scoring.server``)."""

import argparse
import math
import os

from tidemill.launch.cli.inputs import given_options


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
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


def run(args: argparse.Namespace) -> int:
    """Host a reward until drained. Returns the exit code of ``process.run``. Raises ValueError, OSError."""
    from tidemill.bus.config import is_loopback
    from tidemill.bus.system.limits import ProcessLimits
    from tidemill.launch.run import process, workers

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
    reward = workers.ServedReward(name=args.reward, options=given_options(args.option), of_groups=args.group)
    return process.run_refusing(
        lambda draining: workers.run_reward_server(
            reward, limits, draining, host=args.host, port=args.port, token=token
        ),
        drain_s=args.timeout + 5,
    )
