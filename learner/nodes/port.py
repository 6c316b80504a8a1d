"""Port of a node agent to its machine: the layout of the ranks, and their processes."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tidemill.bus.streams.bus import Bus
from tidemill.learner.nodes.node_rows import NodeRow
from tidemill.learner.ranks.process import Part


class Work(Protocol):
    """The ranks of one node."""

    def opened(self, bus: Bus) -> AbstractAsyncContextManager[None]:
        """Run the servers of this node, from the claim of its row to the end of its agent. Raises OSError, BusUnavailable."""
        raise NotImplementedError

    def layout(self, offers: Sequence[NodeRow]) -> tuple[int, ...]:
        """Return the number of ranks of each node. Raises NodeRefused for nodes that cannot run the learner together. Only the leader's."""
        raise NotImplementedError

    async def check(self, proof: str) -> None:
        """Check this node before its ranks start. ``proof``: that of the leader's directory. Raises NodeRefused."""
        raise NotImplementedError

    async def prove(self, proof: str) -> None:
        """Write the proof that ``check`` reads on the other nodes. Only the leader's. Raises OSError."""
        raise NotImplementedError

    async def run(self, part: Part, draining: asyncio.Event, on_step: Callable[[], None]) -> None:
        """Run the processes until they have ended with success, or drained. When cancelled, it ends them first. Raises ChildFailed.

        ``on_step`` is called after steps of its ranks.
        """
        raise NotImplementedError
