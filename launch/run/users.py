"""New passwords for users of a bus that runs, whose server reads its certificates again with them."""

from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.server.auth import LEARNER, credentials_file
from tidemill.bus.server.embedded_bus import EmbeddedBus
from tidemill.launch.run.access import auth_dir
from tidemill.launch.run.bus_requests import BusRequest, RequestRefused
from tidemill.launch.settings.run_config import RunConfig


def request_of(root: Path) -> BusRequest:
    """Return the request for new passwords to the bus of a run."""
    return BusRequest(root / "bus", "users")


def renew(config: RunConfig, servers: EmbeddedBus, names: Sequence[str]) -> None:
    """Give these users new passwords, and have the servers read users and certificates again.

    The connections of these users are closed, and no others. Raises RequestRefused, ServerFailed.
    """
    directory = auth_dir(config)
    for name in names:
        file = credentials_file(directory, name)
        if name == LEARNER:
            cure = f"end both, remove {file}, and start them again"
            raise RequestRefused(f"{name}: learner and bus read its password at their start; {cure}")
        if not config.bus.auth or not file.is_file():
            raise RequestRefused(f"{name}: want a user of this bus, with a file {file}; there is none")
    for name in names:
        credentials_file(directory, name).unlink()
    servers.reload()
