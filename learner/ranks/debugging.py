"""The debugging tools of one rank: data of each step, the report on the first steps, and a dump of activations.

Consumes the batches and metrics of the rank, beside its steps. Produces files and log lines. Changes no weights and no numbers.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from learner.data.batch import StepBatch
from learner.debug.collector import Collector, Target
from learner.debug.config import DebugConfig, DumpModulesConfig
from learner.debug.module_file import write_modules
from learner.debug.profiler import Profiler
from learner.debug.prompts import read_prompts
from learner.debug.report import Facts, report
from learner.megatron.activations import module_outputs, parallel_info
from learner.megatron.model import Policy
from learner.settings.config import LearnerConfig

log = logging.getLogger(__name__)

REPORTED_STEPS = 2


class RankDebug:
    """The tools that the settings ask for. With the default settings it has one log report, and no cost after step 2."""

    def __init__(self, config: DebugConfig, learner: LearnerConfig, policy: Policy, root: Path) -> None:
        """``root``: the run's directory, for files whose place is not set."""
        self._config, self._learner, self._policy, self._root = config, learner, policy, root
        self._memory: dict[str, float] | None = None
        on_cuda = policy.parallel.device.type == "cuda"
        self._profiler = Profiler(root, on_cuda=on_cuda) if policy.parallel.rank == 0 else None
        self.collector: Collector | None = None
        if config.save_train:
            info = parallel_info(policy.parallel)
            writes = info["tp_rank"] == 0 and info["pp_rank"] == info["pp_size"] - 1
            anchor = str(learner.algorithm.anchor)
            target = Target(
                path=config.save_train,
                rank=policy.parallel.rank,
                parallel_info=info,
                writes=writes,
                anchor=anchor,
                routing_layers=policy.routing.layers,
            )
            self.collector = Collector(target)

    @contextmanager
    def around(self, batch: StepBatch) -> Iterator[None]:
        """Dump the activations of the fixed prompts before the step that is set, then run the step. Collective over all ranks."""
        dump = self._config.dump_modules
        if dump.step and batch.step == dump.step:
            self._dump(dump, batch.step)
        with self._profiler.around(batch.step) if self._profiler is not None else nullcontext():
            yield

    def _dump(self, dump: DumpModulesConfig, step: int) -> None:
        prompts = read_prompts(Path(dump.prompts))
        outputs = module_outputs(self._policy, prompts, dump.names)
        if self._policy.parallel.rank == 0:
            path = Path(dump.path) if dump.path else self._root / "debug" / "modules.safetensors"
            write_modules(path, outputs, prompts=prompts, dtype=self._policy.dtype, source=f"learner, step {step}")
            log.info("activations saved step=%d modules=%d path=%s", step, len(outputs), path)

    def close(self) -> None:
        """End a profile that has not ended."""
        if self._profiler is not None:
            self._profiler.close()

    def after(self, batch: StepBatch, metrics: dict[str, float]) -> None:
        """Log the report after the first two steps of a run."""
        if not self._config.report or self._policy.parallel.rank != 0 or batch.step > REPORTED_STEPS:
            return
        memory = self._measured()
        facts = Facts(
            vocab_size=self._policy.bridge.hf_config.vocab_size,
            dtype=self._policy.dtype,
            log_prob_mean=_log_prob_mean(batch),
            own_reference=not self._learner.algorithm.kl.reference,
            minibatches=batch.num_minibatches,
            memory=memory,
            before=self._memory,
        )
        self._memory = memory
        for line in report(batch.step, metrics, facts):
            log.log(logging.INFO if line.good else logging.WARNING, "report step=%d %s", batch.step, line)

    def _measured(self) -> dict[str, float]:
        """Return the resident memory of this process, and the peak of its device so far."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {"host": float(pages * os.sysconf("SC_PAGE_SIZE"))}
        if self._policy.parallel.device.type == "cuda":
            found["device"] = float(torch.cuda.memory_allocated(self._policy.parallel.device))
        return found


def _log_prob_mean(batch: StepBatch) -> float | None:
    """Return the mean log-prob that the engines reported for this rank's trainable tokens."""
    found = batch.engine_log_probs
    return float(found.mean(dtype=np.float64)) if len(found) else None
