"""The store of checkpoints as an object: what it stores, lists, refuses and removes; its URL; and files that are read
from it.
"""

import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from tests import flaky_store
from tests.flaky_store import URL, FlakyFileSystem
from tests.refusals import refusal
from tests.waits import LIMIT_S
from tidemill.learner.checkpoints import disk, remote_files
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, METADATA
from tidemill.learner.checkpoints.object_store import OWNER, ObjectStore, missing_package
from tidemill.learner.checkpoints.remote_files import CheckpointFiles, PeerClient
from tidemill.learner.checkpoints.store_uploads import Silence, in_daemon, survey
from tidemill.learner.errors import CheckpointCorrupt, StoreFailed
from tidemill.learner.settings.config import CheckpointConfig, masked

flaky = flaky_store.flaky
NAME = "step-4-epoch-1"


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    MemoryFileSystem.store.clear()
    (tmp_path / "bucket" / "path").mkdir(parents=True)
    return ObjectStore(
        "memory://bucket/path" if request.param == "memory" else f"file://{tmp_path}/bucket/path/", "digits"
    )


def written(root: Path, step: int = 4) -> Path:
    """Return a checkpoint of one node on the disk."""
    tmp = disk.staging(root, step=step, epoch=1)
    for name in METADATA - {"state.msgpack"}:
        (tmp / name).write_bytes(name.encode())
    (tmp / "__0_0.distcp").write_bytes(bytes(range(256)) * 20_000)  # two blocks
    return disk.commit(tmp, b"state")


def uploaded(store: ObjectStore, path: Path) -> None:
    for file in manifests.read(path).files:
        store.upload(path.name, file, path / file)
    store.complete(path.name, (path / MANIFEST).read_bytes())


def test_what_is_stored_comes_back_and_goes(store: ObjectStore, tmp_path: Path) -> None:
    path = written(tmp_path / "disk")
    assert store.listing() == {}
    uploaded(store, path)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert store.listing() == {NAME: sizes}
    assert store.manifest(NAME) == (path / MANIFEST).read_bytes()
    assert store.read(NAME, "__0_0.distcp", 255, 3) == b"\xff\x00\x01"
    with pytest.raises(FileNotFoundError):
        store.read(NAME, "other", 0, 1)
    store.remove(NAME)
    store.remove(NAME)
    assert store.listing() == {}


def test_a_store_belongs_to_one_run(store: ObjectStore, tmp_path: Path) -> None:
    assert store.claim("mine") == "mine" == store.claim("another's") == store.owner()


@pytest.mark.parametrize("torn", [b"", b'{"run": "mi'])
def test_an_owner_that_was_written_in_part_is_none(store: ObjectStore, tmp_path: Path, torn: bytes) -> None:
    """A process was killed meanwhile. Beside checkpoints it is an unknown run's."""
    store.write(OWNER, torn)
    assert store.owner() == "?" and store.claim("mine") == "mine" == store.owner()
    store.write(OWNER, torn)
    uploaded(store, written(tmp_path / "disk"))
    assert store.claim("another's") == "?"


def test_a_directory_that_is_not_there_is_no_empty_store(tmp_path: Path) -> None:
    """It may be one that is not mounted: nothing is made in its place."""
    store = ObjectStore(f"file://{tmp_path}/not-mounted/sub", "digits")
    for ask in (
        store.owner,
        store.listing,
        store.probe,
        lambda: store.claim("mine"),
        lambda: store.complete(NAME, b""),
    ):
        with refusal(
            StoreFailed, where=re.compile(r"/not-mounted/sub/digits$"), reason=re.compile("/not-mounted/sub;")
        ):
            ask()
    assert not list(tmp_path.iterdir())


