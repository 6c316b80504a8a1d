"""Checkpoints in an object store, by a URL of fsspec. Blocking; no bus, no manifest and no torch.

    URL/<run>/owner.json               the run whose checkpoints these are
    URL/<run>/<checkpoint>/<file>      as on a node's disk
    URL/<run>/<checkpoint>/manifest.json    uploaded last: a checkpoint without it does not count

The protocol's package gets its credentials from the environment of the process; none is in a setting. fsspec is
imported when a store is used.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tidemill.bus.wire.subjects import nonce
from tidemill.learner.checkpoints.manifest import MANIFEST
from tidemill.learner.errors import StoreFailed
from tidemill.learner.settings.config import OF_THIS_MACHINE, masked, protocol_of

OWNER = "owner.json"  # object with the identity of the run that the checkpoints beside it belong to
UNNAMED = ("", "?")  # owners of a store that names no run: it has no such object, or one that cannot be read
PROBE = "probe"
MOST_BYTES = 1 << 28  # largest manifest that is read: a block's digest takes 70 bytes, so this is one of 16 TB
_HAS_DIRECTORIES = (*OF_THIS_MACHINE, "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs")
"""Protocols in which a file needs its directory; in an object store, making one may mean making a bucket."""


class ObjectStore:
    """The checkpoints of one run. Every method raises StoreFailed when the store cannot do it now."""

    def __init__(self, url: str, run: str) -> None:
        """``url`` must exist: directories are made below it alone, because one that is not mounted is not empty."""
        self.url = f"{url.rstrip('/')}/{run}"
        self._opened: tuple[Any, str] | None = None
        """A file system of fsspec, and the path of the run in it. Source: fsspec 2026.9, ``AbstractFileSystem``."""

    def listing(self) -> dict[str, dict[str, int]]:
        """Return the files of all checkpoints with their sizes, also of incomplete ones."""
        with self._edge():
            files, base = self._files()
            files.invalidate_cache()
            sizes: dict[str, dict[str, int]] = {}
            for path, entry in self._found(files, base).items():
                name, _, file = path.removeprefix(base).lstrip("/").partition("/")
                size = entry.get("size")
                if file:
                    sizes.setdefault(name, {})[file] = size if isinstance(size, int) else -1
            return sizes

    def manifest(self, name: str) -> bytes:
        """Return the manifest of a checkpoint. Raises FileNotFoundError."""
        return self._read(f"{name}/{MANIFEST}", 0, MOST_BYTES)

    def read(self, name: str, file: str, start: int, length: int) -> bytes:
        """Return bytes of a file, fewer if it is shorter. Raises FileNotFoundError."""
        return self._read(f"{name}/{file}", start, start + length)

    def upload(self, name: str, file: str, path: Path) -> None:
        """Store a file of this machine. Raises OSError if it cannot be read."""
        path.stat()
        with self._edge():
            files, target = self._place(f"{name}/{file}")
            files.put_file(str(path), target)

    def complete(self, name: str, manifest: bytes) -> None:
        """Store the manifest of a checkpoint whose files are there: it counts from now on."""
        self.write(f"{name}/{MANIFEST}", manifest)

    def retract(self, name: str) -> None:
        """Remove the manifest of a checkpoint: it does not count from now on."""
        with self._edge(), suppress(FileNotFoundError):
            files, base = self._files()
            files.rm_file(f"{base}/{name}/{MANIFEST}")

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first: one that is removed in part does not count."""
        # Object stores remove file by file: without the manifest, a removal that is cut short counts for nothing.
        self.retract(name)
        with self._edge():
            files, base = self._files()
            with suppress(FileNotFoundError):
                files.rm(f"{base}/{name}", recursive=True)

    def owner(self) -> str:
        """Return the identity of the run that owns the checkpoints; "" = none yet, "?" = it cannot be read."""
        try:
            content = json.loads(self._read(OWNER, 0, 1 << 16))
        except FileNotFoundError:
            return ""
        except (ValueError, RecursionError):
            return "?"
        return str(content["run"]) if isinstance(content, dict) and content.get("run") else "?"

    def claim(self, identity: str) -> str:
        """Name the owner of an empty store, if none is named. Returns the owner, "?" for an unknown one.

        A name that cannot be read counts as none in an empty store: a killed process has written it in part.
        """
        if (owner := self.owner()) not in UNNAMED:
            return owner
        if self.listing():
            return "?"
        self.write(OWNER, json.dumps({"run": identity}).encode())
        return self.owner()

    def probe(self) -> None:
        """Write, read and remove a small object."""
        name, content = f"{PROBE}-{nonce()}", nonce().encode()
        self.write(name, content)
        with self._edge():
            files, base = self._files()
            try:
                stored = files.cat_file(f"{base}/{name}")
            finally:
                files.rm_file(f"{base}/{name}")
        if stored != content:
            raise StoreFailed(
                self.url, f"want the {len(content)} bytes that were written, got {len(stored)} other ones"
            )

    def _read(self, path: str, start: int, end: int) -> bytes:
        with self._edge(may_lack=True):
            files, base = self._files()
            return bytes(files.cat_file(f"{base}/{path}", start=start, end=end))

    def write(self, path: str, content: bytes) -> None:
        """Store bytes at a path of the run, in place of what is there."""
        with self._edge():
            files, target = self._place(path)
            files.pipe_file(target, content)

    def _place(self, path: str) -> tuple[Any, str]:
        files, base = self._files()
        if self._has_directories:
            files.makedirs(f"{base}/{path}".rpartition("/")[0], exist_ok=True)
        return files, f"{base}/{path}"

    @property
    def _has_directories(self) -> bool:
        return protocol_of(self.url) in _HAS_DIRECTORIES

    def _found(self, files: Any, base: str) -> Mapping[str, Mapping[str, object]]:
        """Return all files below the run's place. In an object store, FileNotFoundError means no bucket."""
        try:
            return files.find(base, detail=True)
        except FileNotFoundError:
            if self._has_directories:
                return {}
            raise

    def _files(self) -> tuple[Any, str]:
        """Return the file system, and the run's path in it. Raises StoreFailed where the URL's directory is missing."""
        if self._opened is None:
            from fsspec.core import url_to_fs

            # Instances and listings that are kept would hide what other nodes have written.
            files, base = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
            self._opened = files, str(base).rstrip("/")
        files, base = self._opened
        if self._has_directories:
            root = base.rpartition("/")[0]
            try:
                files.info(root)
            except FileNotFoundError:
                raise StoreFailed(
                    self.url, f"no such directory: {root}; is it mounted? Make it once, if it is new"
                ) from None
        return files, base

    @contextmanager
    def _edge(self, *, may_lack: bool = False) -> Iterator[None]:
        """Raise StoreFailed for the errors of any protocol, without secrets; ``may_lack``: FileNotFoundError passes."""
        try:
            yield
        except StoreFailed:
            raise
        except Exception as error:  # each protocol has a tree of its own
            if may_lack and isinstance(error, FileNotFoundError):
                raise
            raise StoreFailed(self.url, masked(f"{type(error).__name__}: {error}")[:300]) from None


def missing_package(url: str) -> tuple[str, str] | None:
    """Return why the protocol of a URL cannot be used here, and the cure; None = it can."""
    protocol = protocol_of(url)
    try:
        from fsspec import get_filesystem_class
        from fsspec.registry import known_implementations

        get_filesystem_class(protocol)
    except ImportError as error:
        classes = {} if error.name == "fsspec" else known_implementations
        package = str(classes.get(protocol, {}).get("class", "fsspec")).partition(".")[0]
        return f"no package {package}", f"install it on every node (pip install {package})"
    except ValueError:
        return f"the protocol {protocol}, which fsspec does not know", "use another one"
    return None
