"""Samples in a file (``docs/wire.md``): frames, and an index of subjects and headers behind them.

    frame       4 bytes length, little-endian | msgpack map
    recording   the first frame: run, creation time of the stream
    stored      one for each sample: seq, subject, headers, stored_s, payload (bytes of the stream, joined from parts)
    index       the last frame: seqs, offsets (of the frames), subjects, headers
    end         8 bytes offset of the index, little-endian | b"TIDEMILL"

A recording that was cut off has no index; its whole frames can be read.
"""

import contextlib
import io
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import msgpack
import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.codec import check_sample, decode_sample
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.message_format import unpack
from tidemill.bus.wire.messages import SCHEMA, Kind, Sample, Status
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.formats import read_values
from tidemill.learner.prompts.responses import KNOWN, listed, responses_in
from tidemill.learner.prompts.rows import row_of

END = b"TIDEMILL"
_LENGTH, _OFFSET = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Run and stream from which the samples of a recording come."""

    run: str
    created: str  # Creation time of the stream that the sequences belong to


class RecordingWriter:
    """Writes a recording. ``close`` writes the index."""

    def __init__(self, file: IO[bytes], origin: Origin) -> None:
        self._file = file
        self._seqs: list[int] = []
        self._offsets: list[int] = []
        self._subjects: list[str] = []
        self._headers: list[dict[str, str]] = []
        self._offset = 0
        self._frame("recording", run=origin.run, created=origin.created)

    @classmethod
    def behind(cls, file: IO[bytes], origin: Origin) -> "RecordingWriter":
        """Return a recorder for a file that has frames already; the caller registers each with ``has``."""
        recorder = cls(io.BytesIO(), origin)  # a buffer for the first frame, which the file has already
        recorder._file = file
        return recorder

    def has(self, stored: StoredSample, offset: int) -> None:
        """Register a sample in the file: its frame begins at ``offset`` and ends at the file's current position."""
        self._note(stored, offset)
        self._offset = self._file.tell()

    def _note(self, stored: StoredSample, offset: int) -> None:
        self._seqs.append(stored.seq)
        self._offsets.append(offset)
        self._subjects.append(stored.subject)
        self._headers.append(stored.headers)

    @property
    def size_bytes(self) -> int:
        """Bytes written so far, without the index."""
        return self._offset

    def add(self, stored: StoredSample) -> None:
        """Write a sample. Raises WireError if parts of it are gone."""
        if isinstance(stored.data, WireError):
            raise stored.data
        self._note(stored, self._offset)
        fields = {name: getattr(stored, name) for name in ("seq", "subject", "headers", "stored_s")}
        self._frame("stored", **fields, payload=stored.data)

    def close(self) -> None:
        """Write the index and flush; the file stays open."""
        at = self._offset
        seqs, offsets = (np.array(column, "<i8").tobytes() for column in (self._seqs, self._offsets))
        self._frame("index", seqs=seqs, offsets=offsets, subjects=self._subjects, headers=self._headers)
        self._file.write(_OFFSET.pack(at) + END)
        self._file.flush()

    def _frame(self, kind: str, **fields: object) -> None:
        data = msgpack.packb({"schema": SCHEMA, "type": kind, **fields})
        self._file.write(_LENGTH.pack(len(data)) + data)
        self._offset += _LENGTH.size + len(data)


