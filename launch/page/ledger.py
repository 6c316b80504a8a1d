"""Where the samples of a run are: the counts of the feeder's own accounting, of PLAN, and of the audit.

    issued -> leased | waiting -> generated -> published -> buffered -> trained | dropped | duplicate | invalid

The feeder's row has every count while it runs; without one the audit of an ended run has them. Counts of PLAN alone
(trained, dropped) are the fallback. Nothing here is computed twice: lost and twice come from ``launch.run.audit``.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Plan, Requeue, Settle
from tidemill.launch.page.texts import safe
from tidemill.launch.run.audit import RunAccounting

ACCOUNTED = "accounted/"  # Prefix of the feeder's counts in its live row
REASONS = ("stale", "filtered", "empty", "failed", "aborted", "dead", "lost")  # Drop reasons that are always shown
REMEMBERED_S, REMEMBER_EVERY_S = 660.0, 10.0


@dataclass(slots=True)
class RunLedger:
    """Counts of a run so far."""

    trained: int = 0  # Samples named by plans, a step counted once
    dropped: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)  # Tasks by reason
    tasks_settled: int = 0
    requeued: int = 0
    feeder: dict[str, int] = field(default_factory=dict)  # Newest counts of the feeder, by flat name
    backlog: tuple[int, int] | None = None  # Tasks (waiting, leased)
    behind: int = 0  # Messages of SAMPLES that the feeder has not read
    accounting: RunAccounting | None = None
    audited: JsonObject = field(default_factory=lambda: {"state": "not yet"})
    _steps: set[int] = field(default_factory=set)
    _history: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def add(self, record: object) -> None:
        """Count a record of PLAN."""
        if isinstance(record, Plan):
            if record.step not in self._steps:
                self._steps.add(record.step)
                self.trained += len(record.seqs)
                self.tasks_settled += len(record.tasks)
        elif isinstance(record, Settle):
            self.given_up[safe(record.reason)] += len(record.tasks)
            self.dropped[safe(record.reason)] += len(record.seqs)
            self.tasks_settled += len(record.tasks)
        elif isinstance(record, Requeue):
            self.requeued += 1

    def note_feeder(self, load: Mapping[str, float]) -> None:
        """Take over the counts in the feeder's live row, if they are there."""
        names = [name for name in load if name.startswith(ACCOUNTED)]
        if names:
            self.feeder = {safe(name.removeprefix(ACCOUNTED)): int(load[name]) for name in names}
        self.behind = int(load.get("behind", 0))

    def counts(self) -> dict[str, int]:
        """Return the count of each disposition of samples, zeros included."""
        if self.accounting is not None:
            return _audited_counts(self.accounting)
        feeder = self.feeder
        dropped = _under(feeder, "dropped/") if feeder else self.dropped
        counts = {"trained": feeder.get("trained", self.trained)}
        counts |= {f"dropped: {reason}": dropped.get(reason, 0) for reason in [*REASONS, *sorted(dropped)]}
        names = ("duplicate", "invalid", "buffered", "eval")
        return counts | {name: feeder.get(name, 0) for name in names} | {"in the stream": self.behind}

    def remember(self, now_s: float) -> None:
        """Keep the counts of now, for ``since``."""
        if not self._history or now_s - self._history[-1][0] >= REMEMBER_EVERY_S:
            self._history.append((now_s, self.counts()))
        while self._history and self._history[0][0] < now_s - REMEMBERED_S:
            self._history.popleft()

    def as_map(self, last_s: float = 0.0, now_s: float = 0.0, group_size: int = 0) -> JsonObject:
        """Return the flow of the run for the page; with ``last_s`` the counts of the last seconds.

        ``group_size``: samples of a task, to show tasks in samples; 0 = not known.
        """
        counts, since_s = self.counts(), None
        total = self._balance(counts)
        if last_s:
            earlier = next((kept for kept in self._history if kept[0] >= now_s - last_s), None)
            if earlier is not None:
                since_s = earlier[0]
                gauges = ("buffered", "in the stream")
                counts = {
                    name: count if name in gauges else max(0, count - earlier[1].get(name, 0))
                    for name, count in counts.items()
                }
        published = sum(count for name, count in counts.items() if name != "eval")
        lost, twice = (self.audited.get(name) for name in ("lost", "twice"))
        rows = [{"fate": name, "samples": count, "tone": _tone(name)} for name, count in counts.items()]
        rows += [{"fate": "lost", "samples": lost, "tone": "bad"}, {"fate": "trained twice", "samples": twice}]
        nodes, links = _sankey(counts, published, *self._waiting_samples(group_size, last_s))
        return {
            "published": published,
            "ledger": rows,
            "tasks": self._tasks(),
            "balance": total,
            "audit": {**self.audited, **audit_words(self.audited)},
            "nodes": nodes,
            "links": links,
            "since_s": since_s,
        }

    def _waiting_samples(self, group_size: int, last_s: float) -> tuple[int, int]:
        """Return the samples of tasks that wait for an actor, and of leased ones, which are gauges of now."""
        if self.backlog is None or last_s:
            return 0, 0
        waiting, leased = self.backlog
        return waiting * group_size, leased * group_size

    def _balance(self, counts: Mapping[str, int]) -> JsonObject:
        if self.accounting is not None:
            published, accounted = self.accounting.published, sum(counts.values()) - counts["eval"]
        elif self.feeder:
            published = self.feeder["published"]
            accounted = sum(count for name, count in counts.items() if name not in ("eval", "in the stream"))
        else:
            checked = self.audited["state"] == "running"
            words = "being checked" if checked else "no feeder reports its counts"
            return {"ok": None, "words": words, "difference": None, "tone": "mute", "text": f"— balance: {words}"}
        difference = published - accounted
        words = "published = sum" if not difference else f"{difference} samples without a disposition"
        tone, text = ("badly", f"✕ {words}") if difference else ("good", f"✓ balance: {words}")
        return {"ok": not difference, "words": words, "difference": difference, "tone": tone, "text": text}

    def _tasks(self) -> JsonObject:
        waiting, leased = self.backlog or (None, None)
        settled = _under(self.feeder, "settled/") if self.feeder else dict(self.given_up)
        issued, unsettled = (self.feeder.get(name) for name in ("issued", "open"))
        if self.accounting is not None:
            issued, unsettled = self.accounting.tasks_issued, self.accounting.tasks_open
        given_up = {reason: count for reason, count in settled.items() if reason != "trained"}
        return {
            "issued": issued,
            "settled": sum(settled.values()) if self.feeder else self.tasks_settled,
            "open": unsettled,
            "waiting": waiting,
            "leased": leased,
            "dead": settled.get("dead", 0),
            "given_up": given_up,
            "requeued": self.requeued,
        }


