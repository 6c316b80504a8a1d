"""``DetailedError``, the base of errors with declared fields, and the error tree of the bus.

Foreign errors (NATS, msgpack, sockets) are translated into this tree at the edge.
"""

from typing import Any, ClassVar, dataclass_transform

from tidemill.bus import exit_codes

_REQUIRED: Any = object()


@dataclass_transform(eq_default=False)
class DetailedError(Exception):
    """An error whose class declares its fields like a dataclass, and its text as one ``template``.

    ``args`` are the values of the fields in their order, so the error can be pickled. The template may name any
    attribute, properties included: ``template = "{where}: want {want}, got {got!r}"``.
    """

    template: ClassVar[str] = ""
    _defaults: ClassVar[dict[str, Any]] = {}
    """Fields in order, with the base classes' first."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The annotations are read unevaluated where a module postpones them: their types play no part.
        declared = [name for name, kind in cls.__annotations__.items() if "ClassVar" not in str(kind)]
        cls._defaults = {**cls._defaults, **{name: cls.__dict__.get(name, _REQUIRED) for name in declared}}

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = dict(self._defaults)
        by_place = dict(zip(fields, values, strict=False))
        if len(values) > len(fields) or by_place.keys() & named.keys() or named.keys() - fields.keys():
            raise TypeError(f"{type(self).__name__}: want the fields {', '.join(fields)}, got {values}, {named}")
        fields.update(by_place, **named)
        if missing := [name for name, value in fields.items() if value is _REQUIRED]:
            got = f"none for {', '.join(missing)}"
            raise TypeError(f"{type(self).__name__}: want the fields {', '.join(fields)}, got {got}")
        super().__init__(*fields.values())
        self.__dict__.update(fields)

    def __str__(self) -> str:
        return self.template.format_map(_Attributes(self))


class _Attributes:
    def __init__(self, error: DetailedError) -> None:
        self._error = error

    def __getitem__(self, name: str) -> object:
        return getattr(self._error, name)


class BusError(Exception):
    """Something failed between this process and the bus."""


class BusUnavailable(DetailedError, BusError):
    """The server cannot be reached, or did not answer within the deadline."""

    where: str
    reason: str
    template = "{where}: bus unavailable: {reason}"


class BusFull(BusUnavailable):
    """The bus stores nothing at present: its disk has no room, or cannot be written. It is waited for without end."""

    template = "{where}: the bus stores nothing: {reason}"


class Denied(DetailedError, BusError):
    """The bus refuses the connection: user or password are wrong or missing, or a certificate is not trusted."""

    exit_code = exit_codes.CONFIG
    where: str
    reason: str
    cure: str
    template = "{where}: denied: {reason}; cure: {cure}"


class PasswordReplaced(Denied):
    """The password of a process was replaced while it ran: started again, it reads the new one."""

    exit_code = exit_codes.CRASHED


class Forbidden(DetailedError, BusError):
    """The bus accepted the connection, but its user lacks this permission: a retry would not help."""

    subject: str
    verb: str
    user: str
    template = "{subject}: user {named_user} may not {verb} here (docs/security.md)"

    @property
    def named_user(self) -> str:
        return self.user or "(none)"


class ServerFailed(DetailedError, BusError):
    """The embedded nats-server ended or did not come up; carries its last lines."""

    reason: str
    log_tail: str = ""
    template = "nats-server: {reason}{log_lines}"

    @property
    def log_lines(self) -> str:
        """The log's last lines as the message shows them: below its first line."""
        return f"\n{self.log_tail}" if self.log_tail else ""


class Unquotable(DetailedError, BusError, ValueError):
    """A text with characters that cannot be written into the configuration of nats-server."""

    exit_code = exit_codes.CONFIG
    text: str
    odd: str
    template = "{text!r}: want a name without control characters, in UTF-8, got {odd!r} in it; use another name"


class ConfigMismatch(DetailedError, BusError):
    """A stream, consumer or bucket exists, or was created, with a configuration other than the requested one."""

    exit_code = exit_codes.CONFIG
    name: str
    field: str
    want: object
    got: object
    template = "{name}.{field}: want {want!r}, the server has {got!r}"


class WireError(DetailedError, BusError, ValueError):
    """A message cannot be decoded or breaks an invariant."""

    field: str
    want: str
    got: object
    template = "{field}: want {want}, got {got!r}"


class UnknownSchema(WireError):
    """The message was written by a program with another schema number."""


# Cures of rows whose values no process can restore from other records; the learner restores all others
_ROW_CURES = {
    "run.epoch": 'end every learner of the run, then store {"epoch": N} with N above every epoch it had',
    "run.checkpoint": 'store {"directory": PATH, "step": N} of its newest checkpoint',
}


class UnreadableRow(WireError):
    """A row that a process needs cannot be read; the error names bucket, key and revision."""

    revision: int
    template = "row {field}, revision {revision}: want {want}, got {got!r}; cure: {cure} (docs/recovery.md)"

    @property
    def exit_code(self) -> int:
        return exit_codes.CONFIG if self.field in _ROW_CURES else exit_codes.CRASHED

    @property
    def cure(self) -> str:
        """What the operator stores in place of the row."""
        return _ROW_CURES.get(self.field, "store a readable row in its place")


class Fenced(DetailedError, BusError):
    """A newer learner has taken over (a higher epoch was seen): this one must end."""

    exit_code = exit_codes.TAKEN_OVER
    where: str
    mine: int
    seen: int
    template = "{where}: epoch {mine} is fenced off by epoch {seen}: another learner has taken over this run"


class RowConflict(DetailedError, BusError):
    """A compare-and-set on a key found another revision than expected."""

    key: str
    expected: int
    template = "{key}: changed by another process since revision {expected}"


class NotFound(DetailedError, BusError):
    """A message or row that does not exist (any more)."""

    where: str
    what: object
    template = "{where}: no {what}"


class Refused(DetailedError, BusError):
    """The server answered with an error; ``code`` is JetStream's error code."""

    where: str
    code: int
    reason: str
    template = "{where}: refused by the server: {reason} ({code})"


class NoRoom(DetailedError, BusError):
    """The server has less room than a stream may take, beside what is reserved for streams already."""

    exit_code = exit_codes.CONFIG
    stream: str
    max_bytes: int
    setting: str
    reserved_bytes: int = 0
    template = (
        "{stream}: want room for {max_gb:.1f} GB ({setting}) beside {reserved_gb:.1f} GB that are reserved already "
        "(tidemill runs), in three quarters of what is free on the disk of the nats-server, got less; "
        "lower {setting}, or keep the server's store on a larger disk"
    )

    @property
    def max_gb(self) -> float:
        return self.max_bytes / 1e9

    @property
    def reserved_gb(self) -> float:
        return self.reserved_bytes / 1e9


class StreamReplaced(DetailedError, BusError):
    """The cursor was made for another stream: it was deleted and created again, or restored."""

    exit_code = exit_codes.CONFIG
    stream: str
    want: str
    got: str
    template = (
        "{stream}: the cursor is for the stream created at {want}, this one was created at {got}; "
        "put the bus's store back, or begin a new run with the newest model (tidemill up --from-checkpoint; "
        "docs/recovery.md)"
    )


class StreamTrimmed(DetailedError, BusError):
    """Messages that the reader still needs are gone."""

    exit_code = exit_codes.CONFIG
    stream: str
    needed: int
    first: int
    template = "{stream}: message {needed} is needed, but the stream begins at {first}: it was trimmed too far"
