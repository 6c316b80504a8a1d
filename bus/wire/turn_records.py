"""Records of an episode's log: the attempt that makes its sample, its turns, states of its program, and its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.invariants import MAX_REWARD, MAX_SECONDS, check_covered, check_log_probs
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import NOT_ON_WIRE, Span

_ID_LIMIT = 2**63
MOST_TURNS = 2**31


class TurnKind(StrEnum):
    """Kinds of a record."""

    TAKE = "take"
    """``attempt`` makes the sample from here on: no earlier one may write."""
    TURN = "turn"
    """An answer, stored before the program is given it."""
    STATE = "state"
    """State of the program behind its first ``number`` turns."""
    END = "end"
    """The sample is stored, as ``sample_seq``."""
    FAILED = "failed"
    """The episode failed. It begins anew: the records before this one are void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A message of TURNS. R = tokens of the answer."""

    kind: TurnKind
    run: str
    task: int
    index: int
    attempt: str
    number: int = 0
    """Number of a turn, from 0 and in order of storage; of a state, above the numbers of the turns in front of it."""
    parent: int = -1
    """Number of the turn with the prompt and answer that its prompt begins with; -1 = none."""
    context: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids of its prompt beyond its parent's end."""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Sampled ids, [R]."""
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    spans: tuple[Span, ...] = ()
    id: str = ""
    """Name of the turn, as the program saw it."""
    finish: str = ""
    matched: int | str | None = None
    """Token id or stop string that ended it."""
    text: str = ""
    agent: str = ""
    begin_s: float = 0.0
    seconds: float = 0.0
    trained: bool = True
    engine: str = ""
    state: JsonObject = field(default_factory=dict)
    """State that the program gave, in a record of kind ``state``."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Numbers of all turns in front of a state, by the names that a program has seen for them."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of turns so far, in a record of kind ``state``."""
    sample_seq: int = 0
    """Sequence of the sample in SAMPLES, in a record of kind ``end``."""
    extra: JsonObject = field(default_factory=dict, metadata=NOT_ON_WIRE)


def check_turn_record(record: TurnRecord) -> None:
    """Check a record. Raises WireError naming the field."""
    if not 1 <= record.task < _ID_LIMIT or not 0 <= record.index < _ID_LIMIT:
        raise WireError("task, index", f"1 <= task < {_ID_LIMIT} and index >= 0", f"{record.task}, {record.index}")
    if not record.attempt:
        raise WireError("attempt", "a nonce", record.attempt)
    if (record.kind is TurnKind.END) != (record.sample_seq > 0):
        raise WireError("sample_seq", "a sequence >= 1 in an end, and only there", record.sample_seq)
    if not -1 <= record.parent < max(record.number, 1) or not 0 <= record.number < MOST_TURNS:
        raise WireError("number, parent", f"-1 <= parent < number < {MOST_TURNS}", f"{record.number}, {record.parent}")
    if record.kind is TurnKind.TURN:
        _check_turn(record)
    if record.kind is TurnKind.STATE:
        _check_state(record)


def _check_turn(record: TurnRecord) -> None:
    length, log_probs = len(record.tokens), record.log_probs
    if not len(record.context) and record.parent < 0:
        raise WireError("context", "at least one id", "none")
    if len(log_probs) != length:
        raise WireError("log_probs", f"{length} values", len(log_probs))
    check_log_probs(log_probs)
    check_covered(record.spans, length)
    if not (abs(record.begin_s) <= MAX_SECONDS and abs(record.seconds) <= MAX_SECONDS):  # NaN fails it
        raise WireError("begin_s, seconds", f"within +-{MAX_SECONDS:g} s", f"{record.begin_s}, {record.seconds}")
    for name, ids in (("context", record.context), ("tokens", record.tokens)):
        if len(ids) and ids.min() < 0:
            raise WireError(name, "ids >= 0", int(ids.min()))


def _check_state(record: TurnRecord) -> None:
    for name, number in record.ids.items():
        if not 0 <= number < record.number:
            raise WireError(f"ids[{name!r}]", f"a number below {record.number}", number)
    for number, reward in record.rewards.items():
        if not 0 <= number < record.number or not abs(reward) <= MAX_REWARD:
            want = f"a number below {record.number}, and a reward within +-{MAX_REWARD:g}"
            raise WireError(f"rewards[{number}]", want, reward)
