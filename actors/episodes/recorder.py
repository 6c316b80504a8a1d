"""Recorder of an episode: a tree of turns linked by exact token prefixes, exported as token sequences. Knows no engine,
bus or clock.

A node is a turn: the ids of its prompt beyond its parent's end, and its output. The parent of a prompt is the deepest
node whose whole path (prompt and output of every turn down to it) is an exact prefix of it. So a token is always
trained behind the very ids it was sampled behind, whatever the client does with its history: text that comes back with
other ids, a compaction, a template that drops reasoning begin a new branch, and nothing is realigned. Ids are compared
as bytes: a turn costs one memory compare of its prompt and a step for every turn of the path; memory is linear in the
new tokens.

Shape letters: P = tokens of a prompt, R = tokens of an output or of a response region, L = tokens of a sequence, E =
layers with experts, K = experts of a token.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.wire.invariants import LOG_PROB_SLACK, MIN_LOG_PROB
from tidemill.bus.wire.messages import SequenceSize, Span, Turns
from tidemill.bus.wire.routed_experts import RoutedExperts

EXTENDS, FORKS, BEGINS = "extends", "forks", "begins"
"""Kinds of a turn's place: behind an output without another turn behind it, behind one that has one (or beside a turn
of the same prompt), and with a context that no recorded turn begins.
"""
UNTRAINED = ("asked", "log_probs", "empty")
"""Reasons for which a turn is context only: it was asked for so; log-probs are missing or out of range; no output."""
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutput:
    """The delivered output of one model call."""

    tokens: NDArray[np.int32]
    """Sampled ids that were delivered, [R]."""
    log_probs: NDArray[np.float32] | None
    """Log-probabilities (nats) under the distribution that was sampled from, [R]; None = not known."""
    spans: tuple[Span, ...]
    id: str = ""
    finish: str = ""
    """Finish reason, as the engine returned it; ``cut`` where the client ended the stream."""
    agent: str = ""
    begin_s: float = 0.0
    seconds: float = 0.0
    trained: bool = True
    """False: a call that was asked for without training."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens of prompt and output, [P + R, E, K]; None = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The tokens of an episode as the fields of a sample."""

    tokens: NDArray[np.int32]
    sequences: tuple[SequenceSize, ...]
    rollout_log_probs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    spans: tuple[Span, ...]
    turns: Turns
    numbers: tuple[int, ...]
    """Number of each of ``turns`` in the recorder."""
    routed_experts: RoutedExperts | None
    """Experts of all tokens, [sum of L, E, K], by the first turn with the token as an input; None = no turn has any."""

    @property
    def response_length(self) -> int:
        """Tokens of all response regions, R."""
        return len(self.loss_mask)


@dataclass(slots=True, eq=False)
class _TurnNode:
    """A turn, or the root (number -1, no ids)."""

    number: int = -1
    parent: "_TurnNode | None" = None
    context: bytes = b""
    """Ids of the prompt beyond the parent's end."""
    output: TurnOutput | None = None
    ids: bytes = b""
    """Context and output."""
    end: int = 0
    """Bytes of the path from the root to its end."""
    trained: bool = False
    experts: RoutedExperts | None = None
    """Experts of the parent's last token and of the turn's own, [1 + own, E, K]; behind the root without the former."""
    children: list["_TurnNode"] = field(default_factory=list)


