"""Answers of a page about samples: lists by headers, and one payload at a time."""

import argparse
import asyncio
import re
import shlex
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tidemill.bus.client.jetstream import Message
from tidemill.bus.errors import BusError, NotFound, WireError
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.messages import Sample, Task
from tidemill.launch.page.held import Disposition
from tidemill.launch.page.reader import RunReader
from tidemill.launch.page.sample_view import SampleView
from tidemill.launch.page.texts import SHORT, cut, ending, made_safe, safe, shortened
from tidemill.launch.samples.filters import Filter, Headline, filter_of, headline, headline_of, prompt_text, task_of
from tidemill.launch.samples.search import Lags, SampleHistory, SampleSearch, history_of, opened, planned
from tidemill.launch.samples.text import Vocabulary

PAGE, MAX_PAGE = 100, 200
SEARCHED = 100_000  # Headers that one request reads at most
SEARCH_S = 2.0  # Seconds after which a search answers with what it has
_CHUNK, _AT_ONCE, _PAYLOADS = (256, 4096), 16, 4
_LONGEST = 18  # Digits of a number in a query: it fits into 64 bits
LONG = 2000  # Characters of a text beside others
AT_A_TIME = 1000  # Headers that are compared before other requests have their turn
MAX_GROUP = 64
MAX_PROMPTS = 100
MAX_FILTER = 2000  # Characters of a filter
KEPT_SAMPLES, KEPT_BYTES = 16, 64 << 20
_WORD = re.compile(r"(?:--)?([a-z]+)[=:](.*)", re.DOTALL)
_NAMES = ("reward", "lag", "tokens", "status", "kind", "task", "actor", "engine", "text", "version", "fate", "step")


class PageFilter:
    """A filter in one line: the words of ``tidemill tail``, and ``version=``, ``fate=`` and ``step=``."""

    def __init__(self, line: str) -> None:
        """Raises ValueError naming the word. ``text=`` is plain text: an expression could hold the server."""
        values: dict[str, list[str]] = {name: [] for name in _NAMES}
        self.words: list[JsonObject] = []
        for name, value in _words(line):
            values[name].append(value)
            self.words.append({"name": name, "value": safe(value)})
        newest = {name: texts[-1] if texts else "" for name, texts in values.items()}
        self.text, self.fate = newest["text"].casefold(), newest["fate"].casefold()
        self.version, self.step = _whole(newest, "version"), _whole(newest, "step")
        names = {name: newest[name] or None for name in ("kind", "actor", "engine")}
        ranges = {name: newest[name] for name in ("reward", "lag", "tokens", "task")}
        try:
            self.headers = filter_of(argparse.Namespace(**ranges, **names, status=values["status"], text=""))
        except ValueError as error:
            raise ValueError(f"filter: {str(error).removeprefix('--')}") from None

    @property
    def selects_all(self) -> bool:
        """True if no sample is left out."""
        return self.headers == Filter() and not self.text and not self.fate and self.version is self.step is None

    def fits(self, line: Headline, disposition: Disposition | None, *, with_lag: bool = True) -> bool | None:
        """Return whether headers fit; None if fields are missing for it. The text is not compared here.

        ``with_lag`` False: no header has the lag, and the registry is read for it only where all else fits.
        """
        if self.version is not None:
            low, high = line.versions or (-1, -1)
            if not low <= self.version <= high:
                return False
        if self.step is not None and (disposition is None or disposition.step != self.step):
            return False
        if self.fate and self.fate not in ("unknown" if disposition is None else disposition.words):
            return False
        return (self.headers if with_lag else replace(self.headers, lag=None)).of(line)

    def fits_text(self, sample: Sample) -> bool:
        """Return whether the text is in the prompt or in the response."""
        return not self.text or any(self.text in part.casefold() for part in (prompt_text(sample), sample.response))


def _whole(values: Mapping[str, str], name: str) -> int | None:
    """Return a number of the filter, None without one. Raises ValueError."""
    text = values[name]
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise ValueError(f"filter: {name}: want a number, got {text!r}")
    return int(text) if text else None


def _words(line: str) -> list[tuple[str, str]]:
    if len(line) > MAX_FILTER:
        raise ValueError(f"filter: want at most {MAX_FILTER} characters, got {len(line)}")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"filter: {error}") from None
    pairs = []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None or match[1] not in _NAMES:
            raise ValueError(f"filter: want NAME=VALUE with one of {', '.join(_NAMES)}, got {word!r}")
        pairs.append((match[1], match[2]))
    return pairs


