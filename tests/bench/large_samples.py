"""What large samples cost: stored in parts in SAMPLES, as they are, and in JetStream's object store beside it.

python -m tests.bench large_samples [--samples 10]

Of three sizes: a response of 128,000 tokens, one with a 6 MB image in its metadata, and one with the experts of its
tokens (48 layers, 8 of 128). Each is published and read back, with the real nats-server. *Object store*: the object is
put, then a message of SAMPLES names it, and the reader gets the object; checks and decoding are the same for both.
Printed: CPU and wall time for a sample, of the client (both sides) and of the server, and what the streams hold.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

import nats
import numpy as np
import psutil
from nats.js.object_store import ObjectStore

from tests.bench.sample_path import make_sample
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Sample

TOKENS, IMAGE_BYTES, LAYERS, TOP_K, EXPERTS = 128_000, 6_000_000, 48, 8, 128
CONFIG = BusConfig(samples_max_bytes=4_000_000_000)


def samples_of_kinds(run: str) -> dict[str, Sample]:
    """Return a sample of each kind."""
    plain, random = make_sample(run, 1, TOKENS), np.random.default_rng(0)
    first = random.integers(0, EXPERTS, (len(plain.tokens), LAYERS, 1))
    experts = ((first + np.arange(TOP_K) * EXPERTS // TOP_K) % EXPERTS).astype(np.uint8)
    return {
        "128k tokens": plain,
        "and an image": replace(plain, metadata={"image": random.bytes(IMAGE_BYTES)}),
        "and its experts": replace(plain, routed_experts=experts),
    }


class Meter:
    """CPU seconds of this process and of the server, and wall time."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = psutil.Process(server.pid)

    @contextmanager
    def measured(self, text: str, count: int) -> Iterator[None]:
        """Print what the block costs for each of ``count`` samples."""
        before, began_s = self._spent(), time.monotonic()
        yield
        wall_s, spent = time.monotonic() - began_s, self._spent()
        client, server = (1e3 * (after - at) / count for at, after in zip(before, spent, strict=True))
        print(f"  {text:<24} client {client:6.1f} ms CPU, server {server:6.1f} ms CPU, {1e3 * wall_s / count:6.1f} ms")

    def _spent(self) -> tuple[float, float]:
        return time.process_time(), sum(self._server.cpu_times()[:2])


async def by_objects(store: ObjectStore, bus: Bus, sample: Sample, count: int) -> None:
    """Publish and read through the object store."""
    names: list[str] = []
    for number in range(count):
        data = encode_sample(sample)
        name = f"{sample.task}.{number}"
        await store.put(name, data)
        await bus.samples.publish(replace(make_sample(bus.run, 1, 1), attempt=f"object-{time.monotonic_ns()}"))
        names.append(name)
    for name in names:
        got = await store.get(name)
        assert got.data is not None
        check_sample(decode_sample(got.data))
        await store.delete(name)


async def by_parts(bus: Bus, sample: Sample, count: int) -> None:
    """Publish and read as samples are."""
    cursor = replace(await bus.samples.cursor(), floor=(await bus.samples.info()).last_seq)
    for _ in range(count):
        await bus.samples.publish(replace(sample, attempt=f"parts-{time.monotonic_ns()}"))
    async with aclosing(bus.samples.read(cursor)) as reading:
        for _ in range(count):
            received = await anext(reading)
            assert isinstance(received.sample, Sample), received.sample


async def compare(server: EmbeddedServer, count: int) -> None:
    """Measure both ways in turn, twice."""
    meter = Meter(server)
    client = await nats.connect(server.url)
    async with connect(server.url, "large", CONFIG, name="bench") as bus:
        await bus.create_layout()
        store = await client.jetstream().create_object_store("large")
        for kind, sample in samples_of_kinds(bus.run).items():
            size = len(encode_sample(sample))
            parts = -(-size // (CONFIG.max_payload_bytes - 1024))
            print(f"{kind}: {size / 1e6:.1f} MB, {'one message' if parts == 1 else f'{parts} parts'}")
            ways: dict[str, Callable[[], Awaitable[None]]] = {
                "SAMPLES, in parts": lambda sample=sample: by_parts(bus, sample, count),
                "object store": lambda sample=sample: by_objects(store, bus, sample, count),
            }
            for name, way in [*ways.items()] * 2:
                with meter.measured(name, count):
                    await way()
            state = await bus.samples.info()
            await bus.samples.trim(state.last_seq + 1)
    await client.close()


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    name = "python -m tests.bench large_samples"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=raw)
    parser.add_argument("--samples", type=int, default=10)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory), CONFIG) as server:
        asyncio.run(compare(server, args.samples))


if __name__ == "__main__":
    main()
