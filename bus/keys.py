"""The keys of a run that its HTTP servers require: made once by the learner, kept as rows of the bus.

``keys/admin`` is for commands to engines; on a bus with users only learner, engines and routers read it.
``run/api_key``, derived from it, is for every other request to a listener that other machines reach. A process keeps
the keys that it has read: an unreadable row stops only a process that has none.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tidemill.bus.client.rows import Value
from tidemill.bus.errors import BusError, NotFound
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import all_of

ADMIN_KEY, API_KEY = "admin", "api_key"  # Rows of the buckets ``keys`` and ``run``: ``{"key": "..."}``
_KEY_BYTES = 24
_AGAIN_S = 1.0  # Seconds between two reads of a row, however many requests bring a wrong key


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of its run that a process has; empty = not known."""

    admin: str = field(default="", repr=False)
    api: str = field(default="", repr=False)

    @classmethod
    def of(cls, admin: str) -> "Keys":
        """Return both keys: the second is derived from ``admin``."""
        return cls(admin, hmac.new(admin.encode(), b"tidemill api key", hashlib.sha256).hexdigest() if admin else "")

    @property
    def bearer(self) -> str:
        """The key to present: the admin key where this process has it, which is accepted everywhere, else the other."""
        return self.admin or self.api

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}

    def admits(self, presented: str, *, admin: bool) -> bool:
        """Return whether ``presented`` is accepted for a command (``admin``) or another request, in constant time."""
        keys = (self.admin,) if admin else (self.admin, self.api)
        presented_bytes = presented.encode(errors="surrogateescape")
        # A list, not a generator: all keys are compared, so that the time does not show which one fits.
        return any([bool(key) and hmac.compare_digest(key.encode(), presented_bytes) for key in keys])


class RunKeys:
    """The keys of a run, read from its rows when they are first needed; for HTTP servers and clients."""

    def __init__(self, read: Callable[[], Awaitable[Keys]]) -> None:
        self._read, self._keys, self._read_s = read, Keys(), float("-inf")
        self._reading = asyncio.Lock()

    @classmethod
    def fixed(cls, keys: Keys) -> "RunKeys":
        """Return an object with these keys, which does not read the bus."""

        async def read() -> Keys:
            return keys

        return cls(read)

    async def known(self) -> Keys:
        """Return the keys as last read; read them where none are known. Raises BusError."""
        return self._keys if self._keys.bearer else await self.newest()

    async def headers(self, *, admin: bool = True) -> dict[str, str]:
        """Return the headers of a request; none while no key is known, because most servers require none.

        ``admin``: with the admin key where it is known; a process that passes on requests does not lend it to them.
        """
        try:
            keys = await self.known()
            return keys.headers if admin else Keys(api=keys.api).headers
        except BusError:
            return {}

    async def newest(self) -> Keys:
        """Return the keys, read again unless that was done within the last second. Raises BusError."""
        async with self._reading:
            if time.monotonic() - self._read_s >= _AGAIN_S:
                self._keys = await self._read()
                self._read_s = time.monotonic()
            return self._keys


def admin_keys(bus: Bus) -> RunKeys:
    """Return the keys for a process that sends commands to engines, or receives them."""

    async def read() -> Keys:
        return Keys.of(await _read_key(bus, "keys", ADMIN_KEY))

    return RunKeys(read)


def api_keys(bus: Bus) -> RunKeys:
    """Return the keys for every other process."""

    async def read() -> Keys:
        return Keys(api=await _read_key(bus, "run", API_KEY))

    return RunKeys(read)


async def make_keys(bus: Bus, *, last: str = "") -> Keys:
    """Return the run's keys, made by its learner if missing or unreadable, before its first command to an engine.

    ``last``: the admin key that the run had, stored again in the place of an unreadable one; empty = not known: a new
    one is made, and engines read it when a command brings it. Raises BusUnavailable.
    """
    new_row: Value = {"key": last or secrets.token_urlsafe(_KEY_BYTES)}
    change = await bus.rows("keys").change(ADMIN_KEY, lambda row: None if row else new_row, replace_unreadable=True)
    keys = Keys.of(str((change.after or new_row)["key"]))
    api: Value = {"key": keys.api}
    await bus.rows("run").change(API_KEY, lambda present: None if present == api else api, replace_unreadable=True)
    return keys


async def keep_keys(bus: Bus, keys: Keys) -> None:
    """Store the keys again whenever a row of theirs is lost or unreadable, until cancelled; for the learner."""
    rows = (("keys", ADMIN_KEY, keys.admin), ("run", API_KEY, keys.api))
    await all_of(bus.rows(bucket).keep(key, {"key": value}) for bucket, key, value in rows)


async def _read_key(bus: Bus, bucket: str, name: str) -> str:
    """Return a key; empty when the run has none (yet). Raises UnreadableRow until the learner has restored it."""
    try:
        row = await bus.rows(bucket).get(name)
    except NotFound:  # a run of an older release has no such bucket
        return ""
    return "" if row is None else str(row[0]["key"])
