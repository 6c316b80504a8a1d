"""Checkpoints in an object store: uploaded beside the training, counted when they are there, fetched by nodes without
them, removed.
"""

import asyncio
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests import flaky_store
from tests.bus_fixtures import BusOpener
from tests.flaky_store import URL, FlakyFileSystem
from tests.integration import test_feeder
from tests.integration.test_checkpoint_copies import NEWEST, write
from tests.integration.test_feeder import OpenWorld
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.bus.streams.bus import Bus
from tidemill.bus.system.coroutines import beside
from tidemill.bus.wire.messages import Done
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, METADATA, STATE
from tidemill.learner.checkpoints.object_store import OWNER, ObjectStore
from tidemill.learner.checkpoints.remote_files import PeerClient
from tidemill.learner.checkpoints.store_uploads import Uploads, identity_of, survey, uploaded
from tidemill.learner.errors import ConfigRefused, NoCheckpoint, StoreFailed
from tidemill.learner.feed.copies import Copies
from tidemill.learner.settings.config import MOST_PENDING, CheckpointConfig

flaky = flaky_store.flaky
open_world = test_feeder.open_world
RUN = "digits"
OLDER = "step-2-epoch-1"


def uploads(bus: Bus, root: Path, *, node: int = 0, keep: int = 2) -> Uploads:
    return Uploads(bus, root, ObjectStore(URL, RUN), node=node, keep=keep)


def copies(bus: Bus, root: Path, *, num_nodes: int = 1) -> Copies:
    return Copies(bus, root, num_nodes=num_nodes, store=ObjectStore(URL, RUN), ask_s=0.0)


def row(root: Path, name: str = NEWEST) -> dict[str, Any]:
    """Return the row of the latest checkpoint, as the feeder writes it."""
    one = disk.named(root / name)
    digests = disk.digests_of(root, [other.path.name for other in disk.listed(root)])
    return {
        "directory": f"/elsewhere/{name}",
        "step": one.step,
        "epoch": one.epoch,
        "manifest": digests[name],
        "manifests": digests,
    }


def fail(flaky: type[FlakyFileSystem], *verbs: str) -> None:
    flaky.fails = staticmethod(lambda verb, path: verb in verbs)


def uploaded_files(flaky: type[FlakyFileSystem]) -> list[str]:
    """Return the files of checkpoints in the order in which they were stored, or were asked to be."""
    return [
        path.removeprefix(f"{RUN}/")
        for verb, path in flaky.done
        if verb in ("upload", "write") and not path.endswith(OWNER)
    ]


async def until(bus: Bus, key: str, found: Any) -> None:
    """Wait until a row fulfils a condition."""
    async with asyncio.timeout(LIMIT_S):
        async for read in bus.rows("run").watch(key):
            if read is not None and found(read[0]):
                return


