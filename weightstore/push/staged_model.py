"""A copy of the whole weights: one part in this process, the others in other ranks of the learner, in their copies of
the same number."""

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence

from torch import Tensor

from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.format.manifest import Bucket, Manifest, joined
from tidemill.weightstore.transport.deadlines import Deadlines
from tidemill.weightstore.transport.parts import PartTensors, Payload, RemotePart, staged
from tidemill.weightstore.transport.staging import Staging


class StagedModel:
    """The view of a push, and of a snapshot.

    Held and released as the copy of this process is, by which the other ranks go.
    """

    def __init__(self, local: Staging, parts: Sequence[RemotePart], deadlines: Deadlines) -> None:
        """``deadlines``: the one of phase ``verify`` also bounds the comparison of checksums in another rank."""
        self._local, self._parts, self._deadlines = local, tuple(parts), deadlines
        self.manifest: Manifest = (
            joined([local.manifest, *(part.manifest for part in self._parts)]) if parts else local.manifest
        )

    @property
    def version(self) -> int:
        """Version of the copy; -1 = it has none yet."""
        return self._local.version

    @property
    def step(self) -> int:
        """Step of the copy."""
        return self._local.step

    def label(self, version: int, step: int) -> None:
        """Set version and step of the copy, which is held."""
        self._local.version, self._local.step = version, step

    @property
    def buckets(self) -> list[tuple[Bucket, Payload]]:
        """All buckets, in the order in which they are sent."""
        return [*self._local.buckets, *(bucket for part in self._parts for bucket in part.buckets(self._local.number))]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors by name.

        Those of other ranks are read from there one at a time; blocking, and OSError where that fails.
        """
        parts = [PartTensors(part.place, staged(self._local.number)) for part in self._parts]
        return ChainMap(dict(self._local.tensors()), *parts)  # type: ignore[arg-type]

    @property
    def differences(self) -> Callable[[ChecksumReport], Awaitable[list[str]]]:
        """A function as ``Staging.differences``, of all parts. Get it while the copy is held; it raises PeerLost."""
        differences_here, number, deadline_s = self._local.differences, self._local.number, self._deadlines.of("verify")

        async def compare(report: ChecksumReport) -> list[str]:
            """Return the lines of all parts, each compared where it is."""
            line_lists = await asyncio.gather(
                asyncio.to_thread(differences_here, report),
                *(part.differences(number, report, deadline_s) for part in self._parts),
            )
            return [line for lines in line_lists for line in lines] + self._not_compared(report)

        return compare

    def _not_compared(self, report: ChecksumReport) -> list[str]:
        """Return a line for each checksum over tensors of several ranks: no rank has the bytes of all of them."""
        owners = [self._local.manifest.by_name.keys(), *(part.manifest.by_name.keys() for part in self._parts)]
        return [
            f"{' + '.join(names)}: sent by several ranks of the learner, so their common checksum is not compared"
            for names in (set(part.names) for part in report.parts)
            if names <= self.manifest.by_name.keys() and not any(names <= owner for owner in owners)
        ]

    def hold(self) -> "StagedModel":
        """Add a user, and return the copy."""
        self._local.hold()
        return self

    def release(self) -> None:
        """Remove a user. Without any, the copies may be filled again."""
        self._local.release()
