"""Settings of the algorithm from plain maps, as a configuration file has them."""

import dataclasses
from typing import Any, cast

from tidemill.bus.section import read
from tidemill.learner.algorithms.config import AlgorithmConfig


def algorithm_of(**settings: Any) -> AlgorithmConfig:
    """Return the settings; a section is a map or an instance."""
    plain = {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        for name, value in settings.items()
    }
    return cast(AlgorithmConfig, read(AlgorithmConfig, plain))
