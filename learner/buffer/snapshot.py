"""Snapshot of a DataSource as a checkpoint has it: one msgpack map of schema 1."""

import msgpack

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.errors import ReplayMismatch

SCHEMA = 1
"""Version of the snapshot format."""
ROWS = "rows"
"""Key of the planned rows (``tidemill.learner.prompts.planned_rows``); snapshots of earlier releases lack them."""


def read_state(data: bytes) -> JsonObject:
    """Return the map of a snapshot. Raises ReplayMismatch for another schema."""
    state: JsonObject = msgpack.unpackb(data)
    if state.get("schema") != SCHEMA:
        raise ReplayMismatch("state of the data", f"schema {SCHEMA}", state.get("schema"))
    return state
