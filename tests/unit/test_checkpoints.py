"""Checkpoint directories: whole or not there, every byte accounted for."""

import hashlib
import json
import logging
import re
from pathlib import Path

import pytest
import torch

from tests.refusals import refusal
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.disk import Checkpoint
from tidemill.learner.checkpoints.manifest import BLOCK_BYTES, CheckpointManifest
from tidemill.learner.errors import CheckpointCorrupt
from tidemill.learner.trainer.checkpoint_facts import read_facts


def write(root: Path, step: int, epoch: int = 1) -> Path:
    tmp = disk.staging(root, step=step, epoch=epoch)
    (tmp / "rank-0").mkdir()
    (tmp / "rank-0" / "model.bin").write_bytes(b"m" * 1000)
    (tmp / "rank-1.bin").write_bytes(b"")
    return disk.commit(tmp, b"state %d" % step, extra={"world": 2})


def test_commit_renames_a_whole_directory(tmp_path: Path) -> None:
    path = write(tmp_path, 20)
    assert path == tmp_path / "step-20-epoch-1"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert disk.verify(path) == {"world": 2}
    assert disk.read_state(path) == b"state 20"
    assert disk.named(path) == Checkpoint(step=20, epoch=1, path=path)


def test_staging_begins_empty(tmp_path: Path) -> None:
    (disk.staging(tmp_path, step=1, epoch=1) / "left over").write_bytes(b"x")
    assert list(disk.staging(tmp_path, step=1, epoch=1).iterdir()) == []


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(FileExistsError, match="step-1-epoch-1"):
        write(tmp_path, 1)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (lambda path: (path / "rank-0" / "model.bin").write_bytes(b"m" * 999 + b"n"), "rank-0/model.bin"),
        (lambda path: (path / "rank-0" / "model.bin").write_bytes(b"m" * 999), "rank-0/model.bin"),
        (lambda path: (path / "rank-1.bin").unlink(), "rank-1.bin"),
        (lambda path: (path / "state.msgpack").write_bytes(b"state 21"), "state.msgpack"),
        (lambda path: (path / "rank-2.bin").write_bytes(b"?"), "rank-2.bin"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json"),
        (
            lambda path: (path / "manifest.json").write_text(json.dumps({"schema": 1, "files": {}, "extra": {}})),
            "manifest.json",
        ),
    ],
)
def test_verify_names_the_first_bad_file(tmp_path: Path, damage: object, file: str) -> None:
    path = write(tmp_path, 20)
    damage(path)  # type: ignore[operator]
    with pytest.raises(CheckpointCorrupt) as caught:
        disk.verify(path)
    assert (caught.value.directory, caught.value.file) == (str(path), file)


def test_latest_valid_passes_over_corrupt_ones_and_logs_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    (new / "rank-1.bin").write_bytes(b"x")
    with caplog.at_level(logging.ERROR):
        found, corrupt = disk.latest_valid([tmp_path / "step-3-epoch-1", new, old])
    assert found == old and {path: error.file for path, error in corrupt.items()} == {
        tmp_path / "step-3-epoch-1": "manifest.json",
        new: "rank-1.bin",
    }
    assert caplog.text.count("CORRUPT") == 2
    assert disk.latest_valid([new])[0] is None


def test_a_corrupt_one_set_aside_is_none_any_more(tmp_path: Path) -> None:
    """It is not listed, so nothing is kept for it in place of a sound one, but it stays on disk. A missing one is no
    error.
    """
    old, new = write(tmp_path, 1), write(tmp_path, 2)
    for _ in range(2):  # the second time there is nothing to set aside
        disk.set_aside(new)
        assert [one.path for one in disk.listed(tmp_path)] == [old]
    write(tmp_path, 2, epoch=2)
    disk.prune(tmp_path, keep=2, latest=disk.named(tmp_path / "step-2-epoch-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-1-epoch-1",
        "step-2-epoch-1.corrupt",
        "step-2-epoch-2",
    ]


@pytest.mark.parametrize("name", ["state.msgpack", "manifest.json"])
def test_every_flipped_byte_and_every_lost_end_is_noticed(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, 20) / name
    whole = file.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole[:place]):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointCorrupt):
                disk.verify(tmp_path / "step-20-epoch-1")
    file.write_bytes(whole)
    disk.verify(tmp_path / "step-20-epoch-1")


def test_an_empty_directory_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "step-3-epoch-1").mkdir()
    with refusal(CheckpointCorrupt, file="manifest.json", got="no such file"):
        disk.verify(tmp_path / "step-3-epoch-1")


def test_listed_is_newest_first_and_leaves_out_what_is_not_whole(tmp_path: Path) -> None:
    for step, epoch in ((9, 1), (10, 1), (10, 2)):
        write(tmp_path, step, epoch)
    disk.staging(tmp_path, step=11, epoch=2)
    (tmp_path / "step-x").mkdir()
    assert [(one.step, one.epoch) for one in disk.listed(tmp_path)] == [(10, 2), (10, 1), (9, 1)]


