"""The arguments of ``tail``, ``show``, ``stats``, ``replay`` and ``archive``. Loads nothing heavy."""

import argparse

from tidemill.bus.client.addresses import parse

STATUSES = ("completed", "truncated", "aborted", "failed", "pending")
_RANGE = "'<0.5', '>=1', 1, or 0.2..0.8"


def bus_url(text: str) -> str:
    """Return the argument ``--bus`` as it was given. Raises ArgumentTypeError for what is no address of a bus."""
    try:
        if text:
            parse(text)
    except ValueError as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None
    return text


def add_tail(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tail``."""
    _place(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow new samples")
    parser.add_argument("--last", type=int, metavar="N", help="start with the N newest that match (default 10; all, with --since)")
    parser.add_argument("--full", action="store_true", help="do not shorten long texts")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--jsonl", "--json", dest="json", action="store_true", help="one JSON object per line")
    how.add_argument("--raw", action="store_true", help="the stored payloads: each a length (4 bytes, little-endian) and its msgpack map")
    _since(parser)
    _filter(parser)


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    parser.add_argument("sample", metavar="SAMPLE", help="a sequence (#123 or 123) or TASK.INDEX (57.3)")
    _place(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--table", action="store_true", help="add a row for each token")
    parser.add_argument("--tokenizer", default="", metavar="DIRECTORY", help="where tokenizer.json is, if not in the run's model directory")


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``archive``."""
    _place(parser)
    parser.add_argument("-o", "--out", required=True, metavar="DIRECTORY", help="directory of the recordings; existing ones are continued")
    parser.add_argument("--name", default="archive", help="name under which it is registered (default: archive)")
    policy = "wait: trimming waits for it, until the stream is 85 %% full; leave: it does not"
    parser.add_argument("--policy", choices=("wait", "leave"), default="wait", help=policy)
    parser.add_argument("--rotate", type=float, default=256.0, metavar="MB", help="size at which a recording is closed (default 256)")
    parser.add_argument("--until-end", action="store_true", help="end at the present end of the stream")


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stats``."""
    _place(parser)
    parser.add_argument("--window", default="5m", metavar="TIME|N", help="a time (5m) or a number of samples (default 5m)")
    parser.add_argument("--pass-reward", type=float, default=1.0, metavar="R", help="for pass@k: right means reward >= R (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("-f", "--follow", action="store_true", help="repeat every two seconds")
    _filter(parser)


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    _place(parser)
    parser.add_argument("--from", dest="source", default="", metavar="FILE", help="samples of a recording instead of a run's")
    parser.add_argument("-o", "--out", default="", metavar="FILE", help="into a recording, or JSON lines where it ends in .jsonl")
    parser.add_argument("--to-bus", default="", metavar="URL", help="into the stream of a run on this bus")
    parser.add_argument(
        "--train", default="", metavar="DIRECTORY", help="into a learner: train the recorded steps of --run-dir again, in this directory"
    )
    parser.add_argument("--set", action="append", default=[], metavar="path.to.key=value", help="with --train: change a setting")
    parser.add_argument("--to-run", default="", metavar="RUN", help="into the stream of this run (default: the run they come from)")
    parser.add_argument("--last", type=int, metavar="N", help="the N newest that match (default: all)")
    _since(parser)
    _filter(parser)


def _place(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(ended=False)  # known when the run is found
    parser.add_argument("--run-dir", default="", help="a run's directory on this machine; or --bus and --run")
    parser.add_argument("--bus", default="", type=bus_url, metavar="URL", help="NATS URL, nats://host:port")
    parser.add_argument("--run", default="", help="name of the run; not needed when the bus carries one run")


def _since(parser: argparse.ArgumentParser) -> None:
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--since", default="", metavar="WHEN", help="a time ago (10m, 2h), an ISO time, or a sequence (#123)")
    begin.add_argument(
        "--since-version", type=int, metavar="V", help="from the first sample without a token older than version V of the weights"
    )
    parser.add_argument("--search", type=int, default=100_000, metavar="N", help="for --last: look through the N newest (default 100000)")


def _filter(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which samples")
    which.add_argument("--reward", default="", metavar="RANGE", help=_RANGE)
    which.add_argument("--lag", default="", metavar="RANGE", help="steps between its oldest version and the newest one when it came")
    which.add_argument("--tokens", default="", metavar="RANGE", help="length of the response")
    which.add_argument("--status", action="append", default=[], choices=STATUSES, help="may be repeated")
    which.add_argument("--kind", choices=("train", "eval"))
    which.add_argument("--task", default="", metavar="TASK[.INDEX]")
    which.add_argument("--actor")
    which.add_argument("--engine", help="as the sample names it")
    which.add_argument("--text", default="", metavar="REGEX", help="in the prompt or the response")
