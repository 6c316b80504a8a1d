"""The decision on restarts of servers that store nothing: after an error, with room, and ever more seldom."""

import errno
import os
from pathlib import Path

import pytest

from tests.small_disk import small_disk
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import ServerFailed
from tidemill.bus.server.embedded_bus import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreKeeper
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.system import files
from tidemill.bus.system.files import lacking

NO_END = 1 << 62
"""Bytes that no disk has."""


class FakeServer(EmbeddedServer):
    """A server without a process, which the test breaks and ends."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, BusConfig())
        self.fault, self.up, self.restarts, self.monitor = "", True, 0, self
        self.fails = False

    @property
    def running(self) -> bool:
        return self.up

    @property
    def pid(self) -> int:
        return 77

    def write_fault(self) -> str:
        return self.fault

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def restart(self) -> None:
        if self.fails:
            raise ServerFailed("ended with 1 while starting")
        self.up, self.restarts = True, self.restarts + 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def kept(directory: Path, need_bytes: int = 1) -> tuple[FakeServer, StoreKeeper, Clock]:
    server, clock = FakeServer(directory), Clock()
    return server, StoreKeeper([server], need_bytes, clock=clock), clock


def look(keeper: StoreKeeper, clock: Clock, *, seconds: float) -> None:
    """Look every second for so long."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        keeper.look()


def test_a_server_that_stores_is_left_alone(tmp_path: Path) -> None:
    server, keeper, clock = kept(tmp_path, NO_END)
    look(keeper, clock, seconds=100)
    assert (server.restarts, keeper.reason) == (0, ""), "a disk without room alone is no reason"


def test_without_room_there_is_no_restart_and_with_room_one(tmp_path: Path) -> None:
    server, keeper, clock = kept(tmp_path, NO_END)
    server.fault = "write error: no space left on device"
    look(keeper, clock, seconds=1000)
    assert server.restarts == 0 and keeper.reason.startswith("no room: "), keeper.reason
    assert f"free on the disk of {tmp_path}" in keeper.reason
    server.fault, keeper.need_bytes = "", 1
    look(keeper, clock, seconds=100)
    assert (server.restarts, keeper.reason) == (1, ""), "the error is remembered until the restart"


def test_restarts_that_cure_nothing_become_seldom(tmp_path: Path) -> None:
    server, keeper, clock = kept(tmp_path)
    server.fault = "write error: input/output error"
    look(keeper, clock, seconds=60)
    assert 4 <= server.restarts <= 7
    before = server.restarts
    look(keeper, clock, seconds=10 * LONGEST_PAUSE_S)
    assert 9 <= server.restarts - before <= 11, "one a minute"
    assert keeper.reason == "" or "input/output error; nats-server is started again in " in keeper.reason
    server.fault = ""
    look(keeper, clock, seconds=4 * LONGEST_PAUSE_S)
    assert keeper.reason == ""
    before, server.fault = server.restarts, "write error: again"
    look(keeper, clock, seconds=2 + 2 * FIRST_PAUSE_S)
    assert server.restarts - before >= 2, "after a while without errors the first pause again"


def test_one_that_has_ended_is_started_at_once_with_room_alone(tmp_path: Path) -> None:
    server, keeper, _ = kept(tmp_path, NO_END)
    server.up = False
    keeper.look()
    assert not server.up and keeper.reason.startswith("no room: ")
    keeper.need_bytes = 1
    keeper.look()
    assert server.up and keeper.reason == ""
    assert (keeper.restarts, keeper.last_restart) == (1, "nats-server (process 77) ended and is started again")
    server.up, server.fails = False, True
    with pytest.raises(ServerFailed, match="while starting"):
        keeper.look()


def test_the_directory_of_a_store_that_is_not_made_yet_counts_as_its_parent(tmp_path: Path) -> None:
    assert lacking(tmp_path / "a/b/c", 1) == ""
    reason = lacking(tmp_path / "a/b/c", NO_END)
    assert (
        reason.startswith("no room: ") and f" MB free on the disk of {tmp_path}, want " in reason and " free " in reason
    )


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ("ro", "no file can be written in {}: Read-only file system"),
        ("nr_inodes=1", "no room: no file can be written in {}: no inodes free"),
    ],
    ids=["read-only", "inodes"],
)
def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path, options: str, cause: str) -> None:
    with small_disk(tmp_path / "disk", size_bytes=10_000_000, options=options) as disk:
        assert lacking(disk.root, 1) == f"{cause.format(disk.root)}"


def test_a_quota_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    assert lacking(tmp_path, 1) == f"no room: no file can be written in {tmp_path}: Disk quota exceeded"