class Recording:
    """Reads a recording. Raises ValueError, at opening, for any other file."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self.cut = False  # True if it ended before its index; known after reading
        first = self._next("recording")
        self._start = file.tell()
        self.origin = Origin(run=first["run"], created=first["created"])

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a recording for reading. Raises ValueError for a file that cannot be opened, or is no recording."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise ValueError(f"--from: want a recording, got {path}: {error.strerror}") from None
        try:
            return cls(file, str(path))
        except ValueError:
            file.close()
            raise

    def index(self) -> list[tuple[int, int, str, dict[str, str]]]:
        """Return (sequence, offset, subject, headers) of every sample. Raises ValueError if it was cut off."""
        size = self._file.seek(0, 2)
        self._file.seek(max(0, size - _OFFSET.size - len(END)))
        end = self._file.read()
        if not end.endswith(END):
            raise ValueError(f"{self._name}: want an index at its end, found none: it was cut off")
        self._file.seek(_OFFSET.unpack(end[: _OFFSET.size])[0])
        fields = self._next("index")
        seqs, offsets = (np.frombuffer(fields[name], "<i8").tolist() for name in ("seqs", "offsets"))
        return list(zip(seqs, offsets, fields["subjects"], fields["headers"], strict=True))

    def at(self, offset: int) -> StoredSample:
        """Return the sample of the frame that begins at ``offset``."""
        self._file.seek(offset)
        return _stored(self._next("stored"))

    def __iter__(self) -> Iterator[StoredSample]:
        self._file.seek(self._start)
        while True:
            try:
                fields = self._next("stored", "index")
            except EOFError:
                self.cut = True
                return
            if fields["type"] == "index":
                return
            yield _stored(fields)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _next(self, *types: str) -> JsonObject:
        """Return the fields of the next frame. Raises EOFError within a frame, ValueError for other types."""
        head = self._file.read(_LENGTH.size)
        data = self._file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if types != ("recording",) and (len(head) < _LENGTH.size or len(data) < _LENGTH.unpack(head)[0]):
            raise EOFError(self._name)
        try:
            return unpack(data, *types)
        except WireError as error:
            raise ValueError(f"{self._name}: want a recording of samples: {error}") from None


def repair(path: Path) -> tuple[Origin | None, int]:
    """Write the missing index of a recording that was cut off; return its origin and its last sequence.

    A complete recording is not changed; one without samples is removed (then the sequence is 0).
    """
    with path.open("r+b") as file:
        try:
            recording = Recording(file, str(path))
            return recording.origin, recording.index()[-1][0]
        except (ValueError, IndexError):
            pass
        file.seek(0)
        try:
            recording = Recording(file, str(path))
        except ValueError:
            path.unlink()
            return None, 0
        end, seqs = file.tell(), []
        recorder = RecordingWriter.behind(file, recording.origin)
        with contextlib.suppress(ValueError):  # the rest may be anything after a loss of power
            for stored in recording:
                seqs.append(stored.seq)
                recorder.has(stored, end)
                end = file.tell()
        if not seqs:
            path.unlink()
            return recording.origin, 0
        file.seek(end)
        file.truncate()
        recorder.close()
        return recording.origin, seqs[-1]


def _stored(fields: JsonMapping) -> StoredSample:
    of_frame = {name: fields[name] for name in ("seq", "subject", "headers", "stored_s")}
    return StoredSample(**of_frame, data=fields["payload"])


SUFFIX = ".tide"
_RIGHT = (Status.COMPLETED, Status.TRUNCATED)
# Keys of a line besides the keys of its response.
_OF_ROW = ("prompt", "label", "metadata", "group", "response", "responses")


@dataclass(slots=True)
class ImportedRows:
    """The groups read so far, in the order of their first responses."""

    groups: dict[object, JsonObject] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # Samples that are in no row, by reason
    _seen: set[tuple[object, int]] = field(default_factory=set)

    def add_sample(self, file: str, sample: Sample) -> None:
        """Add a sample of a recording, or count the reason for which it is left out."""
        group = (file, sample.run, sample.task)
        if reason := _unfit(sample):
            self.left_out[reason] += 1
        elif (group, sample.index) in self._seen:
            self.left_out["duplicate"] += 1
        else:
            self._seen.add((group, sample.index))
            row = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata, "responses": []}
            row["sampling"] = {"temperature": sample.sampling.temperature}
            self.groups.setdefault(group, row)["responses"].append(_response(sample))

    def add_line(self, where: str, file: str, number: int, values: JsonObject) -> None:
        """Add a line from outside. Raises PromptError."""
        if unknown := sorted(set(values) - {*_OF_ROW, *KNOWN}):
            raise PromptError(where, f"only {', '.join((*_OF_ROW, *KNOWN))} in a line", unknown[0])
        new_row = row_of(where, number, {"label": None, "metadata": None, **values}, ("prompt", "label", ""))
        recorded = {name: values[name] for name in KNOWN if name in values}
        if sum(map(bool, (recorded and "response" not in values, "response" in values, "responses" in values))) != 1:
            want = "one of response, responses, and text, messages or tokens in a line"
            raise PromptError(where, want, ", ".join(sorted(values)))
        if "response" in values:
            recorded = {"text": values["response"], **recorded}
        responses = listed(values.get("responses", [recorded]))
        responses_in({"responses": responses}, "responses", where=where)
        group = values.get("group")
        key = (file, number if group is None else json.dumps(group, sort_keys=True, default=str))
        metadata = values.get("metadata") or {}
        new = {"prompt": new_row.prompt, "label": new_row.label, "metadata": metadata, "responses": []}
        row = self.groups.setdefault(key, new)
        if row["prompt"] != new_row.prompt:
            raise PromptError(where, f"the prompt of its group, {row['prompt']!r:.80}", f"{new_row.prompt!r:.80}")
        row["responses"] += responses


def import_files(paths: Sequence[str], out: Path) -> list[str]:
    """Write the rows of all files to ``out``. Returns the result in words. Raises PromptError, ValueError.

    A run trains the rows like any others, in an order of its own, each as often as its passes state (docs/sft.md).
    """
    if out.suffix != ".jsonl":
        raise ValueError(f"--out: want a file that ends in .jsonl, got {out}")
    rows = ImportedRows()
    for path in _files([Path(argument) for argument in paths]):
        if path.suffix == SUFFIX:
            _read_recording(path, rows)
        else:
            _read_lines(path, rows)
    if not rows.groups:
        raise ValueError(f"want at least one response to train, got none{_counts(rows.left_out)}")
    write_whole(out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows.groups.values()))
    groups = [row["responses"] for row in rows.groups.values()]
    words = [f"{out}: {len(groups)} rows, {sum(map(len, groups))} responses{_counts(rows.left_out)}"]
    lacks = [
        any(isinstance(response, dict) and "log_probs" not in response for response in responses)
        for responses in groups
    ]
    if any(lacks):
        cure = "only cross-entropy trains them (correction: sft, sft_coef)"
        words.append(f"{sum(lacks)} rows have responses without log_probs: {cure}")
    if single := sum(len(responses) == 1 for responses in groups):
        why = "an estimator that compares the samples of a group gives them no advantage"
        words.append(f"{single} rows have one response: {why}")
    return words


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path}: want recordings (*{SUFFIX}) in it, got none")
        yield from files


def _read_recording(path: Path, rows: ImportedRows) -> None:
    recording = Recording.open(path)
    try:
        for stored in recording:
            try:
                if isinstance(stored.data, WireError):
                    raise stored.data
                sample = decode_sample(stored.data)
                check_sample(sample)
            except WireError:
                rows.left_out["invalid"] += 1
                continue
            rows.add_sample(recording.origin.created, sample)
    finally:
        recording.close()


def _read_lines(path: Path, rows: ImportedRows) -> None:
    for number, (where, values) in enumerate(read_values(path)):
        if isinstance(values, PromptError):
            raise values
        rows.add_line(where, str(path), number, dict(values))


def _unfit(sample: Sample) -> str:
    if sample.kind is not Kind.TRAIN:
        return sample.kind.value
    if sample.status not in _RIGHT:
        return sample.status.value
    if len(sample.sizes) > 1:
        return "several sequences"
    if not sample.loss_mask.any() or sample.response_length == len(sample.tokens):
        return "nothing to train"
    return ""


def _response(sample: Sample) -> JsonObject:
    first = len(sample.tokens) - sample.response_length
    response: JsonObject = {
        "tokens": sample.tokens[first:].tolist(),
        "prompt_tokens": sample.tokens[:first].tolist(),
        "reward": sample.reward,
        "temperature": sample.sampling.temperature,
    }
    if not sample.demonstration:
        response["log_probs"] = [min(0.0, float(log_prob)) for log_prob in sample.rollout_log_probs]
    if not sample.loss_mask.all():
        response["loss_mask"] = sample.loss_mask.tolist()
    if sample.status is Status.TRUNCATED:
        response["truncated"] = True
    return response


def _counts(left_out: Counter[str]) -> str:
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    return f"; left out: {counts}" if left_out else ""