class TurnRecorder:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._root = _TurnNode()
        self._nodes: list[_TurnNode] = []
        self.branched = dict.fromkeys((FORKS, BEGINS), 0)
        """Trained turns behind the first one that do not extend an output, by their place in the tree."""
        self.last_trained = -1
        """Number of the last turn that is trained; -1 = none is."""
        self.untrained = dict.fromkeys(UNTRAINED, 0)
        """Recorded turns that are context only, by reason."""
        self.total_tokens = 0
        """Maximum number of tokens that the sequences of all turns can have, L."""
        self.sampled_tokens = 0
        """Tokens of all outputs."""

    def __len__(self) -> int:
        return len(self._nodes)

    def record(self, prompt: NDArray[np.int32], output: TurnOutput) -> int:
        """Record a delivered turn, in order of delivery, and return its number.

        It must be recorded before the last byte of its answer is sent, so that a parent is there before its child.
        Raises ValueError for an empty prompt, for spans of another length than the output, and for experts of another
        number of tokens.
        """
        _check(prompt, output)
        ids = _encode_ids(prompt)
        parent = self._parent(ids)
        context, sampled = ids[parent.end :], _encode_ids(output.tokens)
        reason = _untrained(output)
        if reason:
            self.untrained[reason] += 1
        experts = output.routed_experts
        if experts is not None:
            # The parent's last token became an input with this turn; the tokens before it have their own experts.
            experts = experts[max(0, parent.end // _ID_BYTES - 1) :].copy()
        node = _TurnNode(
            number=len(self._nodes),
            parent=parent,
            context=context,
            output=output,
            ids=context + sampled,
            end=len(ids) + len(sampled),
            trained=not reason,
            experts=experts,
        )
        place = BEGINS if parent is self._root else FORKS if parent.children else EXTENDS
        if not reason:
            if self.last_trained >= 0 and place != EXTENDS:
                self.branched[place] += 1
            self.last_trained = node.number
        self.total_tokens += len(node.ids) // _ID_BYTES if place == EXTENDS else node.end // _ID_BYTES
        self.sampled_tokens += len(output.tokens)
        parent.children.append(node)
        self._nodes.append(node)
        return node.number

    def behind(self, prompt: NDArray[np.int32]) -> tuple[int, NDArray[np.int32]]:
        """Return the number of a prompt's parent, -1 = none, and the ids of the prompt beyond the parent's end."""
        parent = self._parent(_encode_ids(prompt))
        return parent.number, prompt[parent.end // _ID_BYTES :]

    def growth(self, prompt: NDArray[np.int32]) -> int:
        """Return the tokens that a turn with this prompt adds to ``total_tokens`` besides its output."""
        parent = self._parent(_encode_ids(prompt))
        return len(prompt) if parent is self._root or parent.children else len(prompt) - parent.end // _ID_BYTES

    def _parent(self, prompt: bytes) -> _TurnNode:
        """Return the deepest node whose path is a prefix of the prompt, the newest of equals; else the root."""
        best, reached = self._root, [self._root]
        while reached:
            node = reached.pop()
            best = max(best, node, key=lambda node: (node.end, node.number))
            # More than one child matches where outputs are equal, or one is a beginning of another.
            reached += [child for child in node.children if prompt.startswith(child.ids, node.end)]
        return best

    def export(self, *, ended_s: float = 0.0) -> Sequences:
        """Return the sequences: one for every turn without a turn behind it that still has something to train, in order
        of first turns.

        A turn is trained by the first sequence that has it; later ones have it in their context. ``ended_s``: seconds
        of the episode at its end, for the time of tools behind the last turn.
        Raises ValueError when no turn is to be trained: there is nothing to make a sample of.
        """
        trained = [node for node in self._nodes if node.trained]
        if not trained:
            raise ValueError("episode: want a turn with sampled tokens and their log-probs, got none")
        return _Export().sequences_of(trained, self.tools_s(ended_s)[1])

    def tools_s(self, ended_s: float) -> tuple[float, list[float]]:
        """Return the seconds without a model call under way: those before the first call, and those behind each turn.
        Behind parallel calls they belong to the turn that ended last. ``ended_s``: seconds of the episode at its end.
        """
        outputs = [node.output for node in self._nodes if node.output is not None]
        seconds = [0.0] * len(outputs)
        last, busy_to_s = -1, 0.0
        for number in sorted(range(len(outputs)), key=lambda number: outputs[number].begin_s):
            output = outputs[number]
            if last >= 0:
                seconds[last] += max(0.0, output.begin_s - busy_to_s)
            if last < 0 or output.begin_s + output.seconds >= busy_to_s:
                last, busy_to_s = number, output.begin_s + output.seconds
        if last >= 0:
            seconds[last] += max(0.0, ended_s - busy_to_s)
        return min((output.begin_s for output in outputs), default=ended_s), seconds


class _Export:
    """The columns of the sequences, filled one sequence after the other."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []
        self._sizes: list[SequenceSize] = []
        self._log_probs: list[NDArray[np.float32]] = []
        self._mask: list[NDArray[np.uint8]] = []
        self._spans: list[Span] = []
        self._at: dict[int, int] = {}
        self._length = 0
        self._experts: list[RoutedExperts | int] = []

    def sequences_of(self, trained: list[_TurnNode], tools_s: list[float]) -> Sequences:
        """Return the sequences that train these turns, in order of delivery. ``tools_s``: of each recorded turn."""
        claimed: set[int] = set()
        for leaf in _leaves(trained):
            path = _down_to(leaf)
            # The turns claimed before are a beginning of the path, so they never lie inside a response region.
            first = next(place for place, node in enumerate(path) if node.trained and node.number not in claimed)
            self._add_sequence(path, first)
            claimed |= {node.number for node in path}
        order = sorted(self._at)
        outputs = [node.output for node in trained if node.output is not None]
        turns = Turns(
            at=np.array([self._at[number] for number in order], np.int32),
            tokens=np.array([len(output.tokens) for output in outputs], np.int32),
            begin_s=np.array([output.begin_s for output in outputs], np.float32),
            seconds=np.array([output.seconds for output in outputs], np.float32),
            tools_s=np.array([tools_s[node.number] for node in trained], np.float32),
            id=tuple(output.id for output in outputs),
            finish=tuple(output.finish for output in outputs),
            agent=tuple(output.agent for output in outputs),
        )
        return Sequences(
            tokens=np.frombuffer(b"".join(self._tokens), "<i4").astype(np.int32),
            sequences=tuple(self._sizes),
            rollout_log_probs=np.concatenate(self._log_probs),
            loss_mask=np.concatenate(self._mask),
            spans=tuple(self._spans),
            turns=turns,
            numbers=tuple(order),
            routed_experts=_joined(self._experts),
        )

    def _add_sequence(self, path: list[_TurnNode], first: int) -> None:
        """Add the sequence of a path that is trained from turn ``path[first]`` on."""
        begin = self._length
        for place, node in enumerate(path[first:], first):
            output, num_outside = node.output, len(node.context) // _ID_BYTES
            assert output is not None, "only the root has no output, and it is on no path"
            if place > first and num_outside:
                # Ids of the environment have the version of the turn that read them.
                self._add(np.zeros(num_outside, np.float32), 0)
                self._spans.append(Span(version=_reader(path[place:]), num_tokens=num_outside))
            if node.trained:
                assert output.log_probs is not None
                self._at[node.number] = self._length
                self._add(output.log_probs.astype(np.float32), 1)
            elif len(output.tokens):  # context, under the versions that made it
                self._add(np.zeros(len(output.tokens), np.float32), 0)
            self._spans += output.spans
        self._tokens += [node.ids for node in path]
        self._experts += [_experts_of(node, path[place + 1 :]) for place, node in enumerate(path)]
        self._sizes.append(SequenceSize(path[-1].end // _ID_BYTES, self._length - begin))

    def _add(self, log_probs: NDArray[np.float32], mask: int) -> None:
        self._log_probs.append(log_probs)
        self._mask.append(np.full(len(log_probs), mask, np.uint8))
        self._length += len(log_probs)


def _experts_of(node: _TurnNode, behind: list[_TurnNode]) -> RoutedExperts | int:
    """Return the experts of a turn's own tokens; the number of these tokens where they are not known.

    Its last token became an input with the next turn that has tokens.
    """
    length, experts = len(node.ids) // _ID_BYTES, node.experts
    after = next((turn.experts for turn in behind if turn.ids), None)
    if not length:
        return 0
    if after is None:
        return length if experts is None else experts[len(experts) - length :]
    before = _unknown(length - 1, after) if experts is None else experts[len(experts) - length : -1]
    return np.concatenate([before, after[:1]])


def _joined(parts: list[RoutedExperts | int]) -> RoutedExperts | None:
    """Return the experts of all tokens in one array; a part that is a number of tokens is unknown. None = none."""
    like = next((part for part in parts if not isinstance(part, int)), None)
    if like is None:
        return None
    return np.concatenate([_unknown(part, like) if isinstance(part, int) else part for part in parts])


def _unknown(length: int, like: RoutedExperts) -> RoutedExperts:
    return np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def _leaves(trained: list[_TurnNode]) -> list[_TurnNode]:
    """Return the nodes without another one of ``trained`` below, ordered by the first turn that each trains."""
    above: set[int] = set()
    for node in trained:
        parent = node.parent
        while parent is not None and parent.number not in above:  # stops where another path was: linear in the turns
            above.add(parent.number)
            parent = parent.parent
    leaves = [node for node in trained if node.number not in above]
    return sorted(leaves, key=lambda leaf: [turn.number for turn in _down_to(leaf)])


def _down_to(node: _TurnNode) -> list[_TurnNode]:
    path = [node]
    while (parent := path[-1].parent) is not None and parent.number >= 0:
        path.append(parent)
    return path[::-1]


def _reader(path: list[_TurnNode]) -> int:
    """Return the version that read the context of a path's first turn: the version of its first output with a token."""
    return next(node.output.spans[0].version for node in path if node.output is not None and node.output.spans)


def _encode_ids(ids: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def _untrained(output: TurnOutput) -> str:
    """Return the reason for which an output is context only; empty = it is trained."""
    if not len(output.tokens):
        return "empty"
    if not output.trained:
        return "asked"
    log_probs = output.log_probs
    if log_probs is None or len(log_probs) != len(output.tokens):
        return "log_probs"
    return "" if ((log_probs >= MIN_LOG_PROB) & (log_probs <= LOG_PROB_SLACK)).all() else "log_probs"  # NaN fails both


def _check(prompt: NDArray[np.int32], output: TurnOutput) -> None:
    length = len(output.tokens)
    if not len(prompt):
        raise ValueError("prompt: want at least one id, got none")
    if (covered := sum(span.num_tokens for span in output.spans)) != length:
        raise ValueError(f"spans: want to cover {length} ids, got {covered}")
    if output.routed_experts is not None and len(output.routed_experts) != len(prompt) + length:
        raise ValueError(
            f"routed_experts: want experts of {len(prompt) + length} tokens, got {len(output.routed_experts)}"
        )
