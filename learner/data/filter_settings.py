"""The setting ``data.filters``: functions that decide which groups and samples are trained. Loads no filter."""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping

BUILT_IN = ("equal_rewards", "gibberish", "length", "mean_reward", "repetition", "truncated")
"""Names of the filters that ship (``learner/data/filters.py``)."""
SCOPES = ("group", "buffer")
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""Names of filters: they are part of reasons in the log of plans, of metrics and of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig:
    """One filter, an entry of ``data.filters``."""

    name: str
    use: str
    """Name of a built-in filter, or import path ``module:function``."""
    options: JsonMapping = field(default_factory=dict)
    """Passed to every call."""
    scope: str = "group"
    """``group``: called with each complete group; ``buffer``: with all of them, before a step is planned."""
    count_only: bool = False
    """True: decisions are counted and have no effect."""
    timeout_s: float = 30.0
    """Seconds for one call of a filter by import path; the group is dropped after it."""
    workers: int = 4
    """Child processes of a filter by import path, each with one call at a time."""


def read_filters(values: JsonMapping) -> tuple[FilterConfig, ...]:
    """Return the filters of the setting, in their order. Raises ValueError naming the setting, what was wanted and what came."""
    return tuple(_filter(name, value, f"filters.{name}") for name, value in values.items())


def identity_of(filters: Sequence[FilterConfig]) -> str:
    """Return what the content of a step depends on, as JSON; empty without filters, ``[]`` where they only count."""
    deciding = [[one.name, one.use, one.options, *(["buffer"] if one.scope == "buffer" else [])] for one in filters if not one.count_only]
    return json.dumps(deciding, sort_keys=True, default=str) if filters else ""


def _filter(name: object, value: Any, where: str) -> FilterConfig:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{where}: want a name of 1 to 40 of A-Z a-z 0-9 _ -")
    if isinstance(value, str):
        value = {"use": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: want the name of a filter, an import path, or a map with use, got {value!r}")
    known = ("use", "options", "scope", "count_only", "timeout_s", "workers")
    if unknown := sorted(str(key) for key in value if key not in known):
        raise ValueError(f"{where}.{unknown[0]}: no such setting; there are {', '.join(known)}")
    use, options, count_only = value.get("use"), value.get("options", {}), value.get("count_only", False)
    if not isinstance(use, str) or (use not in BUILT_IN and not _PATH.fullmatch(use)):
        near = difflib.get_close_matches(str(use), BUILT_IN, n=1)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise ValueError(f"{where}.use: want {', '.join(BUILT_IN)}, or an import path module:function, got {use!r}{hint}")
    scope = value.get("scope", "group")
    if scope not in SCOPES:
        raise ValueError(f"{where}.scope: want {' or '.join(SCOPES)}, got {scope!r}")
    if scope == "buffer" and use in BUILT_IN:
        raise ValueError(f"{where}.scope: want group with the filter {use}, which decides on one group, got buffer")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{where}.options: want a map, got {options!r}")
    if not isinstance(count_only, bool):
        raise ValueError(f"{where}.count_only: want true or false, got {count_only!r}")
    timeout_s, workers = value.get("timeout_s", 30.0), value.get("workers", 4)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"{where}.timeout_s: want a number > 0, got {timeout_s!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 256:
        raise ValueError(f"{where}.workers: want a whole number from 1 to 256, got {workers!r}")
    return FilterConfig(
        name=name, use=use, options=dict(options), scope=scope, count_only=count_only, timeout_s=float(timeout_s), workers=workers
    )
