"""The checkpoints in the store, as far as they can be trusted: complete ones by their manifests, files by their sizes. Blocking."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints.manifest import MANIFEST, FileEntry, Manifest
from tidemill.learner.checkpoints.object_store import MOST_BYTES, ObjectStore
from tidemill.learner.errors import CheckpointCorrupt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A checkpoint in the store with a readable manifest."""

    digest: str
    """Digest of the manifest."""
    files: Mapping[str, FileEntry]
    held: Collection[str]
    """Files that are there with the size in the manifest; their content is verified when it is read."""

    @property
    def is_whole(self) -> bool:
        """True if no file is missing or truncated."""
        return len(self.held) == len(self.files)


def survey(store: ObjectStore) -> tuple[dict[str, Stored], set[str]]:
    """Return the checkpoints with a manifest, and the names of those without: never completed, or damaged. Raises StoreFailed."""
    found, rest = {}, set()
    for name, sizes in store.listing().items():
        if not _is_checkpoint(name):
            continue
        try:
            if not 0 <= sizes.get(MANIFEST, -1) <= MOST_BYTES:
                raise FileNotFoundError(name)
            data = store.manifest(name)
            files = Manifest.parse(f"{store.url}/{name}", data).files
        except FileNotFoundError:
            rest.add(name)
        except CheckpointCorrupt as error:
            log.error("checkpoint in the store is not used: %s", error)
            rest.add(name)
        else:
            held = tuple(file for file, entry in files.items() if sizes.get(file) == entry.size)
            found[name] = Stored(digest=manifests.digest_of(data), files=files, held=held)
            for file in sorted(files.keys() - set(held))[:1]:
                defect = CheckpointCorrupt(f"{store.url}/{name}", file, f"{files[file].size} bytes", f"{sizes.get(file, 'no')} bytes")
                log.error("checkpoint in the store is NOT WHOLE: %s", defect)
    return found, rest


def _is_checkpoint(name: str) -> bool:
    """Return whether a name is that of a checkpoint: nothing else in the store is read or removed."""
    try:
        return str(disk.named(Path(name)).path) == name
    except ValueError:
        return False
