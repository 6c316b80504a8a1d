"""Speed and memory of a rank's step: FLOPs and TFLOP/s, the share of the device's peak (MFU), peak memory.

Only the operations of training are counted; recomputation, old and reference log-probs and values count as none.
"""

from collections.abc import Sequence

import torch

from tidemill.learner.layout.sizes import StepFlops
from tidemill.learner.megatron.model import Policy

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
            peak_tflops(torch.cuda.get_device_name(self._device)) if self._on_cuda and policy.config.bf16 else None
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
