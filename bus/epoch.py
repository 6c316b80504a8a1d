"""The learner's epoch: raised by compare-and-set, so that one learner at a time is the newest."""

from bus import subjects
from bus.connection import Bus
from bus.errors import RowConflict


async def raise_epoch(bus: Bus) -> int:
    """Make this process the newest learner; its epoch (the first is 1)."""
    rows = bus.rows("run")
    while True:
        row = await rows.get(subjects.EPOCH_KEY)
        epoch = 1 if row is None else int(row[0]["epoch"]) + 1
        try:
            await rows.update(subjects.EPOCH_KEY, {"epoch": epoch, "by": bus.name}, 0 if row is None else row[1])
            return epoch
        except RowConflict:  # another learner starts at the same time: the next number is ours, or its
            continue


async def current_epoch(bus: Bus) -> int:
    """0 = no learner has ever started."""
    row = await bus.rows("run").get(subjects.EPOCH_KEY)
    return 0 if row is None else int(row[0]["epoch"])
