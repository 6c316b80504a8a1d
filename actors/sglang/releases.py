"""What differs between SGLang's releases, chosen by what the server says it is. The only place that knows their numbers.

Read from the releases themselves (0.5.15.post1 to 0.5.23); each but 0.5.16 has been tried (``docs/sglang.md``).
"""

import re
from dataclasses import dataclass

from actors.errors import EngineFailed

OLDEST = (0, 5, 15)
"""Earlier ones were not read."""
NEWEST_TRIED = (0, 5, 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """How to talk to one."""

    version: tuple[int, int, int]
    spans: bool
    """Its answers say which version made which token. Without, responses are cut at every update (``actors.sglang.pieces``)."""
    three_phases: bool
    """Weights from a process group must stand between ``begin_weight_update`` and ``end_weight_update``."""
    flush_needs_idle: bool
    """Flushing the cache with a request anywhere in the scheduler ends the server."""
    cpu_checksums: bool
    """/weights_checker works without CUDA."""


def release_of(engine: str, said: object) -> Release:
    """From ``version`` of /server_info. Raises EngineFailed for one that is too old, or says nothing."""
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(said))
    if match is None:
        raise EngineFailed(engine, f"version: want SGLang's, like 0.5.23, got {said!r}")
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < OLDEST:
        raise EngineFailed(engine, f"SGLang: want {'.'.join(map(str, OLDEST))} or newer, got {said}")
    return Release(
        version=version,
        spans=version >= (0, 5, 19),
        three_phases=version >= (0, 5, 21),
        flush_needs_idle=version < (0, 5, 21),
        cpu_checksums=version >= (0, 5, 23),
    )
