"""Settings of rewards: ``reward_parts``, several of them by name, with weights and conditions; ``by_rollout``. Loads no reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping

SCORE = "score"
BY_ROLLOUT = "by_rollout"
"""``actor.reward`` of a run in which every episode gets its reward from its rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One reward of a sum."""

    name: str
    reward: str
    """Name or import path."""
    weight: float = 1.0
    """Factor of its score in the sum; 0 = it is only recorded."""
    options: JsonMapping = field(default_factory=dict)
    when: JsonMapping = field(default_factory=dict)
    """Metadata that a sample must have for this part to apply; empty = any."""

    def applies(self, metadata: JsonMapping) -> bool:
        """Return whether this part is for a sample with such metadata."""
        return fits(self.when, metadata)


def fits(when: JsonMapping, metadata: JsonMapping) -> bool:
    """Return whether metadata has every value of a setting ``when``."""
    return all(metadata.get(key) == value for key, value in when.items())


def read_parts(values: JsonMapping) -> list[Part]:
    """Return the parts of the setting ``reward_parts``. Raises ValueError naming the field."""
    return [_part(name, value) for name, value in values.items()]


def _part(name: str, value: Any) -> Part:
    where = f"reward_parts.{name}"
    if name == SCORE:
        raise ValueError(f"{where}: want another name; the sum has this one")
    if isinstance(value, str):
        value = {"reward": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("reward"), str):
        raise ValueError(f"{where}: want a reward, or a map with reward and, if needed, weight, options and when, got {value!r}")
    if unknown := sorted(map(str, value.keys() - {"reward", "weight", "options", "when"})):
        raise ValueError(f"{where}.{unknown[0]}: want one of reward, weight, options and when")
    weight = value.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not abs(weight) <= 1e6:
        raise ValueError(f"{where}.weight: want a number within +-1e6, got {weight!r}")
    for key in ("options", "when"):
        if not isinstance(value.get(key, {}), Mapping):
            raise ValueError(f"{where}.{key}: want a map, got {value[key]!r}")
    return Part(
        name=name, reward=value["reward"], weight=float(weight), options=dict(value.get("options", {})), when=dict(value.get("when", {}))
    )