def test_a_bucket_that_is_not_found_is_no_empty_store(
    flaky: type[FlakyFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(FlakyFileSystem, "find", lost)
    with refusal(StoreFailed, where="flaky://bucket/path/digits", reason=re.compile("^FileNotFoundError: ")):
        ObjectStore(URL, "digits").claim("mine")


def test_checkpoints_without_an_owner_are_of_another_run(store: ObjectStore, tmp_path: Path) -> None:
    uploaded(store, written(tmp_path / "disk"))
    assert store.claim("mine") == "?" and store.owner() == ""


def test_a_probe_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    store.probe()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and not MemoryFileSystem.store


@pytest.mark.parametrize("verb", ["write", "read", "remove"])
def test_a_probe_that_fails_says_why_without_secrets(flaky: type[FlakyFileSystem], verb: str) -> None:
    flaky.fails = lambda one, path: one == verb
    with pytest.raises(StoreFailed) as failed:
        ObjectStore(URL, "digits").probe()
    assert (
        str(failed.value) == "flaky://bucket/path/digits: RuntimeError: 503 for https://store.example/bucket/object?***"
    )


def test_the_manifest_is_removed_first(flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
    store = ObjectStore(URL, "digits")
    uploaded(store, written(tmp_path))
    flaky.fails = lambda verb, path: verb == "remove" and not path.endswith(MANIFEST)
    with pytest.raises(StoreFailed):
        store.remove(NAME)
    assert survey(store) == ({}, {NAME}), "in part removed, it does not count"


def test_a_bucket_that_is_not_there_is_a_failure(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.upload(NAME, "file", tmp_path / "none")
    with pytest.raises(StoreFailed, match=r"IsADirectoryError|FileNotFoundError|PermissionError|NotADirectoryError"):
        (tmp_path / "file").write_bytes(b"")
        ObjectStore(f"file://{tmp_path}/file", "digits").probe()


def test_a_protocol_without_its_package_names_it() -> None:
    packages = {protocol: entry["class"].partition(".")[0] for protocol, entry in known_implementations.items()}
    protocol, package = next((one, package) for one, package in packages.items() if find_spec(package) is None)
    assert missing_package(f"{protocol}://bucket") == (
        f"no package {package}",
        f"install it on every node (pip install {package})",
    )
    assert missing_package("nonesuch://bucket") == (
        "the protocol nonesuch, which fsspec does not know",
        "use another one",
    )
    assert missing_package("file:///bucket") is None


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"store": "s3"}, "store: want local, shared, or a URL like s3://bucket/path"),
        ({"store": "s3://"}, "or a URL"),
        ({"store": "s3://key:5ec7e7@bucket"}, r"store: want a URL without a password.*got 's3://\*\*\*@bucket'"),
        ({"store": "https://host/x?sig=5ec7e7"}, r"got 'https://host/x\?\*\*\*'"),
        ({"store": "simplecache::s3://bucket"}, "no chain of protocols"),
        ({"store": "s3://bucket/../other"}, "or a URL"),
        ({"store": "file://runs/store"}, "store: want an absolute path of a directory behind file://"),
        ({"store": "file:///"}, "store: want an absolute path of a directory behind file://"),
        ({"store": "s3://key:a/5ec7e7@bucket"}, r"store: want a URL without a password.*got 's3://\*\*\*@bucket'"),
        (
            {"store": "s3://key:a@5ec7e7@bucket/path"},
            r"store: want a URL without a password.*got 's3://\*\*\*@bucket/path'",
        ),
        ({"store": "s3://bucket/run-*"}, "no pattern"),
        ({"store": "s3://bucket/[ab]"}, "no pattern"),
        ({"store": "s3://bucket", "copies": 3}, "copies: want 2 with a URL as store"),
    ],
)
def test_refused_settings(settings: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error) as refused:
        CheckpointConfig(**settings)  # type: ignore[arg-type]
    assert "5ec7e7" not in str(refused.value)


def test_accepted_settings() -> None:
    for url in (
        "s3://bucket/path",
        "gs://bucket",
        "abfs://container@account.dfs.core.windows.net/path",
        "file:///mnt/store",
    ):
        assert CheckpointConfig(store=url).url == url and masked(url) == url
    assert CheckpointConfig().url == "" == CheckpointConfig(store="shared").url


def test_keys_in_an_error_are_masked() -> None:
    text = (
        "DefaultEndpoints=https;AccountKey=5ec7e7==;X=1 X-Amz-Signature=5ec7e7&a=b x-amz-security-token=5ec7e7 "
        "of sftp://a:5ec/7e7@host/x"
    )
    assert masked(text) == (
        "DefaultEndpoints=https;AccountKey=***;X=1 X-Amz-Signature=***&a=b x-amz-security-token=*** of "
        "sftp://***@host/x"
    )


def test_a_user_of_an_address_is_masked_and_a_container_is_none() -> None:
    assert masked("https://sk-Q@h/v1 and https://sk-R@h/a@b, abfs://c@account/x") == (
        "https://***@h/v1 and https://***@h/a@b, abfs://c@account/x"
    )
    assert masked("see 'http://a:p?@w:x@h/x?sig=1' mail me@home a:b@c") == "see 'http://***@h/x?***' mail me@home a:b@c"


