"""Parts of the feeder's start: its epoch, the evaluation as restored, and the checkpoints that ranks load."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidemill.bus.errors import Fenced
from tidemill.bus.streams.bus import Bus, current_epoch, raise_epoch
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Task
from tidemill.bus.wire.rows import VersionRow
from tidemill.bus.wire.subjects import EPOCH_KEY
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.object_store import ObjectStore
from tidemill.learner.feed.copies import Copies
from tidemill.learner.feed.evaluations import EvalPlan, Evaluations
from tidemill.learner.feed.feeder_rules import FeederRules
from tidemill.learner.feed.restart import Resumed
from tidemill.weightstore.store.registry import VersionRegistry


async def own_epoch(bus: Bus, raised: int) -> int:
    """Return the epoch of this start: ``raised``, or a new one where that is 0. Raises Fenced when a later one was raised."""
    if not raised:
        return await raise_epoch(bus)
    newest = await current_epoch(bus)
    if newest > raised:
        raise Fenced(f"run.{EPOCH_KEY}", raised, newest)
    return raised


def copies_of(bus: Bus, rules: FeederRules) -> Copies | None:
    """Return the checkpoints as they are spread over nodes, or over this node and the store; None where one directory has all of them."""
    if rules.store:
        return Copies(bus, rules.root, num_nodes=rules.num_nodes, store=ObjectStore(rules.store, rules.run))
    if rules.copies and rules.num_nodes > 1:
        return Copies(bus, rules.root, num_nodes=rules.num_nodes, copies=rules.copies)
    return None


async def evaluations_of(
    resumed: Resumed, bus: Bus, plan: EvalPlan, *, epoch: int, store: Callable[[Task], Awaitable[Task]]
) -> Evaluations:
    """Restore the evaluation: the state in the checkpoint, then the tasks after it, then the published version."""
    rounds = await asyncio.to_thread(plan.rounds)
    if resumed.evaluation is not None:
        rounds.load(resumed.evaluation)
    evaluations = Evaluations(bus, plan, rounds, epoch=epoch, store=store)
    evaluations.sampled = False
    await evaluations.read_scores()
    for task in resumed.eval_tasks:
        evaluations.issued(task)
    if resumed.source.head is not None:
        evaluations.published(*resumed.source.head)
    return evaluations


async def peers_of(copies: Copies | None, checkpoint: Path | None) -> JsonObject:
    """Return the fields of ``Start`` with the nodes that serve the checkpoint's files; none where this node has all of them."""
    if copies is None or checkpoint is None:
        return {}
    peers = {str(peer.node): peer for peer in await copies.peers()}
    keys = {peer.key for peer in peers.values()}
    return {
        "manifest": await asyncio.to_thread(disk.manifest_digest, checkpoint),
        "peers": {node: peer.url for node, peer in peers.items()},
        "peer_key": keys.pop() if keys else "",
    }


async def initial_weights(rules: FeederRules, resumed: Resumed) -> str | None:
    """Return the verified checkpoint with the initial weights, if the run starts from one. Raises CheckpointCorrupt."""
    return None if resumed.checkpoint is not None else await verified(rules.from_checkpoint)


async def verified(checkpoint: Path | None) -> str | None:
    """Return the directory after its files were compared with the manifest. Raises CheckpointCorrupt."""
    if checkpoint is None:
        return None
    await asyncio.to_thread(disk.verify, checkpoint)
    return str(checkpoint)


async def first_head(registry: VersionRegistry, rules: FeederRules, epoch: int) -> VersionRow | None:
    """Return the head, restored if it cannot be read. Where no rank publishes any, version 0 is published first: engines load it from
    the model directory.

    Raises Fenced.
    """
    if rules.initial_model:
        await registry.fence(epoch)
        await registry.publish_initial(rules.initial_model, epoch)
    return await registry.repaired_head(epoch)
