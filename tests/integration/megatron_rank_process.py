"""A real rank in a process of its own, as ``launch`` starts one; its settings come as JSON. Run by the test."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bus.config import BusConfig
from learner.algorithms.advantages import grpo_no_std
from learner.algorithms.config import AlgorithmConfig
from learner.debug.config import DebugConfig
from learner.feed.feed_keys import FeedKeys
from learner.feed.places import RankPlaces
from learner.ranks.rank import main
from learner.settings.config import LearnerConfig, OptimizerConfig, StalenessConfig
from weightstore.config import WeightsConfig

MARK = 666.0
"""Reward by which ``overflowing`` recognises a marked sample."""


def overflowing(rewards_N: Tensor, groups_N: Tensor, **others: Any) -> Tensor:
    """A custom estimator: infinite where the reward is ``MARK``."""
    return torch.where(rewards_N == MARK, math.inf, grpo_no_std(rewards_N, groups_N))


def run(settings: dict[str, dict[str, object]]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    paths = {"model_dir", "checkpoints", "snapshots", "final_dir"}
    keys = FeedKeys(**settings["places"].pop("feeder_keys"))  # type: ignore[arg-type]
    named = {name: Path(str(value)) if name in paths else value for name, value in settings["places"].items()}
    places = RankPlaces(feeder_keys=keys, **named)  # type: ignore[arg-type]
    return main(
        places,
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=1e-2),
            algorithm=AlgorithmConfig(**settings["algorithm"]),  # type: ignore[arg-type]
            **settings["learner"],  # type: ignore[arg-type]
        ),
        staleness=StalenessConfig(**settings["staleness"]),  # type: ignore[arg-type]
        weights=WeightsConfig(**settings["weights"]),  # type: ignore[arg-type]
        bus=BusConfig(),
        debug=DebugConfig(**settings["debug"]),  # type: ignore[arg-type]
    )