@pytest.mark.parametrize("part", ["://", "a://", ":@", "a://:", "Token=", "'", "?", "a://b?"])
def test_a_text_of_any_length_is_masked_in_time(part: str) -> None:
    """With time that grows as the square of the length this would take hours."""
    masked(part * 500_000)


def test_only_whole_checkpoints_count(store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside one that is whole: one without a manifest, one with a damaged manifest, one with a truncated file, and
    foreign objects.
    """
    for step in (2, 4, 6, 8):
        path = written(tmp_path / "disk", step)
        uploaded(store, path)
        cut = tmp_path / "cut"
        cut.write_bytes((path / ("common.pt" if step == 8 else MANIFEST)).read_bytes()[:-1])
        if step == 4:
            store.remove(path.name)
            store.upload(path.name, "common.pt", path / "common.pt")
        elif step == 6:
            store.upload(path.name, MANIFEST, cut)
        elif step == 8:
            store.upload(path.name, "common.pt", cut)
    store.upload("step-10-epoch-1.old", MANIFEST, tmp_path / "cut")
    store.upload("notes", "todo.txt", tmp_path / "cut")
    found, rest = survey(store)
    assert {name: one.is_whole for name, one in found.items()} == {"step-2-epoch-1": True, "step-8-epoch-1": False}
    assert rest == {"step-4-epoch-1", "step-6-epoch-1"}
    assert f"NOT WHOLE: {store.url}/step-8-epoch-1/common.pt: want 9 bytes, got 8 bytes" in caplog.text
    assert f"checkpoint in the store is not used: {store.url}/step-6-epoch-1/manifest.json: want" in caplog.text


def test_files_come_from_the_store_range_by_range(store: ObjectStore, tmp_path: Path) -> None:
    uploaded(store, written(tmp_path / "other"))
    client = PeerClient((), store)
    here = tmp_path / "here" / NAME
    digest = manifests.digest_of((tmp_path / "other" / NAME / MANIFEST).read_bytes())
    assert sorted(remote_files.complete(here, client, sha256=digest)) == sorted(METADATA)
    files = CheckpointFiles(here, manifests.read(here).files, client)
    with files.open("__0_0.distcp") as stream:
        stream.seek(5_000_000)
        assert stream.read(4) == bytes((5_000_000 + offset) % 256 for offset in range(4))
    assert 0 < files.fetched_bytes < 1_000_000, "the second block alone"
    with refusal(
        CheckpointCorrupt, file=MANIFEST, want=re.compile("0" * 64), got=re.compile(r"/digits\) has another one")
    ):
        remote_files.complete(tmp_path / "there" / NAME, client, sha256="0" * 64)


def test_a_process_does_not_wait_for_a_store_that_hangs() -> None:
    """The interpreter joins all threads but daemons, and those of asyncio's executor, when it ends."""
    program = """
import asyncio, threading
from tidemill.learner.checkpoints.store_uploads import Silence, in_daemon

async def note(seconds):
    raise TimeoutError(f"silent for {seconds:.2f} s")

try:
    asyncio.run(in_daemon(threading.Event().wait, Silence(note=note, after_s=0.01)))
except TimeoutError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=LIMIT_S, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("silent for ") and not ended.stderr


async def test_silence_is_noted_until_there_is_an_answer() -> None:
    hangs, noted = threading.Event(), []

    async def note(seconds: float) -> None:
        noted.append(seconds)
        if len(noted) == 3:
            hangs.set()

    assert await in_daemon(lambda: hangs.wait(60), Silence(note=note, after_s=0.01)) is True
    assert noted == sorted(noted) and len(noted) >= 3 and noted[0] > 0


def test_a_damaged_block_in_the_store_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    """The same file, damaged on the disk, comes from the store; damaged in both places it is refused with both."""
    path = written(tmp_path / "disk")
    uploaded(store, path)
    whole = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(b"?" + whole[1:])
    files = CheckpointFiles(path, manifests.read(path).files, PeerClient((), store))
    assert files.block("__0_0.distcp", 0) == whole[: 1 << 22]
    store.upload(NAME, "__0_0.distcp", path / "__0_0.distcp")
    files = CheckpointFiles(path, manifests.read(path).files, PeerClient((), store))
    damaged = re.compile(r"\bthis node has a damaged block; .*/digits\) has a damaged block")
    with refusal(CheckpointCorrupt, file="__0_0.distcp", got=damaged):
        files.block("__0_0.distcp", 0)
