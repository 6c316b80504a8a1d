"""The files of named repositories in this machine's cache: listed, downloaded, compared with their digests.

Downloads go through the proxies of the environment. A transfer that is cut continues where it was cut; a process that
starts again keeps the files that were whole. Every file is fetched at one commit, and a branch counts as cached only
when all its files are there.
"""

import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidemill.bus.system.files import write_whole
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.hub import selection
from tidemill.launch.hub.errors import (
    WAY_OUT,
    HubRefused,
    HubUnreachable,
    endpoint,
    explained,
    is_offline,
    shown_endpoint,
)
from tidemill.launch.settings.hub_names import COMMIT, DATASET, MODEL_PATH, HubName, cache, kept, names_in

log = logging.getLogger(__name__)

RECORD = "hub.json"  # File in a run's directory with the names it uses, and their files with bytes and digests
ANSWER_S = 30.0  # Seconds for the list of a repository's files
TRIES = 6  # Number of downloads in a row that may end without a further file
PAUSE_S = 0.5  # Seconds before the second try; each further pause is twice as long
BLOCK = 1 << 22
_WRONG = "fewer, or some with another digest than the hub lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A repository in the cache, as a setting names it."""

    name: HubName  # Pinned; of a data set with the file or pattern inside
    written: HubName  # As it stands in the settings
    num_files: int
    size_bytes: int
    is_offline: bool

    def __str__(self) -> str:
        place = "the cache" if self.is_offline else shown_endpoint()
        size = _amount(self.num_files, self.size_bytes)
        return f"{self.written}: commit {self.name.revision} of {place}, {size}, in {self.name.folder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a commit: (bytes, digest) by path; a digest is empty where it is not known."""

    commit: str
    files: Mapping[str, tuple[int, str]]
    is_offline: bool = False


def fetch(
    name: HubName, where: str, *, weights: bool = True, tokenizer: bool = False, say: Callable[[str], None] = log.info
) -> Fetched:
    """Bring what a run needs of a repository into the cache. Blocks. Raises HubRefused; ``where``: of its message."""
    endpoint()  # refused before the library is imported, which ends at a malformed one without its name
    try:
        listing = _listed(name, where)
    except HubRefused as refused:
        listing = _cached_after(refused, name)
    pinned = replace(name, revision=listing.commit)
    try:
        if name.kind == DATASET:
            if selection.CARD in listing.files:
                _download(pinned, where, listing, [selection.CARD], say)
            chosen, inside = selection.data_files(where, name, listing.files, _card(pinned))
            pinned = replace(pinned, inside=inside)
        else:
            chosen = selection.model_files(where, name, listing.files, weights=weights, tokenizer=tokenizer)
    except HubRefused as refused:
        if not listing.is_offline:
            raise
        cure = f"{refused.cure}; or {WAY_OUT}" if name.kind == DATASET else WAY_OUT
        got = f"{refused.got} in {cache()}, which may have a part of it"
        raise HubUnreachable(where, refused.want, got, cure) from None
    _download(pinned, where, listing, chosen, say)
    if not name.is_pinned and not listing.is_offline and weights:
        write_whole(name.storage / "refs" / (name.revision or "main"), listing.commit)
    counts = {"num_files": len(chosen), "size_bytes": sum(listing.files[file][0] for file in chosen)}
    return Fetched(name=pinned, written=name, is_offline=listing.is_offline, **counts)


def fetch_all(
    names: Mapping[str, HubName], began: Mapping[str, HubName], at: Callable[[str], str], say: Callable[[str], None]
) -> tuple[dict[str, Fetched], list[str]]:
    """Fetch the repositories of all settings, at the commits of the names with which the run ``began``.

    Returns them by setting, and the reasons why others cannot be used.
    """
    fetched, refused = {}, []
    for setting, name in names.items():
        try:
            commit = kept(name, began.get(setting))
            fetched[setting] = fetch(commit, at(setting), tokenizer=setting == MODEL_PATH, say=say)
        except HubRefused as error:
            refused.append(str(error))
        except ValueError as error:
            refused.append(f"{at(setting)}: {error}")
    return fetched, refused


