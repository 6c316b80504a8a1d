"""Samples in a file (``docs/wire.md``): frames of a length and a msgpack map, and an index of subjects and headers
behind them.

    frame       4 bytes length, little-endian | msgpack map
    recording   the first frame: run, creation time of the stream
    stored      one for each sample: seq, subject, headers, stored_s, payload (bytes of the stream, joined from parts)
    index       the last frame: seqs, offsets (of the frames), subjects, headers
    end         8 bytes offset of the index, little-endian | b"TIDEMILL"

A recording that was cut off has no index; its whole frames can be read.
"""

import contextlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import msgpack
import numpy as np

from tidemill.bus.errors import WireError
from tidemill.bus.streams.history import StoredSample
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.message_format import unpack
from tidemill.bus.wire.messages import SCHEMA

END = b"TIDEMILL"
_LENGTH, _OFFSET = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Run and stream from which the samples of a recording come."""

    run: str
    created: str
    """Creation time of the stream that the sequences belong to."""


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
        self._frame(
            "stored",
            seq=stored.seq,
            subject=stored.subject,
            headers=stored.headers,
            stored_s=stored.stored_s,
            payload=stored.data,
        )

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
        self.cut = False
        """True if it ended before its index; known after reading."""
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
    return StoredSample(
        seq=fields["seq"],
        subject=fields["subject"],
        headers=fields["headers"],
        data=fields["payload"],
        stored_s=fields["stored_s"],
    )