async def test_the_manifest_comes_last_and_makes_it_the_latest(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    async with open_bus() as bus:
        write([tmp_path], 4)
        waiting = asyncio.create_task(copies(bus, tmp_path).wait(lambda: [tmp_path / NEWEST]))
        files = manifests.read(tmp_path / NEWEST).files
        lacks = await copies(bus, tmp_path).lacks(tmp_path / NEWEST)
        assert lacks == f"{NEWEST} to be uploaded to {URL}/{RUN}: 0 of {len(files)} files are there"
        await uploads(bus, tmp_path).look()
        assert uploaded_files(flaky) == [*(f"{NEWEST}/{file}" for file in sorted(files)), f"{NEWEST}/{MANIFEST}"]
        await asyncio.wait_for(waiting, LIMIT_S)
        assert await copies(bus, tmp_path).lacks(tmp_path / NEWEST) == ""


async def test_node_0_completes_what_all_nodes_have_uploaded(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    roots = [tmp_path / "node-0", tmp_path / "node-1"]
    async with open_bus() as bus:
        write(roots, 4)
        first, second = (uploads(bus, root, node=node) for node, root in enumerate(roots))
        await first.look()
        assert survey(ObjectStore(URL, RUN)) == ({}, {NEWEST}) and not (await uploaded(bus))[0].trouble
        await second.look()
        assert not (await uploaded(bus))[1].whole and (await uploaded(bus))[1].files == {NEWEST: ["__1_0.distcp"]}
        await first.look()
        assert (await uploaded(bus))[0].whole.keys() == {NEWEST}
        assert uploaded_files(flaky).count(f"{NEWEST}/common.pt") == 1, "node 0 alone uploads the metadata"
        await second.look()
        assert len(uploaded_files(flaky)) == len(manifests.read(roots[0] / NEWEST).files) + 1, (
            "nothing is uploaded twice"
        )


async def test_files_without_their_manifest_do_not_count(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """The upload has stopped before the manifest; the next process stores the files again, and completes the
    checkpoint.
    """
    async with open_bus() as bus:
        write([tmp_path], 4)
        flaky.fails = staticmethod(lambda verb, path: verb == "write" and path.endswith(MANIFEST))
        await uploads(bus, tmp_path).look()
        assert not (await uploaded(bus))[0].whole
        with refusal(
            NoCheckpoint,
            directory=re.compile(re.escape(f"{tmp_path / 'empty'}, ")),
            reason=re.compile(r"\bmanifest\.json\b"),
        ):
            await copies(bus, tmp_path / "empty").whole(row(tmp_path))
        fail(flaky)
        await uploads(bus, tmp_path).look()
        assert (await uploaded(bus))[0].whole.keys() == {NEWEST}
        assert uploaded_files(flaky).count(f"{NEWEST}/__0_0.distcp") == 2


async def test_an_outage_ends_nothing_and_is_reported(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with open_bus() as bus:
        write([tmp_path], 4)
        fail(flaky, "upload")
        waiting = asyncio.create_task(copies(bus, tmp_path).wait(lambda: [tmp_path / NEWEST]))
        async with beside(uploads(bus, tmp_path).run()):
            await until(bus, "stored.0", lambda found: found["trouble"])
            lacks = await copies(bus, tmp_path).lacks(tmp_path / NEWEST)
            assert lacks.endswith(
                "files are there; node 0: flaky://bucket/path/digits: RuntimeError: 503 for "
                "https://store.example/bucket/object?***"
            )
            assert not waiting.done()
            fail(flaky)
            await asyncio.wait_for(waiting, LIMIT_S)
            await until(bus, "stored.0", lambda found: not found["trouble"])
        assert caplog.text.count("checkpoints are not uploaded, trying again") == 1, "a reason is logged once"
        assert "checkpoints are uploaded again" in caplog.text and "5ec7e7" not in caplog.text


async def test_a_damaged_file_is_not_uploaded_and_holds_up_no_other(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    async with open_bus() as bus:
        write([tmp_path], 2)
        write([tmp_path], 4)
        damaged = tmp_path / OLDER / "__0_0.distcp"
        damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
        await uploads(bus, tmp_path).look()
        found = (await uploaded(bus))[0]
        assert found.trouble.startswith(f"{tmp_path}/{OLDER}/__0_0.distcp: want sha256")
        assert f"{OLDER}/__0_0.distcp" not in uploaded_files(flaky)
        assert [name for name, one in survey(ObjectStore(URL, RUN))[0].items() if one.is_whole] == [NEWEST]


async def test_a_file_that_was_stored_in_part_is_stored_again(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """The store has taken the file, and lists another size: the checkpoint is not complete, whatever the upload has
    returned.
    """
    store = ObjectStore(URL, RUN)
    (tmp_path / "cut").write_bytes(b"cut")
    async with open_bus() as bus:
        roots = [tmp_path / "node-0", tmp_path / "node-1"]
        write(roots, 4)
        first, second = (uploads(bus, root, node=node) for node, root in enumerate(roots))
        await first.look()
        await second.look()
        store.upload(NEWEST, "__0_0.distcp", tmp_path / "cut")
        await first.look()
        assert "after the upload" in (await uploaded(bus))[0].trouble and not survey(store)[0]
        await first.look()
        assert survey(store)[0][NEWEST].is_whole and not (await uploaded(bus))[0].trouble


async def test_each_node_sees_what_the_store_has_of_its_files(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """The store takes a file of node 1 and does not have it: node 1 does not count it, and stores it again."""
    roots = [tmp_path / "node-0", tmp_path / "node-1"]
    async with open_bus() as bus:
        write(roots, 4)
        second = uploads(bus, roots[1], node=1)
        await uploads(bus, roots[0]).look()
        flaky.loses = "__1_0.distcp"
        await second.look()
        found = (await uploaded(bus))[1]
        assert found.files == {NEWEST: []} and found.trouble.endswith("bytes, got no after the upload")
        flaky.loses = ""
        await second.look()
        assert (await uploaded(bus))[1].files == {NEWEST: ["__1_0.distcp"]}


async def test_a_file_of_another_node_that_the_store_loses_is_uploaded_again(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """Node 1 believes that it is there; node 0 does not find it, says so in its row, and completes another checkpoint
    meanwhile.
    """
    roots = [tmp_path / "node-0", tmp_path / "node-1"]
    async with open_bus() as bus:
        for step in (2, 4):
            write(roots, step)
        first, second = (uploads(bus, root, node=node) for node, root in enumerate(roots))
        await first.look()
        await second.look()
        del flaky.store[f"/bucket/path/{RUN}/{OLDER}/__1_0.distcp"]
        await first.look()
        found = (await uploaded(bus))[0]
        assert found.lacking == {OLDER: ["__1_0.distcp"]} and found.whole.keys() == {NEWEST}
        assert found.trouble.endswith(f"{OLDER}/__1_0.distcp: want 11000 bytes, got no after the upload")
        await second.look()
        await first.look()
        found = (await uploaded(bus))[0]
        assert found.whole.keys() == {OLDER, NEWEST} and not found.lacking and not found.trouble
        await second.look()
        assert [uploaded_files(flaky).count(f"{name}/__1_0.distcp") for name in (OLDER, NEWEST)] == [2, 1]


async def test_an_upload_that_waits_for_another_node_is_not_removed(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """It is before the latest one, and node 1 cannot upload its part."""
    roots = [tmp_path / "node-0", tmp_path / "node-1"]
    async with open_bus() as bus:
        for step in (2, 4):
            write(roots, step)
        (roots[1] / OLDER / "__1_0.distcp").write_bytes(b"rot")
        first, second = (uploads(bus, root, node=node) for node, root in enumerate(roots))
        await first.look()
        await second.look()
        await bus.rows("run").put("checkpoint", row(roots[0]))
        write(roots, 6)
        fail(flaky, "upload")
        await first.look()  # and the store is read again
        fail(flaky)
        for _ in range(2):
            await first.look()
        assert (await uploaded(bus))[0].whole.keys() == {NEWEST}
        assert not [path for verb, path in flaky.done if verb == "remove"]
        assert uploaded_files(flaky).count(f"{OLDER}/common.pt") == 1


async def test_another_checkpoint_of_the_same_name_is_uploaded(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """With a bus from a backup epochs are used again: a name alone does not count, and the pickle of one without a row
    is not fetched.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    async with open_bus() as bus:
        for step in (2, 4):
            write([old], step)
        await uploads(bus, old).look()
        write([new], 1)
        (new / "step-1-epoch-1").rename(new / "other")
        shutil.copytree(old / NEWEST, new / NEWEST)
        shutil.copy(new / "other" / "__0_0.distcp", new / NEWEST)
        files = disk.digest(new / NEWEST, list(disk.held(old / NEWEST)))
        disk.write_manifest(new / NEWEST, manifests.CheckpointManifest(files=files, extra={}).encode())
        waits, uploading = copies(bus, new), uploads(bus, new)
        assert "to be uploaded" in await waits.lacks(new / NEWEST)
        flaky.fails = staticmethod(lambda verb, path: verb == "upload" and path.endswith(".metadata"))
        await uploading.look()
        assert survey(ObjectStore(URL, RUN))[1] == {NEWEST}, "in part replaced, it does not count"
        fail(flaky)
        await uploading.look()
        assert await waits.lacks(new / NEWEST) == ""
        assert survey(ObjectStore(URL, RUN))[0][NEWEST].digest == disk.manifest_digest(new / NEWEST)
        assert not (new / OLDER).exists(), "the row does not name it"


async def test_the_store_keeps_what_the_run_keeps(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """Also the ones spared for their score; those that were never completed go; a newer one, which is being uploaded,
    stays.
    """
    store = ObjectStore(URL, RUN)
    async with open_bus() as bus:
        for step in (1, 2, 3, 4, 5):
            write([tmp_path], step)
        uploading = uploads(bus, tmp_path)
        await uploading.look()
        await bus.rows("run").put("checkpoint", row(tmp_path) | {"kept": ["step-1-epoch-1"]})
        (tmp_path / "left").write_bytes(b"left over")
        store.upload("step-3-epoch-0", "common.pt", tmp_path / "left")
        store.upload("step-6-epoch-1", "common.pt", tmp_path / "left")
        store.upload("notes", "todo.txt", tmp_path / "left")
        await uploads(bus, tmp_path).look()
        assert sorted(store.listing()) == [
            "notes",
            "step-1-epoch-1",
            "step-3-epoch-1",
            NEWEST,
            "step-5-epoch-1",
            "step-6-epoch-1",
        ]


async def test_a_node_without_its_disk_goes_on_from_the_store(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    root, empty = tmp_path / "root", tmp_path / "empty"
    async with open_bus() as bus:
        write([root], 2)
        write([root], 4)
        await uploads(bus, root).look()
        saved = row(root) | {"kept": [OLDER]}
        found = await copies(bus, empty).whole(saved)
        assert found == empty / NEWEST and disk.held(found).keys() == METADATA, "ranks read the rest, range by range"
        assert disk.held(empty / OLDER).keys() == METADATA
        await uploads(bus, empty).look()
        assert not (await uploaded(bus))[0].trouble, "what came back from the store is not uploaded again"
        await bus.rows("run").put("checkpoint", saved)
        await uploads(bus, tmp_path / "third").look()
        assert disk.held(tmp_path / "third" / OLDER).keys() == METADATA, (
            "the feeder trims the streams by the oldest one's state"
        )


async def test_a_truncated_checkpoint_is_passed_over(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, empty = tmp_path / "root", tmp_path / "empty"
    async with open_bus() as bus:
        write([root], 2)
        write([root], 4)
        await uploads(bus, root).look()
        (tmp_path / "cut").write_bytes(b"cut")
        ObjectStore(URL, RUN).upload(NEWEST, "__0_0.distcp", tmp_path / "cut")
        remote_files.complete(empty / NEWEST, PeerClient((), ObjectStore(URL, RUN)))
        assert await copies(bus, empty).whole(row(root)) == empty / OLDER
        await uploads(bus, empty).look()
        assert not (await uploaded(bus))[0].trouble, "no file is missed on a disk that has the metadata alone"
        assert f"{NEWEST}: neither a living node nor the store has __0_0.distcp" in caplog.text


async def test_a_checkpoint_that_the_row_does_not_name_is_not_used(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One under the name of the latest with another manifest, and one with a name that the row lacks: the files may be
    anyone's.
    """
    root, foreign = tmp_path / "root", tmp_path / "foreign"
    async with open_bus() as bus:
        write([root], 4)
        shutil.copytree(root / NEWEST, foreign / NEWEST)
        shutil.rmtree(root)
        for step in (3, 4):
            write([root], step)
        saved = row(root)
        saved = saved | {"manifest": disk.digests_of(foreign, [NEWEST])[NEWEST][::-1], "manifests": {}}
        await uploads(bus, root).look()
        with pytest.raises(NoCheckpoint):
            await copies(bus, tmp_path / "empty").whole(saved)
        assert "checkpoint in the store is of another run" in caplog.text
        assert f"checkpoint {URL}/{RUN}/step-3-epoch-1 is not used: the run's row does not name it" in caplog.text


async def test_a_store_that_does_not_answer_is_not_lost(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """With the latest checkpoint on the disk the run goes on without it; without one no older checkpoint is taken
    instead.
    """
    root = tmp_path / "root"
    async with open_bus() as bus:
        write([root], 4)
        await uploads(bus, root).look()
        fail(flaky, "find", "read", "write")
        await copies(bus, root).claim(is_new=False)
        assert await copies(bus, root).whole(row(root)) == root / NEWEST
        with pytest.raises(StoreFailed, match="503"):
            await copies(bus, tmp_path / "empty").whole(row(root))
        with pytest.raises(StoreFailed, match="503"):
            await copies(bus, root).claim(is_new=True)


async def test_a_store_that_hangs_is_reported(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """As a directory of NFS whose server is away: uploads wait with a row, a start goes on with the disk, or fails
    behind its deadline.
    """
    hangs = threading.Event()
    async with open_bus() as bus:
        write([tmp_path], 4)
        await uploads(bus, tmp_path).look()
        flaky.fails = staticmethod(lambda verb, path: hangs.wait(60))
        waits = Copies(bus, tmp_path, num_nodes=1, store=ObjectStore(URL, RUN), ask_s=0.0, silence_s=0.01)
        try:
            async with asyncio.timeout(LIMIT_S):
                await waits.claim(is_new=False)
                assert await waits.whole(row(tmp_path)) == tmp_path / NEWEST and waits.waits_for == ""
                with refusal(StoreFailed, reason=re.compile(r"\b0 s$")):
                    await waits.claim(is_new=True)
            hanging = Uploads(bus, tmp_path, ObjectStore(URL, RUN), keep=2, silence_s=0.01)
            async with beside(hanging.run()):
                await until(bus, "stored.0", lambda found: "digits: no answer for " in found["trouble"])
                hangs.set()
                fail(flaky)
                await until(bus, "stored.0", lambda found: not found["trouble"])
        finally:
            hangs.set()


async def test_the_store_of_another_run_is_refused(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """Another bus with a run of the same name, as after --fresh: nothing in the store is touched."""
    store = ObjectStore(URL, RUN)
    async with open_bus() as bus:
        write([tmp_path], 4)
        store.claim("another")
        with refusal(ConfigRefused, field="learner.checkpoint.store"):
            await copies(bus, tmp_path).claim(is_new=True)
        await uploads(bus, tmp_path).look()
        assert "give another URL" in (await uploaded(bus))[0].trouble and store.listing() == {}
        flaky.store.clear()
        await copies(bus, tmp_path).claim(is_new=True)
        assert store.owner() == await identity_of(bus)


async def test_a_store_that_has_lost_its_owner_is_not_claimed_again(
    open_bus: BusOpener, flaky: type[FlakyFileSystem], tmp_path: Path
) -> None:
    """The directory that is there when it is not mounted: no process takes it for an empty one, and it is found again
    when it is back.
    """
    root = tmp_path / "root"
    async with open_bus() as bus:
        write([root], 2)
        write([root], 4)
        await uploads(bus, root).look()
        saved, there = row(root), dict(flaky.store)
        flaky.store.clear()
        shutil.rmtree(root / NEWEST)
        with refusal(StoreFailed, reason=re.compile(r"\bhas lost its owner\.json: .*\bstored\.0\b")):
            await copies(bus, root).claim(is_new=True)
        with refusal(StoreFailed, reason=re.compile(r"\bhas no owner\.json\b")):
            await copies(bus, root).whole(saved)
        for node in (0, 1):
            for _ in range(2):
                await uploads(bus, root, node=node).look()
            assert "has lost its owner.json" in (await uploaded(bus))[node].trouble
        assert set((await uploaded(bus))[0].whole) == {NEWEST, OLDER} and not flaky.store
        flaky.store.update(there)
        assert await copies(bus, root).whole(saved) == root / NEWEST
        flaky.store.clear()
        elsewhere = Uploads(bus, root, ObjectStore(f"{URL}/another", RUN), keep=2)
        await elsewhere.look()
        assert not (await uploaded(bus))[0].trouble, "a URL that is new is claimed"


async def test_a_store_that_is_away_holds_up_checkpoints_and_no_step(
    open_world: OpenWorld, flaky: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    """Of twelve steps with a checkpoint each, the disk gets a few; when the store is back the last one is the latest,
    and the run ends.
    """
    steps = 12
    async with (
        open_world(steps=steps, checkpoint_every=1, checkpoint=CheckpointConfig(store=URL)) as world,
        world.actors(),
    ):
        fail(flaky, "upload")
        uploading = Uploads(world.bus, world.root, ObjectStore(URL, world.run), keep=2)
        async with beside(uploading.run()), world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            async with asyncio.timeout(LIMIT_S):
                async for _, record in world.bus.plans.follow():
                    if isinstance(record, Done) and record.step == steps:
                        break
            assert await world.bus.rows("run").get("checkpoint") is None
            written = [one.step for one in disk.listed(world.root) if one.step < steps]
            assert MOST_PENDING <= len(written) <= MOST_PENDING + 2, written
            assert re.search(
                r"no checkpoint of step 11, because [23] wait: step-1-epoch-1 to be uploaded to flaky://", caplog.text
            )
            fail(flaky)
            await asyncio.wait_for(asyncio.gather(training, feeding), LIMIT_S)
        row, _ = await world.bus.rows("run").get("checkpoint") or ({}, 0)
        assert row["step"] == steps and set(row["manifests"]) >= {f"step-{steps}-epoch-1"}
        # One may have been written after they were listed; the metadata of one that is in the store may have come back
        # behind its removal.
        newest, *before = [one.step for one in disk.listed(world.root)]
        assert newest == steps and 1 <= len(before) <= 2 and written[0] <= before[0] < steps


@pytest.mark.parametrize("name", [STATE, "another"])
async def test_a_checkpoint_that_cannot_be_uploaded_holds_up_no_newer_one(
    name: str, open_world: OpenWorld, flaky: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    """A file of the first of those that wait is damaged on the disk: a newer one becomes the latest, others are
    written, the run ends.
    """
    steps = 6
    async with (
        open_world(steps=steps, checkpoint_every=1, checkpoint=CheckpointConfig(store=URL)) as world,
        world.actors(),
    ):
        uploading = Uploads(world.bus, world.root, ObjectStore(URL, world.run), keep=2)
        async with world.feeder() as (url, feeding):
            training = asyncio.create_task(world.train(url))
            async with asyncio.timeout(LIMIT_S):
                async for _, record in world.bus.plans.follow():
                    if isinstance(record, Done) and record.step == steps:
                        break
            (damaged,) = [one.path for one in disk.listed(world.root) if one.step == 1]
            file = damaged / (name if name == STATE else sorted(disk.held(damaged).keys() - {STATE})[0])
            file.write_bytes(b"?" + file.read_bytes()[1:])
            async with beside(uploading.run()):
                await asyncio.wait_for(asyncio.gather(training, feeding), LIMIT_S)
        row, _ = await world.bus.rows("run").get("checkpoint") or ({}, 0)
        assert row["step"] == steps
        assert f"checkpoint was overtaken before it had its copies path={damaged}" in caplog.text