def show_progress() -> None:
    """Let the library draw its bars on a terminal, and nowhere else."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def write_record(root: Path, values: JsonObject) -> None:
    """Write the pinned names of a run's configuration with their files into its directory, if there are some.

    The cache names a file's content by its digest: SHA-256 of large files, git's of small ones.
    """
    names = {setting: name for setting, name in names_in(values).items() if name.is_pinned}
    record = {setting: {"name": str(name), "files": _files_of(name)} for setting, name in names.items()}
    if record:
        write_whole(root / RECORD, json.dumps(record, indent=2) + "\n")


def _files_of(name: HubName) -> dict[str, JsonObject]:
    inside = glob.glob(name.inside, root_dir=name.folder) if name.inside else os.listdir(name.folder)
    paths = {file: name.folder / file for file in sorted(inside)}
    return {
        file: {"bytes": path.stat().st_size, "digest": path.resolve().name if path.is_symlink() else ""}
        for file, path in paths.items()
        if path.is_file()
    }


def _listed(name: HubName, where: str) -> Listing:
    """Ask the hub for the commit of a revision and its files. Raises HubRefused."""
    with explained(where, name.repo, name.kind):
        from huggingface_hub import HfApi

        info: Any = HfApi(endpoint=endpoint(), library_name="tidemill").repo_info(
            name.repo, repo_type=name.kind, revision=name.revision or None, timeout=ANSWER_S, files_metadata=True
        )
        files = {
            str(sibling.rfilename): (int(sibling.size or 0), _digest_of(sibling)) for sibling in info.siblings or ()
        }
    if not COMMIT.fullmatch(str(info.sha)) or (name.is_pinned and info.sha != name.revision):
        raise HubRefused(where, f"a commit of {name}", repr(info.sha)[:80], "set HF_ENDPOINT to a hub, or unset it")
    return Listing(commit=info.sha, files=files)


def _digest_of(file: Any) -> str:
    return f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}" if file.blob_id else ""


def _cached_after(refused: HubRefused, name: HubName) -> Listing:
    """Return the files in the cache where the hub gave none. Raises ``refused`` where they do not count.

    A commit never changes; a branch does, so its last commit counts in offline mode alone.
    """
    listing = _cached(name)
    if listing is not None and (name.is_pinned or is_offline()):
        return listing
    if listing is not None and isinstance(refused, HubUnreachable):
        cure = f"set HF_HUB_OFFLINE=1 to use commit {listing.commit[:12]} in the cache, or {refused.cure}"
        raise HubUnreachable(refused.where, refused.want, refused.got, cure) from None
    raise refused


def _cached(name: HubName) -> Listing | None:
    """Return the files that the cache has of a commit, or of the last complete one of a branch; None without any."""
    ref = name.storage / "refs" / (name.revision or "main")
    commit = name.revision if name.is_pinned else ref.read_text().strip() if ref.is_file() else ""
    folder = name.storage / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    paths = [Path(directory) / file for directory, _, files in os.walk(folder) for file in files]
    files = {str(path.relative_to(folder)): (path.stat().st_size, "") for path in paths if path.is_file()}
    return Listing(commit=commit, files=files, is_offline=True)


def _card(name: HubName) -> Mapping[str, object]:
    """Return the metadata at the head of a data set's card; empty without any, or with some that cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(name.folder / selection.CARD) or {}
    except Exception as error:  # of YAML or the library; then the names of the files tell the splits
        log.info("card not read name=%s error=%s", name, error)
        return {}


def _download(name: HubName, where: str, listing: Listing, files: list[str], say: Callable[[str], None]) -> None:
    """Download the files that the cache lacks, and compare their digests. Raises HubRefused."""
    missing = _missing(name, files)
    if not missing:
        return
    _refuse_full_disk(name, where, size := sum(listing.files[file][0] for file in missing))
    show_progress()
    say(f"{name.repo}: fetching {_amount(len(missing), size)}, from {shown_endpoint()}")
    tries, before = 0, -1
    while missing:
        try:
            with explained(where, name.repo, name.kind):
                _download_snapshot(name, missing)
            error = HubRefused(where, f"the files of {name}", _WRONG, WAY_OUT)
            missing = _verified(name, listing, missing)
        except HubUnreachable as unreachable:
            error = unreachable
        now = _bytes_here(name)
        tries = 0 if now > before else tries + 1
        before = now
        if missing and tries >= TRIES:
            raise error
        if missing:
            log.info("download goes on name=%s files=%d error=%s", name, len(missing), error)
            time.sleep(PAUSE_S * 2**tries)


def _download_snapshot(name: HubName, files: list[str]) -> None:
    """Download files; a file of another length than the hub lists is left out. Raises the library's errors."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in files],
            cache_dir=cache(),
            endpoint=endpoint(),
            library_name="tidemill",
        )
    except OSError as error:
        if "Consistency check failed" not in str(error):
            raise


def _missing(name: HubName, files: list[str]) -> list[str]:
    return [file for file in files if not (name.folder / file).is_file()]


def _verified(name: HubName, listing: Listing, files: list[str]) -> list[str]:
    """Compare downloaded files with the hub's digests; remove wrong ones, and return what is missing."""
    for file in files:
        path, digest = name.folder / file, listing.files[file][1]
        if path.is_file() and digest and _digest(path, digest.partition(":")[0]) != digest:
            log.warning("wrong digest file=%s", path)
            path.resolve().unlink()
            path.unlink(missing_ok=True)
    return _missing(name, files)


def _digest(path: Path, kind: str) -> str:
    """Return the digest of a file: SHA-256, or git's of a blob (SHA-1 of "blob SIZE", a zero byte and the content)."""
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"


def _bytes_here(name: HubName) -> int:
    """Return the bytes of a repository's content in the cache."""
    return sum(file.stat().st_size for file in (name.storage / "blobs").glob("*") if file.is_file())


def _amount(num_files: int, size_bytes: int) -> str:
    return f"{num_files} file{'s' * (num_files > 1)}, {size_bytes / 1e6:,.1f} MB"


def _refuse_full_disk(name: HubName, where: str, size: int) -> None:
    place = next(path for path in (name.storage, *name.storage.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < size:
        cure = "free some, or set HF_HOME to another disk"
        raise HubRefused(where, f"{size:,} bytes free in {place} for {name}", f"{free:,}", cure)
