"""Measurements and debugging tools of one rank: waits, speed and memory of a step, a report on the first steps, traces
of the steps that a request asks for.

<run>/debug/profile.request -> rank 0 -> the rank: torch profiler around its next steps
    -> <run>/debug/profile_rank<r>_<first>_<last>.json.gz

Only the operations of training are counted as FLOPs; recomputation, old and reference log-probs and values count as
none.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.debug.collector import CRITIC, Collector
from tidemill.learner.debug.config import (
    DIRECTORY,
    DebugConfig,
    DumpModulesConfig,
    ProfileRequest,
    read_prompts,
    take_request,
    trace_name,
)
from tidemill.learner.debug.report import LOOKS, REPORTED_STEPS, Facts, excerpt, report
from tidemill.learner.debug.train_file import write_modules
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.layout.sizes import StepFlops
from tidemill.learner.settings.config import LearnerConfig
from tidemill.learner.trainer.port import AnyBackend, Policy

log = logging.getLogger(__name__)


class RankDebug:
    """The tools of the settings; with the defaults, one report in the log, and no cost after step 2."""

    def __init__(
        self,
        config: DebugConfig,
        learner: LearnerConfig,
        *,
        backend: AnyBackend,
        policy: Policy,
        model_dir: Path,
        root: Path,
    ) -> None:
        """``model_dir``: with the tokenizer. ``root``: the run's directory, for files whose place is not set."""
        self._config, self._learner, self._backend, self._policy = config, learner, backend, policy
        self._model_dir, self._root = model_dir, root
        parallel = policy.parallel
        self._memory = StepMemory(parallel)
        self._before: Mapping[str, Sequence[float]] | None = None
        self._profiler = Profiler(root, rank=parallel.rank, on_cuda=parallel.device.type == "cuda")
        self.collector = Collector(config.save_train, parallel) if config.save_train else None
        self.critic_collector = Collector(config.save_train, parallel, role=CRITIC) if config.save_train else None

    def take_request(self) -> ProfileRequest | None:
        """Return the request for a profile that a command has written, on rank 0; else None."""
        if self._policy.parallel.rank:
            return None
        try:
            return take_request(self._root, dist.get_world_size())
        except ValueError as error:
            log.warning("profile not begun: %s", error)
            return None

    def profile(self, request: ProfileRequest) -> None:
        """Profile the next steps, if the request names this rank."""
        self._profiler.request(request)

    @contextmanager
    def around(self, batch: StepBatch) -> Iterator[None]:
        """Dump activations before the step that is set, then run the step. Collective over all ranks."""
        dump = self._config.dump_modules
        if dump.step and batch.step == dump.step:
            self._dump(dump, batch.step)
        if self._reports(batch):
            self._memory.begin()
        with self._profiler.around(batch.step):
            yield

    def _dump(self, dump: DumpModulesConfig, step: int) -> None:
        prompts = read_prompts(Path(dump.prompts))
        outputs = self._backend.module_outputs(self._policy, prompts, dump.names)
        if self._policy.parallel.rank == 0:
            path = Path(dump.path) if dump.path else self._root / "debug" / "modules.safetensors"
            write_modules(path, outputs, prompts=prompts, dtype=self._policy.dtype, source=f"learner, step {step}")
            log.info("activations saved step=%d modules=%d path=%s", step, len(outputs), path)

    def close(self) -> None:
        """End a profile that has not ended."""
        self._profiler.close()

    def _reports(self, batch: StepBatch) -> bool:
        return self._config.report and batch.step <= REPORTED_STEPS

    def after(self, batch: StepBatch, metrics: dict[str, float]) -> dict[str, float]:
        """Log the report on one of the first two steps, on rank 0, and return its metric. Collective over all ranks."""
        if not self._reports(batch):
            return {}
        memory = self._memory.of_all_ranks()
        if self._policy.parallel.rank != 0:
            return {}
        facts = Facts(
            vocab_size=self._policy.vocab_size,
            dtype=self._policy.dtype,
            log_prob_mean=_log_prob_mean(batch),
            excerpt=excerpt(batch, self._model_dir),
            own_reference=not self._learner.algorithm.kl.reference,
            minibatches=batch.num_minibatches,
            memory=memory,
            before=self._before,
        )
        self._before = memory
        lines = report(batch.step, metrics, facts)
        for line in lines:
            log.log(logging.INFO if line.good else logging.WARNING, "report step=%d %s", batch.step, line)
        return {LOOKS: float(sum(not line.good for line in lines))}