_UNCHECKED = {"not yet": "not checked yet", "running": "being checked"}


def audit_words(audited: Mapping[str, Any]) -> JsonObject:
    """Return tone, sentence and notes of a check for the page. Only one that has ended without a finding is good."""
    state, lost, twice = (audited.get(name) for name in ("state", "lost", "twice"))
    if state in _UNCHECKED:
        return {"tone": "mute", "text": f"◌ lost and trained twice: {_UNCHECKED[state]}", "notes": []}
    if state != "checked":
        notes = [audited["words"]] if "words" in audited else []
        return {"tone": "badly", "text": f"✕ not checked: {state}", "notes": notes}
    problems = audited.get("problems", ())
    is_fine = lost == 0 and twice == 0 and not problems
    numbers = ("—" if count is None else f"{count:,}" for count in (lost, twice))
    text = f"{'✓' if is_fine else '✕'} lost {next(numbers)} · trained twice {next(numbers)}"
    notes = [f"up to sample #{audited['at_seq']}", *problems]
    return {"tone": "good" if is_fine else "badly", "text": text, "notes": notes}


def _under(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


def _audited_counts(accounting: RunAccounting) -> dict[str, int]:
    dropped = {safe(reason): count for reason, count in accounting.dropped.items()}
    counts = {"trained": accounting.trained_here}
    counts |= {f"dropped: {reason}": dropped.get(reason, 0) for reason in [*REASONS, *sorted(dropped)]}
    return counts | {
        "duplicate": accounting.duplicates,
        "invalid": accounting.invalid,
        "buffered": accounting.buffered,
        "eval": accounting.eval,
        "in the stream": 0,
    }


def _tone(name: str) -> str:
    if name.startswith("dropped") or name in ("duplicate", "invalid"):
        return "warn"
    return "ok" if name == "trained" else "mute"


def _sankey(
    counts: Mapping[str, int], published: int, waiting: int, leased: int
) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return nodes and links of the diagram, in samples."""
    evaluated = counts["eval"]
    dropped = {name: count for name, count in counts.items() if name.startswith("dropped") and count}
    ends = {"trained": counts["trained"], **dropped, "duplicate": counts["duplicate"], "invalid": counts["invalid"]}
    ends |= {"buffered": counts["buffered"]}
    generated, read = published + evaluated, published - counts["in the stream"]

    def links() -> Iterator[JsonObject]:
        yield {"from": "issued", "to": "waiting for an actor", "value": waiting, "tone": "mute"}
        yield {"from": "issued", "to": "leased", "value": leased, "tone": "mute"}
        yield {"from": "issued", "to": "generated", "value": generated, "tone": "ok"}
        yield {"from": "generated", "to": "published", "value": published, "tone": "ok"}
        yield {"from": "generated", "to": "evaluation", "value": evaluated, "tone": "mute"}
        yield {"from": "published", "to": "read", "value": read, "tone": "ok"}
        yield {"from": "published", "to": "in the stream", "value": counts["in the stream"], "tone": "mute"}
        for name, count in ends.items():
            yield {"from": "read", "to": name, "value": count, "tone": _tone(name)}

    places = {"issued": (0, waiting + leased + generated), "waiting for an actor": (1, waiting)}
    places |= {"leased": (1, leased), "generated": (1, generated), "published": (2, published)}
    places |= {"evaluation": (2, evaluated), "read": (3, read), "in the stream": (3, counts["in the stream"])}
    places |= {name: (4, count) for name, count in ends.items()}
    names = {"published": "scored and published", "read": "read by the learner"}
    shown = [link for link in links() if link["value"]]
    tones = {link["to"]: link["tone"] for link in shown}
    nodes = [
        {"id": name, "name": names.get(name, name), "column": at, "value": count, "tone": tones.get(name, "mute")}
        for name, (at, count) in places.items()
    ]
    return nodes, shown
