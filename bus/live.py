"""Which processes are alive: rows renewed by heartbeats, judged by the reader's own clock."""

from typing import Any, Self

from bus.connection import Bus
from bus.messages import LiveRow


class Heartbeat:
    """Async context manager: writes the row ``<role>.<id>`` every ``every_s``, deletes it on a clean exit."""

    row: LiveRow
    last_error: str

    def __init__(self, bus: Bus, row: LiveRow, every_s: float = 1.0) -> None: ...
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...
    def update(self, **changes: Any) -> None:
        """Change fields of the row; written at once."""


class LiveView:
    """Remembers revisions and when they changed, on this process' monotonic clock."""

    def __init__(self, bus: Bus, dead_after_s: float = 5.0) -> None: ...
    async def refresh(self) -> list[tuple[LiveRow, float]]:
        """(row, seconds since its revision changed), by role and id."""
        raise NotImplementedError

    async def alive(self, role: str | None = None) -> list[LiveRow]:
        """Rows that changed within ``dead_after_s``, after a refresh (a row seen for the first time counts as just changed)."""
        raise NotImplementedError


async def processes(bus: Bus) -> list[tuple[LiveRow, float]]:
    """(row, age in seconds by the server's time stamps against this process' clock) of every process; one look."""
    raise NotImplementedError
