"""The learner's epoch: raised by compare-and-set, so that one learner at a time is the newest."""

from tidemill.bus.client.rows import Value
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects


async def raise_epoch(bus: Bus) -> int:
    """Make this process the newest learner, and return its epoch (the first is 1)."""

    def following(row: Value | None) -> Value:
        """Return the row with the next epoch."""
        return {"epoch": 1 if row is None else int(row["epoch"]) + 1, "by": bus.name}

    return int((await bus.rows("run").change(subjects.EPOCH_KEY, following)).after["epoch"])


async def current_epoch(bus: Bus) -> int:
    """Return the epoch of the newest learner; 0 = no learner has ever started."""
    row = await bus.rows("run").get(subjects.EPOCH_KEY)
    return 0 if row is None else int(row[0]["epoch"])
