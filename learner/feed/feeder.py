"""The feeder process, the learner's connection to the bus except for pushes: runs one ``Feeder``."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from tidemill.bus import exit_codes
from tidemill.bus.errors import BusError
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus, connect, current_epoch, raise_epoch
from tidemill.bus.system.coroutines import cancellable, first_error
from tidemill.bus.wire.rows import LiveRow
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_loops import Feeder
from tidemill.learner.feed.feeder_row import BEAT_S, FeederRow
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.filtering import OpenFilter, opened_filters
from tidemill.learner.feed.outcomes import refuse_newer
from tidemill.learner.feed.restart import copies_of, restore
from tidemill.learner.prompts.prompt_file import PromptFile


async def run_feeder(settings: FeederSettings, prompts: PromptFile, draining: asyncio.Event) -> None:
    """Feed all ranks of the learner until the last step is done and in a checkpoint.

    Once ``draining`` is set, it ends when no rank is left and their reports are stored.
    Raises ConfigRefused, ReplayMismatch, NoCheckpoint, NoProgress, TasksFail, RankFailed, RankSilent, FeedError,
    PromptError, UnknownReward, BadRewardOption, RewardFailed (of a filter); of the bus
    Fenced (another learner has taken over), StreamReplaced, StreamTrimmed, BusUnavailable (not there at the start).
    """
    async with opened_ends(settings) as (server, bus), opened_filters(settings.filters) as filters:
        await cancellable(FeederRun(bus, settings, prompts, server, filters).run(draining))


@asynccontextmanager
async def opened_ends(settings: FeederSettings) -> AsyncIterator[tuple[FeedServer, Bus]]:
    """Yield the server and the bus, with the streams of the run.

    The first error inside is sent to the ranks, and raised alone.
    """
    places = settings.places
    server = FeedServer(
        places.listen,
        keys=places.keys,
        world_size=settings.learner.num_ranks,
        data_parallel=settings.learner.data_parallel,
        rank_silence_s=places.rank_silence_s,
    )
    try:
        async with connect(places.bus_url, places.run, places.bus, name="feeder") as bus:
            await bus.create_layout(shadow=bool(settings.debug.shadow_of))
            yield server, bus
    except BaseException as error:
        first = first_error(error)
        is_cancelled = isinstance(first, asyncio.CancelledError)
        await server.fail("it was told to end" if is_cancelled else exit_codes.message(first), exit_codes.of(first))
        raise first from None
    finally:
        await server.close()


async def own_epoch(bus: Bus, raised: int) -> int:
    """Return the epoch of this start: ``raised``, or a new one for 0. Raises Fenced when a later one was raised."""
    if not raised:
        return await raise_epoch(bus)
    refuse_newer(await current_epoch(bus), raised)
    return raised


def row_publisher(bus: Bus, epoch: int, *, phase: str) -> HeartbeatPublisher:
    """Return the publisher of the feeder's live row."""
    host, pid = socket.gethostname(), os.getpid()
    row = LiveRow(role="feeder", id="feeder", host=host, pid=pid, phase=phase, epoch=epoch)
    return HeartbeatPublisher(bus, row, BEAT_S)


class FeederRun:
    """One start of the feeder, on an open bus."""

    def __init__(
        self, bus: Bus, settings: FeederSettings, prompts: PromptFile, server: FeedServer, filters: Sequence[OpenFilter]
    ) -> None:
        self._bus, self._settings, self._prompts, self._server, self._filters = bus, settings, prompts, server, filters
        self._row = FeederRow(server, settings.learner)
        self._epoch = 0

    async def run(self, draining: asyncio.Event) -> None:
        """Restore, feed, end. Raises a group of errors; Fenced alone when another learner has taken over."""
        try:
            await self._run(draining)
        except BaseExceptionGroup:
            # The take-over may cause any of these errors, for example of a rank that was fenced first.
            newest = 0
            with suppress(BusError):
                newest = await current_epoch(self._bus)
            refuse_newer(newest, self._epoch)
            raise

    async def _run(self, draining: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            # First, because ranks connect while the state is being restored, and get heartbeats meanwhile.
            loops = [group.create_task(self._server.run(), name="ranks")]
            self._epoch = await own_epoch(self._bus, self._settings.places.epoch)
            async with row_publisher(self._bus, self._epoch, phase="starting") as heartbeat:
                loops.append(group.create_task(self._row.beat(heartbeat), name="beat"))
                feeder = await self._open()
                loops += [group.create_task(cancellable(loop()), name=name) for name, loop in feeder.loops.items()]
                await feeder.finish(draining)
                for loop_task in loops:
                    loop_task.cancel()

    async def _open(self) -> Feeder:
        """Take over the streams, restore the state, and start the ranks."""
        self._row.text = "the fences of PLAN and TASKS"
        # The fences come before the state is read: an older learner that still runs writes nothing into these streams
        # afterwards.
        await self._bus.plans.fence(self._epoch)
        await self._bus.tasks.fence(self._epoch)
        self._row.text = "the checkpoint to be verified and the streams to be read"
        self._row.copies = copies_of(self._bus, self._settings)
        restored = await restore(self._bus, self._settings, self._prompts, epoch=self._epoch, copies=self._row.copies)
        feeder = Feeder(self._bus, self._settings, self._prompts, self._server, restored, self._row, self._filters)
        await feeder.start_ranks()
        return feeder
