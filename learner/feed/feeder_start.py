"""Start of a feeder: its ends, its epoch, and the state that it restores from the checkpoint and the streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.bus import exit_codes
from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import Bus, connect, current_epoch, raise_epoch
from tidemill.bus.system.coroutines import first_error
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.rows import VersionRow
from tidemill.bus.wire.subjects import EPOCH_KEY
from tidemill.learner.buffer.senders import Senders, refused_before
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.evaluation.rounds import Rounds
from tidemill.learner.feed.copies import Copies
from tidemill.learner.feed.feed_server import FeedServer
from tidemill.learner.feed.feeder_settings import FeederSettings
from tidemill.learner.feed.places import FeederPlaces
from tidemill.learner.feed.restart import Resumed, recorded_settings, recorded_versions, resume
from tidemill.learner.prompts.planned_rows import PlannedRows
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.settings.config import LearnerConfig
from tidemill.weightstore.store.registry import VersionRegistry


@asynccontextmanager
async def opened_ends(places: FeederPlaces, learner: LearnerConfig) -> AsyncIterator[tuple[FeedServer, Bus]]:
    """Yield the server and the bus, with the streams of the run. The first error inside is sent to the ranks, and
    raised alone.
    """
    server = FeedServer(
        places.listen,
        keys=places.keys,
        world_size=learner.num_ranks,
        data_parallel=learner.data_parallel,
        rank_silence_s=places.rank_silence_s,
    )
    try:
        async with connect(places.bus_url, places.run, places.bus, name="feeder") as bus:
            await bus.create_layout()
            yield server, bus
    except BaseException as error:
        first = first_error(error)
        ended = isinstance(first, asyncio.CancelledError)
        await server.fail("it was told to end" if ended else exit_codes.message(first), exit_codes.of(first))
        raise first from None
    finally:
        await server.close()


async def own_epoch(bus: Bus, raised: int) -> int:
    """Return the epoch of this start: ``raised``, or a new one where that is 0. Raises Fenced when a later one was
    raised.
    """
    if not raised:
        return await raise_epoch(bus)
    newest = await current_epoch(bus)
    if newest > raised:
        raise Fenced(f"run.{EPOCH_KEY}", raised, newest)
    return raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The state with which the parts of a feeder begin."""

    epoch: int
    resumed: Resumed
    planned: PlannedRows
    rounds: Rounds
    """State of the evaluation in the checkpoint."""
    senders: Senders
    settings: list[tuple[int, JsonObject]]
    """Settings with which recorded steps are repeated, see ``Start.settings``."""


async def restore(
    bus: Bus, settings: FeederSettings, prompts: PromptFile, *, epoch: int, copies: Copies | None
) -> Restored:
    """Restore the state from the checkpoint and the streams, and the registry from both. The caller has fenced PLAN and
    TASKS.

    Raises as ``resume``.
    """
    planned, root = PlannedRows(prompts), settings.places.checkpoints
    resumed = await resume(
        bus, rules=settings.data_rules(prompts), epoch=epoch, root=root, planned=planned, copies=copies
    )
    resumed.source.max_record_bytes = bus.plans.max_record_bytes
    now = settings.step_settings
    recorded = await recorded_settings(bus, resumed, now, epoch=epoch) if now else []
    registry = VersionRegistry(bus)
    if await registry.lost(resumed.versions):
        await registry.restore(resumed.versions | await recorded_versions(bus), epoch)
    head = await first_head(registry, settings.initial_model, epoch)
    if head is not None:  # a publisher fences the head before it writes one
        resumed.source.published(head.version, head.step)
    rounds = await asyncio.to_thread(settings.evaluation.rounds)
    if resumed.evaluation is not None:
        rounds.load(resumed.evaluation)
    senders = Senders(await refused_before(bus))
    return Restored(epoch=epoch, resumed=resumed, planned=planned, rounds=rounds, senders=senders, settings=recorded)


def copies_of(bus: Bus, settings: FeederSettings) -> Copies | None:
    """Return the checkpoints as they are spread over nodes, or over this node and the store; None where one directory
    has all of them.
    """
    places, store = settings.places, settings.learner.checkpoint.url
    if store:
        return Copies(bus, places.checkpoints, num_nodes=places.num_nodes, store=ObjectStore(store, places.run))
    if settings.num_copies and places.num_nodes > 1:
        return Copies(bus, places.checkpoints, num_nodes=places.num_nodes, copies=settings.num_copies)
    return None


async def peers_of(copies: Copies | None, checkpoint: Path | None) -> JsonObject:
    """Return the fields of ``Start`` with the nodes that serve the checkpoint's files; none where this node has all of
    them.
    """
    if copies is None or checkpoint is None:
        return {}
    peers = {str(peer.node): peer for peer in await copies.peers()}
    keys = {peer.key for peer in peers.values()}
    return {
        "manifest": await asyncio.to_thread(disk.manifest_digest, checkpoint),
        "peers": {node: peer.url for node, peer in peers.items()},
        "peer_key": keys.pop() if keys else "",
    }


async def verified(checkpoint: Path | None) -> str | None:
    """Return the directory after its files were compared with the manifest. Raises CheckpointCorrupt."""
    if checkpoint is None:
        return None
    await asyncio.to_thread(disk.verify, checkpoint)
    return str(checkpoint)


async def first_head(registry: VersionRegistry, initial_model: str, epoch: int) -> VersionRow | None:
    """Return the head, restored if it cannot be read. Where no rank publishes any, version 0 is published first:
    engines load it from the model directory.

    Raises Fenced.
    """
    if initial_model:
        await registry.fence(epoch)
        await registry.publish_initial(initial_model, epoch)
    return await registry.repaired_head(epoch)
