"""Addresses and directories of the learner's processes. Made by their caller; knows no setting of the training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.bus.config import BusConfig

if TYPE_CHECKING:  # it loads zmq, which commands without a learner do not have
    from tidemill.learner.feed.feed_keys import FeedKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederPlaces:
    """Addresses, keys and directories of the feeder."""

    run: str
    bus_url: str
    bus: BusConfig = field(default_factory=BusConfig)
    listen: str
    """Where ranks connect: tcp://host:port."""
    keys: "FeedKeys"
    """They admit the ranks."""
    checkpoints: Path
    """Root of the checkpoints."""
    num_nodes: int = 1
    """Nodes of the learner."""
    epoch: int = 0
    """Epoch that the leader of several nodes has raised for this start; 0 = the feeder raises it."""
    rank_silence_s: float = 0.0
    """Longest time without a heartbeat of a rank; 0 = ranks send none, as on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Addresses, keys and directories of a rank."""

    run: str
    bus_url: str
    feeder_url: str
    feeder_keys: "FeedKeys"
    silence_s: float = 0.0
    """Longest time without a heartbeat of the feeder, in a collective, too; 0 = there are none, as on one node."""
    progress: int = -1
    """Inherited descriptor of a pipe that gets a byte for every step; -1 = none."""
    model_dir: Path
    """Initial weights, configuration and tokenizer, in Hugging Face format."""
    megatron_checkpoint: Path | None = None
    """Checkpoint of Megatron's own training, whose weights replace those in ``model_dir``; None = there is none."""
    checkpoints: Path
    """Root of the checkpoints, as the feeder's; with ``learner.checkpoint.store: local`` that of this rank's node."""
    node: int = 0
    """Node of the rank."""
    snapshots: Path
    """Snapshots of versions are kept here."""
    final_dir: Path
    """The trained model is written here, in Hugging Face format, after the last step."""
