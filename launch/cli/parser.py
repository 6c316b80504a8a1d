"""The parser of commands: unknown options are refused with the usage of their command. Loads nothing heavy."""

import argparse
import difflib
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Parses a command, and refuses an unknown option with the usage of that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values and no other words. Exits with status 2 where there are some."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            names = [word for word in rest if word.startswith("-")]
            nearest = difflib.get_close_matches(names[0].partition("=")[0], self._option_string_actions, n=1) if names else []
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f" (nearest: {nearest[0]})" if nearest else ""))
        return found, rest


class PrintVersion(argparse.Action):
    """Prints the installed version."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object, **more: object) -> None:
        """Print, and end with status 0."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tidemill {version('tidemill')}")
        except PackageNotFoundError:
            parser.exit(1, "tidemill is not installed as a package: its version is in pyproject.toml\n")
        parser.exit()
