"""The learner's live row: its agent's reason for waiting, and the engines that take no pushes. The only writer of these fields.

Consumes the changes of the agent and the row ``weights/evicted``; produces ``phase``, ``waits_for`` and ``trouble``.
"""

from contextlib import suppress

from tidemill.bus.errors import BusError
from tidemill.bus.liveness.heartbeats import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus
from tidemill.learner.nodes.node_rows import NodeRow, Phase
from tidemill.weightstore.store.registry import EVICTED, VersionRegistry

_PHASES = {Phase.READY: "waiting", Phase.RUNNING: "working"}


class LearnerRow:
    """Phase and waits of the live row of a learner, or of one of its nodes."""

    def __init__(self, heartbeat: HeartbeatPublisher) -> None:
        self._heartbeat = heartbeat
        self._node = self._engines = ""

    def show(self, row: NodeRow) -> None:
        """Show the agent's reason for waiting, and why its last attempt ended."""
        self._node = row.waits_for
        self._heartbeat.update(phase=_PHASES.get(row.phase, row.phase.value), waits_for=self._waits_for(), trouble=row.reason)

    async def follow_evicted(self, bus: Bus) -> None:
        """Background loop: show the engines that the learner does not push to, and why."""
        async for _ in bus.rows("weights").watch(EVICTED):
            with suppress(BusError):
                evicted = await VersionRegistry(bus).evicted()
                self._engines = "; ".join(f"{id} to take pushes: {why}" for id, why in sorted(evicted.items()))
                self._heartbeat.update(waits_for=self._waits_for())

    def _waits_for(self) -> str:
        return "; ".join(text for text in (self._node, self._engines) if text)
