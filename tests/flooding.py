"""``python -m tests.flooding URL RUN``: store samples of 32 KB in a run, and trim them, as fast as the bus lets it."""

import asyncio
import sys

from tests.bus_kit import make_sample
from tidemill.bus.config import BusConfig
from tidemill.bus.streams.bus import connect

_AT_ONCE, _KEPT = 100, 1000


async def flood(url: str, run: str) -> None:
    """Publish for ever, many samples at once. Prints a line when the first one is stored."""
    numbers = iter(range(1 << 60))
    async with connect(url, run, BusConfig(samples_max_bytes=100_000_000), name="flood") as bus:
        await bus.create_layout()

        async def publish() -> None:
            for number in numbers:
                await bus.samples.publish(make_sample(run, task=number, prompt="x" * 32_000))
                if number == 0:
                    print("stored", flush=True)
                await bus.samples.trim(number - _KEPT)

        await asyncio.gather(*[publish() for _ in range(_AT_ONCE)])


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1], sys.argv[2]))