class StepMemory:
    """Memory of a step: the resident memory of the process behind it, and the peak of its device."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel, self._on_cuda, self._allocated = parallel, parallel.device.type == "cuda", 0

    def begin(self) -> None:
        """Begin a step: its peak leaves out the loading of the model."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._parallel.device)
            self._allocated = torch.cuda.memory_allocated(self._parallel.device)

    def of_all_ranks(self) -> dict[str, list[float]]:
        """Return bytes by kind and rank: ``host``, and on CUDA ``device``. Collective over all ranks.

        Memory that a step leaves allocated is added to its peak: after the first one it is the optimizer's state.
        """
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        kinds = {"host": float(pages * os.sysconf("SC_PAGE_SIZE"))}
        if self._on_cuda:
            device = self._parallel.device
            remaining = max(0, torch.cuda.memory_allocated(device) - self._allocated)
            kinds["device"] = float(torch.cuda.max_memory_allocated(device) + remaining)
        own_K = torch.tensor(list(kinds.values()), dtype=torch.float64, device=self._parallel.device)
        found_RK = [torch.empty_like(own_K) for _ in range(dist.get_world_size())]
        dist.all_gather(found_RK, own_K)
        return dict(zip(kinds, torch.stack(found_RK, dim=1).tolist(), strict=True))


def _log_prob_mean(batch: StepBatch) -> float | None:
    log_probs = batch.engine_log_probs
    return float(log_probs.mean(dtype=np.float64)) if len(log_probs) else None


def agreed(request: ProfileRequest | None, parallel: Parallel) -> ProfileRequest | None:
    """Return the request that rank 0 has read. Collective over all ranks."""
    values = (0, 0, 0) if request is None else (request.steps, int(request.memory), request.rank)
    numbers = torch.tensor(values, dtype=torch.int32, device=parallel.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)  # the others have no request, and 0 in its place
    steps, memory, rank = numbers.tolist()
    return ProfileRequest(steps=steps, memory=bool(memory), rank=rank) if steps else None


class WaitClock:
    """Measures the time spent waiting for batches, per step and since the first request."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._total_s = 0.0
        self._last_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for a batch."""
        began = time.monotonic()
        self._began = self._began or began
        yield
        self._last_s = time.monotonic() - began
        self._total_s += self._last_s

    def metrics(self) -> dict[str, float]:
        """Return ``train/wait_seconds`` of this step and ``train/wait_share`` since the first request."""
        since_s = time.monotonic() - (self._began or time.monotonic())
        return {"train/wait_seconds": self._last_s, "train/wait_share": self._total_s / since_s if since_s else 0.0}


PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIE", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
)
"""Dense bfloat16 peak by a part of the device's name, the first that fits. Source: NVIDIA's data sheets."""


class Meter:
    """Measures the steps of one policy, and of its critic if it has one, on this rank."""

    def __init__(
        self, policy: Policy, flops: StepFlops, critic: StepFlops | None = None, *, warmup_steps: int = 0
    ) -> None:
        """``warmup_steps``: first steps, in which the critic alone is trained."""
        ranks = policy.parallel
        self._flops, self._critic, self._warmup_steps, self._device = flops, critic, warmup_steps, ranks.device
        self._shared_by = ranks.tp_size * ranks.pp_size * ranks.cp_size
        self._on_cuda = self._device.type == "cuda"
        self._peak = (
            peak_tflops(torch.cuda.get_device_name(self._device))
            if self._on_cuda and policy.dtype == "bfloat16"
            else None
        )

    def operations(self, step: int, spans: Sequence[tuple[int, int]]) -> float:
        """Return this rank's share of a step's operations over ``spans`` (``PackedRow``), with equal stages."""
        trained = [self._flops] if self._critic is None or step > self._warmup_steps else []
        trained += [] if self._critic is None else [self._critic]
        return sum(flops.behind(spans) for flops in trained) / self._shared_by

    def metrics(self, step: int, spans: Sequence[tuple[int, int]], seconds: float) -> dict[str, float]:
        """Return ``train/tflops``; on CUDA peak memory, and ``train/mfu`` for a known device in bfloat16."""
        rate = self.operations(step, spans) / seconds / 1e12
        metrics = {"train/tflops": rate}
        if self._peak is not None:
            metrics["train/mfu"] = rate / self._peak
        if self._on_cuda:
            metrics["train/peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        return metrics


def peak_tflops(name: str) -> float | None:
    """Return the dense bfloat16 peak of the device ``name`` in TFLOP/s; None = not known."""
    return next((peak for part, peak in PEAK_TFLOPS if part in name.upper()), None)


MEMORY_EVENTS = 100_000  # allocations that a memory snapshot keeps, the newest ones


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
