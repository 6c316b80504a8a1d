"""Settings of the learner's checkpoints, and the URL of a store outside of its nodes. Knows text, no file system."""

import re
from dataclasses import dataclass

from tidemill.bus.section import Positive, section

LOCAL, SHARED = "local", "shared"
OF_THIS_MACHINE = ("file", "local")
"""Protocols for directories of the machine itself."""
MOST_PENDING = 2
"""Checkpoints that may wait for their copies, or for their upload; while there are as many, none is written."""
_FORM = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#*\[\]]+")
_USER = re.compile(r"(?<=://)[^\s]*:[^\s]*@")
"""A user with a password, which may have any character: up to the last @ of the word."""
_SECRET = re.compile(r"(?i)((?:AccountKey|Signature|Token)=)[^\s;&'\"]+")
_QUERY = re.compile(r"(\w://[^\s?'\"]*)\?[^\s'\"]*")


@section
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where the learner's checkpoints are kept, and how they are written."""

    store: str = LOCAL
    """`local`, each node's files on its own disk; `shared`, one directory for all nodes (the same with one node); or
    the URL of an object store, such as `s3://bucket/path`, to which the files on the disks are uploaded, and from which
    nodes without them resume.
    """
    copies: Positive = 2
    """With ``local`` and several nodes: number of nodes that have each file before a checkpoint counts as the latest.
    """
    background: bool = True
    """Write while training goes on, from a copy in host memory; false = the step waits, and no copy is kept."""

    def __post_init__(self) -> None:
        if self.store not in (LOCAL, SHARED):
            refuse_url(self.store)
        if self.url and self.copies != 2:
            want = "2 with a URL as store, where each file is on the disk of the node that wrote it and in the store"
            raise ValueError(f"copies: want {want}, got {self.copies}")

    @property
    def url(self) -> str:
        """URL of the store; empty = there is none."""
        return "" if self.store in (LOCAL, SHARED) else self.store


def protocol_of(url: str) -> str:
    """Return the protocol of a URL."""
    return url.partition("://")[0]


def refuse_url(store: str) -> None:
    """Raise ValueError for a text that is no URL of a store, and for a password: settings are in files and logs."""
    shown = masked(store)
    if _USER.search(store):
        raise ValueError(
            "store: want a URL without a password, which the environment of each process gives its package, "
            f"got {shown!r}"
        )
    if not _FORM.fullmatch(store) or "::" in store or ".." in store.split("/"):
        raise ValueError(
            "store: want local, shared, or a URL like s3://bucket/path (no query, no pattern, no chain of "
            f"protocols), got {shown!r}"
        )
    path = store.partition("://")[2]
    if protocol_of(store) in OF_THIS_MACHINE and (not path.startswith("/") or not path.strip("/")):
        raise ValueError(f"store: want an absolute path of a directory behind {protocol_of(store)}://, got {shown!r}")


def masked(text: str) -> str:
    """Return a text without passwords, queries (which may be signatures) and keys of accounts in its URLs."""
    return _SECRET.sub(r"\1***", _QUERY.sub(r"\1?***", _USER.sub("***@", text)))
