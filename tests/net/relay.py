"""A distant network: a TCP relay that delays every byte by a time each way. It delays bytes, not packets, so no
handshake and no loss.

python -m tests.net.relay LISTEN_HOST LISTEN_PORT TARGET_HOST TARGET_PORT DELAY_MS
"""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter

READ_BYTES = 1 << 16
MOST_READS = 4096
"""Reads that are on their way at a time; more wait in the sender's socket."""


async def carry(reader: StreamReader, writer: StreamWriter, delay_s: float) -> None:
    """Pass bytes on, each ``delay_s`` after it was read, until an end of file or an error of either side."""
    loop, on_the_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](MOST_READS)

    async def read() -> None:
        """Put the bytes into the queue; empty ones are the end."""
        data = b"begin"
        while data:
            try:
                data = await reader.read(READ_BYTES)
            except ConnectionError:
                data = b""
            await on_the_way.put((loop.time() + delay_s, data))

    reading = asyncio.create_task(read())
    try:
        while True:
            due, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        reading.cancel()
        writer.close()


async def serve(listen: tuple[str, int], target: tuple[str, int], delay_s: float) -> None:
    """Relay every connection until cancelled."""

    async def relay(reader: StreamReader, writer: StreamWriter) -> None:
        """Relay one connection to its end, and print where it comes from."""
        print(f"from {writer.get_extra_info('peername')[0]}", flush=True)
        try:
            from_target, to_target = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, to_target, delay_s), carry(from_target, writer, delay_s))

    async with await asyncio.start_server(relay, *listen) as server:
        await server.serve_forever()


if __name__ == "__main__":
    host, port, to_host, to_port, delay_ms = sys.argv[1:]
    asyncio.run(serve((host, int(port)), (to_host, int(to_port)), float(delay_ms) / 1000))
