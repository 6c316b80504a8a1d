"""Arguments that several commands have, and the parser that refuses unknown options with the usage of their command."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from tidemill.bus.client.addresses import parse
from tidemill.bus.exit_codes import CRASHED, DONE, FINAL, NOT_IN_TIME
from tidemill.launch.settings.run_paths import config_file

STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
_CONFIG = "YAML file, or a shipped one by name, such as digits; later ones win"
_RANGE = "'<0.5', '>=1', 1, or 0.2..0.8"


class CommandParser(argparse.ArgumentParser):
    """Parses a command, and refuses an unknown option with the usage of that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values and no other words. Exits with status 2 where there are some."""
        parsed, unknown_words = super().parse_known_args(args, namespace)
        if unknown_words:
            names = [word for word in unknown_words if word.startswith("-")]
            name = names[0].partition("=")[0] if names else ""
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            nearest = f" (nearest: {near[0]})" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown_words)}{nearest}")
        return parsed, unknown_words


class PrintVersion(argparse.Action):
    """Prints the installed version."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object, **options: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tidemill {version('tidemill')}")
        except PackageNotFoundError:
            parser.exit(1, "tidemill is not installed as a package: its version is in pyproject.toml\n")
        parser.exit()


def command_of(parser: argparse.ArgumentParser) -> str:
    """Return the command that a parser is for, where several have one module."""
    return parser.prog.rpartition(" ")[2]


def bus_url(text: str) -> str:
    """Return the argument ``--bus`` as it was given. Raises ArgumentTypeError for what is no address of a bus."""
    try:
        if text:
            parse(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None
    return text


def refuse_no_model(where: str, directory: Path) -> None:
    """Raise ValueError for a directory without a Hugging Face model. ``where``: the argument that names it."""
    if not (directory / "config.json").is_file():
        want = "a directory with a Hugging Face model (config.json in it)"
        raise ValueError(f"{where}: want {want}, got {str(directory)!r}")


def add_config(parser: argparse.ArgumentParser, *, positional: bool = False, required: bool = True) -> None:
    """Add the configuration, the settings that change it, and --print-config."""
    if positional:
        nargs = "+" if required else "*"
        parser.add_argument("config", type=config_file, nargs=nargs, metavar="CONFIG", help=_CONFIG)
    else:
        text = "the run's YAML files"
        parser.add_argument("--config", type=config_file, nargs="+", required=required, default=[], help=text)
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="change a setting")
    parser.add_argument("--print-config", action="store_true", help="print every setting and its origin, and end")


def add_from_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add --from-checkpoint, a setting under another name."""
    parser.add_argument(
        "--from-checkpoint",
        action="append",
        dest="set",
        type=lambda directory: f"learner.from_checkpoint={Path(directory).resolve()}",
        metavar="DIR",
        help="begin a new run with the weights of this checkpoint: learner.from_checkpoint",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the run to read."""
    parser.set_defaults(ended=False)  # set when the run is found
    parser.add_argument("--run-dir", default="", help="a run's directory on this machine; or --bus and --run")
    parser.add_argument("--bus", default="", type=bus_url, metavar="URL", help="NATS URL, nats://host:port")
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")


def add_bus(parser: argparse.ArgumentParser) -> None:
    """Add --bus, without which the process has nothing to do."""
    parser.add_argument("--bus", required=True, type=bus_url, metavar="URL", help="NATS URL, nats://host:port")


def add_drained_code(parser: argparse.ArgumentParser) -> None:
    """Add --drained-code, so that schedulers can tell a drained process from one whose run is done."""
    text = "exit code when a signal has drained it before the end of the run (default 0)"
    parser.add_argument("--drained-code", type=_drained_code, default=DONE, metavar="N", help=text)


def _drained_code(text: str) -> int:
    """Return a code of a drained process. Raises ArgumentTypeError for one with another meaning."""
    reserved_codes = {CRASHED, NOT_IN_TIME, *FINAL}
    if not (text.isascii() and text.isdigit() and int(text) < 126 and int(text) not in reserved_codes):
        want = f"0 to 125, and none of {', '.join(map(str, sorted(reserved_codes)))}"
        raise argparse.ArgumentTypeError(f"want {want}, got {text[:40]!r}")
    return int(text)


def add_until_end(parser: argparse.ArgumentParser) -> None:
    """Add --until-end and --resume-wait, for processes that serve a run."""
    parser.add_argument("--until-end", action="store_true", help="drain, and end with 0, when the run has ended")
    text = "seconds without a learner after which an end that was there before this process counts (default 60)"
    parser.add_argument("--resume-wait", type=float, default=60.0, metavar="S", help=text)


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Add --allow, for settings that come from the bus."""
    text = "accept a setting with code, a program or a file here from the run; * for any value; repeatable"
    parser.add_argument("--allow", action="append", default=[], metavar="SETTING=VALUE", help=text)


def add_listening(parser: argparse.ArgumentParser) -> None:
    """Add the addresses at which a process listens, and is reached by others."""
    parser.add_argument("--host", default="", help="address to listen on; default: of the route to the bus")
    parser.add_argument("--advertise", default="", metavar="HOST[:PORT]", help="address for others, if not --host")


def probes_address(text: str) -> tuple[str, int]:
    """Return host and port of the argument ``--probes``. Raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536) or (":" in host and host[:1] != "["):
        raise argparse.ArgumentTypeError(f"want [HOST:]PORT with a port from 0 (any free one) to 65535, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def add_probes(parser: argparse.ArgumentParser) -> None:
    """Add --probes, for whatever supervises the process."""
    text = "answer GET /healthz, /readyz and /metrics here; a port alone is one of 127.0.0.1"
    parser.add_argument("--probes", type=probes_address, metavar="[HOST:]PORT", help=text)


def add_since(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the first sample."""
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--since", default="", metavar="WHEN", help="a time ago (10m, 2h), ISO time, or sequence (#123)")
    begin.add_argument("--since-version", type=int, metavar="V", help="the first sample without tokens older than V")
    parser.add_argument("--search", type=int, default=100_000, metavar="N", help="for --last: search the N newest")


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select samples."""
    which = parser.add_argument_group("which samples")
    which.add_argument("--reward", default="", metavar="RANGE", help=_RANGE)
    which.add_argument("--lag", default="", metavar="RANGE", help="steps from its oldest version to the newest")
    which.add_argument("--tokens", default="", metavar="RANGE", help="length of the response")
    which.add_argument("--status", action="append", default=[], choices=STATUSES, help="may be repeated")
    which.add_argument("--kind", choices=("train", "eval"))
    which.add_argument("--task", default="", metavar="TASK[.INDEX]")
    which.add_argument("--actor")
    which.add_argument("--engine", help="as the sample names it")
    which.add_argument("--text", default="", metavar="REGEX", help="in the prompt or the response")
