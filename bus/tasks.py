"""The work queue of prompts: issued by one fenced learner, leased by any number of actors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.messages import Kind, Task


class Lease:
    """A task held by this process until it is settled, handed back, failed, or not renewed for ``lease_s``."""

    task: Task
    attempt: str
    """Nonce of this lease: ``Sample.attempt`` of everything made under it."""
    deliveries: int
    """1 = first time."""

    async def renew(self) -> None: ...
    async def settle(self) -> bool:
        """All samples are stored. True when the server confirmed; False = it may be delivered again, which is harmless."""
        raise NotImplementedError

    async def hand_back(self, delay_s: float = 0) -> None:
        """Let another actor have it, at once or after ``delay_s``."""

    async def fail(self, reason: str, *, actor: str) -> bool:
        """Report a failure and hand back; the ``max_attempts``-th report makes the task dead. True = it is dead now."""
        raise NotImplementedError

    @asynccontextmanager
    async def kept(self) -> AsyncIterator["Lease"]:
        """Renew every ``lease_s / 3`` while the block runs."""
        raise NotImplementedError
        yield


class TaskQueue:
    async def fence(self, epoch: int) -> None:
        """Take over as the only writer. Raises Fenced."""

    async def issue(self, task: Task) -> int:
        """Store a task; its id. Retries until stored. Raises Fenced; needs ``fence`` first; ``task.epoch`` must be the fenced one."""
        raise NotImplementedError

    def scan(self, start: int = 1) -> AsyncIterator[Task]:
        """Every valid task from id ``start`` to the present end, in order."""
        raise NotImplementedError

    async def lease(self, timeout_s: float, *, kind: Kind = Kind.TRAIN) -> Lease | None:
        """The next task, None when there is none within ``timeout_s`` (or no bus)."""
        raise NotImplementedError

    async def backlog(self, kind: Kind = Kind.TRAIN) -> tuple[int, int]:
        """(waiting, leased)."""
        raise NotImplementedError

    async def fetch(self, id: int) -> Task:
        """One task. Raises NotFound."""
        raise NotImplementedError

    async def raise_floor(self, floor: int) -> None:
        """All tasks with ids up to ``floor`` are settled: their deliveries are acked unworked (row run/task_floor; never falls)."""

    async def trim(self, below: int) -> None:
        """Forget tasks with ids < ``below``; fences stay."""
