"""The embedded bus: one nats-server child, three that are a cluster, or this machine's one of a cluster; their disk.

    a server ended, or its own state has a write error
      -> is there room, and can a file be written?        no: wait, with the reason
      -> is the pause since the last restart over?        no: wait, with the reason
      -> start it again

The state is entered by an error alone and left at ``need_bytes`` of free room, so a disk that is full to the last
megabyte causes no restarts; the pause between two restarts doubles, up to a minute, so an error of another kind causes
one a minute.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig, quoted, quoted_list
from tidemill.bus.errors import ServerFailed
from tidemill.bus.server.auth import ACCOUNT, NO_ACCOUNT, make_users, route_password, viewer_alone
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.system.files import lacking

_log = logging.getLogger(__name__)

CHECK_S = 1.0
# Seconds between two restarts after write errors: doubled with each, anew after the longest without any
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_CLUSTER_NAME = "tidemill"


class EmbeddedBus:
    """The servers of this machine. Synchronous: call it from a thread that lives as long as the process."""

    def __init__(
        self,
        directory: Path,
        run: str,
        config: BusConfig,
        auth_dir: Path | None = None,
        *,
        read_only: bool = False,
        viewer: str = "",
    ) -> None:
        """``read_only``: as in ``EmbeddedServer``. ``viewer``: password of the only user of a bus without ``auth``."""
        self._directory, self._config, self._read_only = directory, config, read_only
        self._auth_dir, self._run = auth_dir or directory / "auth", run
        users = make_users(self._auth_dir, run, config) if config.auth else viewer_alone(viewer, run, config)
        on_this_machine = config.cluster if config.cluster > 1 and not config.server_name else 0
        # Ports of the routes, reserved until ``stop``: each server needs all of them before the others listen
        self.routes = [KeptPort() for _ in range(on_this_machine)]
        self.servers = [self._server(number, users) for number in range(config.cluster)]

    @property
    def url(self) -> str:
        """URL of all servers, separated by commas; without a user."""
        return ",".join(server.url for server in self.servers)

    @property
    def pid(self) -> int:
        """Process id of the first server. Raises ServerFailed before ``start``."""
        return self.servers[0].pid

    def start(self) -> str:
        """Start all servers that do not run, and return the URL. Raises ServerFailed."""
        for server in self.servers:
            _check_account(server.store, with_users=self._config.auth)
            server.start()
        return self.url

    def ended(self) -> list[EmbeddedServer]:
        """Return the servers that should be running and are not."""
        return [server for server in self.servers if not server.running]

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
        for port in self.routes:
            port.close()

    def reload(self) -> None:
        """Have the servers read users and certificates again, while they run. Raises ServerFailed."""
        users = make_users(self._auth_dir, self._run, self._config) if self._config.auth else []
        for number, server in enumerate(self.servers):
            server.reload(self._lines(number, users))

    def _server(self, number: int, users: Sequence[str]) -> EmbeddedServer:
        config, directory = self._config, self._directory
        if config.cluster > 1:
            directory = directory / f"n{number}"
            config = dataclasses.replace(config, port=config.port + number if config.port > 0 else config.port)
        return EmbeddedServer(directory, config, extra=self._lines(number, users), read_only=self._read_only)

    def _lines(self, number: int, users: Sequence[str]) -> list[str]:
        """Return the lines of a server's configuration about users and the cluster."""
        config = self._config
        if config.server_name:
            return [*users, *self._cluster_lines(config.server_name, config.cluster_listen, config.cluster_routes)]
        if config.cluster > 1:
            routes = [f"127.0.0.1:{port.number}" for port in self.routes]
            return [*users, *self._cluster_lines(f"n{number}", routes[number], routes)]
        return list(users)

    def _cluster_lines(self, name: str, listen: str, routes: Sequence[str]) -> list[str]:
        """Return the lines of the routes between servers, with a password and TLS where clients have them."""
        config = self._config
        password = route_password(self._auth_dir) if config.auth else ""
        login = f"routes:{password}@" if password else ""
        lines = [f"server_name: {quoted(name)}", "cluster {", f"  name: {_CLUSTER_NAME}", f"  listen: {quoted(listen)}"]
        lines.append(f"  routes: {quoted_list(f'nats-route://{login}{route}' for route in routes)}")
        if password:
            lines.append(f"  authorization {{ user: routes, password: {quoted(password)} }}")
        if config.tls_cert and config.tls_ca:
            files = {"cert_file": config.tls_cert, "key_file": config.tls_key, "ca_file": config.tls_ca}
            lines.append(f"  tls {{ {', '.join(f'{name}: {quoted(file)}' for name, file in files.items())} }}")
        return [*lines, "}"]


