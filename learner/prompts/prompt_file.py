"""Prompts of files in a deterministic order: (seed, epoch, offset) -> prompt, tokens, label, metadata."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.bus.wire.messages import Task
from tidemill.learner.data import REFUSE, Source
from tidemill.learner.errors import NEW_RUN, ConfigRefused, PromptError
from tidemill.learner.prompts.formats import add_rows, data_files, is_function
from tidemill.learner.prompts.responses import RecordedSequence, Recordings
from tidemill.learner.prompts.rows import (
    BadRows,
    PromptRow,
    RowRules,
    RowTokens,
    all_bad,
    refuse_template,
    row_digest,
    scan_rows,
)
from tidemill.learner.prompts.tokenizer import Tokenize


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of one source among the rows of all sources, and their number in a pass."""

    first: int
    size: int
    weight: float
    name: str

    @property
    def whole(self) -> int:
        """Copies of every row in a pass."""
        return int(self.weight)

    @property
    def extra(self) -> int:
        """Rows that a pass has once more, in turn; < size."""
        return min(round((self.weight - self.whole) * self.size), self.size - 1)

    @property
    def in_pass(self) -> int:
        """Rows of this source in a pass."""
        return self.whole * self.size + self.extra

    @property
    def passes(self) -> int:
        """Passes after which every row has been in one, wherever they begin."""
        return 1 if self.whole else -(-self.size // self.extra) * 2


def order_of(shares: Sequence[Share], *, shuffle: bool, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the row numbers of one pass: sorted by the raw output of Philox with key (seed, epoch), which is stable.

    One source of weight 1 has the order of the releases that had one file only.
    """
    rows = np.concatenate([part for share in shares for part in _parts(share, shuffle=shuffle, seed=seed, epoch=epoch)])
    return rows[_sorted(len(rows), seed, epoch)] if shuffle else rows


def _parts(share: Share, *, shuffle: bool, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    rows = np.arange(share.first, share.first + share.size, dtype=np.int64)
    parts = [rows] * share.whole
    # The extra rows go round and round through the source: pass e has its places e * extra to (e + 1) * extra - 1.
    done, end = epoch * share.extra, (epoch + 1) * share.extra
    while done < end:
        cycle, begin = divmod(done, share.size)
        stop = min(share.size, begin + end - done)
        ordered = rows[_sorted(share.size, _seed_of(share.name, seed), cycle)] if shuffle else rows
        parts.append(ordered[begin:stop])
        done += stop - begin
    return parts


def _sorted(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    key = np.array([seed & (2**64 - 1), epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}.{name}".encode()).digest()[:8], "little")


def prompts_digest(sources: Sequence[Source], *, shuffle: bool, seed: int) -> str:
    """Return a digest of the files' content and of all settings that determine the order of prompts. Raises
    PromptError.

    The digest of one whole file is as in the releases that had nothing else: checkpoints have it.
    """
    files = [data_files(source.path) for source in sources]
    if len(sources) == 1 and sources[0].plain and not sources[0].path.is_dir() and len(files[0]) == 1:
        digest = hashlib.sha256(repr((sources[0].template, shuffle, seed)).encode())
        _add_content(digest, files[0][0])
        return digest.hexdigest()[:16]
    described: list[tuple[object, ...]] = [
        (source.template, source.system_prompt, source.start, source.stop, source.weight) for source in sources
    ]
    columns = [(source.reward, source.reward_key, source.sampling_key, source.tools_key) for source in sources]
    if any(map(any, columns)):
        described += columns  # only then: checkpoints of earlier releases have the digest without
    if any(source.responses_key for source in sources):
        described += [(source.responses_key,) for source in sources]
    if any(source.rollout_key for source in sources) or len({source.rollout for source in sources}) > 1:
        described += [(source.rollout, source.rollout_key) for source in sources]
    digest = hashlib.sha256(repr((described, shuffle, seed)).encode())
    for file in (file for of_source in files for file in [*of_source, None]):
        content = hashlib.sha256()
        if file is not None:
            _add_content(content, file)
        digest.update(content.digest())
    return digest.hexdigest()[:16]


def _add_content(digest: "hashlib._Hash", path: Path) -> None:
    if is_function(path):
        add_rows(digest, path)
        return
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A prompt at a position of the order."""

    epoch: int
    offset: int
    row: PromptRow
    tokens: NDArray[np.int32]
    recorded: tuple[RecordedSequence, ...] = ()
    """Recorded responses of the row, for a rollout that has them."""
    chat_template_args: JsonMapping = field(default_factory=dict)
    """Variables of the chat template in the chats of its rollout."""
    digest: int = 0
    """Digest of the row."""


SHORT_CHARS = 4096
"""Characters of a prompt that is drawn without a thread."""


class PromptFile:
    """The rows of one or several sources, drawn in an order that depends on the seed and the epoch alone.

    A row that cannot be used keeps its place in the order and is skipped there (``bad_rows``). Whether it can be used
    depends on the row and the settings alone, so a later start skips the same rows.
    """

    def __init__(
        self,
        path: Path | Sequence[Source],
        *,
        tokenize: Tokenize,
        max_tokens: int,
        shuffle: bool = True,
        seed: int = 0,
        recordings: Recordings | None = None,
        chat_template_args: JsonMapping | None = None,
        rules: RowRules | None = None,
    ) -> None:
        """``path``: one file, with the defaults of ``Source``; or sources.
        ``recordings``: makes the sequences of recorded responses; None = no row has any. ``chat_template_args``: for
        the chats of rollouts.

        Raises PromptError, which names file and line, for a source that cannot be read, or without a usable row;
        with the policy refuse for any bad row.
        """
        self.sources = [Source(path=path)] if isinstance(path, Path) else list(path)
        self.shuffle, self.seed, self._rules = shuffle, seed, rules or RowRules()
        self._row_tokens = RowTokens(tokenize, max_tokens=max_tokens, recordings=recordings)
        self.chat_template_args = dict(chat_template_args or {})
        # Before the rows are read: a file that changes meanwhile then differs from the file of later starts.
        self.digest = prompts_digest(self.sources, shuffle=shuffle, seed=seed)
        self.bad_rows = BadRows(self._rules.policy)
        self._rows: list[PromptRow | PromptError] = []
        digests: list[int] = []
        self.shares = [self._read(source, number, digests) for number, source in enumerate(self.sources)]
        self.digests = np.array(digests, np.uint32)
        """Digest of each row as it is used, before it has tokens."""
        # Two passes: at the end of one, reissued prompts of it and new prompts of the next are drawn in turn.
        self._order = lru_cache(maxsize=2)(self._permutation)
        self._drawn_passes = set[int]()
        """Passes with an order, which takes long to make of many rows."""
        if self._rules.policy == REFUSE:
            for number in range(len(self._rows)):
                self._row_tokens.of(self.row(number))

    def _read(self, source: Source, number: int, digests: list[int]) -> Share:
        """Append the rows of a source, and their digests. Raises PromptError."""
        refuse_template(source.template)
        first = len(self._rows)
        recordings = self._row_tokens.recordings
        for row in scan_rows(source):
            digests.append(row_digest(row))
            self._rows.append(self._rules.applied(row, None if recordings is None else recordings.rollouts))
        rows = self._rows[first:]
        share = Share(first=first, size=len(rows), weight=source.weight, name=f"{number}")
        if not rows:
            raise PromptError(str(source), "at least one prompt", "none")
        if isinstance(rows[0], PromptError) and not any(isinstance(row, PromptRow) for row in rows):
            raise all_bad(rows[0], str(source), len(rows))
        if not share.in_pass:
            want = f"a weight with at least one of its {share.size} prompts in a pass"
            raise PromptError(str(source), want, f"{source.weight}; raise it, or remove the source")
        return share

    def __len__(self) -> int:
        """Return the number of prompts in a pass: the number of rows, unless sources have weights."""
        return sum(share.in_pass for share in self.shares)

    @property
    def trouble(self) -> str:
        """Description of the rows skipped so far, for status; empty while there are none."""
        return self.bad_rows.trouble(len(self._rows))

    def row(self, number: int) -> PromptRow:
        """Return the row of a number, which counts through the sources. Raises PromptError for a bad row."""
        row = self._rows[number]
        if isinstance(row, PromptError):
            raise row
        return row

    def place(self, number: int) -> str:
        """Return the file and line of a row, as in messages."""
        return self._rows[number].where

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of one pass, [len]; they count through the sources in their order."""
        return self._order(epoch)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        self._drawn_passes.add(epoch)
        return order_of(self.shares, shuffle=self.shuffle, seed=self.seed, epoch=epoch)

    def at(self, epoch: int, offset: int) -> Drawn:
        """Return the prompt at a position. Raises PromptError for a row that cannot be used."""
        number = int(self.order(epoch)[offset])
        row = self.row(number)
        tokens, recorded = self._row_tokens.of(row)
        return Drawn(
            epoch=epoch,
            offset=offset,
            row=row,
            tokens=tokens,
            recorded=recorded,
            chat_template_args=self.chat_template_args if row.rollout and not recorded else {},
            digest=int(self.digests[number]),
        )

    def is_short(self, epoch: int, offset: int) -> bool:
        """Return whether a position of a pass that is drawn from has a text that is tokenized within milliseconds."""
        if epoch not in self._drawn_passes or offset >= len(self):
            return False
        row = self._rows[int(self.order(epoch)[offset])]
        return isinstance(row, PromptRow) and isinstance(row.prompt, str) and len(row.prompt) <= SHORT_CHARS

    def after(self, epoch: int, offset: int) -> Drawn:
        """Return the first prompt at or after a position that can be used. Skipped rows are added to ``bad_rows``.

        Raises PromptError when no row can be used, and with the policy refuse for any bad row.
        """
        first_error: PromptError | None = None
        # This pass to its end and all of the next, in its other order; more where a pass has only some of the rows.
        for _ in range((1 + max(share.passes for share in self.shares)) * len(self)):
            if offset >= len(self):
                epoch, offset = epoch + 1, 0
            try:
                return self.at(epoch, offset)
            except PromptError as error:
                self.bad_rows.add(int(self.order(epoch)[offset]), error)
                first_error = first_error or error
            offset += 1
        assert first_error is not None
        raise all_bad(first_error, " + ".join(map(str, self.sources)), len(self._rows))

    def leave_out(self, epoch: int, offset: int, error: WireError) -> None:
        """Make the row at a position bad, because no task can carry it. Raises PromptError with the policy refuse."""
        number = int(self.order(epoch)[offset])
        bad_row = PromptError(self.place(number), f"a task with {error.field} of {error.want}", error.got)
        self._rows[number] = bad_row
        self.bad_rows.add(number, bad_row)


def sampler_seed(seed: int, epoch: int, offset: int, reissues: int) -> int:
    """Return the sampler seed of a group (its samples add their index), 0 <= seed < 2**31 - 2**16, by SHA-256."""
    digest = hashlib.sha256(f"{seed}.{epoch}.{offset}.{reissues}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % (2**31 - 2**16)  # room for 2**16 indices below 2**31


SETTING = "data.path"
_MAX_NAMED = 5
"""Maximum number of rows that a message names."""


class PlannedRows:
    """The rows of the tasks of one run, as every checkpoint has them.

    A start may read other files than the one before, as long as each position up to the last issued one has the row
    that it had. Rows behind that position, and rows that were skipped, may change.
    """

    def __init__(self, prompts: PromptFile) -> None:
        self._prompts = prompts
        self._planned = np.zeros(len(prompts.digests), np.bool_)
        self._next = (0, 0)
        """The position behind the last planned one."""

    def note(self, task: Task) -> None:
        """Register an issued task."""
        self._planned[int(self._prompts.order(task.prompt_epoch)[task.offset])] = True
        self._next = max(self._next, (task.prompt_epoch, task.offset + 1))

    def repeat(self, task: Task) -> None:
        """Register a task that an earlier start issued. Raises ConfigRefused if its position has another row."""
        order = self._prompts.order(task.prompt_epoch)
        if task.offset >= len(order):
            want = f"a prompt at position {task.offset} of pass {task.prompt_epoch}, as task {task.id} has"
            raise _refused(want, f"{len(order)} prompts")
        number = int(order[task.offset])
        if task.row_digest not in (None, int(self._prompts.digests[number])):
            raise self._other_row(number)
        self.note(task)

    def _other_row(self, number: int) -> ConfigRefused:
        try:
            got = f"{self._prompts.row(number).prompt!r:.80}"
        except PromptError as error:
            got = f"a bad row: {error}"
        return _refused(f"the row {self._prompts.place(number)} as it was when the run planned it", got)

    def dump(self) -> JsonObject:
        """Return the state for a snapshot: 33 bits for each row of the files."""
        return {
            "digests": self._prompts.digests.astype("<u4").tobytes(),
            "planned": np.packbits(self._planned).tobytes(),
            "next": list(self._next),
            "shuffle": self._prompts.shuffle,
            "shares": _facts(self._prompts.shares),
        }

    def load(self, state: JsonMapping) -> str:
        """Replace the state by one that ``dump`` has returned. Returns the differences of the rows, which are not
        planned yet, in words.

        Raises ConfigRefused if a planned row differs, or a position up to the last planned one has another row.
        """
        before, now = np.frombuffer(state["digests"], "<u4"), self._prompts.digests
        planned = np.unpackbits(np.frombuffer(state["planned"], np.uint8), count=len(before)).astype(np.bool_)
        self._next = (state["next"][0], state["next"][1])
        self._refuse_other_order(state, len(before))
        common = min(len(before), len(now))
        changed = before[:common] != now[:common]
        if len(lost := np.flatnonzero(changed & planned[:common])):
            raise self._other_row(int(lost[0]))
        self._planned[:common] = planned[:common]
        return self._differences(np.flatnonzero(changed), len(before))

    def _refuse_other_order(self, state: JsonMapping, count: int) -> None:
        facts = {"shuffle": self._prompts.shuffle, "shares": _facts(self._prompts.shares)}
        if {name: state[name] for name in facts} == facts:
            return
        shares = [
            Share(first=first, size=size, weight=weight, name=name) for first, size, weight, name in state["shares"]
        ]
        for epoch in range(self._next[0] + 1):
            before = order_of(shares, shuffle=state["shuffle"], seed=self._prompts.seed, epoch=epoch)
            before = before[: self._next[1]] if epoch == self._next[0] else before
            if not np.array_equal(before, self._prompts.order(epoch)[: len(before)]):
                want = (
                    f"{count} rows, and the weights and the shuffling of the sources, as when pass {epoch} was planned"
                )
                got = f"{len(self._prompts.digests)} rows in another order; append rows with data.shuffle: false alone"
                raise _refused(want, got)

    def _differences(self, changed: NDArray[np.int64], count: int) -> str:
        differences = []
        if len(changed):
            places = ", ".join(self._prompts.place(int(number)) for number in changed[:_MAX_NAMED])
            dots = ", ..." if len(changed) > _MAX_NAMED else ""
            differences.append(f"{len(changed)} of {count} rows differ ({places}{dots})")
        if added := len(self._prompts.digests) - count:
            differences.append(f"{abs(added)} rows {'more' if added > 0 else 'fewer'}")
        return "; ".join(differences) or "the rows are the same"


def _facts(shares: list[Share]) -> list[list[object]]:
    return [[share.first, share.size, share.weight, share.name] for share in shares]


def _refused(want: str, got: str) -> ConfigRefused:
    return ConfigRefused(SETTING, f"{want} (put the file back, or {NEW_RUN})", got)
