"""nats-servers with a configuration of the test's own, for topologies that the embedded bus does not make."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from tests.waits import until
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.server.nats_server import find_binary
from tidemill.bus.system.processes import dying_with_parent


@asynccontextmanager
async def started_server(directory: Path, name: str, *lines: str) -> AsyncIterator[str]:
    """Yield the URL of a server with these lines of configuration, once it is ready; it ends with the block."""
    config, log = directory / f"{name}.conf", directory / f"{name}.log"
    with KeptPort() as port:
        own = (f"server_name: {name}", f"listen: 127.0.0.1:{port.number}", f'log_file: "{log}"')
        config.write_text("\n".join((*own, "max_payload: 8000000", *lines)) + "\n")
        command, arrange = dying_with_parent([find_binary(), "-c", str(config)])
        process = await asyncio.create_subprocess_exec(*command, preexec_fn=arrange)
        try:
            is_ready = partial(_says, log, "Server is ready")
            await until(is_ready, alive=lambda: process.returncode is None)
            yield f"nats://127.0.0.1:{port.number}"
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _says(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()
