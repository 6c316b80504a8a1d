"""Sources of prompts as maps, one a row: JSONL, Parquet and Arrow files, their shards, and functions. Distrusts them;
knows no column.

A function (``python:module:function`` in place of a file) takes nothing and returns an iterable of maps, the same ones
at every call: a run that is resumed reads them again.
"""

import glob
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from tidemill.bus.errors import WireError
from tidemill.bus.system.foreign import described, errors_as
from tidemill.bus.system.functions import FunctionRefused, find_function
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.errors import PromptError

_END = object()
PREFIX = "python:"
MAX_ROWS = 50_000_000
"""Rows after which a function counts as endless."""


def is_function(path: Path) -> bool:
    """Return whether ``path`` names a function."""
    return str(path).startswith(PREFIX)


def rows_of(path: Path) -> Iterator[JsonMapping | PromptError]:
    """Yield the maps of a function; for another row, the error. Raises PromptError for a function that fails."""
    rows = _called(path)
    for number in range(MAX_ROWS + 1):
        with errors_as(partial(_refused, f"{path}:{number + 1}", "a row, or the end")):
            row = next(rows, _END)
        if row is _END:
            return
        if number == MAX_ROWS:
            break
        yield (
            row
            if isinstance(row, dict)
            else PromptError(f"{path}:{number + 1}", "a map", f"{type(row).__name__} {row!r:.80}")
        )
    raise PromptError(str(path), f"at most {MAX_ROWS} rows", "more; a function must end")


def add_rows(digest: "hashlib._Hash", path: Path) -> None:
    """Add the content of all rows to a digest. Raises PromptError."""
    for row in rows_of(path):
        if isinstance(row, PromptError):
            digest.update(str(row).encode(errors="replace"))
            continue
        try:
            digest.update(json.dumps(row, sort_keys=True).encode())
        except (TypeError, ValueError, RecursionError) as error:  # and not by its repr, which may have an address in it
            raise PromptError(str(path), "rows of JSON values with texts as keys", f"{error} in {row!r:.80}") from error


def _called(path: Path) -> Iterator[Any]:
    want = (
        "python:module:function, which returns an iterable of maps; modules are searched in this directory and "
        "in PYTHONPATH"
    )
    try:
        function: Callable[[], Iterable[Any]] = find_function(str(path).removeprefix(PREFIX))
    except FunctionRefused as error:
        raise PromptError(str(path), want, error.reason) from error
    with errors_as(partial(_refused, str(path), want)):
        return iter(function())


def _refused(where: str, want: str, error: BaseException) -> PromptError:
    return PromptError(where, want, described(error))


SUFFIXES = (".jsonl", ".parquet")
_NUMBERED = re.compile(r"(?P<name>.*?)(?P<between>[-_.]?)\d+(?:[-_]of[-_](?P<count>\d+)(?:-[0-9a-f]{8,})?)?")
"""The name of a shard without its suffix: train-00000-of-00002, part_7, train-00000-of-00002-1b2c3d4e5f607182 (older
files of the Hub).
"""


def is_pattern(path: Path) -> bool:
    """Return whether a path stands for the files that match it: ``train-*.parquet``."""
    return glob.has_magic(str(path))


