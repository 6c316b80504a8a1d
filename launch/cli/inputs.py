"""Inputs of a command: its configuration, checked or printed, its name, the bus, secrets in ``.env`` (no settings; a
value is in no message), and arguments for its children.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus import exit_codes
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.launch.settings import hub_names, yaml_file
from tidemill.launch.settings.config_loader import (
    ENVIRONMENT_PREFIX,
    Loaded,
    SettingsError,
    load,
    render,
    to_map,
)
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_paths import CONFIGS

if TYPE_CHECKING:
    from tidemill.launch.checks.findings import Report
    from tidemill.launch.hub.repository import Fetched
ENV_FILE = ".env"
SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "TIDEMILL_WEBHOOK",
    "TIDEMILL_METRICS_TOKEN",
)
SECRETS_PREFIX = "AWS_"  # Start of further names that are read: the credentials of an object store
_ENV_LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)", re.ASCII)
_ENV_VALUE = re.compile(r"""(?P<quote>["'])(?P<quoted>[^"'\\]*)(?P=quote)\s*(?:\#.*)?|(?P<bare>[^\s"']*)(?:\s+\#.*)?""")
_ENV_QUOTED = re.compile(r"""'(?:\\'|[^'])*'|"(?:\\"|[^"])*\"""")  # over lines too, as python-dotenv reads it
MAX_ENV_BYTES = 1 << 16


def loaded_config(args: argparse.Namespace) -> Loaded:
    """Return the run's configuration and where its values come from. Raises SettingsError.

    Secrets of ``.env`` beside it come into the environment; without a file, and for one of the package, of the working
    directory.
    """
    beside = dict.fromkeys(Path() if file.parent == CONFIGS else file.parent for file in args.config)
    read_secrets(args, beside or [Path()])
    return load(args.config, args.set, os.environ)


def read_secrets(args: argparse.Namespace, directories: Iterable[Path]) -> None:
    """Put the secrets of each ``.env`` into this process's environment, whose own values win. Raises SettingsError.

    An empty value in the environment counts as none: compose files pass on variables that are not set as empty ones. A
    warning about a file goes to stderr, once.
    """
    for directory in directories:
        secrets, warning = read_env_file(directory / ENV_FILE)
        os.environ.update({name: value for name, value in secrets.items() if not os.environ.get(name)})
        if warning and warning not in getattr(args, "warned", ()):
            args.warned = (*getattr(args, "warned", ()), warning)
            print(f"tidemill {args.command}: warning: {warning}", file=sys.stderr)


def with_fetched(
    args: argparse.Namespace, loaded: Loaded, began: JsonMapping | None = None
) -> "tuple[Loaded, Sequence[Fetched]]":
    """Return the configuration with every repository of the hub that it names in the cache, and these.

    ``--set`` gets the commits, for all processes of this start. ``began``: the configuration of the run's start, whose
    commits stay. Raises CheckFailed with the reason for each that cannot be used.
    """
    names = hub_names.names_in(to_map(loaded.config))
    if not names:
        return loaded, ()
    require("hub")
    from tidemill.launch.checks.findings import CheckFailed, Report
    from tidemill.launch.hub.repository import fetch_all

    then = {} if began is None else hub_names.names_in(dict(began))
    at = Report(loaded.origins).at
    fetched, refused = fetch_all(names, then, at, lambda text: print(text, file=sys.stderr))
    if refused:
        raise CheckFailed(refused)
    for setting, repository in fetched.items():
        args.set.append(f"{setting}={json.dumps(str(repository.name))}")
        variable = ENVIRONMENT_PREFIX + setting.replace(".", "__").upper()
        if variable in os.environ:  # it would win over --set
            os.environ[variable] = str(repository.name)
    return dataclasses.replace(loaded_config(args), origins=loaded.origins), list(fetched.values())


def path_here(text: str) -> str:
    """Return a path of prompts in an argument; of a name of the hub the path in the cache. Raises HubRefused."""
    name = hub_names.parse(hub_names.DATASET, text)
    if name is None:
        return text
    require("hub")
    from tidemill.launch.hub.repository import fetch

    return fetch(name, text, say=lambda line: print(line, file=sys.stderr)).name.path


def with_commits_of_run(args: argparse.Namespace, loaded: Loaded, *, leads: bool) -> Loaded:
    """Return the configuration as ``with_fetched``, for a learner: at the commits in the run's row on the bus.

    A learner that does not lead the others waits for the row. Raises CheckFailed; ends the process without a bus.
    """
    from tidemill.bus.errors import BusError
    from tidemill.launch.run.access import learner_user
    from tidemill.launch.run.learner_process import began_with

    names, began = hub_names.names_in(to_map(loaded.config)), None
    if any(not name.is_pinned for name in names.values()):
        try:
            address = bus_address(args, loaded.config, learner_user(loaded.config))
            began = asyncio.run(began_with(loaded.config, address, role="" if leads else "learner"))
        except BusError as error:
            print(f"{exit_codes.LINE}{error}", file=sys.stderr)
            raise SystemExit(exit_codes.CRASHED) from None
    loaded, _ = with_fetched(args, loaded, began)
    if names:
        from tidemill.launch.hub.repository import write_record

        write_record(loaded.config.root, to_map(loaded.config))
    return loaded


def bus_address(args: argparse.Namespace, config: RunConfig | None, user: str) -> str:
    """Return the address of the bus with the password in it: for this process only, never to be shown."""
    from tidemill.launch.run.access import address_line

    return address_line(args.bus, config, user, os.environ)


def process_id(args: argparse.Namespace) -> str:
    """Return the process's name on the bus, as ``name_on_bus``, by --id."""
    return name_on_bus("--id", args.id)


def name_on_bus(option: str, name: str) -> str:
    """Return the name, else the user of the bus in the environment, which may write under no other name.

    Raises ValueError for a name that is not the user's.
    """
    user = user_name()
    if name not in ("", user) and is_user_of_process(user):
        raise ValueError(f"{option}: want {user}, the user of the bus in the environment, or none, got {name}")
    return name or user


def is_user_of_process(user: str) -> bool:
    """Return whether `tidemill bus` makes such users for single processes. A server of yours may have any users."""
    return bool(re.fullmatch(r"(engine|actor|scorer|host)-[0-9]+|router", user))


def user_name() -> str:
    """Return the user of the bus in the environment; empty if there is none."""
    from tidemill.launch.run.access import user_of_environment

    return user_of_environment(os.environ)[0]


def unprinted_config(args: argparse.Namespace) -> RunConfig | None:
    """Return the run's configuration; None if it was printed instead."""
    loaded = loaded_config(args)
    if args.print_config:
        print(render(loaded), end="")
        return None
    return loaded.config


def print_checked(args: argparse.Namespace, loaded: Loaded) -> int:
    """Print the configuration, also one that cannot work, then check it. Returns 0. Raises CheckFailed after errors."""
    print(render(loaded), end="", flush=True)
    check_loaded(args, with_fetched(args, loaded)[0])
    return 0


def check_loaded(args: argparse.Namespace, loaded: Loaded, **purpose: bool) -> "Report":
    """Check the configuration and print warnings to stderr. Returns the report. Raises CheckFailed after errors."""
    from tidemill.launch.checks.run import Purpose, check

    report = check(loaded, Purpose(**purpose))
    report.refuse()
    for finding in report.warnings:
        print(f"tidemill {args.command}: warning: {finding.text}", file=sys.stderr)
    return report


def with_iteration(args: argparse.Namespace, loaded: Loaded) -> Loaded:
    """Return the configuration with one iteration in ``model.megatron_checkpoint``, for all processes of this start.

    The job that writes the checkpoints may finish another one at any time. Raises ConfigRefused.
    """
    from tidemill.learner.checkpoints.torch_dist import SETTING, find

    checkpoint = loaded.config.model.megatron_checkpoint
    if checkpoint and str(iteration := find(Path(checkpoint))) != checkpoint:
        args.set.append(f"{SETTING}={iteration}")
        return loaded_config(args)
    return loaded


def given_options(words: list[str]) -> dict[str, object]:
    """Return the options in ``KEY=VALUE`` words, values as YAML. Raises ValueError."""
    options: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"--option: want KEY=VALUE, got {word!r}")
        try:
            options[key] = yaml_file.value(value, f"--option {key}")[0]
        except SettingsError as error:  # ends as the other wrong arguments do
            raise ValueError(str(error)) from None
    return options


