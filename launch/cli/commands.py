"""The sub-commands that make or check something or run a process: one function for each, from its arguments to its exit code.

Heavy modules are imported inside. Commands that read or change a run are in ``run_commands.py``.
"""

import argparse
import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

from tidemill.bus import exit_codes
from tidemill.launch.cli.inputs import (
    bus_address,
    check_loaded,
    children_arguments,
    given_options,
    loaded_config,
    process_id,
    reached_at,
    unprinted_config,
    user_name,
    with_iteration,
)
from tidemill.launch.run.access import LEARNER, allowed
from tidemill.launch.settings.config_loader import changes, render
from tidemill.launch.settings.extras import require

if TYPE_CHECKING:
    from tidemill.launch.run.host_learner import HostLearner

ROUTER_DRAIN_S = 30.0
"""Seconds that a router has to finish its requests."""
TEACHER_DRAIN_S = 30.0
"""Seconds that a teacher has to finish its requests."""


def config(args: argparse.Namespace) -> int:
    """Check a configuration and show its devices on this machine, or print it, the memory it needs, its schema or the reference. Returns 0.

    Raises ValueError without CONFIG, SettingsError, CheckFailed.
    """
    if args.schema or args.reference:
        from tidemill.launch.settings import reference

        print(json.dumps(reference.schema(), indent=2) if args.schema else reference.page())
        return 0

    if not args.config:
        raise ValueError("want CONFIG, a YAML file; or --schema, or --reference")
    loaded = loaded_config(args)
    if args.print_config:
        print(render(loaded), end="")
        return 0
    if args.memory:
        from tidemill.launch.cli.memory import print_memory

        print_memory(loaded)
        return 0
    from tidemill.launch.checks.devices import PLACEMENT

    report = check_loaded(args, loaded)
    print(f"{' '.join(map(str, args.config))}: valid (--print-config prints it, tidemill check lists the checks)")
    for line in report.on(PLACEMENT):
        print(line)
    return 0


def check(args: argparse.Namespace) -> int:
    """Print the findings of all checks. Returns 0, or 78 when there are errors. Raises SettingsError."""
    from tidemill.launch.checks import run

    loaded = loaded_config(args)
    if args.print_config:
        print(render(loaded), end="")
        return 0
    report = run.check(loaded, run.Purpose(uses_bus=True, call_reward=args.check_reward))
    for finding in report.findings:
        print(finding)
    return exit_codes.CONFIG if report.errors else 0


def up(args: argparse.Namespace) -> int:
    """Run everything on this machine and return the exit code of ``run_up``.

    Raises SettingsError, PackagesMissing, CheckFailed and CannotBegin before any process is started.
    """
    loaded = loaded_config(args)
    if args.print_config:
        print(render(loaded), end="")
        return 0
    require("engine", "learner")
    check_loaded(args, loaded, uses_bus=True, resumes=args.resume, fresh=args.fresh)
    loaded = with_iteration(args, loaded)
    from tidemill.launch.run.up import run_up

    return run_up(loaded.config, resume=args.resume, fresh=args.fresh)


def data(args: argparse.Namespace) -> int:
    """Check prompt files (returns 78 for bad rows), write one of a taskset, or import recorded responses.

    Raises SettingsError, PromptError, ValueError.
    """
    if args.word == "verifiers":
        from tidemill.launch.cli.taskset_prompts import write_prompts

        return write_prompts(args)
    if args.word == "import":
        from tidemill.launch.samples.imports import import_files

        print(*import_files(args.files, args.out), sep="\n")
        return 0
    from tidemill.launch.cli.check_data import run_check

    return run_check(args)


def eval(args: argparse.Namespace) -> int:
    """Print the scores of a model. Returns 0, or 1 when a prompt had no answer. Raises SettingsError, CheckFailed, GaveUp."""
    from tidemill.launch.cli.evaluate import run_eval

    return run_eval(args)


def prepare(args: argparse.Namespace) -> int:
    """Make the model and the prompts of the section ``prepare``. Returns 0. Raises SettingsError, PackagesMissing, PreparedOtherwise."""
    wanted = unprinted_config(args)
    if wanted is None:
        return 0
    require("learner")
    from tidemill.launch.run.process import set_up_logging
    from tidemill.launch.run.roles import run_prepare

    set_up_logging("prepare")
    return run_prepare(wanted)


def convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint to a model directory, or the reverse. Returns 0. Raises ValueError."""
    require("learner")
    from tidemill.launch.cli.convert import run_convert

    return run_convert(args.source, args.out, args.model, args.bridge)


def bus(args: argparse.Namespace) -> int:
    """Run the embedded nats-server, or a cluster, until it is drained. Returns the exit code of ``process.run``."""
    args.set += ["bus.auth=true"] if args.auth or args.auth_dir else []
    args.set += [f"bus.auth_dir={args.auth_dir}"] if args.auth_dir else []
    wanted = unprinted_config(args)
    if wanted is None:
        return 0
    from tidemill.launch.run import bus_role, process

    process.set_up_logging("bus")
    return process.run(lambda draining: bus_role.run_bus(wanted, draining), drain_s=wanted.up.drain_s, uvloop=False)


def engine(args: argparse.Namespace) -> int:
    """Run an engine until it is drained. Returns the exit code of ``process.run``; 1 also when the bus is not reached within --wait."""
    return _worker(args, "engine")


def actor(args: argparse.Namespace) -> int:
    """Run an actor until it is drained. Returns the exit code of ``process.run``; 1 also when the bus is not reached within --wait."""
    return _worker(args, "actor")


def scorer(args: argparse.Namespace) -> int:
    """Run a scorer until it is drained. Returns the exit code of ``process.run``; 1 also when the bus is not reached within --wait."""
    return _worker(args, "scorer")


def _worker(args: argparse.Namespace, role: str) -> int:
    if args.print_config and not args.config:
        raise ValueError("--print-config: want --config FILE; without it the configuration is read from the bus, at the start")
    wanted, changed = None, changes(args.set, os.environ)
    if args.config:
        wanted = unprinted_config(args)
        if wanted is None:
            return 0
    require("actor" if role == "scorer" else role)
    from tidemill.bus.errors import BusUnavailable
    from tidemill.launch.run import process, roles

    id = process_id(args)
    process.set_up_logging(role, id)
    address = bus_address(args, wanted, id)
    run = args.run or (wanted.run if wanted is not None else "")
    drain_s = wanted.up.drain_s if wanted is not None else 60.0
    work = {"engine": roles.run_engine, "actor": roles.run_actor, "scorer": roles.run_scorer}[role]
    own = roles.LocalSettings(
        allowed=allowed(args.allow, os.environ, replaced=changed),
        changed=changed,
        host=getattr(args, "host", ""),
        advertise=getattr(args, "advertise", ""),
        port=getattr(args, "port", 0),
    )
    unreachable: list[BusUnavailable] = []

    async def body(draining: asyncio.Event) -> None:
        """Wait for the bus and do the work of the role. A bus that is not reached is recorded for the caller, not raised."""
        try:
            await roles.reach_bus(address, role, draining, wait_s=args.wait)
        except BusUnavailable as error:
            unreachable.append(error)
            return
        await work(wanted, run, address, id, draining, own)

    code = process.run(body, drain_s=drain_s)
    if unreachable:
        print(f"{exit_codes.LINE}{unreachable[0]} (--wait)", file=sys.stderr)
    return exit_codes.CRASHED if unreachable else code


def router(args: argparse.Namespace) -> int:
    """Run a router until it is drained. Returns the exit code of ``process.run``. Raises ValueError for arguments that cannot be used."""
    from tidemill.actors.router.config import RouterConfig, check_url
    from tidemill.bus.client.addresses import AUTO
    from tidemill.launch.run import process, roles

    if args.exact:
        require("router")
    exact = ["tidemill.actors.router.token_history:TokenHistory"] if args.exact else []
    wanted = RouterConfig(
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
    id = process_id(args)
    process.set_up_logging("router", id)
    address = bus_address(args, None, id) if args.bus else ""

    refused: list[ValueError] = []

    async def body(draining: asyncio.Event) -> None:
        """Serve. A ValueError is recorded, for the caller to raise as wrong use of the command."""
        try:
            await roles.run_router(wanted, args.run, address, id, draining, drain_s=ROUTER_DRAIN_S)
        except ValueError as error:
            refused.append(error)

    code = process.run(body, drain_s=ROUTER_DRAIN_S + 5)
    if refused:
        raise refused[0]
    return code


def reward_server(args: argparse.Namespace) -> int:
    """Host a reward until it is drained. Returns the exit code of ``process.run``. Raises ValueError for wrong use, OSError."""
    import math

    from tidemill.bus.config import is_loopback
    from tidemill.launch.run import process, roles
    from tidemill.rewards.children.limits import Limits

    token = os.environ.get(args.token_env, "") if args.token_env else ""
    if args.token_env and not token:
        raise ValueError(f"--token-env: want the variable {args.token_env} set")
    if not is_loopback(args.host) and not token and not args.insecure:
        raise ValueError(f"--host {args.host}: want --token-env VARIABLE, or --insecure: other machines could use the reward")
    if not 0 < args.timeout < math.inf or args.workers < 1 or args.memory_mb < 0:
        raise ValueError("want --timeout > 0, --workers >= 1 and --memory-mb >= 0")
    limits = Limits(timeout_s=args.timeout, workers=args.workers, memory_mb=args.memory_mb)
    process.set_up_logging("reward-server", args.reward)
    reward = roles.ServedReward(name=args.reward, options=given_options(args.option), of_groups=args.group)
    refused: list[ValueError] = []

    async def body(draining: asyncio.Event) -> None:
        """Serve. A ValueError is recorded, for the caller to raise as wrong use of the command."""
        try:
            await roles.run_reward_server(reward, limits, draining, host=args.host, port=args.port, token=token)
        except ValueError as error:
            refused.append(error)

    code = process.run(body, drain_s=args.timeout + 5)
    if refused:
        raise refused[0]
    return code


def teacher(args: argparse.Namespace) -> int:
    """Serve a fixed model until it is drained. Returns the exit code of ``process.run``. Raises ValueError for wrong use."""
    if not (args.model / "config.json").is_file():
        raise ValueError(f"MODEL_DIR: want a directory with a Hugging Face model (config.json in it), got {str(args.model)!r}")
    if not 0 <= args.port < 65536 or args.max_context < 0:
        raise ValueError(f"want --port 0 to 65535 and --max-context >= 0, got {args.port}, {args.max_context}")
    require("engine")
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.errors import UnsupportedModel
    from tidemill.launch.run import process
    from tidemill.launch.run.teacher import run_teacher

    names = ("host", "port", "insecure", "device", "dtype", "threads", "max_context")
    config = EngineConfig(**{name: getattr(args, name) for name in names})
    process.set_up_logging("teacher", args.model.name)
    refused: list[ValueError] = []

    async def body(draining: asyncio.Event) -> None:
        """Serve. An error of wrong use is recorded, for the caller to raise."""
        try:
            await run_teacher(args.model, config, draining, drain_s=TEACHER_DRAIN_S)
        except (ValueError, UnsupportedModel) as error:
            refused.append(ValueError(str(error)))

    code = process.run(body, drain_s=TEACHER_DRAIN_S + 5)
    if refused:
        raise refused[0]
    return code


def host(args: argparse.Namespace) -> int:
    """Run the engines and actors of this machine until it is drained. Returns the exit code of ``process.run``. Raises HostExists."""
    from pathlib import Path

    from tidemill.actors.engines.membership import host_name
    from tidemill.launch.run import process, roles
    from tidemill.launch.run.desired import parse
    from tidemill.launch.run.host import HostExists, only_one, users_in

    name = args.name or user_name() or host_name()
    own = parse(args.wanted)
    if own.get("engine"):
        require("engine")
    machine = roles.Machine(
        name=name,
        pool=args.pool,
        own=own,
        directory=args.dir or Path("runs/hosts") / name,
        drain_s=args.drain,
        restarts=args.restarts,
        users=None if args.users is None else users_in(args.users),
        allowed=allowed(args.allow, os.environ),
        server_words=reached_at(args),
        learner=_learner_node(args),
    )
    process.set_up_logging("host", name)

    refused: list[HostExists] = []

    async def body(draining: asyncio.Event) -> None:
        """Run the host. HostExists is recorded, for the caller to raise as wrong use of the command."""
        try:
            await roles.run_host(args.run, args.bus, draining, machine)
        except HostExists as error:
            refused.append(error)

    with only_one(machine.directory, name):
        code = process.run(body, drain_s=2 * args.drain + 30)
    if refused:
        raise refused[0]
    return code


def _learner_node(args: argparse.Namespace) -> "HostLearner | None":
    """Return the learner's node of a host, after checks of its configuration and machine. Raises ValueError, SettingsError, CheckFailed."""
    if args.learner_node is None:
        if args.config or args.set:
            raise ValueError("--config, --set: want --learner-node R with them, got none: engines and actors read theirs from the bus")
        return None
    if not args.config:
        raise ValueError("--learner-node: want --config FILE, the configuration of the run, got none")
    require("learner")
    from tidemill.launch.run.host_learner import HostLearner
    from tidemill.launch.run.node_rank import node_place

    loaded = loaded_config(args)
    place = node_place(loaded.config.learner.nodes, args.learner_node, os.environ)
    if place.nodes == 1:
        raise ValueError("--learner-node: want learner.nodes > 1, got 1; cure: tidemill up, or --set learner.nodes=N")
    if args.run not in ("", loaded.config.run):
        raise ValueError(f"--run: want {loaded.config.run}, the run of --config, got {args.run}")
    args.set.append(f"learner.nodes={place.nodes}")
    check_loaded(args, loaded, starts_workers=False, resumes=True)
    words = ["learner", *children_arguments(args), "--node-rank", str(place.rank), *reached_at(args)]
    return HostLearner(config=loaded_config(args).config, rank=place.rank, arguments=words, users=args.users)


