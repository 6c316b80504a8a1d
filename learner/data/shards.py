"""Shards: a directory, or a pattern of file names, of which the files are one source in the order of their names. Reads no row."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from tidemill.learner.errors import PromptError

SUFFIXES = (".jsonl", ".parquet")
_NUMBERED = re.compile(r"(?P<name>.*?)(?P<between>[-_.]?)\d+(?:[-_]of[-_](?P<count>\d+)(?:-[0-9a-f]{8,})?)?")
"""The name of a shard without its suffix: train-00000-of-00002, part_7, train-00000-of-00002-1b2c3d4e5f607182 (older files of the Hub)."""


def is_pattern(path: Path) -> bool:
    """Return whether a path stands for the files that match it: ``train-*.parquet``."""
    return glob.has_magic(str(path))


def matching(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, in the order of their names. Raises PromptError for none, and for files of two kinds."""
    found = [Path(one) for one in sorted(glob.glob(str(pattern)))]
    if not found:
        raise PromptError(str(pattern), "a file of prompts", "no file that matches")
    return _of_one_kind(str(pattern), found)


def shards_in(directory: Path, *, kinds: str) -> list[Path]:
    """Return the files of a directory, in the order of their names. Files of other kinds are passed over.

    ``kinds``: the paths that can be read, in words. Raises PromptError for none, for files of two kinds, for those of several names (they
    may be a split for training and one for tests), and where one of ``-of-`` is missing.
    """
    there = sorted(directory.iterdir())
    found = [one for one in there if one.suffix in SUFFIXES and not one.name.startswith(".") and one.is_file()]
    if not found:
        below = ", ".join(str(one) for one in there if one.is_dir() and not one.name.startswith("."))
        raise PromptError(
            str(directory), kinds, "a directory without state.json and shards" + (f"; in it are {below:.300}" if below else "")
        )
    _of_one_kind(str(directory), found)
    groups: dict[str, int] = {}
    for one in found:
        shard = _NUMBERED.fullmatch(one.stem)
        groups.setdefault(
            one.name if shard is None else f"{shard['name']}{shard['between']}*{one.suffix}", int((shard and shard["count"]) or 0)
        )
    if len(groups) > 1:
        got = f"those of {len(groups)}; name one of them: {', '.join(str(directory / one) for one in groups):.600}"
        raise PromptError(str(directory), "shards of one name, such as train-00000-of-00002.parquet", got)
    [(name, count)] = groups.items()
    if count not in (0, len(found)):
        raise PromptError(str(directory), f"all {count} shards {name}", f"{len(found)} of them")
    return found


def _of_one_kind(where: str, found: Sequence[Path]) -> list[Path]:
    kinds = {one.suffix for one in found}
    if kinds - {*SUFFIXES} or len(kinds) > 1 or not all(one.is_file() for one in found):
        odd = next((one for one in found if one.suffix not in SUFFIXES or not one.is_file()), None)
        raise PromptError(where, "either .jsonl or .parquet files", "both" if odd is None else str(odd))
    return list(found)