def with_probes(
    args: argparse.Namespace, main: Callable[[asyncio.Event], Coroutine[object, None, None]]
) -> Callable[[asyncio.Event], Coroutine[object, None, None]]:
    """Return the body of a process with the probes of --probes, if it was given."""
    if args.probes is None:
        return main
    from tidemill.launch.deploy.probes import probed
    from tidemill.launch.metrics.prometheus import TOKEN_VARIABLE

    return probed(main, *args.probes, token=os.environ.get(TOKEN_VARIABLE, ""))


def reached_at(args: argparse.Namespace) -> list[str]:
    """Return the options --host and --advertise of an engine, as they were given here."""
    addresses = (("--host", args.host), ("--advertise", args.advertise))
    return [word for option, value in addresses if value for word in (option, value)]


def children_arguments(args: argparse.Namespace) -> list[str]:
    """Return the options with which a child reads the same configuration and reaches the same bus."""
    settings = [word for setting in args.set for word in ("--set", setting)]
    return ["--config", *map(str, args.config), *settings, "--bus", args.bus]


def read_env_file(file: Path) -> tuple[dict[str, str], str]:
    """Return the secrets of a file, none without one, and a warning if others may read it. Raises SettingsError."""
    if not file.is_file():
        return {}, ""
    try:
        mode = file.stat().st_mode
        if file.stat().st_size > MAX_ENV_BYTES:
            raise SettingsError(f"{file}: want at most {MAX_ENV_BYTES} bytes of NAME=value, got {file.stat().st_size}")
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # a BOM is no part of the first name
    except OSError as error:
        raise SettingsError(f"{file}: want a file that can be read, got {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file}: want text in UTF-8, got other bytes; save it again") from None
    others = mode & (stat.S_IRWXG | stat.S_IRWXO)
    warning = f"{file}: want a file that its owner alone can read, got mode {stat.S_IMODE(mode):o}; chmod 600 {file}"
    return _secrets_in(file, lines), warning if others else ""


def _secrets_in(file: Path, lines: list[str]) -> dict[str, str]:
    secrets, passed_over = {}, 0
    for number, line in enumerate(map(str.strip, lines), 1):
        if number <= passed_over or not line or line.startswith("#"):
            continue
        match = _ENV_LINE.fullmatch(line)
        if match is not None and not (match["name"] in SECRETS or match["name"].startswith(SECRETS_PREFIX)):
            quoted = _ENV_QUOTED.match("\n".join([match["value"], *lines[number:]]))
            passed_over = number + (quoted[0].count("\n") if quoted else 0)
            continue
        value = _ENV_VALUE.fullmatch(match["value"]) if match is not None else None
        if match is None or value is None or "\0" in line:
            got = "another line" if match is None else f"a value of {match['name']} with a blank or a part of a quote"
            raise SettingsError(f"{file}:{number}: want NAME=value, or NAME='value' with blanks in it, got {got}")
        secrets[match["name"]] = value["quoted"] if value["quote"] else value["bare"]
    return secrets
