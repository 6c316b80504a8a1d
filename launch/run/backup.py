"""A backup of a run: the store of its bus and its checkpoints at one instant, in a directory that a run can go on from.

    tidemill backup                               bus process, which looks every 0.2 s
      asks (run/directory.py)  --------------->   servers stop -> store copied, checkpoints linked -> servers start
      waits for the answer  <------------------   digests of the copy, then backup.json

While the servers are stopped nothing is stored: the copy has a sample together with the ack of its task and the record
of its plan, or none of them. A process that ends in the middle leaves a directory without backup.json, which is no
backup.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidemill.bus.server.nats_server import LOCK_FILE, EmbeddedServer, in_use
from tidemill.bus.system.files import lacking, sync, write_whole
from tidemill.launch.run.access import AUTH_DIR
from tidemill.launch.run.directory import BusRequest
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig

BUS_DIR, CHECKPOINTS_DIR = "bus", "checkpoints"
_MANIFEST = "backup.json"
_STORED = ("store", "port")  # What of a server's directory is state; its configuration, log and locks are made anew
_CHUNK_BYTES = 1 << 20


class BackupRefused(ValueError):
    """A backup cannot be taken, is not whole, or cannot be put there."""


class _Entry(msgspec.Struct):
    size: int
    sha256: str


class _Manifest(msgspec.Struct):
    run: str
    time_s: float
    files: dict[str, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The directories of a run that are copied."""

    run: str
    root: Path
    checkpoints: Path

    @classmethod
    def of(cls, config: RunConfig) -> "Source":
        return cls(run=config.run, root=config.root, checkpoints=config.checkpoints)

    @property
    def servers(self) -> list[Path]:
        """Directories of the servers: one, or all servers of a cluster on this machine."""
        bus = self.root / BUS_DIR
        return [bus] if (bus / "store").is_dir() else sorted(bus.glob("n[0-9]"))


# ---- the command's side


def ask(source: Source, target: Path, *, wait_s: float) -> None:
    """Have the bus take a backup into ``target``, or take it here when no bus runs. Blocks. Raises BackupRefused."""
    target = target.absolute()
    _refuse_filled(target)
    if not source.servers:
        raise BackupRefused(f"{source.root}: want the directory of a run whose bus is on this machine, got none in it")
    if not any(in_use(server) for server in source.servers):
        with _locked(source.servers):
            _copy(source, target)
        _seal(source.run, target)
        return
    request_of(source.root).ask(str(target), wait_s=wait_s)


def request_of(root: Path) -> BusRequest:
    """Return the request for a backup to the bus of a run."""
    return BusRequest(root / BUS_DIR, "backup")


@contextmanager
def _locked(directories: Sequence[Path]) -> Iterator[None]:
    """Keep every server off these directories while entered."""
    locks = [os.open(directory / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644) for directory in directories]
    try:
        for directory, lock in zip(directories, locks, strict=True):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupRefused(f"{directory}: its server is just starting; repeat the command") from None
        yield
    finally:
        for lock in locks:
            os.close(lock)


# ---- the bus's side


def take(source: Source, servers: Sequence[EmbeddedServer], target: Path) -> None:
    """Take a backup of the servers, which are stopped for the time of the copy. Raises BackupRefused, OSError."""
    _refuse_filled(target)
    size = sum(file.stat().st_size for server in source.servers for file in (server / "store").rglob("*"))
    if lack := lacking(target, size):
        raise BackupRefused(lack)
    try:
        for server in servers:
            server.halt()
        _copy(source, target)
    finally:
        for server in servers:
            server.start()
    _seal(source.run, target)


def _refuse_filled(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupRefused(f"{target}: want a directory that is new or empty")


def _copy(source: Source, target: Path) -> None:
    """Copy the state of a run whose servers are stopped; checkpoints as links, where the disk has them."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for server in source.servers:
        copied = target / server.relative_to(source.root)
        copied.mkdir(parents=True)
        for name in _STORED:
            _copy_any(server / name, copied / name)
    for name in (AUTH_DIR, CONFIG_FILE):
        _copy_any(source.root / name, target / name)
    whole = [path for path in source.checkpoints.glob("step-*") if not path.suffix and path.is_dir()]
    for checkpoint in whole:
        shutil.copytree(checkpoint, target / CHECKPOINTS_DIR / checkpoint.name, copy_function=_link)


def _copy_any(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _link(source: str, target: str) -> str:
    """Link a file that is never written again, or copy it to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _seal(run: str, target: Path) -> None:
    """Write the manifest of a copy, when every file of it is on the disk."""
    files = {str(path.relative_to(target)): _entry(path) for path in sorted(target.rglob("*")) if path.is_file()}
    for directory in (target, *(path for path in target.rglob("*") if path.is_dir())):
        sync(directory)
    manifest = _Manifest(run=run, time_s=time.time(), files=files)
    write_whole(target / _MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n", private=True)
    sync(target)


def _entry(path: Path) -> _Entry:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        os.fsync(file.fileno())
    return _Entry(size=path.stat().st_size, sha256=digest.hexdigest())


# ---- restore


def restore(backup: Path, root: Path) -> str:
    """Put a backup into the directory of a run, which has no bus yet; return the run's name. Raises BackupRefused.

    The store is there at the end, or not at all.
    """
    manifest = _read(backup)
    if (root / BUS_DIR).exists():
        raise BackupRefused(f"{root / BUS_DIR}: want a directory without a bus, got one with the streams of a run")
    for name in (AUTH_DIR, CHECKPOINTS_DIR, CONFIG_FILE):
        if (backup / name).exists() and (root / name).exists():
            raise BackupRefused(f"{root / name}: it is in the way of the one in the backup; move it away")
    root.mkdir(parents=True, exist_ok=True)
    for name in (AUTH_DIR, CHECKPOINTS_DIR, CONFIG_FILE):
        _copy_any(backup / name, root / name)
    staged = root / f".{BUS_DIR}.new"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(backup / BUS_DIR, staged)
    staged.rename(root / BUS_DIR)
    return manifest.run


def _read(backup: Path) -> _Manifest:
    """Return the manifest of a backup whose files are all as it states. Raises BackupRefused."""
    file = backup / _MANIFEST
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=_Manifest)
        for name, entry in manifest.files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise BackupRefused(f"{file}: want names inside the backup, got {name!r}")
            if _entry(backup / name) != entry:
                raise BackupRefused(
                    f"{backup / name}: its size or digest is not that of {_MANIFEST}; take another backup"
                )
    except OSError as error:
        raise BackupRefused(
            f"{error.filename}: want a whole backup, which ends with {_MANIFEST}: {error.strerror}"
        ) from None
    except msgspec.MsgspecError as error:
        raise BackupRefused(f"{file}: want the manifest of a backup: {error}") from None
    return manifest
