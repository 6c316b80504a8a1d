"""Commands to running processes: fast and lossy; what must last is written to a row as well."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    role: str
    id: str
    """``all`` = every process of the role."""
    command: str
    """drain | pause | continue | profile | ..."""
    args: dict[str, Any] = field(default_factory=dict)


class Commands:
    async def send(self, role: str, id: str, command: str, args: dict[str, Any] | None = None) -> None: ...
    def receive(self, role: str, id: str) -> AsyncIterator[Command]:
        """Commands to this process, for ever."""
        raise NotImplementedError
