"""`tidemill archive`, a real process on a real stream: every sample once, through kills of all processes; trimming
waits for it.
"""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bus_fixtures import BusOpener
from tests.data_kit import sample, task
from tests.forked import Forked
from tests.launched import tidemill
from tests.waits import until
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import Bus
from tidemill.bus.streams.readers import WAIT, Cursors
from tidemill.launch.cli import archive
from tidemill.launch.samples.recording import Recording, repair


async def publish(bus: Bus, first: int, last: int) -> None:
    of = task(1, run=bus.run)
    for number in range(first, last + 1):
        assert await bus.samples.publish(sample(of, number % of.group_size, attempt=f"n{number}")) == number


@contextlib.asynccontextmanager
async def archiving(url: str, run: str, out: Path, *more: str) -> AsyncIterator[Forked]:
    words = ("archive", "--bus", url, "--run", run, "--out", str(out), *more)
    process = await asyncio.to_thread(tidemill, *words, output=out.parent / "archive.log")
    try:
        yield process
    finally:
        process.kill()
        await process.ended()


def archived(out: Path) -> list[tuple[int, str]]:
    """Return (sequence, message id) of everything, in the order of the files. Asserts that each file is complete."""
    found = []
    for path in sorted(out.glob("*.tide")):
        recording = Recording.open(path)
        here = [(stored.seq, stored.headers["Nats-Msg-Id"]) for stored in recording]
        assert not recording.cut
        assert [(seq, headers["Nats-Msg-Id"]) for seq, _, _, headers in recording.index()] == here
        recording.close()
        found += here
    return found


async def place(bus: Bus, floor: int) -> None:
    """Wait until the archive's cursor has reached ``floor``."""

    async def reached() -> bool:
        at = (await Cursors(bus).all()).get("archive")
        return at is not None and at.floor >= floor

    await until(reached)


async def test_every_sample_is_archived_once_despite_kills(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    out = tmp_path / "archive"
    async with open_bus() as bus:
        await publish(bus, 1, 40)
        for round in range(4):
            async with archiving(nats_server.url, bus.run, out, "--rotate", "0.004") as process:
                await publish(bus, 41 + 40 * round, 80 + 40 * round)
                await place(bus, 30 + 40 * round)
                process.kill()  # between reading, writing, closing, and moving the cursor
        async with archiving(nats_server.url, bus.run, out, "--rotate", "0.004") as process:
            await publish(bus, 201, 210)
            await place(bus, 210)
            process.send_signal(signal.SIGTERM)
            assert await process.ended() == 0
        found = archived(out)
        assert [seq for seq, _ in found] == list(range(1, 211))
        assert found == [(seq, f"1.{seq % 2}.n{seq}") for seq in range(1, 211)]
        assert len(list(out.glob("*.tide"))) > 5, "recordings are closed when they are large enough"


async def test_every_shard_is_archived_once_despite_kills(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Each has a registered reader and a directory of its own, which is an archive like that of one stream."""
    out = tmp_path / "archive"
    seqs = []

    async with open_bus(sample_shards=2) as bus:

        async def published(first: int, last: int) -> None:
            for number in range(first, last + 1):
                of = task(number, run=bus.run)
                seqs.append(await bus.samples.publish(sample(of, 0, attempt=f"n{number}")))

        async def both_at(floor: int) -> bool:
            places = await Cursors(bus).all()
            return len(places) == 2 and all(place.floor >= floor for place in places.values())

        await published(1, 40)
        async with archiving(nats_server.url, bus.run, out, "--rotate", "0.004") as process:
            await until(lambda: both_at(min(seqs)))
            process.kill()
        await published(41, 60)
        async with archiving(nats_server.url, bus.run, out, "--rotate", "0.004") as process:
            await until(lambda: both_at(max(seqs) - 1))
            process.send_signal(signal.SIGTERM)
            assert await process.ended() == 0
        for shard in range(2):
            found = archived(out / f"shard-{shard}of2")
            assert [seq for seq, _ in found] == [seq for seq in seqs if seq % 2 == shard]
        assert set(await Cursors(bus).all()) == {"archive-0of2", "archive-1of2"}


async def test_archived_samples_are_not_written_again_if_the_position_was_not_moved(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The state is that after a kill between the write to disk and the update of the cursor."""
    out = tmp_path / "archive"
    async with open_bus() as bus:
        await publish(bus, 1, 10)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 0
        place, _ = await bus.rows("run").get("cursor.archive") or ({}, 0)
        await bus.rows("run").put("cursor.archive", place | {"floor": 4})
        await publish(bus, 11, 15)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 0
        assert [seq for seq, _ in archived(out)] == list(range(1, 16))
        assert (await Cursors(bus).all())["archive"].floor == 15


async def test_a_bus_that_delivers_late_does_not_end_an_archive_early(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait for a sample is over before one can come."""
    monkeypatch.setattr(archive, "SYNC_EVERY_S", 0.0)
    async with open_bus() as bus:
        await publish(bus, 1, 10)
        words = argparse.Namespace(
            name="archive", out=str(tmp_path), rotate=1.0, policy=WAIT, until_end=True, ended=False
        )
        await archive.archive(nats_server.url, bus.run, words, asyncio.Event())
        assert [seq for seq, _ in archived(tmp_path)] == list(range(1, 11))


async def test_an_archive_that_was_given_up_reports_it_and_continues_only_with_policy_leave(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    out, log = tmp_path / "archive", tmp_path / "archive.log"
    async with open_bus() as bus:
        await publish(bus, 1, 10)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 0, log.read_text()
        assert len(archived(out)) == 10
        await publish(bus, 11, 30)
        await bus.samples.trim(21)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 2
        assert "samples 11 to 20 are missing (--policy leave continues without them)" in log.read_text()
        async with archiving(nats_server.url, bus.run, out, "--until-end", "--policy", "leave") as process:
            assert await process.ended() == 0, log.read_text()
        assert [seq for seq, _ in archived(out)] == [*range(1, 11), *range(21, 31)]


async def test_an_archive_directory_of_another_stream_is_refused(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    out = tmp_path / "archive"
    async with open_bus() as bus, open_bus(run=f"{bus.run}-b") as other:
        await publish(bus, 1, 3)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 0
        async with archiving(nats_server.url, other.run, out, "--until-end") as process:
            assert await process.ended() == 2
        assert f"--out: want a directory for run {other.run}" in (tmp_path / "archive.log").read_text()


@pytest.mark.parametrize("what", ["torn frame", "torn index", "no end", "zeros", "only a head"])
async def test_a_recording_cut_off_by_a_kill_is_repaired(
    open_bus: BusOpener, nats_server: EmbeddedServer, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "archive"
    async with open_bus() as bus:
        await publish(bus, 1, 5)
        async with archiving(nats_server.url, bus.run, out, "--until-end") as process:
            assert await process.ended() == 0
        (path,) = out.glob("*.tide")
        recording = Recording.open(path)
        offsets = [offset for _, offset, _, _ in recording.index()]
        recording.close()
        data = path.read_bytes()
        at = int.from_bytes(data[-16:-8], "little")
        cut, left = {
            "torn frame": (data[: offsets[4] + 7], 4),
            "torn index": (data[: at + 9], 5),
            "no end": (data[:-8], 5),
            "zeros": (data[: offsets[3]] + bytes(100), 3),
            "only a head": (data[: offsets[0]], 0),
        }[what]
        path.write_bytes(cut)
        origin, last = repair(path)
        assert last == left
        assert [seq for seq, _ in archived(out)] == list(range(1, left + 1))
        assert origin is not None
        assert repair(path) == (origin, left) if left else not path.exists()
