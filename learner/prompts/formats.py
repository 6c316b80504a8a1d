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
from tidemill.bus.system.functions import FunctionRefused, described, errors_as, find_function
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.errors import PromptError

_END = object()
PREFIX = "python:"
MAX_ROWS = 50_000_000
"""Rows after which a function counts as endless."""


def is_function(path: Path) -> bool:
    """Return whether a path stands for a function."""
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
        got = f"{type(row).__name__} {row!r:.80}"
        yield row if isinstance(row, dict) else PromptError(f"{path}:{number + 1}", "a map", got)
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
"""Kinds of files."""
NUMBERED = re.compile(r"(?P<name>.*?)(?P<between>[-_.]?)\d+(?:[-_]of[-_](?P<count>\d+)(?:-[0-9a-f]{8,})?)?")
"""Name of a shard without its suffix: train-00000-of-00002, part_7; older files of the Hub have a hash behind it."""


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that match a pattern, sorted. Raises PromptError for none, and for files of two kinds."""
    files = [Path(file) for file in sorted(glob.glob(str(pattern)))]
    if not files:
        raise PromptError(str(pattern), "a file of prompts", "no file that matches")
    _refuse_two_kinds(str(pattern), files)
    return files


def _shards_in(directory: Path) -> list[Path]:
    """Return the files of a directory, in the order of their names. Files of other kinds are passed over.

    Raises PromptError for none, for files of two kinds or of several names (they may be a split for training and one
    for tests), and where one of ``-of-`` is missing.
    """
    entries = [entry for entry in sorted(directory.iterdir()) if not entry.name.startswith(".")]
    files = [entry for entry in entries if entry.suffix in SUFFIXES and entry.is_file()]
    if not files:
        folders = ", ".join(str(entry) for entry in entries if entry.is_dir())
        hint = f"; in it are {folders:.300}" if folders else ""
        raise PromptError(str(directory), KINDS, f"a directory without state.json and shards{hint}")
    _refuse_two_kinds(str(directory), files)
    counts: dict[str, int] = {}
    """Number of shards by their common name; 0 = not in the name."""
    for file in files:
        shard = NUMBERED.fullmatch(file.stem)
        name = file.name if shard is None else f"{shard['name']}{shard['between']}*{file.suffix}"
        counts.setdefault(name, int((shard and shard["count"]) or 0))
    if len(counts) > 1:
        names = ", ".join(str(directory / name) for name in counts)
        got = f"those of {len(counts)}; name one of them: {names:.600}"
        raise PromptError(str(directory), "shards of one name, such as train-00000-of-00002.parquet", got)
    [(name, count)] = counts.items()
    if count not in (0, len(files)):
        raise PromptError(str(directory), f"all {count} shards {name}", f"{len(files)} of them")
    return files


def _refuse_two_kinds(where: str, files: Sequence[Path]) -> None:
    odd_file = next((file for file in files if file.suffix not in SUFFIXES or not file.is_file()), None)
    if odd_file is not None or len({file.suffix for file in files}) > 1:
        raise PromptError(where, "either .jsonl or .parquet files", "both" if odd_file is None else str(odd_file))


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
        is_saved = (path / STATE).is_file() or (path / SPLITS).is_file()
        return _arrow_files(path) if is_saved else _shards_in(path)
    if not path.is_file() and glob.has_magic(str(path)):
        return _matching_files(path)
    if not path.is_file():
        raise PromptError(str(path), "a file of prompts", "no such file")
    if path.suffix not in SUFFIXES:
        want = KINDS if path.suffix == ".arrow" else "a .jsonl or .parquet file"
        raise PromptError(str(path), want, f"suffix {path.suffix!r}")
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
                while line and not line.endswith(b"\n"):
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
        splits = ", ".join(sorted(str(file.parent) for file in path.glob(f"*/{STATE}"))) or "none"
        raise PromptError(str(path), "the directory of one split", f"one of several splits; name one of them: {splits}")
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
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
    """Return the value under ``key``, or under its parts in nested maps (``reward_model.ground_truth``).

    A key that exists unsplit takes precedence on every level. Raises PromptError with the keys of the level at which
    the lookup fails.
    """
    level, remainder, path = values, key, ""
    while remainder not in level:
        head, _, remainder = remainder.partition(".")
        below = level.get(head)
        if not remainder or not isinstance(below, Mapping):
            got = f"keys {sorted(level)}" + (f" in {path!r}" if path else "")
            if head in level and remainder:
                got = f"{kind_of(below)} in {_joined(path, head)!r}"
            raise PromptError(where, f"key {key!r} ({setting})", got)
        level, path = below, _joined(path, head)
    return level[remainder]


def refuse_unsendable(value: object, *, where: str, key: str) -> None:
    """Raise PromptError for a value that a task cannot carry: not of JSON, not finite, or text that is not Unicode."""
    pending = [(key, value)]
    while pending:
        place, part = pending.pop()
        if isinstance(part, str):
            if not part.isascii() and any("\ud800" <= letter <= "\udfff" for letter in part):
                raise PromptError(where, f"Unicode text in {place!r}", f"half of a surrogate pair in {part[:80]!a}")
        elif isinstance(part, Mapping):
            if not all(isinstance(name, str) for name in part):
                got = repr(sorted(map(repr, part)))[:80]
                raise PromptError(where, f"a map with texts as keys in {place!r}", got)
            pending += [(place, name) for name in part]
            pending += [(_joined(place, name), below) for name, below in part.items()]
        elif isinstance(part, (list, tuple)):
            pending += [(place, below) for below in part]
        elif isinstance(part, bool) or part is None or isinstance(part, bytes):
            continue
        elif isinstance(part, int):
            if not -(2**63) <= part < 2**64:
                got = f"{len(str(part))} digits; write it as text"
                raise PromptError(where, f"whole numbers of 64 bits in {place!r}", got)
        elif not isinstance(part, (float, Decimal)):
            got = f"a {type(part).__name__}; save the column as text or a number"
            raise PromptError(where, f"values of JSON in {place!r}", got)
        elif not math.isfinite(part):
            raise PromptError(where, f"finite numbers in {place!r}", f"{part}; write null, or remove the row")


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