def learner(args: argparse.Namespace) -> int:
    """Run feeder and ranks to the last step, or until drained. Returns the exit code of ``process.run``. Raises CheckFailed."""
    wanted = unprinted_config(args)
    if wanted is None:
        return 0
    require("learner")
    from tidemill.launch.run.node_rank import node_place

    place = node_place(wanted.learner.nodes, args.node_rank, os.environ)
    if place.nodes == 1 and (args.host or args.advertise):
        raise ValueError("--host, --advertise: want --nodes N > 1, got one node: nothing of it listens on the network")
    if place.nodes != wanted.learner.nodes:
        args.set.append(f"learner.nodes={place.nodes}")  # for the ranks, too
        wanted = loaded_config(args).config
    if not args.checked:
        check_loaded(args, loaded_config(args), starts_workers=False, resumes=True)
    wanted = with_iteration(args, loaded_config(args)).config
    from tidemill.launch.run import learner_roles, process

    process.set_up_logging("learner", args.id or (f"node {place.rank}" if place.nodes > 1 else ""))
    address = bus_address(args, wanted, LEARNER)
    if place.nodes > 1:
        from tidemill.launch.run import learner_nodes

        given = learner_nodes.Given(place=place, host=args.host, advertise=args.advertise, id=args.id)
        return process.run(
            lambda draining: learner_nodes.run_agent(wanted, address, given, children_arguments(args), draining),
            drain_s=wanted.up.drain_s + 5,
            uvloop=False,
        )
    return process.run(
        lambda draining: learner_roles.run_learner(wanted, address, args.id, children_arguments(args), draining),
        drain_s=wanted.up.drain_s + 5,
        uvloop=False,
    )


