"""SGLang's releases: which are supported, and how they differ (``docs/sglang.md``). Only here are their numbers."""

import re
from dataclasses import dataclass

from tidemill.actors.errors import EngineFailed

OLDEST = (0, 5, 21)
"""First release with ``begin_weight_update``; a paused one flushes its cache with requests in its queue."""
NEWEST = (0, 5, 23)
"""Release that the tests run."""
CPU_CHECKSUMS = (0, 5, 23)
"""First release with /weights_checker on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One supported release."""

    version: tuple[int, int, int]

    @property
    def cpu_checksums(self) -> bool:
        """True when /weights_checker works without CUDA."""
        return self.version >= CPU_CHECKSUMS


def release_of(engine: str, said: object) -> Release:
    """Return the release that ``version`` of /server_info names. Raises EngineFailed unless it is OLDEST or newer."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(said))
    if match is None:
        raise EngineFailed(
            engine, f"version in /server_info: want a release of SGLang, like {written(NEWEST)}, got {said!r}"
        )
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise EngineFailed(
            engine,
            f"SGLang's release: want >= {written(OLDEST)}, got {said}; install a newer one for engine.sglang.python, "
            "or start the server at engine.sglang.url with one",
        )
    return Release(version=version)


def written(version: tuple[int, int, int]) -> str:
    """Return a release as text, like ``0.5.21``."""
    return ".".join(map(str, version))
