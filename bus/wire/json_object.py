"""Names for decoded JSON and msgpack maps."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A decoded map with text keys. Its values are of any type until they are checked."""
JsonMapping = Mapping[str, Any]
"""A ``JsonObject`` that is only read."""
