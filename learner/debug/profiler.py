"""The profiler of one rank: traces of the steps that a request asks for.

<run>/debug/profile.request -> rank 0 -> the rank: torch profiler around its next steps
    -> <run>/debug/profile_rank<r>_<first>_<last>.json.gz
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tidemill.learner.debug.config import DIRECTORY, ProfileRequest, trace_name

log = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000
"""Allocations that a memory snapshot keeps, the newest ones."""


class Profiler:
    """Profiles steps on request. Without a request it does nothing."""

    def __init__(self, root: Path, *, rank: int, on_cuda: bool) -> None:
        """``root``: directory of the run."""
        self._root, self._rank, self._on_cuda = root, rank, on_cuda
        self._running: profile | None = None
        self._request: ProfileRequest | None = None
        self._pending: ProfileRequest | None = None
        self._first = self._last = 0

    def request(self, request: ProfileRequest) -> None:
        """Profile the next steps, behind a running one. The newest request counts; one for another rank is ignored."""
        if request.rank == self._rank:
            self._pending = request

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Begin a requested profile before the step, and end it after the last step of the request."""
        if self._running is None:
            self._begin(step)
        yield
        self._last = step
        if self._request is not None and step - self._first + 1 >= self._request.steps:
            self._end(step)

    def close(self) -> None:
        """End a profile that lacks steps, and keep those it has: a process must not end with a running profiler."""
        if self._running is not None:
            self._end(max(self._first, self._last))

    def _begin(self, step: int) -> None:
        self._request, self._pending = self._pending, None
        if self._request is None:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._first = step
        if self._request.memory and self._on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._running = profile(activities=activities, record_shapes=True, profile_memory=self._request.memory)
        self._running.__enter__()
        log.info(
            "profile begun rank=%d step=%d steps=%d memory=%s",
            self._rank,
            step,
            self._request.steps,
            self._request.memory,
        )

    def _end(self, step: int) -> None:
        running, request = self._running, self._request
        assert running is not None and request is not None
        self._running = self._request = None
        running.__exit__(None, None, None)
        trace = self._root / DIRECTORY / trace_name(self._rank, self._first, step)
        trace.parent.mkdir(parents=True, exist_ok=True)
        aside = trace.with_name(f".{trace.name}")  # the profiler compresses a name that ends in .gz
        running.export_chrome_trace(str(aside))
        aside.rename(trace)
        log.info("profile saved steps=%d..%d path=%s", self._first, step, trace)
        if request.memory:
            self._save_memory(running, trace)

    def _save_memory(self, running: profile, trace: Path) -> None:
        if self._on_cuda:
            path = trace.with_name(trace.name.replace(".json.gz", "_memory.pickle"))
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            path = trace.with_name(trace.name.replace(".json.gz", "_memory.txt"))
            path.write_text(running.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=50))
        log.info("memory saved path=%s", path)