class SampleAnswers:
    """Lists of samples, and single ones. Payloads are read one by one, and the newest of them kept."""

    def __init__(self, reader: RunReader, model_dirs: tuple[Path, ...] = ()) -> None:
        """``model_dirs``: places of the tokenizer, before the place that the run's settings name."""
        self._reader, self._history, self._lags = reader, reader.history, Lags(reader.bus)
        self._search = SampleSearch(reader.bus, Filter())
        self._model_dirs, self._vocabulary = model_dirs, asyncio.Lock()
        self._tokens: Vocabulary | None = None
        self._kept: OrderedDict[int, StoredSample] = OrderedDict()

    # ---- lists

    async def page(self, words: str, before: int | None, count: int, *, texts: bool = False) -> JsonObject:
        """Return rows with sequences below ``before``, newest first; a search is bounded in headers and time."""
        chosen, state = PageFilter(words), await self._history.state()
        high = state.last_seq + 1 if before is None else min(before, state.last_seq + 1)
        rows: list[JsonObject] = []
        candidates: list[Headline] = []  # Their headers fit; payloads are read several at once
        searched, deadline = 0, time.monotonic() + SEARCH_S
        first = max(1, state.first_seq)
        async for line in self.newest_first(high, first):
            searched, high = searched + 1, line.seq
            if chosen.fits(line, self._reader.held.disposition(line.seq), with_lag=False) is not False:
                candidates.append(line)
            left, over = min(count, MAX_PAGE) - len(rows), searched >= SEARCHED or time.monotonic() > deadline
            if over or len(candidates) >= min(_PAYLOADS, left):
                rows += await self._rows(candidates, chosen, texts=texts)
                candidates = []
            if over or len(rows) >= min(count, MAX_PAGE):
                break
        else:
            high = first
            rows += await self._rows(candidates, chosen, texts=texts)
        span = {"first_seq": first, "last_seq": state.last_seq, "filter": chosen.words}
        return {"rows": rows, "next": high if high > first else None, "searched": searched, **span}

    async def newest_first(self, before: int, first: int) -> AsyncIterator[Headline]:
        """Yield the held headers without a gap, then the headers of the stream."""
        high, size = before, _CHUNK[0]
        async for line in _interruptible(self._reader.held.newest_first(before)):
            if high - line.seq > 1:
                break  # parts of a large sample, or headers that are not read yet
            high = line.seq
            yield line
        while high > first:
            low = max(first, high - size)
            chunk: list[Message] = [glimpse async for glimpse in self._history.glimpses(low, high - 1)]
            async for line in _interruptible(map(headline, reversed(chunk))):
                yield line
            high, size = low, min(2 * size, _CHUNK[1])

    async def _rows(self, lines: list[Headline], chosen: PageFilter, *, texts: bool) -> list[JsonObject]:
        rows = await asyncio.gather(*[self._row(line, chosen, texts=texts) for line in lines])
        return [row for row in rows if row is not None]

    async def _row(self, line: Headline, chosen: PageFilter, *, texts: bool) -> JsonObject | None:
        disposition = self._reader.held.disposition(line.seq)
        fits = chosen.fits(line, disposition, with_lag=False)
        if fits is False:
            return None
        line = await self._lags.of(line)
        sample: Sample | WireError | None = None
        if chosen.text or texts or fits is None:
            try:
                stored = await self.stored(line.seq)
            except NotFound:
                return None
            sample = opened(stored)
            if isinstance(sample, Sample):
                line = replace(headline_of(line.seq, line.stored_s, stored.subject, sample), lag=line.lag)
        if not chosen.selects_all:
            text_fits = not chosen.text or (isinstance(sample, Sample) and chosen.fits_text(sample))
            if not chosen.fits(line, disposition) or not text_fits:
                return None
        return row_of(line, disposition) | (_texts_of(sample) if texts else {})

    async def histogram(self, words: str) -> JsonObject:
        """Return the rewards of the held samples in bins. Raises ValueError for a filter of texts or dispositions."""
        chosen = PageFilter(words)
        if chosen.text or chosen.fate or chosen.version is not None or chosen.step is not None:
            raise ValueError("filter: a histogram is made of headers: want no text=, fate=, version= or step=")
        held = self._reader.held
        if chosen.headers == Filter():
            return held.histogram()
        lines = _interruptible(held.newest_first(held.last_seq + 1))
        return held.histogram([line.reward async for line in lines if chosen.headers.of(line)])

    async def group(self, task: int) -> JsonObject:
        """Return the samples of a task beside each other."""
        members = await self.members(task)
        answers, prompt, label = [], "", None
        for line in members:
            stored = await self.stored(line.seq)
            sample = opened(stored)
            row = row_of(await self._lags.of(line), self._reader.held.disposition(line.seq))
            if isinstance(sample, Sample):
                prompt, label = prompt_text(sample), sample.label
                row["response"], row["cut"] = cut(sample.response, size=LONG)
            answers.append(row)
        text, left = cut(prompt, size=LONG)
        return {"task": task, "prompt": text, "cut": left, "label": _label(label), "members": answers}

    async def members(self, task: int) -> list[Headline]:
        """Return the headers of the samples of a task: the held ones, else those in the stream from its issue on."""
        if held := self._reader.held.of_task(task):
            return sorted(held, key=lambda line: (line.index or 0, line.seq))[:MAX_GROUP]
        lines: list[Headline] = []
        start, deadline = await self._history.at_task(task), time.monotonic() + SEARCH_S
        async for glimpse in self._history.glimpses(start, start + SEARCHED):
            line = headline(glimpse)
            if line.task == task:
                lines.append(line)
            if len(lines) >= MAX_GROUP or time.monotonic() > deadline:
                break
        return sorted(lines, key=lambda line: (line.index or 0, line.seq))

    async def prompts(self) -> JsonObject:
        """Return the prompts whose held samples all have the highest reward, and the prompts without such a sample.

        The latter begin with the lowest best reward: with rewards of 0 and 1 they are always wrong.
        """
        groups, (low, high) = self._reader.held.groups(), self._reader.held.reward_range()
        equal = sum(lowest == highest for _, lowest, highest in groups.values())
        right = [task for task, (_, lowest, _) in groups.items() if lowest == high]
        wrong = [task for task, (_, _, highest) in groups.items() if highest < high]
        if low == high <= 0:  # all rewards are equal: right or wrong, not both
            right, wrong = [], right
        wrong.sort(key=lambda task: (groups[task][2], -task))
        answer: JsonObject = {"groups": len(groups), "zero_gradient": equal}
        for name, tasks in (("right", sorted(right, reverse=True)), ("wrong", wrong)):
            rows = await self._by_prompt(tasks[: 4 * MAX_PROMPTS], groups)
            answer[name] = sorted(rows, key=lambda row: (row["reward"], -row["count"]))[:MAX_PROMPTS]
        return answer

    async def _by_prompt(self, tasks: list[int], groups: dict[int, tuple[int, float, float]]) -> list[JsonObject]:
        """Return the tasks joined by their prompts, with the best reward."""
        by_prompt: dict[str, JsonObject] = {}
        limit = asyncio.Semaphore(_AT_ONCE)

        async def fetch(task: int) -> Task | None:
            async with limit:
                try:
                    return await self._reader.bus.tasks.fetch(task)
                except (BusError, WireError):
                    return None  # trimmed

        for task, issued in zip(tasks, await asyncio.gather(*map(fetch, tasks)), strict=True):
            if issued is None:
                continue
            text = prompt_text(issued)
            count, _, best = groups[task]
            row = {"task": task, "tasks": [], "count": 0, "reward": best, "prompt": ending(text)}
            known = by_prompt.setdefault(text, row)
            known["tasks"].append(task)
            known["count"] += count
            known["reward"] = max(known["reward"], best)
        return list(by_prompt.values())

    async def find(self, query: dict[str, str]) -> JsonObject:
        """Return the first sequence of a time, version, step or task. Raises ValueError, NotFound."""
        if "version" in query:
            return {"seq": await self._history.at_version(_natural("version", query["version"]))}
        if "task" in query:
            return {"seq": await self._history.at_task(_task(query["task"])[0])}
        if "step" in query:
            step = _natural("step", query["step"])
            times = self._reader.metrics.times_s(step, step)
            if not len(times) or times[0] != times[0]:
                raise ValueError(f"step: want one of {self._reader.metrics.first} to {self._reader.metrics.last}")
            return {"seq": await self._history.at_time(float(times[0]))}
        word = query.get("time", "")
        try:
            moment = float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else datetime.fromisoformat(word).timestamp()
        except ValueError:
            return {"seq": await self._search.begin(word, None)}
        return {"seq": await self._history.at_time(moment)}

    # ---- one sample

    async def stored(self, seq: int) -> StoredSample:
        """Return the payload of a sample. Raises NotFound; ValueError for the sequence of another message."""
        if (kept := self._kept.pop(seq, None)) is None:
            kept = await self._history.payload(seq)
        self._kept[seq] = kept
        while len(self._kept) > KEPT_SAMPLES or (len(self._kept) > 1 and self._kept_bytes() > KEPT_BYTES):
            self._kept.popitem(last=False)
        return kept

    def _kept_bytes(self) -> int:
        return sum(len(stored.data) for stored in self._kept.values() if isinstance(stored.data, bytes))

    async def read(self, seq: int) -> StoredSample:
        """Return a payload as ``stored`` does, without keeping it: a step has more of them than are kept."""
        return self._kept.get(seq) or await self._history.payload(seq)

    async def view(self, seq: int) -> SampleView:
        """Return one sample for its answers. Raises NotFound."""
        stored = await self.stored(seq)
        sample = opened(stored)
        line = headline(Message(seq, stored.subject, stored.headers, b"", stored.stored_s))
        if isinstance(sample, Sample):
            line = headline_of(seq, stored.stored_s, stored.subject, sample)
        return SampleView(await self._lags.of(line), sample, await self._pieces())

    async def tokens(self, seq: int, start: int, count: int) -> JsonObject:
        """Return columns of a sample's tokens, as ``SampleView.tokens``. Raises ValueError, NotFound."""
        view, disposition = await self.view(seq), self._reader.held.disposition(seq)
        plan = await self._reader.plan(disposition.step) if disposition is not None else None
        if plan is not None and isinstance(view.sample, Sample):
            view = await self._with_trained(view, planned(plan, seq, view.sample))
        return view.tokens(start, count)

    async def _with_trained(self, view: SampleView, history: SampleHistory | None) -> SampleView:
        """Add the recorded values of the tokens, which the rank that trained the sample has stored."""
        if history is None or not history.step:
            return view
        trained = self._reader.bus.trained
        return replace(view, trained=await trained.of_sample(history.step, view.line.seq, history.rank))

    async def sample(self, query: dict[str, str]) -> JsonObject:
        """Return one sample with its outcome and its group. Raises ValueError, NotFound."""
        seq = await self._named(query)
        view = await self.view(seq)
        outcome: JsonObject = {"state": "invalid", "words": "invalid: it cannot be read"}
        if isinstance(view.sample, Sample):
            history = await history_of(self._reader.bus, seq, view.sample)
            outcome = made_safe({**history.as_map(), "words": str(history)})
            view = await self._with_trained(view, history)
        members = [] if view.line.task is None else await self.members(view.line.task)
        answer = {**row_of(view.line, self._reader.held.disposition(seq)), **view.as_map(), "fate": outcome}
        answer["group_members"] = [row_of(line, self._reader.held.disposition(line.seq)) for line in members]
        return answer

    async def _named(self, query: dict[str, str]) -> int:
        if "task" not in query:
            return _natural("seq", query.get("seq", ""))
        task, index = _task(query["task"])
        members = [line for line in await self.members(task) if index is None or line.index == index]
        if not members:
            raise ValueError(f"task: want one with samples in the stream, got {query['task']!r}")
        return members[0].seq

    async def _pieces(self) -> Vocabulary:
        async with self._vocabulary:
            if self._tokens is None:
                path = self._reader.settings.get("model.path", str, "")
                places = [*self._model_dirs, *([Path(path)] if path else [])]
                self._tokens = await asyncio.to_thread(Vocabulary.read, places)
            return self._tokens


