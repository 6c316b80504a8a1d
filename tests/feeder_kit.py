"""Environment of a feeder: a learner without a model, and actors without an engine."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.data_kit import RUN, sample
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.config import BusConfig
from tidemill.bus.streams.bus import Bus, connect
from tidemill.bus.wire.messages import Done, Kind, Plan, Requeue, Sample, Sampling, Settle, Task
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.checkpoints import disk
from tidemill.learner.errors import LearnerError
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feed_messages import FeedEnd, FeedStart, Last, encode_batch
from tidemill.learner.feed.feeder import run_feeder
from tidemill.learner.feed.feeder_settings import FeederPlaces, FeederSettings, ModelFacts
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig, StalenessConfig
from tidemill.weightstore.store.registry import VersionRegistry

WITHIN_S = 60.0
"""Longest wait for another part of the run."""
KEYS = FeedKeys.new()
"""Keys of every feeder and rank of these tests."""


def task_settings(*, group_size: int = 2, **changes: Any) -> FeederSettings:
    """Return the settings of a feeder of which only the tasks are looked at."""
    places = FeederPlaces(run=RUN, bus_url="", listen="", keys=KEYS, checkpoints=Path())
    learner = LearnerConfig(steps=1, groups_per_step=1, group_size=group_size)
    return FeederSettings(places=places, model=ModelFacts(vocab_size=256), learner=learner, **changes)


@dataclass
class World:
    """One run on a real bus."""

    url: str
    run: str
    bus: Bus
    root: Path
    learner: LearnerConfig
    staleness: StalenessConfig
    config: BusConfig
    digests: dict[int, set[str]] = field(default_factory=dict)
    """Digests of the batches served to ranks, by step: one digest if they were always the same."""
    batches: list[StepBatch] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    """Steps of the versions that ranks have published."""
    num_nodes: int = 1
    metadata: bool = False
    """True if the ranks ask for the metadata of samples."""
    most_tasks: int | None = None
    """Number of training tasks after which the actors take no more; each may take one beyond it. None = no limit."""
    taken: set[int] = field(default_factory=set)
    """The tasks that they have taken."""
    metrics: Callable[[int], dict[str, float]] = lambda step: {"loss": 1.0 / step}
    """Metrics that rank 0 reports of a step."""

    def prompts(self) -> PromptFile:
        path = self.root.parent / "prompts.jsonl"
        if not path.exists():
            path.write_text(
                "".join(json.dumps({"prompt": f"p{number}", "label": number}) + "\n" for number in range(7))
            )
        return PromptFile(path, tokenize=lambda prompt: [ord(letter) for letter in prompt], max_tokens=8)

    @asynccontextmanager
    async def feeder(self, **changes: Any) -> AsyncIterator[tuple[str, "asyncio.Task[None]"]]:
        """Run a feeder; yield its URL and task. Leaving the block kills it; an error of its own is raised by awaiting
        the task.
        """
        values: dict[str, Any] = {
            "model": ModelFacts(vocab_size=256),
            "learner": self.learner,
            "staleness": self.staleness,
            "sampling": Sampling(max_new_tokens=8),
        }
        draining = changes.pop("draining", None) or asyncio.Event()
        with KeptPort() as port:
            url = f"tcp://127.0.0.1:{port.number}"
            places = FeederPlaces(
                run=self.run,
                bus_url=self.url,
                bus=self.config,
                listen=url,
                keys=KEYS,
                checkpoints=self.root,
                num_nodes=self.num_nodes,
            )
            settings = FeederSettings(places=places, **(values | changes))
            feeding = asyncio.create_task(run_feeder(settings, self.prompts(), draining), name="feeder")
            try:
                yield url, feeding
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    @asynccontextmanager
    async def actors(
        self, make: Callable[[Task, int], Sample] | None = None, *, kind: Kind = Kind.TRAIN
    ) -> AsyncIterator[None]:
        """Run two scripted actors."""
        acting = [asyncio.create_task(self._act(make or self.respond, kind)) for _ in range(2)]
        try:
            yield
        finally:
            for one in acting:
                one.cancel()
            await asyncio.gather(*acting, return_exceptions=True)

    async def _act(self, make: Callable[[Task, int], Sample], kind: Kind) -> None:
        async with connect(self.url, self.run, self.config, name="actor") as bus:
            while True:
                if kind is Kind.TRAIN and self.most_tasks is not None and len(self.taken) >= self.most_tasks:
                    await asyncio.Event().wait()
                lease = await bus.tasks.lease(5, kind=kind)
                if lease is None:
                    continue
                if kind is Kind.TRAIN:
                    self.taken.add(lease.task.id)
                async with lease.kept():
                    for index in range(lease.task.group_size):
                        await bus.samples.publish(make(lease.task, index))
                await lease.ack()

    def respond(self, task: Task, index: int) -> Sample:
        return sample(task, index, ((task.min_version, 2 + (task.id + index) % 4),))

    async def publish(self, step: int, epoch: int, *, initial: bool = False) -> int:
        """Change the registry as a publisher does, and return the version."""
        registry = VersionRegistry(self.bus)
        await registry.fence(epoch)
        row = await (registry.publish_initial("model", epoch) if initial else registry.reserve(step, epoch))
        version = (await registry.publish(row)).version
        self.versions[version] = step
        return version

    async def train(
        self, url: str, *, rank: int = 0, stop: Callable[[str, int], bool] = lambda what, step: False
    ) -> FeedStart:
        """Act as a rank, in a thread, until the end or until ``stop(what, step)`` is true; what: batch | done |
        checkpoint | publish.
        """
        return await asyncio.to_thread(self._rank, url, rank, stop, asyncio.get_running_loop())

    def _rank(
        self, url: str, rank: int, stop: Callable[[str, int], bool], loop: asyncio.AbstractEventLoop
    ) -> FeedStart:
        def publish(step: int, *, initial: bool = False) -> None:
            publishing = asyncio.run_coroutine_threadsafe(self.publish(step, start.epoch, initial=initial), loop)
            client.published(publishing.result(WITHIN_S), step)

        def checkpoint(step: int, state: bytes) -> None:
            path = disk.staging(self.root, step=step, epoch=start.epoch)
            (path / "rank-0.bin").write_bytes(b"weights of step %d" % step)
            client.checkpointed(step, str(disk.commit(path, state)))

        place = {"rank": rank, "dp_rank": rank, "dp_size": self.learner.data_parallel}
        with FeedClient(url, keys=KEYS, **place, metadata=self.metadata, silence_s=WITHIN_S) as client:
            start = client.hello()
            if rank == 0 and start.head_version < 0:
                publish(0, initial=True)
            elif rank == 0 and start.recorded_until == start.step:
                publish(start.step)
            for step in range(start.step + 1, start.steps + 2):
                batch = client.next(step)
                if isinstance(batch, FeedEnd):
                    assert step == start.steps + 1
                    return start
                if isinstance(batch, Last):
                    assert batch.step == step - 1
                    if rank == 0 and batch.state:
                        checkpoint(batch.step, batch.state)
                    if stop("last", batch.step):
                        return start
                    assert isinstance(client.next(step), FeedEnd)
                    return start
                self.digests.setdefault(step * 10 + rank, set()).add(digest(batch))
                self.batches.append(batch)
                if stop("batch", step):
                    return start
                if rank != 0:
                    continue
                client.done(step, self.metrics(step), f"weights {step}")
                if stop("done", step):
                    return start
                if batch.state:
                    checkpoint(step, batch.state)
                if stop("checkpoint", step):
                    return start
                if not batch.recorded or step == start.recorded_until:
                    publish(step)
                if stop("publish", step):
                    return start
        raise LearnerError("no end was served")

    async def records(self) -> list[Plan | Done | Settle | Requeue]:
        return [
            record async for _, record in self.bus.plans.scan() if isinstance(record, Plan | Done | Settle | Requeue)
        ]

    async def plans(self) -> list[Plan]:
        return [record for record in await self.records() if isinstance(record, Plan)]


def digest(batch: StepBatch) -> str:
    """Return the digest of everything a rank trains on; the repetition flag and the checkpoint's bytes are not part of
    it.
    """
    frames = encode_batch(batch)
    header = (batch.step, batch.dp_rank, batch.num_tokens, len(batch.micro_batches))
    return hashlib.sha256(repr(header).encode() + b"".join(bytes(frame) for frame in frames[2:])).hexdigest()
