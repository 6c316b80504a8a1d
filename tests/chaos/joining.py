"""An engine joins a run in progress: its first response is of the newest version, and no other process has waited for
it.
"""

import asyncio
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.actor_kit import row_until
from tests.chaos.parts import PATIENCE_S, parts
from tests.chaos.rounds import SETTINGS, serving
from tests.chaos.test_instants import new_steps
from tests.waits import until
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Sample
from tidemill.weightstore.store.registry import VersionRegistry

MAX_LAG = 2
"""``staleness.max_lag`` of smoke.yaml: a version and the next one that made a sample differ by at most one step more.
"""


def join(tmp_path: Path, engine: Sequence[str] = ()) -> None:
    """Play the test. ``engine``: further settings, of both engines above all."""
    asyncio.run(_join(tmp_path, engine))


async def _join(tmp_path: Path, engine: Sequence[str]) -> None:
    with parts(tmp_path, *SETTINGS, "weights.phase_deadline_s=60", *engine) as run:
        await run.begin("actor", "learner")
        first = run.start("engine", name="first")
        async with run.bus() as bus:
            await new_steps(bus, 3)
            versions, seen = VersionRegistry(bus), _Seen(bus)
            watching = asyncio.create_task(seen.watch())
            try:
                before, phases = await _head(versions), first.log.count("engine phase=")
                second = run.start("engine", name="second")
                second.process.send_signal(signal.SIGSTOP)
                await row_until(bus.rows("weights"), "head", lambda row: row["version"] >= before + 3)
                second.process.send_signal(signal.SIGCONT)
                row = await serving(bus, second, 0, "joining")
                after = await _head(versions)
                async with asyncio.timeout(PATIENCE_S):
                    await until(lambda: max(seen.versions, default=0) >= after)
                meanwhile = list(seen.versions)
                async with asyncio.timeout(PATIENCE_S):
                    await until(lambda: seen.of_second is not None)
                await new_steps(bus, 3)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            told = {
                part.name: await serving(bus, part, 0, "afterwards") for part in run.started if part.role == "engine"
            }
            pushes = next(part for part in run.started if part.name == "learner").log
    begun, newest = seen.of_second.spans[0].version, seen.newest_before_it
    assert row.version >= before, "it served nothing older"
    late = "a push that began before it was there, and one under way"
    assert begun >= max(before, newest - 2), f"newest seen {newest}: it may lack {late}; head was {before}; got {begun}"
    assert after >= before + 3, "steps and pushes went on while it joined"
    made = sorted({before, after} | {version for version in meanwhile if before < version < after})
    assert max(b - a for a, b in itertools.pairwise(made)) <= MAX_LAG + 1, (
        f"and so did the other engine: versions {made}"
    )
    assert first.log.count("engine phase=") == phases, "which has served all the time"
    assert (
        sum(
            row.load.get("requests_aborted", 0) + row.load.get("requests_aborted_by_pushes", 0) for row in told.values()
        )
        == 0
    )
    assert "evicted" not in pushes.replace("evicted=0", ""), "no push has left anybody out"


async def _head(versions: VersionRegistry) -> int:
    head = await versions.head()
    assert head is not None
    return head.version


class _Seen:
    """Samples, recorded as they are stored."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._newest: list[tuple[float, int]] = []
        """Time at which a sample was stored, and the newest version until then."""
        self.versions: list[int] = []
        self.of_second: Sample | None = None
        self.newest_before_it = -1
        """Newest version of the samples that were stored when generation of that one began."""

    async def watch(self) -> None:
        async for received in self._bus.samples.tail(follow=True):
            sample = received.sample
            if not isinstance(sample, Sample) or not sample.spans:
                continue
            self.versions += [span.version for span in sample.spans]
            if sample.engine == "second" and self.of_second is None:
                began_s = received.stored_s - sample.timings.generating_s - sample.timings.reward_s
                self.newest_before_it = max(
                    (newest for stored_s, newest in self._newest if stored_s < began_s), default=-1
                )
                self.of_second = sample
            self._newest.append((received.stored_s, max(self.versions)))
