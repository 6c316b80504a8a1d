"""Parts shared by the adapters of gyms: the fields of a row about its environment, and checks of an environment's results."""

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages


def own(data: Mapping[str, Any], id: str) -> tuple[str, dict[str, Any]]:
    """Return the environment of a row (``metadata.env``, else ``id``) and its ``metadata.extras``. Raises RuntimeError."""
    metadata = data.get("metadata") or {}
    env, extras = metadata.get("env", id), metadata.get("extras") or {}
    if not isinstance(env, str) or not env:
        raise RuntimeError(f"metadata.env: want the id of an environment, got {env!r:.80}")
    if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
        raise RuntimeError(f"metadata.extras: want a map with names, got {extras!r:.80}")
    return env, dict(extras)


def number_of(reward: SupportsFloat) -> float:
    """Return a reward as a float. Raises RuntimeError unless it is a finite number."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(reward, str | bytes) or not math.isfinite(value):
        raise RuntimeError(f"the environment's reward: want a finite number, got {reward!r:.80}")
    return value


def only_text(observation: object) -> str:
    """Return an observation that is a text. Raises RuntimeError for any other."""
    if not isinstance(observation, str):
        raise RuntimeError(f"the environment's observation: want a text, got {type(observation).__name__}")
    return observation


def messages_in(given: object, where: str) -> list[dict[str, Any]]:
    """Return messages. Raises RuntimeError for anything else."""
    if isinstance(given, list | tuple) and not given:  # behind the last answer
        return []
    try:
        return chat_messages(given, where)
    except WireError as error:
        raise RuntimeError(str(error)) from None