def matching(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, sorted. Raises PromptError for none, and for files of two kinds."""
    found = [Path(one) for one in sorted(glob.glob(str(pattern)))]
    if not found:
        raise PromptError(str(pattern), "a file of prompts", "no file that matches")
    return _of_one_kind(str(pattern), found)


def shards_in(directory: Path, *, kinds: str) -> list[Path]:
    """Return the files of a directory, in the order of their names. Files of other kinds are passed over.

    ``kinds``: the paths that can be read, in words. Raises PromptError for none, for files of two kinds, for those of
    several names (they may be a split for training and one for tests), and where one of ``-of-`` is missing.
    """
    there = sorted(directory.iterdir())
    found = [one for one in there if one.suffix in SUFFIXES and not one.name.startswith(".") and one.is_file()]
    if not found:
        below = ", ".join(str(one) for one in there if one.is_dir() and not one.name.startswith("."))
        raise PromptError(
            str(directory),
            kinds,
            "a directory without state.json and shards" + (f"; in it are {below:.300}" if below else ""),
        )
    _of_one_kind(str(directory), found)
    groups: dict[str, int] = {}
    for one in found:
        shard = _NUMBERED.fullmatch(one.stem)
        groups.setdefault(
            one.name if shard is None else f"{shard['name']}{shard['between']}*{one.suffix}",
            int((shard and shard["count"]) or 0),
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


LINE_BYTES = 64 << 20
"""Longest line of a JSONL file."""
COUNTED_BYTES = 256_000_000
"""Bytes of JSONL files up to which their rows are counted."""
KINDS = (
    "a .jsonl or .parquet file, a directory of such shards or a pattern for their names, a directory saved "
    "by datasets (save_to_disk), "
    "or python:module:function"
)

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of a directory that ``Dataset.save_to_disk`` wrote, and of one by ``DatasetDict.save_to_disk``."""


def where_of(path: Path, number: int) -> str:
    """Return the place of row ``number``, from 0, as in messages: its line, from 1."""
    return f"{path}:{number + 1}"


def data_files(path: Path) -> list[Path]:
    """Return the files with the rows of ``path``, in their order; a function is returned as it is.

    Raises PromptError for a path that cannot be read as prompts.
    """
    if is_function(path):
        return [path]
    if path.is_dir():
        return (
            _arrow_files(path)
            if (path / STATE).is_file() or (path / SPLITS).is_file()
            else shards_in(path, kinds=KINDS)
        )
    if not path.is_file() and is_pattern(path):
        return matching(path)
    if not path.is_file():
        raise PromptError(str(path), "a file of prompts", "no such file")
    if path.suffix not in SUFFIXES:
        raise PromptError(
            str(path), KINDS if path.suffix == ".arrow" else "a .jsonl or .parquet file", f"suffix {path.suffix!r}"
        )
    return [path]


def read_values(path: Path) -> Iterator[tuple[str, JsonMapping | PromptError]]:
    """Yield the place of each row, as in messages, and its values, in the order of the files; for a line that is no
    JSON map, the error.

    The place names the shard of a source that has several. Raises PromptError when the rest of a file cannot be read.
    """
    files = data_files(path)
    if is_function(path) or files[0].suffix == ".arrow":
        rows = rows_of(path) if is_function(path) else _read_arrow(files)
        yield from ((where_of(path, number), values) for number, values in enumerate(rows))
        return
    for file in files:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        else:
            yield from ((where_of(file, number), values) for number, values in enumerate(_read_parquet(file)))


def _read_jsonl(path: Path) -> Iterator[tuple[str, JsonMapping | PromptError]]:
    """Yield the place and the values of each line that is not blank."""
    with path.open("rb") as file:
        for number in count():
            line, where = file.readline(LINE_BYTES + 1), where_of(path, number)
            if not line:
                return
            if len(line) > LINE_BYTES:
                while line and not line.endswith(b"\n"):  # its rest
                    line = file.readline(LINE_BYTES)
                yield where, PromptError(where, f"a line of at most {LINE_BYTES} bytes", "a longer one")
            elif line.strip():
                yield where, _of_line(where, line)


def _of_line(where: str, line: bytes) -> JsonMapping | PromptError:
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return PromptError(where, "a JSON map", f"{error.doc.strip()[:80]!r} ({error.msg})")
    except UnicodeDecodeError as error:
        return PromptError(where, "a JSON map in UTF-8", f"{line.strip()[:80]!r} ({error})")
    except (ValueError, RecursionError) as error:
        return PromptError(where, "a JSON map", f"{line.strip()[:80]!r} ({error})")
    return values if isinstance(values, dict) else PromptError(where, "a JSON map", kind_of(values))


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON; write null or a number")


def _read_parquet(path: Path) -> Iterator[JsonMapping]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise PromptError(str(path), "a parquet file", str(error)) from error


def _arrow_files(path: Path) -> list[Path]:
    """Return the files of a directory of ``Dataset.save_to_disk``: ``state.json`` lists them (datasets 2 to 5)."""
    state = path / STATE
    if (path / SPLITS).is_file():
        found = ", ".join(sorted(str(one.parent) for one in path.glob(f"*/{STATE}"))) or "none"
        raise PromptError(str(path), "the directory of one split", f"one of several splits; name one of them: {found}")
    try:
        said = json.loads(state.read_bytes())
        names = [one["filename"] for one in said["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PromptError(str(state), "a map with _data_files", f"{type(error).__name__}: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise PromptError(str(state), "names of files beside it in _data_files", repr(name)[:80])
    return [path / name for name in names]


def _read_arrow(files: Iterable[Path]) -> Iterator[JsonMapping]:
    import pyarrow

    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, 1024):
                        yield from batch.slice(start, 1024).to_pylist()
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise PromptError(str(file), "an Arrow file of datasets", str(error)) from error


def count_rows(path: Path) -> int | None:
    """Return the number of rows; None where counting takes long: for functions and large JSONL files."""
    files = data_files(path)
    if is_function(path) or (
        files[0].suffix == ".jsonl" and sum(file.stat().st_size for file in files) > COUNTED_BYTES
    ):
        return None
    return sum(map(_count, files))


def _count(file: Path) -> int:
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    import pyarrow
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
            return sum(batch.num_rows for batch in stream)
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(str(file), "a file of rows", str(error)) from error


def value_at(values: Mapping[str, object], key: str, *, where: str, setting: str) -> Any:
    """Return the value under ``key``, or that under its parts in nested maps (``reward_model.ground_truth``).

    A key that exists unsplit takes precedence on every level. Raises PromptError with the keys of the level at which
    the lookup fails.
    """
    level, rest, path = values, key, ""
    while rest not in level:
        head, _, rest = rest.partition(".")
        below = level.get(head)
        if not rest or not isinstance(below, Mapping):
            inside = f" in {path!r}" if path else ""
            got = (
                f"keys {sorted(level)}{inside}"
                if head not in level or not rest
                else f"{kind_of(below)} in {_joined(path, head)!r}"
            )
            raise PromptError(where, f"key {key!r} ({setting})", got)
        level, path = below, _joined(path, head)
    return level[rest]


def refuse_unsendable(value: object, *, where: str, key: str) -> None:
    """Raise PromptError for a value that a task cannot carry: not of JSON, not finite, or text that is not Unicode."""
    pending = [(key, value)]
    while pending:
        place, one = pending.pop()
        if isinstance(one, str):
            if not one.isascii() and any("\ud800" <= letter <= "\udfff" for letter in one):
                raise PromptError(where, f"Unicode text in {place!r}", f"half of a surrogate pair in {one[:80]!a}")
        elif isinstance(one, Mapping):
            if not all(isinstance(name, str) for name in one):
                raise PromptError(where, f"a map with texts as keys in {place!r}", repr(sorted(map(repr, one)))[:80])
            pending += [(place, name) for name in one] + [(_joined(place, name), below) for name, below in one.items()]
        elif isinstance(one, (list, tuple)):
            pending += [(place, below) for below in one]
        elif isinstance(one, bool) or one is None or isinstance(one, bytes):
            continue
        elif isinstance(one, int):
            if not -(2**63) <= one < 2**64:
                raise PromptError(
                    where, f"whole numbers of 64 bits in {place!r}", f"{len(str(one))} digits; write it as text"
                )
        elif not isinstance(one, (float, Decimal)):
            raise PromptError(
                where, f"values of JSON in {place!r}", f"a {type(one).__name__}; save the column as text or a number"
            )
        elif not math.isfinite(one):
            raise PromptError(where, f"finite numbers in {place!r}", f"{one}; write null, or remove the row")


def messages_in(value: object, *, where: str, key: str) -> list[JsonObject]:
    """Return the chat messages under ``key`` in the form that templates read. Raises PromptError."""
    try:
        return chat_messages(value, key)
    except WireError as error:
        raise PromptError(where, f"{error.want} in {error.field!r}", error.got) from None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def kind_of(value: object) -> str:
    """Return the name of a value's type in JSON and YAML."""
    names = {dict: "a map", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
