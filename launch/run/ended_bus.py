"""The bus of a run that is over, started for one command: read-only, on the run's own store, and stopped when the
command ends.

    store not in use -> nats-server on a free port of 127.0.0.1 -> the viewer reads -> stopped (also after kill -9)

The viewer may create nothing but consumers in memory, so the streams do not change. The run itself has priority: when
it is started again, its bus sends SIGTERM to this process, which stops the server at once, even in the middle of its
work.
"""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from tidemill.bus.client.addresses import parse
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import ServerFailed
from tidemill.bus.server.auth import VIEWER
from tidemill.bus.server.cluster import EmbeddedBus
from tidemill.bus.server.nats_server import in_use
from tidemill.launch.run.access import AUTH_DIR, BUS_URL_FILE, viewer_line
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import from_map

CONFIG_FILE, BUS_DIR = "config.yaml", "bus"
"""Names in the run's directory: its settings, and its embedded bus with the streams."""
_PASSWORD_BYTES = 24


class RunResumed(ValueError):
    """SIGTERM was received: the run was started again, and needs its store."""

    def __init__(self) -> None:
        super().__init__("ended by SIGTERM: the run was started again; repeat the command")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBus:
    """Settings and directories with which the bus is started."""

    directory: Path
    auth_dir: Path
    run: str
    config: BusConfig

    @classmethod
    def of(cls, root: Path) -> "EndedBus | None":
        """Return the bus of the run in ``root``; None if it is external or running. Raises ValueError."""
        file = root / CONFIG_FILE
        config = from_map(yaml_file.read(file)[0], str(file))
        bus, directory = config.bus, root / BUS_DIR
        if bus.url or ((root / BUS_URL_FILE).exists() and _running(directory)):
            return None
        if bus.server_name:
            raise ValueError(
                f"{root}: its bus is a cluster of several machines; start it with `tidemill bus --config "
                f"{file}` on them"
            )
        if not (directory / ("n0/store" if bus.cluster > 1 else "store")).is_dir():
            raise ValueError(f"{root}: no bus is running here, and {directory} does not hold the streams of a run")
        users_dir = Path(bus.auth_dir) if bus.auth_dir else root / AUTH_DIR
        plain = replace(bus, host="127.0.0.1", port=-1, tls_cert="", tls_key="", tls_verify=False)
        return cls(directory=directory, auth_dir=users_dir, run=config.run, config=plain)


def _running(directory: Path) -> bool:
    """Return whether a server has the store open. The address file alone does not prove it: it remains after a kill."""
    return any(in_use(server_dir) for server_dir in (directory, *directory.glob("n[0-9]")))


@contextmanager
def started(bus: EndedBus) -> Iterator[str]:
    """Run the bus while entered; yield its address, not to be shown. Raises ValueError, RunResumed on SIGTERM."""
    password = "" if bus.config.auth else secrets.token_urlsafe(_PASSWORD_BYTES)
    try:
        servers = EmbeddedBus(bus.directory, bus.run, bus.config, bus.auth_dir, read_only=True, viewer=password)
    except OSError as error:
        raise ValueError(f"{bus.auth_dir}: the users of the bus cannot be read: {error.strerror}") from None
    is_resumed = False

    def give_way(number: int, frame: FrameType | None) -> None:
        """Stop the server and raise KeyboardInterrupt in the main thread."""
        nonlocal is_resumed
        is_resumed = True
        servers.stop()  # here, in the handler: this process may be blocked by a pager that reads no further
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, give_way)
    try:
        url = _start(servers)
        yield replace(parse(url), user=VIEWER, password=password).line() if password else _with_user(url, bus)
    except BaseException:
        if is_resumed:
            raise RunResumed from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        servers.stop()


def _start(servers: EmbeddedBus) -> str:
    try:
        return servers.start()
    except ServerFailed as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"{error.filename}: the store of the run cannot be opened: {error.strerror}") from None


def _with_user(url: str, bus: EndedBus) -> str:
    return viewer_line(url, os.environ, bus.directory, {"auth": True, "auth_dir": str(bus.auth_dir)})
