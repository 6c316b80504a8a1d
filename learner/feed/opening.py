"""The two ends of a feeder: the server of the ranks and the connection to the bus, open while a feeder runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidemill.bus import exit_codes
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.system.coroutines import first_error
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.places import FeederPlaces
from tidemill.learner.settings.config import LearnerConfig


@asynccontextmanager
async def opened_ends(places: FeederPlaces, learner: LearnerConfig) -> AsyncIterator[tuple[FeedServer, Bus]]:
    """Yield the server and the bus, with the streams of the run. The first error inside is sent to the ranks, and raised alone."""
    server = FeedServer(
        places.listen,
        keys=places.keys,
        world_size=learner.num_ranks,
        data_parallel=learner.data_parallel,
        rank_silence_s=places.rank_silence_s,
    )
    try:
        async with connect(places.bus_url, places.run, places.bus, name="feeder") as connected:
            await connected.create_layout()
            yield server, connected
    except BaseException as error:
        first = first_error(error)
        ended = isinstance(first, asyncio.CancelledError)
        await server.fail("it was told to end" if ended else exit_codes.message(first), exit_codes.of(first))
        raise first from None
    finally:
        await server.close()