def feeder(args: argparse.Namespace) -> int:
    """Run the feeder of a learner. Returns the exit code of ``process.run``."""
    wanted = unprinted_config(args)
    if wanted is None:
        return 0
    from tidemill.launch.run import learner_roles, process
    from tidemill.learner.feed.feed_keys import FeedKeys

    process.set_up_logging("feeder")
    address, keys = bus_address(args, wanted, LEARNER), FeedKeys.read(args.feeder_keys)
    return process.run(
        lambda draining: learner_roles.run_feeder(wanted, address, args.feeder_url, keys, draining, epoch=args.epoch),
        drain_s=wanted.up.drain_s,
    )


def rank(args: argparse.Namespace) -> int:
    """Run one rank of a learner; its number is in the variable RANK. Returns its exit code."""
    wanted = unprinted_config(args)
    if wanted is None:
        return 0
    from tidemill.launch.run import learner_roles, process
    from tidemill.learner.feed.feed_keys import FeedKeys

    process.set_up_logging("rank", os.environ.get("RANK", "0"))
    return learner_roles.run_rank(
        wanted, bus_address(args, wanted, LEARNER), args.feeder_url, FeedKeys.read(args.feeder_keys), progress=args.progress
    )


def debug(args: argparse.Namespace) -> int:
    """Compare dumps or weights, score prompts, or request a profile. Returns 0, or 1 when something differs. Raises ValueError."""
    from tidemill.launch.cli.debug import run_debug

    return run_debug(args)
