"""Devices of the engines that a host starts: a free block of the machine's devices for each.

The machine is read once, when the first engine is wanted. Free are the devices that no rank and no other engine has:
ranks by the placement (``tidemill up``) or by the learner's live row (``tidemill host``), engines of this host by their
names, others by their rows.
"""

import logging
import os
from asyncio import to_thread
from collections.abc import Callable, Collection
from dataclasses import replace

from tidemill.actors.engines.membership import CONFIG_KEY
from tidemill.bus.liveness import LiveView
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.checks.model import size_here
from tidemill.launch.devices.demand import ModelSize, engine_variables, want_of
from tidemill.launch.devices.placement import engine_place
from tidemill.launch.devices.shapes import DeviceError, Node, Others, PlacementRefused
from tidemill.launch.devices.visible import this_node
from tidemill.launch.settings.config_loader import SettingsError, changes
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_row import from_row

log = logging.getLogger(__name__)

_CONFIGURATION = "the run's configuration, for the number of devices of an engine"
AWAITED = PlacementRefused("engine", _CONFIGURATION, "none yet", "start the learner")


class EngineDevices:
    """The devices of one machine, and the engines of one host that have them."""

    def __init__(
        self, bus: Bus, config: RunConfig | None = None, read: Callable[[], Node] = lambda: this_node(os.environ)
    ) -> None:
        """``config``: the run's, if its ranks are on this machine; None = read from the bus, no ranks here."""
        self._bus, self._with_ranks, self._config, self._read = bus, config is not None, config, read
        self._view = LiveView(bus)
        self._node: Node | None = None
        self._unreadable: DeviceError | None = None
        self._size = ModelSize()  # Sizes of the run's model, if it is on this machine
        self._held: dict[str, tuple[str, ...]] = {}  # Engine of this host -> UUIDs of its devices
        self._elsewhere: dict[str, tuple[str, ...]] = {}
        """Live engine that this host has not started -> UUIDs of its devices."""
        self._learners: list[LiveRow] = []
        """Live rows of a learner whose ranks are not placed here: one for each of its nodes."""

    async def refresh(self) -> None:
        """Read the state that decides on free devices; the machine is read once. Raises BusError."""
        if self._node is None and self._unreadable is None:
            try:
                self._node = await to_thread(self._read)
            except DeviceError as error:
                self._unreadable = error
        if self._node is None or not self._node.devices:
            return
        if not self._with_ranks:
            self._config = await self._config_of_run()
        if self._config is not None and not self._size.tensors:
            self._size = await to_thread(size_here, self._config)
        engines = await self._view.alive("engine")
        self._elsewhere = {row.id: row.capabilities.devices for row in engines if row.id not in self._held}
        self._learners = [] if self._with_ranks else await self._view.alive("learner")

    async def _config_of_run(self) -> RunConfig | None:
        """Return the run's configuration with the changes made here, without devices of another machine."""
        row, _ = await self._bus.rows("run").read(CONFIG_KEY)
        if row is None:
            return None
        changed = changes((), os.environ)
        try:
            config = from_row(row, self._bus.run, changed)
        except SettingsError as error:  # the engines refuse it, too, and have a log
            log.warning("devices are not placed, the run's configuration cannot be read error=%s", error)
            return None
        return config if "engine.devices" in changed else replace(config, engine=replace(config.engine, devices=()))

    def give(self, name: str) -> dict[str, str]:
        """Return the variables of a new engine, which has its devices from now on. Raises DeviceError."""
        if self._unreadable is not None:
            raise self._unreadable
        assert self._node is not None, "the devices were not read"
        if not self._node.devices:
            return {}
        if self._config is None:
            raise AWAITED
        want = want_of(self._config, self._node, learner=self._with_ranks, engines=1, size=self._size)
        neighbours = Others(
            engines=(*self._elsewhere.values(), *self._held.values()),
            ranks=tuple(uuid for row in self._learners for uuid in row.capabilities.devices),
            learner_is_here=any(row.host == self._node.host for row in self._learners),
        )
        place = engine_place([self._node], want, others=neighbours)
        self._held[name] = place.uuids
        return engine_variables(self._node, place)

    def keep_only(self, names: Collection[str], *, desired: Collection[str]) -> None:
        """Take back the devices of engines without a name here. Rows of ``desired`` ones are of earlier processes."""
        self._held = {name: devices for name, devices in self._held.items() if name in names}
        self._elsewhere = {name: devices for name, devices in self._elsewhere.items() if name not in desired}
