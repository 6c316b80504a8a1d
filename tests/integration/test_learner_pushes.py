"""The learner's pushes on a real bus, of a rank that cannot gather its weights alone: a failed push is repeated with
the staged weights.
"""

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from tests.integration.test_weightstore_publisher import GOOD, state
from tests.metric_names import undocumented
from tests.receiver_app import Behaviour, digest, receivers, tiny_tensors, write_tiny_companions
from tests.waits import LIMIT_S
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.feed.feed_client import FeedClient
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feed_messages import FeedStart
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.ranks.pushes import Pushes
from tidemill.learner.ranks.weight_parts import WeightParts
from tidemill.weightstore.config import WeightsConfig
from tidemill.weightstore.push.version_pusher import VersionPusher

START = FeedStart(epoch=1, checkpoint=None, step=0, steps=9, head_version=-1, head_step=-1, recorded_until=0)


@dataclass
class Sharded:
    """A policy whose export is collective, so the number of its calls must be exact."""

    step: int = 0
    exports: int = 0
    begins_apart: bool = False
    adapters: None = None
    parallel: Any = field(default_factory=lambda: SimpleNamespace(rank=0, pp_size=1, num_senders=lambda at_most: 1))

    def export_part(self, senders: int) -> Iterator[tuple[str, torch.Tensor]]:
        self.exports += 1
        yield from tiny_tensors(self.step).items()


@dataclass
class Feed:
    told: list[tuple[int, int]] = field(default_factory=list)

    def published(self, version: int, step: int) -> None:
        self.told.append((version, step))


@contextmanager
def pushing(
    policy: Sharded, feed: Feed, url: str, run: str, directory: Path, *, wait: bool, **settings: Any
) -> Iterator[Pushes]:
    places = RankPlaces(
        run=run,
        bus_url=url,
        feeder_url="",
        feeder_keys=FeedKeys.new(),
        model_dir=write_tiny_companions(directory / "model"),
        checkpoints=directory / "checkpoints",
        snapshots=directory / "snapshots",
        final_dir=directory / "final",
    )
    weights = WeightsConfig(phase_deadline_s=5.0, **settings)
    parts = WeightParts(cast(MegatronPolicy, policy), places, weights)
    pushes = Pushes(
        cast(MegatronPolicy, policy), parts, cast(FeedClient, feed), places, bus=BusConfig(), weights=weights, wait=wait
    )
    with parts.open(), pushes.open(START):
        yield pushes


@contextmanager
def failing() -> Iterator[Callable[[], str]]:
    """Yield a function that waits until a push has failed and is to be repeated. It returns the error."""
    errors: queue.Queue[str] = queue.Queue()

    def note(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("pushing again"):
            errors.put(record.getMessage())
        return True

    logger = logging.getLogger(VersionPusher.__module__)
    logger.addFilter(note)
    try:
        yield lambda: errors.get(timeout=LIMIT_S)
    finally:
        logger.removeFilter(note)


def test_a_push_that_failed_is_made_again_with_what_was_staged(bus_url: str, run_id: str, tmp_path: Path) -> None:
    policy, feed = Sharded(), Feed()
    with failing() as failed, pushing(policy, feed, bus_url, run_id, tmp_path, wait=False, min_engines=1) as pushes:
        policy.step = pushes.step = 1
        before = policy.exports
        pushes.publish()
        assert "want >= 1 engines, 0 took it" in failed()
        pushes.collect()
        assert feed.told == [(0, 0)]
        policy.step = pushes.step = 2  # a step is made meanwhile
        with receivers(bus_url, run_id, {"e1": GOOD}) as engines:
            pushes.collect(wait=True)
            assert policy.exports == before + 1
            assert feed.told[-1][1] == 1 and state(engines["e1"][0])["digest"] == digest(tiny_tensors(1))
            pushes.publish()
            pushes.collect(wait=True)
            assert policy.exports == before + 2
            assert feed.told[-1][1] == 2 and state(engines["e1"][0])["digest"] == digest(tiny_tensors(2))
            metrics = pushes.metrics()
            assert metrics["weights/push_gb_per_s/gloo"] > 0 and not undocumented(metrics)
        assert feed.told[0] == (0, 0) and len(feed.told) == 3


def test_an_outage_of_the_bus_longer_than_a_push_is_waited_for(
    nats_server: EmbeddedServer, bus_url: str, run_id: str, tmp_path: Path
) -> None:
    policy, feed = Sharded(), Feed()
    with (
        receivers(bus_url, run_id, {"e1": GOOD}) as engines,
        failing() as failed,
        pushing(policy, feed, bus_url, run_id, tmp_path, wait=False, min_engines=1) as pushes,
    ):
        nats_server.kill()
        policy.step = pushes.step = 1
        before = policy.exports
        pushes.publish()
        assert "bus unavailable" in failed()
        nats_server.start()
        pushes.collect(wait=True)
        assert (policy.exports, feed.told[-1][1]) == (before + 1, 1)
        assert state(engines["e1"][0])["digest"] == digest(tiny_tensors(1))


def test_an_engine_that_a_push_evicts_is_counted(bus_url: str, run_id: str, tmp_path: Path) -> None:
    policy, bad = Sharded(), Behaviour(fails="refuse", at="bucket")
    with (
        receivers(bus_url, run_id, {"good": GOOD, "bad": bad}),
        pushing(policy, Feed(), bus_url, run_id, tmp_path, wait=True, min_engines=1) as pushes,
    ):
        policy.step = pushes.step = 1
        pushes.publish()
        metrics = pushes.metrics()
        assert (metrics["push/engines"], metrics["push/evicted"]) == (1, 1) and not undocumented(metrics)
