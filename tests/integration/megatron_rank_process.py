"""A real rank in a process of its own, as ``launch`` starts one; its settings come as JSON. Run by the test."""

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tidemill.bus.config import BusConfig
from tidemill.learner.algorithms.advantages import grpo_no_std
from tidemill.learner.debug.config import DebugConfig
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feeder_settings import RankPlaces, RankSettings
from tidemill.learner.ranks.rank import main
from tidemill.learner.settings.config import HooksConfig, LearnerConfig, OptimizerConfig, StalenessConfig
from tidemill.learner.trainer.hooks import BeforeStep
from tidemill.weightstore.config import WeightsConfig

MARK = "marked"
"""Key in the metadata of a sample for which ``overflowing`` is infinite."""


def overflowing(rewards_N: Tensor, groups_N: Tensor, *, metadata: Sequence[Mapping[str, object]]) -> Tensor:
    """A custom estimator: infinite for marked samples."""
    return torch.where(torch.tensor([MARK in one for one in metadata]), math.inf, grpo_no_std(rewards_N, groups_N))


def failing(moment: BeforeStep) -> None:
    """A hook that fails at step 2."""
    if moment.batch.step == 2:
        raise RuntimeError("no second step")


def run(settings: dict[str, dict[str, object]]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    paths = {"model_dir", "checkpoints", "snapshots", "final_dir"}
    keys = FeedKeys(**settings["places"].pop("feeder_keys"))  # type: ignore[arg-type]
    named = {name: Path(str(value)) if name in paths else value for name, value in settings["places"].items()}
    places = RankPlaces(feeder_keys=keys, **named)  # type: ignore[arg-type]
    return main(
        RankSettings(
            places=places,
            learner=LearnerConfig(
                optimizer=OptimizerConfig(**settings["optimizer"]),  # type: ignore[arg-type]
                algorithm=algorithm_of(**settings["algorithm"]),
                hooks=HooksConfig(**settings["hooks"]),  # type: ignore[arg-type]
                **settings["learner"],  # type: ignore[arg-type]
            ),
            staleness=StalenessConfig(**settings["staleness"]),  # type: ignore[arg-type]
            weights=WeightsConfig(**settings["weights"]),  # type: ignore[arg-type]
            bus=BusConfig(),
            debug=DebugConfig(**settings["debug"]),  # type: ignore[arg-type]
        )
    )
