"""``tidemill config``: checks a configuration, or prints it, the memory it needs, its schema or the reference."""

import argparse
import json

from tidemill.launch.cli.arguments import add_config
from tidemill.launch.cli.inputs import check_loaded, loaded_config, print_checked, with_fetched


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
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
        from tidemill.launch.cli.memory import print_memory

        print_memory(loaded)
        return 0
    from tidemill.launch.checks.devices import PLACEMENT

    report = check_loaded(args, loaded)
    print(f"{' '.join(map(str, args.config))}: valid (--print-config prints it, tidemill check lists the checks)")
    for line in report.on(PLACEMENT):
        print(line)
    return 0
