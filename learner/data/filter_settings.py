"""The setting ``data.filters``: functions that decide which groups and samples are trained. Loads no filter."""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from tidemill.bus.section import PositiveFloat, ShortNamed, refusal, section, short
from tidemill.bus.wire.json_object import JsonObject

BUILT_IN = ("equal_rewards", "gibberish", "length", "mean_reward", "repetition", "truncated")
"""Names of the filters that ship (``learner/filters/filters.py``)."""
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _known(use: str) -> str:
    if use in BUILT_IN or _PATH.fullmatch(use):
        return use
    near = difflib.get_close_matches(use, BUILT_IN, n=1)
    hint = f" (nearest: {near[0]!r})" if near else ""
    raise refusal(f"{', '.join(BUILT_IN)}, or an import path module:function{hint}")


@section
@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """One filter, an entry of ``data.filters``."""

    name: SkipJsonSchema[str] = field(default="", init=False)
    use: Annotated[str, AfterValidator(_known)]
    """Name of a built-in filter, or import path ``module:function``."""
    options: JsonObject = field(default_factory=dict)
    """Passed to every call."""
    scope: Literal["group", "buffer"] = "group"
    """``group``: called with each complete group; ``buffer``: with all of them, before a step is planned."""
    count_only: bool = False
    """True: decisions are counted and have no effect."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one call of a filter by import path; the group is dropped after it."""
    workers: Annotated[int, Field(ge=1, le=256)] = 4
    """Child processes of a filter by import path, each with one call at a time."""

    def __post_init__(self) -> None:
        if self.scope == "buffer" and self.use in BUILT_IN:
            raise ValueError(f"scope: want group with the filter {self.use}, which decides on one group, got buffer")


Filters = ShortNamed[Annotated[FilterConfig, short("use", FilterConfig)]]
"""The filters by name, in their order; one that is a text alone is what it uses. Names are parts of reasons, metrics
and messages.
"""


def identity_of(filters: Iterable[FilterConfig]) -> str:
    """Return what the content of a step depends on, as JSON; empty without filters, ``[]`` where they only count."""
    filters = list(filters)
    deciding = [
        [config.name, config.use, config.options, *(["buffer"] if config.scope == "buffer" else [])]
        for config in filters
        if not config.count_only
    ]
    return json.dumps(deciding, sort_keys=True, default=str) if filters else ""
