"""Prompt files as maps, one a row: JSONL, Parquet, Arrow files and functions. Distrusts them; knows no column and no order."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.learner.data.row_functions import is_function, rows_of
from tidemill.learner.data.shards import SUFFIXES, is_pattern, matching, shards_in
from tidemill.learner.errors import PromptError

LINE_BYTES = 64 << 20
"""Longest line of a JSONL file."""
COUNTED_BYTES = 256_000_000
"""Bytes of JSONL files up to which their rows are counted."""
KINDS = (
    "a .jsonl or .parquet file, a directory of such shards or a pattern for their names, a directory saved by datasets (save_to_disk), "
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
        return _arrow_files(path) if (path / STATE).is_file() or (path / SPLITS).is_file() else shards_in(path, kinds=KINDS)
    if not path.is_file() and is_pattern(path):
        return matching(path)
    if not path.is_file():
        raise PromptError(str(path), "a file of prompts", "no such file")
    if path.suffix not in SUFFIXES:
        raise PromptError(str(path), KINDS if path.suffix == ".arrow" else "a .jsonl or .parquet file", f"suffix {path.suffix!r}")
    return [path]


def read_values(path: Path) -> Iterator[tuple[str, JsonMapping | PromptError]]:
    """Yield the place of each row, as in messages, and its values, in the order of the files; for a line that is no JSON map, the error.

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
    """Return the number of rows without their values; None where that takes long: for functions and large JSONL files."""
    files = data_files(path)
    if is_function(path) or (files[0].suffix == ".jsonl" and sum(file.stat().st_size for file in files) > COUNTED_BYTES):
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

    A key that exists unsplit takes precedence on every level. Raises PromptError with the keys of the level at which the lookup fails.
    """
    level, rest, path = values, key, ""
    while rest not in level:
        head, _, rest = rest.partition(".")
        below = level.get(head)
        if not rest or not isinstance(below, Mapping):
            inside = f" in {path!r}" if path else ""
            got = f"keys {sorted(level)}{inside}" if head not in level or not rest else f"{kind_of(below)} in {_joined(path, head)!r}"
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
                raise PromptError(where, f"whole numbers of 64 bits in {place!r}", f"{len(str(one))} digits; write it as text")
        elif not isinstance(one, (float, Decimal)):
            raise PromptError(where, f"values of JSON in {place!r}", f"a {type(one).__name__}; save the column as text or a number")
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
