"""The newest samples of a run by their headers: columns in a ring, for lists, histograms and groups. Knows no bus."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.launch.page.columns import rounded
from tidemill.launch.page.texts import shortened
from tidemill.launch.samples.filters import Headline

HELD = 1 << 17  # Number of newest sequences that are held
BINS = 20  # Bins between the lowest and the highest reward
MAX_NAMES = 4096  # Different names of actors, engines and statuses that are kept apart; others are one
TRAINED, DROPPED = "trained", "dropped"
_NONE = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Disposition:
    """Outcome of a sample: trained in a step, or dropped for a reason."""

    state: str
    step: int = 0
    reason: str = ""

    @property
    def words(self) -> str:
        """The outcome as the page names it."""
        return f"{self.state}: {self.reason}" if self.reason else self.state


class HeldSamples:
    """Headers of the newest ``HELD`` sequences, and dispositions, which PLAN may name before the header is read."""

    def __init__(self, size: int = HELD) -> None:
        self.size = size
        self.seq = np.zeros(size, np.int64)
        self._whole = {name: np.full(size, _NONE, np.int64) for name in ("task", "index", "low", "high", "tokens")}
        self._names = {name: np.zeros(size, np.int32) for name in ("kind", "actor", "status", "engine")}
        self.reward = np.full(size, np.nan, np.float32)
        self._stored_s = np.zeros(size)
        self._decided_seq = np.zeros(size, np.int64)
        self._decided = np.zeros(size, np.int32)
        self._texts: list[str | None] = [None]
        self._numbers: dict[str, int] = {}
        self._dispositions: list[Disposition] = []
        self._disposition_numbers: dict[Disposition, int] = {}
        self.last_seq = 0

    def add(self, line: Headline) -> None:
        """Register the headers of a sample."""
        place = line.seq % self.size
        self.seq[place] = line.seq
        low, high = line.versions or (_NONE, _NONE)
        whole = {"task": line.task, "index": line.index, "low": low, "high": high, "tokens": line.tokens}
        for name, value in whole.items():
            self._whole[name][place] = _NONE if value is None else value
        for name in self._names:
            self._names[name][place] = self._number(getattr(line, name))
        self.reward[place] = np.nan if line.reward is None else line.reward
        self._stored_s[place] = line.stored_s
        self.last_seq = max(self.last_seq, line.seq)

    def decide(self, seqs: NDArray[np.int64], disposition: Disposition) -> None:
        """Register the disposition of samples."""
        number = self._disposition_numbers.get(disposition)
        if number is None:
            number = self._disposition_numbers[disposition] = len(self._dispositions)
            self._dispositions.append(disposition)
        places = seqs % self.size
        newer = seqs >= self._decided_seq[places]
        self._decided_seq[places[newer]], self._decided[places[newer]] = seqs[newer], number

    def disposition(self, seq: int) -> Disposition | None:
        """Return the disposition of a sample; None if none is known here."""
        place = seq % self.size
        return self._dispositions[self._decided[place]] if self._decided_seq[place] == seq else None

    def newest_first(self, before: int) -> Iterator[Headline]:
        """Yield the held headers with sequences below ``before``."""
        for seq in range(min(before - 1, self.last_seq), max(0, self.last_seq - self.size), -1):
            if self.seq[seq % self.size] == seq:
                yield self._line(seq)

    def of_task(self, task: int) -> list[Headline]:
        """Return the held headers of the samples of a task, oldest first."""
        places = np.flatnonzero((self._whole["task"] == task) & (self.seq > self.last_seq - self.size))
        return [self._line(seq) for seq in sorted(self.seq[places].tolist())]

    @property
    def first_seq(self) -> int:
        """Smallest sequence held; 0 for none."""
        held = self.seq[self.seq > max(0, self.last_seq - self.size)]
        return int(held.min()) if len(held) else 0

    def _line(self, seq: int) -> Headline:
        place = seq % self.size
        whole = {name: int(column[place]) for name, column in self._whole.items()}
        names = {name: self._texts[column[place]] for name, column in self._names.items()}
        return Headline(
            seq=seq,
            stored_s=float(self._stored_s[place]),
            kind=names["kind"] or "",
            actor=names["actor"] or "",
            task=_some(whole["task"]),
            index=_some(whole["index"]),
            versions=None if whole["low"] == _NONE else (whole["low"], whole["high"]),
            reward=None if np.isnan(self.reward[place]) else rounded(float(self.reward[place])),
            status=names["status"],
            tokens=_some(whole["tokens"]),
            engine=names["engine"],
        )

    def engines(self) -> list[dict[str, object]]:
        """Return samples, tokens, newest version and versions behind the run of each engine, the last ones first.

        Behind: the newest version of a sample, compared with the newest one of all samples that were stored before it.
        An ended run has no live rows, but it has this.
        """
        order = np.argsort(self.seq)
        train = self._names["kind"] == self._numbers.get("train", -1)
        known = order[((self.seq > 0) & train & (self._whole["high"] >= 0))[order]]
        versions, numbers = self._whole["high"][known], self._names["engine"][known]
        behind, rows = _behind(versions), list[tuple[float, dict[str, object]]]()
        for number in np.unique(numbers[numbers > 0]).tolist():
            of_engine = numbers == number
            mean = float(behind[of_engine].mean())
            row = {"engine": self._texts[number], "samples": int(of_engine.sum()), "behind": round(mean, 2)}
            row |= {"most_behind": int(behind[of_engine].max()), "version": int(versions[of_engine].max())}
            row["tokens"] = int(np.maximum(self._whole["tokens"][known][of_engine], 0).sum())
            rows.append((mean, row))
        return [row for _, row in sorted(rows, key=lambda entry: -entry[0])]

    def _number(self, text: str | None) -> int:
        if text is None:
            return 0
        text = shortened(text)  # of a header, which may have a megabyte
        number = self._numbers.get(text)
        if number is None:
            if len(self._texts) >= MAX_NAMES:
                return 0
            number = self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return number

    def histogram(self, chosen: Sequence[float | None] | None = None) -> dict[str, object]:
        """Return rewards in bins; the lowest and the highest have their own. None = of all held samples."""
        rewards = self.reward[self.seq > 0]
        if chosen is not None:
            rewards = np.array([np.nan if reward is None else reward for reward in chosen], np.float32)
        known = rewards[~np.isnan(rewards)].astype(np.float64)
        answer: dict[str, object] = {"count": len(known), "undefined": len(rewards) - len(known), "bins": []}
        return answer | {"bins": _bins(known)} if len(known) else answer

    def reward_range(self) -> tuple[float, float]:
        """Return the lowest and the highest reward of the held samples; 0 for none."""
        known = self.reward[(self.seq > 0) & ~np.isnan(self.reward)]
        return (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)

    def groups(self) -> dict[int, tuple[int, float, float]]:
        """Return task -> (samples, lowest reward, highest reward) of the held groups of two samples and more."""
        train = self._numbers.get("train", -1)
        there = (self.seq > 0) & (self._names["kind"] == train) & ~np.isnan(self.reward) & (self._whole["task"] > 0)
        tasks, rewards = self._whole["task"][there], self.reward[there]
        if not len(tasks):
            return {}
        order = np.argsort(tasks, kind="stable")
        tasks, rewards = tasks[order], rewards[order]
        starts = np.flatnonzero(np.diff(tasks, prepend=tasks[0] - 1))
        lows, highs = np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts)
        counts = np.diff(starts, append=len(tasks))
        chosen = np.flatnonzero(counts >= 2)
        return {int(tasks[starts[at]]): (int(counts[at]), float(lows[at]), float(highs[at])) for at in chosen}


def _behind(versions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how far each version, in the order of storing, is behind the newest one so far."""
    return np.maximum.accumulate(versions) - versions


def _some(value: int) -> int | None:
    return None if value == _NONE else value


def _bins(known: NDArray[np.float64]) -> list[dict[str, object]]:
    low, high = float(known.min()), float(known.max())
    bins = [_bin(low, low, int((known == low).sum()), exact=True)]
    if high == low:
        return bins
    inner = known[(known > low) & (known < high)]
    edges = np.linspace(low, high, BINS + 1)
    counts, _ = np.histogram(inner, edges)
    bins += [_bin(edges[at], edges[at + 1], int(counts[at]), exact=False) for at in range(BINS)]
    return [*bins, _bin(high, high, int((known == high).sum()), exact=True)]


def _bin(low: float, high: float, count: int, *, exact: bool) -> dict[str, object]:
    low, high = float(f"{low:.7g}"), float(f"{high:.7g}")
    chosen = f"reward={low:g}" if exact else f"reward={low:g}..{high:g}"
    return {"low": low, "high": high, "exact": exact, "count": count, "filter": chosen}