def _check_account(store: Path, *, with_users: bool) -> None:
    """Raise ServerFailed for a store of the other kind: with users, streams made without them are invisible."""
    other_account = NO_ACCOUNT if with_users else ACCOUNT
    account_streams = store / "jetstream" / other_account / "streams"
    if account_streams.is_dir() and any(account_streams.iterdir()):
        how, want = ("without", "false") if with_users else ("with", "true")
        raise ServerFailed(f"the streams in {store} were made {how} users: want bus.auth: {want}, or another directory")


# ---- the disk under the servers


class StoreKeeper:
    """The one place that decides on restarts of a bus's servers. Synchronous: call ``look`` from a thread."""

    def __init__(
        self, servers: Sequence[EmbeddedServer], need_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.servers, self.need_bytes, self._clock = servers, need_bytes, clock
        # Servers that store nothing, with their errors, until they are started again
        self._faults: dict[EmbeddedServer, str] = {}
        self._checked_s = self._restarted_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        # Number of restarts of servers that had ended, and the sentence on the last one
        self.restarts, self.last_restart = 0, ""
        # Reason for which messages are not stored at present, with the missing room; empty when they are stored
        self.reason = ""

    def look(self) -> None:
        """Start every server again that ended or stopped storing, once its disk has room. Raises ServerFailed."""
        now = self._clock()
        if now - self._checked_s < CHECK_S and all(server.running for server in self.servers):
            return
        self._checked_s = now
        for server in self.servers:
            if server.running and server not in self._faults and (fault := server.monitor.write_fault()):
                self._faults[server] = fault
        reasons = [reason for server in self.servers if (reason := self._cure(server, now))]
        reason = reasons[0] if reasons else ""
        if bool(reason) != bool(self.reason):
            _log.warning("the bus stores %s", f"nothing: {reason}" if reason else "messages again")
        self.reason = reason

    def _cure(self, server: EmbeddedServer, now: float) -> str:
        """Start a server again if it needs to be and can be. Returns the reason for which it is not, else nothing."""
        fault = self._faults.get(server, "")
        if server.running and not fault:
            return ""
        if lack := lacking(server.directory, self.need_bytes):
            return lack
        wait_s = self._restarted_s + self._pause_s - now
        if server.running and wait_s > 0:
            return f"{fault}; nats-server is started again in {wait_s:.0f} s"
        sentence = f"nats-server (process {server.pid}) {fault or 'ended'} and is started again"
        _log.warning("%s; its last log lines:\n%s", sentence, server.log_tail(5))
        if fault:
            since_s = now - self._restarted_s
            self._pause_s = FIRST_PAUSE_S if since_s > 2 * LONGEST_PAUSE_S else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._restarted_s = now
        lack = self._restart(server)
        if not lack and not fault:  # a write error has been named as the reason for storing nothing
            self.restarts, self.last_restart = self.restarts + 1, sentence
        return lack

    def _restart(self, server: EmbeddedServer) -> str:
        try:
            server.restart()
        except (OSError, ServerFailed):
            if lack := lacking(server.directory, self.need_bytes):  # it was filled again meanwhile
                return lack
            raise
        self._faults.pop(server, None)
        return ""
