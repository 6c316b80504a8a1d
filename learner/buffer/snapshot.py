"""Snapshot of a DataSource as a checkpoint has it: one msgpack map of schema 1, read with its schema and the run's
identity checked.
"""

import msgpack

from tidemill.bus.wire.json_object import JsonObject
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.errors import ConfigRefused, ReplayMismatch

SCHEMA = 1
"""Version of the snapshot format."""
ROWS = "rows"
"""Key of the rows that were planned (``tidemill.learner.prompts.planned_rows``); snapshots of earlier releases lack
them.
"""


def read_state(data: bytes) -> JsonObject:
    """Return the map of a snapshot. Raises ReplayMismatch for another schema."""
    state: dict[str, object] = msgpack.unpackb(data)
    if state.get("schema") != SCHEMA:
        raise ReplayMismatch("state of the data", f"schema {SCHEMA}", state.get("schema"))
    return state


def refuse_other_identity(state: JsonObject, rules: DataRules) -> None:
    """Raise ConfigRefused if a snapshot is one of a run with another identity. Prompts are compared by their rows,
    where it has them.
    """
    for name, value in rules.identity.items():
        if name == "prompts_digest" and ROWS in state:
            continue
        if state["identity"].get(name, value) != value:
            want = f"{state['identity'].get(name)!r}, as in the checkpoint (another one needs another run)"
            raise ConfigRefused(name, want, value)
