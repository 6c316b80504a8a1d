"""Rows of one source as far as a check reads and tokenizes them: a second or so, and at least some hundred rows."""

import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from tidemill.launch.checks.findings import Report
from tidemill.learner.data.bad_rows import REFUSE, RowTooLong
from tidemill.learner.data.formats import count_rows
from tidemill.learner.data.prompts import Row, RowRules, RowTokens, refuse_template, scan_rows
from tidemill.learner.data.source import Source
from tidemill.learner.errors import PromptError

READ_S = 0.5
"""Seconds after which no further row is read, or tokenized, once ``SURE_ROWS`` rows are."""
SURE_ROWS = 500
"""Rows that are read and tokenized, however long it takes."""
MOST_CAUSES = 5
"""Most causes of bad rows that are reported for a source."""
ROOM = "a larger context or data.max_prompt_tokens, or a smaller sampling.max_new_tokens makes room"


@dataclass(slots=True, kw_only=True)
class Reading:
    """The rows of a source that were read."""

    source: Source
    rows: list[Row] = field(default_factory=list)
    """Those that can be used."""
    bad: list[PromptError] = field(default_factory=list)
    """Errors of rows that were read."""
    rejected: list[PromptError] = field(default_factory=list)
    """Errors of rows that were tokenized."""
    read: int = 0
    total: int | None = None
    """Rows of the source; None = not known."""
    readable: int = 0
    """Rows that had no error before they were tokenized."""
    tokenized: int = 0
    longest: int = 0
    """Tokens of the longest prompt that is used."""

    @classmethod
    def of(cls, source: Source, rules: RowRules, recorded: Collection[str]) -> "Reading":
        """Read a source. ``recorded``: rollouts with recorded responses. Raises PromptError for a source that cannot be read."""
        refuse_template(source.template)
        reading, until = cls(source=source), time.monotonic() + READ_S
        for found in scan_rows(source):
            row = rules.applied(found, recorded)
            reading.read += 1
            if isinstance(row, PromptError):
                reading.bad.append(row)
            else:
                reading.rows.append(row)
            if reading.read >= SURE_ROWS and time.monotonic() > until:
                reading.total = _size(source)
                return reading
        if not reading.read:
            raise PromptError(str(source), "at least one prompt", "none")
        reading.total = reading.read
        return reading

    @property
    def complete(self) -> bool:
        """True if every row was read."""
        return self.read == self.total

    def tokenize(self, tokens: RowTokens) -> None:
        """Tokenize the first row and others in random order; bad ones leave ``rows``. Raises TemplateLacks.

        In random order, because of a file that is sorted by length the rows tokenized in time would all be short, or all long.
        """
        self.readable = len(self.rows)
        others = random.Random(0).sample(range(1, len(self.rows)), max(0, len(self.rows) - 1))
        until, bad = time.monotonic() + READ_S, dict[int, PromptError]()
        for number in chain([0] if self.rows else [], others):
            try:
                prompt, recorded = tokens.of(self.rows[number])
            except PromptError as error:
                bad[number] = error
            else:
                self.longest = max(self.longest, max((len(one.tokens) for one in recorded), default=len(prompt)))
            self.tokenized += 1
            if self.tokenized >= SURE_ROWS and time.monotonic() > until:
                break
        self.rejected = [error for _, error in sorted(bad.items())]
        self.rows = [row for number, row in enumerate(self.rows) if number not in bad]

    def __str__(self) -> str:
        """Return how much was read and tokenized."""
        size = f"{self.read} prompts read"
        if not self.complete:
            share = "" if self.total is None else f" of {self.total} ({100 * self.read / self.total:.2g} %)"
            size = f"the first {self.read} prompts read{share}"
        part = f", {self.tokenized} of them tokenized" if self.tokenized < self.readable else ""
        return size + part + ("" if self.complete and not part else " (tidemill data check reads all)")

    def report(self, report: Report, topic: str, policy: str, *, cure: str) -> None:
        """Report the bad rows by cause: as errors where they are refused, or none can be used.

        ``policy``: ``data.bad_rows``. ``cure``: for causes other than the length.
        """
        causes: dict[tuple[str, str], list[PromptError]] = {}
        tokenized = f"{self.read} rows read" if self.tokenized == self.readable else f"{self.tokenized} rows tokenized"
        for errors, total in ((self.bad, f"{self.read} rows read"), (self.rejected, tokenized)):
            for error in errors:
                causes.setdefault((error.want, total), []).append(error)
        refused = policy == REFUSE or not self.rows or 0 < self.tokenized == len(self.rejected)
        for (_, total), errors in list(causes.items())[:MOST_CAUSES]:
            first, remedy = errors[0], ROOM if isinstance(errors[0], RowTooLong) else cure
            got = f"{first.got}; {len(errors)} of {total} are such"
            if refused:
                report.error(topic, first.where, want=first.want, got=got, cure=remedy)
            else:
                report.warning(topic, first.where, want=first.want, got=got, cure=f"they are skipped (data.bad_rows: skip); {remedy}")
        if others := len(causes) - MOST_CAUSES if len(causes) > MOST_CAUSES else 0:
            got = f"bad rows of {others} further causes"
            report.warning(topic, str(self.source), want="rows that can be used", got=got, cure="tidemill data check names all of them")


def _size(source: Source) -> int | None:
    """Return the rows of a source, by its files' size where that takes no time; None = not known."""
    count = count_rows(source.path)
    return None if count is None else len(range(count)[source.start : source.stop])


def all_rows(readings: Collection[Reading]) -> Iterator[Row]:
    """Yield the rows of all sources that can be used."""
    for reading in readings:
        yield from reading.rows
