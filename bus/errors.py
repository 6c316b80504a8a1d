"""The error tree of the bus. Foreign errors (NATS, msgpack, sockets) are translated into these at the edge."""

from tidemill.bus import exit_codes


class BusError(Exception):
    """Something failed between this process and the bus."""


class BusUnavailable(BusError):
    """The server cannot be reached, or did not answer within the deadline."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"{self.where}: bus unavailable: {self.reason}"


class BusFull(BusUnavailable):
    """The bus stores nothing at present: its disk has no room, or cannot be written. It is waited for without end."""

    def __str__(self) -> str:
        return f"{self.where}: the bus stores nothing: {self.reason}"


class Denied(BusError):
    """The bus refuses the connection: user or password are wrong or missing, or a certificate is not trusted."""

    exit_code = exit_codes.CONFIG

    def __init__(self, where: str, reason: str, cure: str) -> None:
        super().__init__(where, reason, cure)
        self.where, self.reason, self.cure = where, reason, cure

    def __str__(self) -> str:
        return f"{self.where}: denied: {self.reason}; cure: {self.cure}"


class Forbidden(BusError):
    """The bus accepted the connection, but its user lacks this permission: a retry would not help."""

    def __init__(self, subject: str, verb: str, user: str) -> None:
        super().__init__(subject, verb, user)
        self.subject, self.verb, self.user = subject, verb, user

    def __str__(self) -> str:
        return f"{self.subject}: user {self.user or '(none)'} may not {self.verb} here (docs/security.md)"


class ServerFailed(BusError):
    """The embedded nats-server ended or did not come up; carries its last lines."""

    def __init__(self, reason: str, log_tail: str = "") -> None:
        super().__init__(reason, log_tail)
        self.reason, self.log_tail = reason, log_tail

    def __str__(self) -> str:
        return f"nats-server: {self.reason}" + (f"\n{self.log_tail}" if self.log_tail else "")


class Unquotable(BusError, ValueError):
    """A text, such as the path of a directory, with characters that cannot be written into the configuration of nats-server."""

    exit_code = exit_codes.CONFIG

    def __init__(self, text: str, odd: str) -> None:
        super().__init__(text, odd)
        self.text, self.odd = text, odd

    def __str__(self) -> str:
        return f"{self.text!r}: want a name without control characters, in UTF-8, got {self.odd!r} in it; use another name"


class ConfigMismatch(BusError):
    """A stream, consumer or bucket exists, or was created, with a configuration other than the requested one."""

    exit_code = exit_codes.CONFIG

    def __init__(self, name: str, field: str, want: object, got: object) -> None:
        super().__init__(name, field, want, got)
        self.name, self.field, self.want, self.got = name, field, want, got

    def __str__(self) -> str:
        return f"{self.name}.{self.field}: want {self.want!r}, the server has {self.got!r}"


class WireError(BusError, ValueError):
    """A message cannot be decoded or breaks an invariant; the error names the field, the expected and the actual value."""

    def __init__(self, field: str, want: str, got: object) -> None:
        super().__init__(field, want, got)
        self.field, self.want, self.got = field, want, got

    def __str__(self) -> str:
        return f"{self.field}: want {self.want}, got {self.got!r}"


class UnknownSchema(WireError):
    """The message was written by a program with another schema number."""


_ROW_CURES = {
    "run.epoch": 'end every learner of the run, then store {"epoch": N} with N above every epoch it had',
    "run.checkpoint": 'store {"directory": PATH, "step": N} of its newest checkpoint',
}
"""Cures of rows whose values no process can restore from other records; one of the others is restored by the learner."""


class UnreadableRow(WireError):
    """A row that a process needs cannot be read; the error names bucket, key and revision."""

    def __init__(self, field: str, revision: int, want: str, got: object) -> None:
        super().__init__(field, want, got)
        self.args = (field, revision, want, got)
        self.revision = revision

    @property
    def exit_code(self) -> int:
        """Exit code of a process that this ends."""
        return exit_codes.CONFIG if self.field in _ROW_CURES else exit_codes.CRASHED

    def __str__(self) -> str:
        cure = f"{_ROW_CURES.get(self.field, 'store a readable row in its place')} (docs/recovery.md)"
        return f"row {self.field}, revision {self.revision}: want {self.want}, got {self.got!r}; cure: {cure}"


class Fenced(BusError):
    """A newer learner has taken over (a higher epoch was seen): this one must end."""

    exit_code = exit_codes.TAKEN_OVER

    def __init__(self, where: str, mine: int, seen: int) -> None:
        super().__init__(where, mine, seen)
        self.where, self.mine, self.seen = where, mine, seen

    def __str__(self) -> str:
        return f"{self.where}: epoch {self.mine} is fenced off by epoch {self.seen}: another learner has taken over this run"


class RowConflict(BusError):
    """A compare-and-set on a key found another revision than expected."""

    def __init__(self, key: str, expected: int) -> None:
        super().__init__(key, expected)
        self.key, self.expected = key, expected

    def __str__(self) -> str:
        return f"{self.key}: changed by another process since revision {self.expected}"


class NotFound(BusError):
    """A message or row that does not exist (any more)."""

    def __init__(self, where: str, what: object) -> None:
        super().__init__(where, what)
        self.where, self.what = where, what

    def __str__(self) -> str:
        return f"{self.where}: no {self.what}"


class Refused(BusError):
    """The server answered with an error; ``code`` is JetStream's error code."""

    def __init__(self, where: str, code: int, reason: str) -> None:
        super().__init__(where, code, reason)
        self.where, self.code, self.reason = where, code, reason

    def __str__(self) -> str:
        return f"{self.where}: refused by the server: {self.reason} ({self.code})"


class NoRoom(BusError):
    """The server's disk has less room than a stream may take."""

    exit_code = exit_codes.CONFIG

    def __init__(self, stream: str, max_bytes: int) -> None:
        super().__init__(stream, max_bytes)
        self.stream, self.max_bytes = stream, max_bytes

    def __str__(self) -> str:
        setting = f"bus.{self.stream.rpartition('_')[2].lower()}_max_bytes"
        return (
            f"{self.stream}: want room for {self.max_bytes / 1e9:.1f} GB ({setting}) in three quarters of what is free on the "
            f"disk of the nats-server, got less; lower {setting}, or keep the server's store on a larger disk"
        )


class StreamReplaced(BusError):
    """The stream is not the one that the cursor was made for: it was deleted and created again, or restored."""

    exit_code = exit_codes.CONFIG

    def __init__(self, stream: str, want: str, got: str) -> None:
        super().__init__(stream, want, got)
        self.stream, self.want, self.got = stream, want, got

    def __str__(self) -> str:
        return (
            f"{self.stream}: the cursor is for the stream created at {self.want}, this one was created at {self.got}; "
            "put the bus's store back, or begin a new run with the newest model (tidemill up --from-checkpoint; docs/recovery.md)"
        )


class StreamTrimmed(BusError):
    """Messages that the reader still needs are gone."""

    exit_code = exit_codes.CONFIG

    def __init__(self, stream: str, needed: int, first: int) -> None:
        super().__init__(stream, needed, first)
        self.stream, self.needed, self.first = stream, needed, first

    def __str__(self) -> str:
        return f"{self.stream}: message {self.needed} is needed, but the stream begins at {self.first}: it was trimmed too far"