def test_prune_keeps_the_newest_up_to_the_latest(tmp_path: Path) -> None:
    """Epoch 1 had written step 8 when it was killed, without committing it; epoch 2 has already written 6."""
    for step, epoch in ((2, 1), (4, 1), (8, 1), (5, 2), (6, 2)):
        write(tmp_path, step, epoch)
    disk.staging(tmp_path, step=9, epoch=1)
    disk.staging(tmp_path, step=7, epoch=2)
    latest = disk.named(tmp_path / "step-5-epoch-2")
    kept = disk.prune(tmp_path, keep=2, latest=latest)
    assert [(one.step, one.epoch) for one in kept] == [(5, 2), (4, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-4-epoch-1",
        "step-5-epoch-2",
        "step-6-epoch-2",
        "step-7-epoch-2.tmp",
    ]


def test_prune_spares_what_is_kept_for_its_score(tmp_path: Path) -> None:
    for step, epoch in ((2, 1), (4, 1), (5, 1), (9, 1), (6, 2), (7, 2)):
        write(tmp_path, step, epoch)
    spared = ["step-2-epoch-1", "step-9-epoch-1", "step-7-epoch-2"]
    kept = disk.prune(tmp_path, keep=2, latest=disk.named(tmp_path / "step-7-epoch-2"), spared=spared)
    assert [one.step for one in kept] == [7, 6], "the streams are trimmed to the oldest of these"
    assert [one.step for one in disk.listed(tmp_path)] == [7, 6, 2], "step 9 was never committed"


def test_a_strange_name_is_no_checkpoint(tmp_path: Path) -> None:
    with refusal(ValueError, place=re.compile(r"final$")):
        disk.named(tmp_path / "final")


def test_a_checkpoint_of_an_older_release_is_read(tmp_path: Path) -> None:
    """The manifest of an older release has neither blocks nor holders."""
    path = write(tmp_path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    for entry in manifest["files"].values():
        del entry["blocks"], entry["holders"]
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal}))
    assert disk.verify(path) == {"world": 2}
    assert disk.held(path).keys() == {"rank-0/model.bin", "rank-1.bin", "state.msgpack"}


def test_held_are_the_files_that_are_here(tmp_path: Path) -> None:
    path = write(tmp_path, 20)
    (path / "rank-1.bin").unlink()
    (path / "rank-0" / "model.bin").write_bytes(b"cut")
    assert disk.held(path).keys() == {"state.msgpack"}


def test_files_of_other_nodes_may_be_missing(tmp_path: Path) -> None:
    """For readers of the data's state; the metadata and this node's files may not."""
    tmp = disk.staging(tmp_path, step=2, epoch=1)
    names = ["__0_0.distcp", "__1_0.distcp", *sorted(manifests.METADATA)]
    for name in names:
        (tmp / name).write_bytes(name.encode())
    files = {
        name: entry.written_by([1] if name == "__1_0.distcp" else [0])
        for name, entry in disk.digest(tmp, names).items()
    }
    disk.write_manifest(tmp, CheckpointManifest(files=files, extra={}).encode())
    path = disk.publish(tmp)
    assert disk.is_spread(path) and not disk.is_spread(write(tmp_path, 3))
    (path / "__1_0.distcp").unlink()
    assert disk.verify(path, partly=True) == {}
    with refusal(CheckpointCorrupt, got="no such file"):
        disk.verify(path)
    for name in ("__0_0.distcp", ".metadata"):
        (path / name).rename(tmp_path / "aside")
        with refusal(CheckpointCorrupt, got="no such file"):
            disk.verify(path, partly=True, stored=name == ".metadata")
        if name != ".metadata":
            disk.verify(path, stored=True)
        (tmp_path / "aside").rename(path / name)


def test_blocks_are_digested_as_the_file_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * (BLOCK_BYTES // 256) + b"more"
    (tmp_path / "file").write_bytes(content)
    entry = manifests.digested(tmp_path / "file")
    assert (entry.size, entry.sha256) == (BLOCK_BYTES + 4, hashlib.sha256(content).hexdigest())
    assert entry.blocks == tuple(hashlib.sha256(part).hexdigest() for part in (content[:BLOCK_BYTES], b"more"))


GOOD = {"size": 5, "sha256": "0" * 64, "blocks": ["0" * 64], "holders": [0]}


@pytest.mark.parametrize(
    "files",
    [
        {"../../outside": GOOD},
        {"/etc/passwd": GOOD},
        {"": GOOD},
        {"a\0b": GOOD},
        {"a": None},
        {"a": GOOD | {"size": -1}},
        {"a": GOOD | {"size": True}},
        {"a": GOOD | {"sha256": "0" * 63}},
        {"a": GOOD | {"sha256": None}},
        {"a": GOOD | {"blocks": []} | {"blocks": ["0" * 64, "0" * 64]}},
        {"a": GOOD | {"blocks": ["x"]}},
        {"a": GOOD | {"blocks": {}, "size": 0} | {"blocks": {"0": 1}}},
        {"a": GOOD | {"holders": [-1]}},
        {"a": GOOD | {"holders": "0"}},
        [],
    ],
)
def test_a_sealed_manifest_of_another_shape_is_refused(files: object) -> None:
    """The seal is no proof of origin: a manifest comes from other nodes as well."""
    content = {"schema": 2, "extra": {}, "files": files}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    with pytest.raises(CheckpointCorrupt):
        CheckpointManifest.parse("there", json.dumps(content | {"sha256": seal}).encode())
    good = {"schema": 2, "extra": {}, "files": {"a": GOOD}}
    seal = hashlib.sha256(json.dumps(good, sort_keys=True).encode()).hexdigest()
    assert CheckpointManifest.parse("there", json.dumps(good | {"sha256": seal}).encode()).files["a"].holders == (0,)


class _Code:
    """Touches a file when it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_code_in_the_facts_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save({"facts": {"step": 3, "numbers": {"a": 1.0}, "world": 2}}, tmp_path / "common.pt")
    assert read_facts(tmp_path)["step"] == 3
    torch.save({"facts": {"step": _Code(tmp_path / "ran")}}, tmp_path / "common.pt")
    with refusal(CheckpointCorrupt, file="common.pt"):
        read_facts(tmp_path)
    assert not (tmp_path / "ran").exists()
