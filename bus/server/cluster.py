"""The embedded bus: one nats-server child, three that are a cluster, or this machine's one of a cluster."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tidemill.bus.config import BusConfig, quoted, quoted_list
from tidemill.bus.errors import ServerFailed
from tidemill.bus.server.auth import ACCOUNT, NO_ACCOUNT, make_users, route_password, viewer_alone
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.server.ports import KeptPort

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
        self._auth_dir = auth_dir or directory / "auth"
        users = make_users(self._auth_dir, run, config) if config.auth else viewer_alone(viewer, run, config)
        on_this_machine = config.cluster if config.cluster > 1 and not config.server_name else 0
        # Ports of the routes, reserved until ``stop``: each server needs all of them before the others listen
        self._routes = [KeptPort() for _ in range(on_this_machine)]
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
        """Stop all servers."""
        for server in self.servers:
            server.stop()
        for port in self._routes:
            port.close()

    def _server(self, number: int, users: Sequence[str]) -> EmbeddedServer:
        config, directory, lines = self._config, self._directory, list(users)
        if config.server_name:
            lines += self._cluster_lines(config.server_name, config.cluster_listen, config.cluster_routes)
        elif config.cluster > 1:
            routes = [f"127.0.0.1:{port.number}" for port in self._routes]
            lines += self._cluster_lines(f"n{number}", routes[number], routes)
            directory = directory / f"n{number}"
            config = dataclasses.replace(config, port=config.port + number if config.port > 0 else config.port)
        return EmbeddedServer(directory, config, extra=lines, read_only=self._read_only)

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
