"""Checks that query a server, and settings that a process without a file changes: with a real nats-server."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bus_fixtures import BusOpener
from tests.check_kit import write_run
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.launch.checks import servers
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.run.workers import LocalSettings, config_on_bus
from tidemill.launch.settings.config_loader import changes, load, to_map


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "ANSWER_S", 60.0)


def reached(tmp_path: Path, url: str) -> Report:
    return check(load(write_run(tmp_path), [f"bus.url={url}"]), Purpose(uses_bus=True))


@contextmanager
def answering(line: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers one connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(line)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"nats://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def info(**fields: Any) -> bytes:
    return b"INFO " + json.dumps({"version": "2.11.0", "jetstream": True, **fields}).encode() + b"\r\n"


def test_a_usable_server_is_found(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    report = reached(tmp_path, f"nats://127.0.0.1:1,{nats_server.url}")
    assert not report.errors
    assert any("with JetStream" in finding.text for finding in report.findings)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (info(version="2.9.25"), "want nats-server >= 2.10, got 2.9.25"),
        (info(jetstream=False), "want a nats-server with JetStream"),
        (info(max_payload=1100), "max_payload of nats://127.0.0.1:"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no nats-server answers there"),
        (b"INFO {\r\n", "want a nats-server that can be reached"),
        (b"INFO 3\r\n", "no nats-server answers there"),
    ],
    ids=["old", "no-jetstream", "small-messages", "http", "half", "number"],
)
def test_an_unusable_server_is_an_error(tmp_path: Path, line: bytes, complaint: str) -> None:
    with answering(line) as url:
        (error,) = reached(tmp_path, url).errors
    assert complaint in error.text


def test_no_server_is_an_error_where_one_is_needed_at_once(tmp_path: Path) -> None:
    (error,) = reached(tmp_path, "nats://127.0.0.1:1").errors
    assert "want a nats-server that can be reached, got nats://127.0.0.1:1: " in error.text
    assert not check(load(write_run(tmp_path), ["bus.url=nats://127.0.0.1:1"]), Purpose()).errors


async def test_a_process_that_knows_only_the_bus_takes_set_and_environment(
    tmp_path: Path, open_bus: BusOpener, nats_server: EmbeddedServer
) -> None:
    environment = {"TIDEMILL_ENGINE__MAX_RUNNING": "3"}
    async with open_bus() as bus:
        await bus.rows("run").put("config", to_map(load(write_run(tmp_path), [f"run={bus.run}"]).config))
        found = await config_on_bus(
            bus.run,
            nats_server.url,
            "engine",
            "e",
            asyncio.Event(),
            LocalSettings(changed=changes(["engine.dtype=bfloat16"], environment)),
        )
    assert found is not None
    assert (found.engine.dtype, found.engine.max_running, found.actor.reward) == ("bfloat16", 3, "exact")