async def _interruptible(lines: Iterable[Headline]) -> AsyncIterator[Headline]:
    """Yield the lines, and let other requests run after each ``AT_A_TIME``, also while none fits."""
    for number, line in enumerate(lines, start=1):
        yield line
        if not number % AT_A_TIME:
            await asyncio.sleep(0)


def row_of(line: Headline, disposition: Disposition | None) -> JsonObject:
    """Return headers and disposition as a row of a list."""
    names = ("seq", "stored_s", "kind", "task", "index", "versions", "lag", "reward", "status", "tokens", "actor")
    row = {name: shortened(getattr(line, name)) for name in (*names, "engine")}
    row["fate"], row["step"] = (None, None) if disposition is None else (disposition.words, disposition.step or None)
    return made_safe(row)  # type: ignore[no-any-return]


def _texts_of(sample: Sample | WireError | None) -> JsonObject:
    if not isinstance(sample, Sample):
        return {"prompt": "", "response": "", "label": None}
    prompt, response = ending(prompt_text(sample)), cut(sample.response, size=SHORT)[0]
    return {"prompt": prompt, "response": response, "label": _label(sample.label)}


def _label(label: object) -> str | None:
    return None if label is None else cut(str(label), size=SHORT)[0]


def _task(text: str) -> tuple[int, int | None]:
    if len(text) > 2 * _LONGEST:
        raise ValueError(f"task: want TASK or TASK.INDEX, got {text[:40]!r}")
    task, index = task_of("task", text)
    return _natural("task", str(task)), index


def _natural(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _LONGEST:
        raise ValueError(f"{name}: want a number, got {text[:40]!r}")
    return int(text)
