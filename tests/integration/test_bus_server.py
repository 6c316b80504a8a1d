"""The embedded nats-server: ready at once, on the same port again, ends with its parent, never two on one store."""

import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.refusals import refusal
from tidemill.bus import exit_codes
from tidemill.bus.config import BusConfig, quoted
from tidemill.bus.errors import ServerFailed, Unquotable
from tidemill.bus.server.nats_server import EmbeddedServer


def test_it_keeps_its_port_over_kills(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, BusConfig())
    url = server.start()
    try:
        for _ in range(2):
            server.kill()
            assert not server.running
            with socket.socket() as stranger, refusal(OSError, errno=errno.EADDRINUSE):
                stranger.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            assert server.start() == url
        assert server.start() == url, "starting a running one does nothing"
    finally:
        server.stop()
    assert not server.running
    with EmbeddedServer(tmp_path, BusConfig()) as again:
        assert again.url == url, "the port is kept in the directory"


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tidemill.bus.config import BusConfig; from "
        "tidemill.bus.server.nats_server import EmbeddedServer\n"
        f"server = EmbeddedServer(pathlib.Path({str(tmp_path)!r}), BusConfig()); server.start()\n"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        poll = select.poll()  # select.select takes descriptors up to 1023 only
        poll.register(child, select.POLLIN)
        assert poll.poll(60_000), "nats-server outlived its parent"
    finally:
        os.close(child)
        parent.stdin.close()
        parent.stdout.close()


IN_A_THREAD = """
import os, pathlib, signal, sys, threading
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer

class OfTheMainThread:
    def __del__(self, ours=os.getpid(), getpid=os.getpid, kill=os.kill):
        if getpid() != ours:
            kill(getpid(), signal.SIGSEGV)

local = threading.local()
local.held = OfTheMainThread()
server = EmbeddedServer(pathlib.Path(sys.argv[1]), BusConfig())

def serve():
    server.start()
    print(server.pid, flush=True)
    sys.stdin.read()

threading.Thread(target=serve).start()
"""


def test_it_is_started_in_any_thread_and_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IN_A_THREAD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = parent.stdout.readline()
        assert pid, "a copy of the process destroyed an object of the main thread"
        child = os.pidfd_open(int(pid))
        try:
            parent.send_signal(signal.SIGKILL)
            poll = select.poll()
            poll.register(child, select.POLLIN)
            assert poll.poll(60_000), "nats-server outlived its parent"
        finally:
            os.close(child)


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = EmbeddedServer(tmp_path, BusConfig(port=taken.getsockname()[1]))
        with refusal(ServerFailed, log_tail=re.compile("address already in use")):
            server.start()


def test_a_remembered_port_that_is_taken_is_given_up_at_a_fresh_start(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, BusConfig()) as first:
        port = int(first.url.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", port)), EmbeddedServer(tmp_path, BusConfig()) as second:
        assert second.url != first.url


def test_a_reserved_port_that_a_program_takes_by_its_number_is_given_up(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, BusConfig())
    number = server._port()
    with socket.create_server(("127.0.0.1", number)):
        try:
            assert server.start() != f"nats://127.0.0.1:{number}"
            assert (tmp_path / "port").read_text() == server.url.rsplit(":", 1)[1]
        finally:
            server.stop()


def test_a_port_that_others_know_is_not_given_up(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, BusConfig()) as server:
        url = server.url
        server.stop()
        with (
            socket.create_server(("127.0.0.1", int(url.rsplit(":", 1)[1]))),
            refusal(ServerFailed, reason=re.compile(rf"\[Errno {errno.EADDRINUSE}\]"), log_tail=""),
        ):
            server.start()
        assert server.start() == url


def test_an_address_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    with refusal(ServerFailed, reason=re.compile(r"\bnowhere\.invalid:0: \[Errno"), log_tail=""):
        EmbeddedServer(tmp_path, BusConfig(host="nowhere.invalid", insecure=True)).start()


def test_two_never_run_on_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.bus.server.nats_server._STOP_S", 0.1)
    with EmbeddedServer(tmp_path, BusConfig()) as first:
        with refusal(ServerFailed, reason=re.compile(rf"{tmp_path}$")):
            EmbeddedServer(tmp_path, BusConfig()).start()
        assert first.running


ODD_NAMES = (
    "é",
    "模型",
    "a b",
    'say "hi"',
    "it's",
    "back\\slash",
    "\\u00e9 \\n \\x41",
    "$HOME",
    "#no; comment",
    "{[(",
    "100k",
    "\u3000",
    "😀",
)
"""Names of directories that mean something else, or nothing, in a configuration of nats-server."""


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    with EmbeddedServer(tmp_path / name, BusConfig()) as server:
        assert server.store.is_dir() and [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["two\nlines", "tab\t", "\x7f", "\udce9"])
def test_a_name_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with refusal(Unquotable, text=str(tmp_path / name)) as refused:
        EmbeddedServer(tmp_path / name, BusConfig()).start()
    assert refused.value.exit_code == exit_codes.CONFIG
    for setting in ("tls_cert", "tls_key", "tls_ca"):
        with refusal(ValueError, place=setting):
            BusConfig(**{"tls_cert": "c", "tls_key": "k", setting: name})  # type: ignore[arg-type]


@settings(max_examples=examples(5))
@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"])), min_size=20, max_size=60), st.data())
def test_a_server_reads_the_texts_that_were_written(texts: list[str], data: st.DataObject) -> None:
    special = st.text(st.sampled_from("\\\"'$#{}[](),:;=/*~<x41nu é"))
    texts += data.draw(st.lists(special, min_size=20, max_size=20))
    lines = ["server_metadata {", *(f"  k{number}: {quoted(text)}" for number, text in enumerate(texts)), "}"]
    with TemporaryDirectory() as directory, EmbeddedServer(Path(directory), BusConfig(), extra=lines) as server:
        assert server.monitor.read("varz")["metadata"] == {f"k{number}": text for number, text in enumerate(texts)}


def test_before_the_start_it_has_no_url(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="not started yet"):
        _ = EmbeddedServer(tmp_path, BusConfig()).url


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_it_listens_at_an_ipv6_address(tmp_path: Path, host: str) -> None:
    with EmbeddedServer(tmp_path, BusConfig(host=host)) as server:
        assert server.url.startswith("nats://[::1]:")
        socket.create_connection(("::1", int(server.url.rsplit(":", 1)[1])), timeout=5).close()
        url = server.url
        server.kill()
        assert server.start() == url
