"""``tidemill config``, ``check`` and ``prepare``: a configuration checked, printed with the memory it needs, its schema
or the reference; the findings of all checks before a start; the files that its section ``prepare`` asks for.
"""

import argparse
import json
import os
from itertools import groupby

from tidemill.bus import exit_codes
from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import (
    check_loaded,
    loaded_config,
    print_checked,
    unprinted_config,
    with_fetched,
)
from tidemill.launch.settings.config_loader import Loaded
from tidemill.launch.settings.extras import require

NOT_COUNTED = (
    "Not counted: what libraries take for themselves on a GPU (CUDA context, NCCL, cuBLAS: 1 to 3 GB together), "
    "padding of rows with sequences of different lengths, and memory that the allocator cannot use again (on the CPU "
    "about a tenth). Copies for checkpoints are there from the copy until they are written."
)
OF_ANY_FAMILY = (
    "Nor counted for this family: activations and logits. Matrices that it keeps whole on every tensor-parallel "
    "rank count as split."
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tidemill config``."""
    add_config(parser, positional=True, required=False)
    parser.add_argument("--memory", action="store_true", help="print the memory that each process needs, and end")
    parser.add_argument("--schema", action="store_true", help="print a JSON Schema of configuration files, and end")
    parser.add_argument("--reference", action="store_true", help="print docs/configuration.md, and end")


def run(args: argparse.Namespace) -> int:
    """Check a configuration and show its devices, or print it, its memory, its schema or the reference. Returns 0."""
    if args.schema or args.reference:
        from tidemill.launch.settings import reference

        print(json.dumps(reference.schema(), indent=2) if args.schema else reference.page())
        return 0
    if not args.config:
        raise ValueError("want CONFIG, a YAML file; or --schema, or --reference")
    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    loaded, _ = with_fetched(args, loaded)
    if args.memory:
        print_memory(loaded)
        return 0
    from tidemill.launch.checks.devices import PLACEMENT

    report = check_loaded(args, loaded)
    print(f"{' '.join(map(str, args.config))}: valid (--print-config prints it, tidemill check lists the checks)")
    for line in report.on(PLACEMENT):
        print(line)
    return 0


def add_check(parser: argparse.ArgumentParser) -> None:
    add_config(parser, positional=True)
    parser.add_argument("--check-reward", action="store_true", help="also call a reward by import path, once")


def run_check(args: argparse.Namespace) -> int:
    """Print the findings of all checks. Returns 0, or 78 when there are errors. Raises SettingsError."""
    from tidemill.launch.checks import run as checks
    from tidemill.launch.checks.findings import OK, Finding

    loaded = loaded_config(args)
    if args.print_config:
        return print_checked(args, loaded)
    loaded, repositories = with_fetched(args, loaded)
    for repository in repositories:
        print(Finding(level=OK, topic="hub", text=str(repository)))
    report = checks.check(loaded, checks.Purpose(uses_bus=True, call_reward=args.check_reward))
    for finding in report.findings:
        print(finding)
    return exit_codes.CONFIG if report.errors else 0


def add_prepare(parser: argparse.ArgumentParser) -> None:
    add_config(parser, positional=True)


def run_prepare(args: argparse.Namespace) -> int:
    """Make the files of ``prepare``. Returns 0. Raises SettingsError, PackagesMissing, PreparedOtherwise."""
    config = unprinted_config(args)
    if config is None:
        return 0
    require("learner")
    from tidemill.launch.run import process, workers

    process.set_up_logging("prepare")
    workers.run_prepare(config)
    return 0


# ---- the table of memory


def print_memory(loaded: Loaded) -> None:
    """Print the memory that each process of a run needs, and a sum for each. Raises CheckFailed, DeviceError."""
    from rich.console import Console

    from tidemill.actors.serving.builtin.blocks import host_memory
    from tidemill.launch.checks.findings import CheckFailed, Report
    from tidemill.launch.checks.model import check_model, rank_rows
    from tidemill.launch.checks.run import check_prepare
    from tidemill.launch.devices.visible import this_node
    from tidemill.launch.samples.text import plain_table

    config, report = loaded.config, Report(loaded.origins)
    model = check_model(report, config, prepared=check_prepare(report, config, fresh=False).model)
    report.refuse()
    assert model is not None, "without a model there is an error"
    if model.shape is None and not model.tensors:
        raise CheckFailed([f"{model.directory}: no table: the tensors of the model are not known"])
    devices = this_node(os.environ).devices
    cuda = config.learner.device == "cuda" or (config.learner.device == "auto" and bool(devices))
    engine_memory = min((device.memory_bytes for device in devices), default=0) if cuda else host_memory()
    sizes = ("device", "host") if cuda else ("memory",)
    shown = plain_table("process", "part", *sizes, right=sizes)
    rows = rank_rows(model, config, cuda=cuda, engine_memory=engine_memory)
    for process, rows_of_process in groupby(rows, lambda row: row.process):
        parts = list(rows_of_process)
        for row in parts:
            shown.add_row(process, row.part, *([""] if row.on_host and cuda else []), _size(row.bytes))
        if len(parts) > 1:
            sums = [sum(row.bytes for row in parts if row.on_host is on_host) for on_host in (False, True)]
            shown.add_row(process, "sum", *(map(_size, sums) if cuda else [_size(sum(sums))]), style="bold")
    console = Console(highlight=False)
    console.print(shown)
    for note in (NOT_COUNTED, *([OF_ANY_FAMILY] if model.shape is None else [])):
        console.print(note, style="dim")


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
