"""Throughput of a push by transport: bytes delivered to engines in a second. Pure."""

from collections.abc import Mapping

HOST_HANDLES, CUDA_HANDLES = "host_handles", "cuda_handles"
"""Transports by handles, of host memory and of a GPU's; the others are the backends of process groups."""


class Throughput:
    """Engines that took a version, by transport, and the time until the last of them had it."""

    def __init__(self) -> None:
        self._engines: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def add(self, transport: str, engines: int, seconds: float) -> None:
        """Count a push group with an update of ``seconds``; the groups of a push are updated at the same time."""
        if engines:
            self._engines[transport] = self._engines.get(transport, 0) + engines
            self._seconds[transport] = max(self._seconds.get(transport, 0.0), seconds)

    def gb_per_s(self, num_bytes: int) -> Mapping[str, float]:
        """Return 10^9 bytes a second by transport, for weights of ``num_bytes``; none for a transport without engines."""
        return {one: count * num_bytes / 1e9 / self._seconds[one] for one, count in self._engines.items() if self._seconds[one] > 0}
