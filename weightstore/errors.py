"""The error tree of the weightstore, into which errors of torch.distributed, HTTP and the file system are translated.

A learner that has been replaced meets ``tidemill.bus.errors.Fenced`` here as everywhere.
"""

from collections.abc import Mapping

from tidemill.bus.errors import DetailedError


class WeightstoreError(Exception):
    """Something went wrong between the weights of the learner and the weights of an engine."""


class BadManifest(DetailedError, WeightstoreError, ValueError):
    """A tensor that does not match the manifest."""

    where: str
    want: object
    got: object
    template = "{where}: want {want}, got {got}"


class PeerLost(DetailedError, WeightstoreError):
    """The other end of a process group died, hung beyond the deadline, or never came."""

    group: str
    doing: str
    reason: str
    template = "group {group}: {doing}: peer lost: {reason}"


class PartLost(PeerLost):
    """A rank of the learner that sends a part of the weights is gone, too slow, or has failed: no engine's fault."""


class ReceiverFailed(DetailedError, WeightstoreError):
    """An engine refused, failed or exceeded the deadline of a phase of a push."""

    url: str
    phase: str
    reason: str
    answered: bool = False
    """The engine itself reported the error."""
    template = "engine {url}: {phase}: {reason}"


class PushFailed(DetailedError, WeightstoreError):
    """A version that was not published; the head is unchanged."""

    version: int
    reason: str
    evicted: Mapping[str, str]
    """Engines that failed, and the reasons."""

    def __str__(self) -> str:
        engines = "".join(f"; {engine}: {why}" for engine, why in self.evicted.items())
        return f"push of version {self.version}: {self.reason}{engines}"


class PublisherClosed(WeightstoreError):
    """The publisher's thread is not running; the message has the reason."""


class SnapshotBroken(DetailedError, WeightstoreError):
    """A file of a snapshot is missing, cut short or changed."""

    file: str
    want: object
    got: object
    template = "{file}: want {want}, got {got}"


class SnapshotUnavailable(DetailedError, WeightstoreError):
    """A snapshot cannot be downloaded: its server has gone, or has removed it."""

    url: str
    reason: str
    is_connected: bool = True
    """The server, or some server, has answered."""
    template = "snapshot {url}: {reason}"


class SnapshotNotLoaded(WeightstoreError):
    """An engine refused to load a snapshot."""


class CatchUpTimeout(DetailedError, WeightstoreError):
    """An engine did not reach the head within its deadline; ``waited_for`` names the step that was not finished."""

    deadline_s: float
    waited_for: str
    template = "catching up: not done within {deadline_s:g} s; waited for {waited_for}"
