"""Authority over an engine: the run's keys, the newest learner epoch, the GPUs it opens. Knows no HTTP, no updates."""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from tidemill.actors.errors import BadRequest, EngineError, EngineUnavailable
from tidemill.actors.http_api import need
from tidemill.bus.errors import BusError
from tidemill.bus.keys import RunKeys
from tidemill.weightstore.transport.nccl import sees

log = logging.getLogger(__name__)

NewestEpoch = Callable[[], Awaitable[int]]
"""Returns the newest learner epoch, read from the bus. Raises BusError."""
Record = Callable[[int | None, str], None]
"""Records an epoch that is named by a command. Raises StaleEpoch when a higher one was seen."""


class Authority:
    """Keys and epoch of an engine that belongs to a run. Without keys (a teacher) the engine accepts no command."""

    def __init__(
        self,
        keys: RunKeys | None = None,
        newest_epoch: NewestEpoch | None = None,
        visible_devices: Collection[str] | None = None,
        *,
        unguarded: bool = False,
    ) -> None:
        """``visible_devices``: UUIDs of the GPUs that the engine can open. ``unguarded``: without keys, obey all
        clients.
        """
        self.keys, self.unguarded, self._visible = keys, unguarded, visible_devices
        self._read, self._newest = newest_epoch, 0
        self.refused = ""
        """Why the newest command was refused; "" once a command has been accepted."""

    @property
    def accepts_commands(self) -> bool:
        """False for an engine whose weights never change."""
        return self.keys is not None or self.unguarded

    async def require_current_epoch(self, record: Record, body: Mapping[str, object], engine: str, what: str) -> None:
        """Check and ``record`` the epoch of a command, if it has one. Raises StaleEpoch for an older learner's,
        BadRequest for one that no learner of the run has (it would fence the real ones), EngineUnavailable while the
        bus cannot confirm a new one.
        """
        try:
            record(await self._epoch_in(body, engine), what)
        except EngineError as error:
            self.note(str(error))
            raise
        self.refused = ""

    def require_visible(self, handle: Mapping[str, object]) -> None:
        """Raise BadRequest for GPU memory that the engine does not see: a server of SGLang that opens it ends."""
        if self._visible is None or "shares" not in handle:
            return
        device = str(handle.get("device", ""))
        if not sees(self._visible, device):
            devices = ", ".join(self._visible) or "no GPU"
            want, cure = f"want one that this engine sees ({devices})", "cure: weights.staging: host"
            reason = f"handle: device: {want}, got {device!r:.60}; {cure}"
            self.note(reason)
            raise BadRequest(reason)

    def note(self, refused: str) -> None:
        """Record why the newest command was refused, for the log and the engine's live row."""
        if refused != self.refused:
            log.warning("command refused: %s", refused)
        self.refused = refused

    async def _epoch_in(self, body: Mapping[str, object], engine: str) -> int | None:
        if body.get("epoch") is None:
            return None
        epoch = need(body, "epoch", int)
        if epoch < 0:
            raise BadRequest(f"epoch: want an integer >= 0, got {epoch!r:.40}")
        # Only an epoch above the known one needs the bus: every bucket of a push is a command.
        if self._read is not None and epoch > self._newest:
            try:
                self._newest = await self._read()
            except BusError as error:
                raise EngineUnavailable(engine, f"epoch {epoch!r:.40} cannot be confirmed: {error}") from error
            if epoch > self._newest:
                raise BadRequest(f"epoch: want at most {self._newest}, the newest of this run, got {epoch!r:.40}")
        return epoch
