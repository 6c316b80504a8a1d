"""The error tree of the weightstore. Errors of torch.distributed, HTTP and the file system are translated into these at the edge.

A learner that has been replaced meets ``tidemill.bus.errors.Fenced`` here as everywhere.
"""


class WeightstoreError(Exception):
    """Something went wrong between the weights of the learner and those of an engine."""


class BadManifest(WeightstoreError, ValueError):
    """A tensor that does not match the manifest: where, the wanted value, the value received."""

    def __init__(self, where: str, want: object, got: object) -> None:
        super().__init__(where, want, got)
        self.where, self.want, self.got = where, want, got

    def __str__(self) -> str:
        return f"{self.where}: want {self.want}, got {self.got}"


class PeerLost(WeightstoreError):
    """The other end of a process group died, hung beyond the deadline, or never came."""

    def __init__(self, group: str, doing: str, reason: str) -> None:
        super().__init__(group, doing, reason)
        self.group, self.doing, self.reason = group, doing, reason

    def __str__(self) -> str:
        return f"group {self.group}: {self.doing}: peer lost: {self.reason}"


class PartLost(PeerLost):
    """Another rank of the learner, which sends a part of the weights, is gone, too slow, or has failed: no engine's fault."""


class ReceiverFailed(WeightstoreError):
    """An engine refused, failed or exceeded the deadline of a phase of a push; ``answered`` = the engine itself reported the error."""

    def __init__(self, url: str, phase: str, reason: str, answered: bool = False) -> None:
        super().__init__(url, phase, reason, answered)
        self.url, self.phase, self.reason, self.answered = url, phase, reason, answered

    def __str__(self) -> str:
        return f"engine {self.url}: {self.phase}: {self.reason}"


class PushFailed(WeightstoreError):
    """A version that was not published; the head is unchanged. ``evicted`` has the engines that failed, and the reasons."""

    def __init__(self, version: int, reason: str, evicted: dict[str, str] | None = None) -> None:
        super().__init__(version, reason, evicted)
        self.version, self.reason, self.evicted = version, reason, evicted or {}

    def __str__(self) -> str:
        engines = "".join(f"; {engine}: {why}" for engine, why in self.evicted.items())
        return f"push of version {self.version}: {self.reason}{engines}"


class PublisherClosed(WeightstoreError):
    """The publisher's thread is not running; the message has the reason."""


class SnapshotBroken(WeightstoreError):
    """A file of a snapshot is missing, cut short or changed."""

    def __init__(self, file: str, want: object, got: object) -> None:
        super().__init__(file, want, got)
        self.file, self.want, self.got = file, want, got

    def __str__(self) -> str:
        return f"{self.file}: want {self.want}, got {self.got}"


class SnapshotUnavailable(WeightstoreError):
    """A snapshot cannot be downloaded: its server has gone, or has removed it."""

    def __init__(self, url: str, reason: str, *, is_connected: bool = True) -> None:
        """``is_connected``: the server, or some server, has answered."""
        super().__init__(url, reason)
        self.url, self.reason, self.is_connected = url, reason, is_connected

    def __str__(self) -> str:
        return f"snapshot {self.url}: {self.reason}"


class SnapshotNotLoaded(WeightstoreError):
    """An engine refused to load a snapshot."""


class CatchUpTimeout(WeightstoreError):
    """An engine did not reach the head within its deadline; ``waited_for`` names the step that was not finished."""

    def __init__(self, deadline_s: float, waited_for: str) -> None:
        super().__init__(deadline_s, waited_for)
        self.deadline_s, self.waited_for = deadline_s, waited_for

    def __str__(self) -> str:
        return f"catching up: not done within {self.deadline_s:g} s; waited for {self.waited_for}"
