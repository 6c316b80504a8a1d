"""Settings of rewards: ``reward_parts`` by name, with weights and conditions. Loads no reward, and apart from the port:
settings are read without numpy, and a keeper of rewards starts without pydantic.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.section import Sections, section, short
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

SCORE = "score"


@section
@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One reward of a sum, an entry of ``actor.reward_parts``."""

    name: SkipJsonSchema[str] = field(default="", init=False)
    reward: str
    """Name or import path."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor of its score in the sum; 0 = it is only recorded."""
    options: JsonObject = field(default_factory=dict)
    """Passed to the reward."""
    when: JsonObject = field(default_factory=dict)
    """Metadata that a sample must have for this part to apply; empty = any."""

    def applies(self, metadata: JsonMapping) -> bool:
        """Return whether this part is for a sample with such metadata."""
        return fits(self.when, metadata)


# The parts by name; one that is a text alone is the name of its reward
RewardParts = Sections[Annotated[RewardPart, short("reward", RewardPart)]]


def fits(when: JsonMapping, metadata: JsonMapping) -> bool:
    """Return whether metadata has every value of a setting ``when``."""
    return all(metadata.get(key) == value for key, value in when.items())
