"""What a push tells: its report, and the handle of one under way."""

from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from weightstore.errors import PublisherClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did and what it cost."""

    version: int
    step: int
    engines: tuple[str, ...]
    """Those that serve the version now."""
    evicted: dict[str, str]
    """engine -> why it does not."""
    prepare_s: float
    """Copying into the staging, in the trainer's thread."""
    transfer_s: float
    """From the first begin to the last end."""
    stall_s: dict[str, float]
    """engine -> seconds for which the flip held up its generation."""
    verified: tuple[str, ...]
    """Those of ``engines`` whose checksums were compared with what was sent, before they served it."""
    verify_s: dict[str, float]
    """engine -> seconds that took."""
    seconds: float
    """The whole push, without preparation: reserve, join, transfer, head."""
    bytes: int
    """Of the weights; each engine was sent so many."""


class PushHandle:
    """A push under way."""

    def __init__(self, future: "Future[PushReport]") -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Until it has ended, however; each of its phases has a deadline."""
        try:
            self._future.exception()
        except CancelledError:
            return

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for its end. Raises PushFailed, Fenced, PublisherClosed; TimeoutError when it still goes on."""
        try:
            return self._future.result(timeout)
        except CancelledError:
            raise PublisherClosed("publisher: closed during the push") from None
