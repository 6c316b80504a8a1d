"""Speed and memory of a rank's step: TFLOP/s, the share of the device's peak (MFU), peak memory.

Only the work of training is counted: 6 operations for each weight of a matrix product and token, and causal attention within each sequence
(Kaplan et al. 2020; Chowdhery et al. 2022, appendix B). Recomputation, old and reference log-probs take time and count as none.
"""

import numpy as np
import torch

from learner.data.batch import StepBatch
from learner.megatron.model import Policy

PEAK_TFLOPS = (("B200", 2250.0), ("GH200", 989.0), ("H200", 989.0), ("H100 PCIE", 756.0), ("H100", 989.0), ("A100", 312.0), ("L40S", 362.0))
"""Dense bfloat16 peak by a part of the device's name, the first that fits. Source: NVIDIA's data sheets, without sparsity."""


class Meter:
    """Measures the steps of one policy on this rank."""

    def __init__(self, policy: Policy) -> None:
        config, tensor_parallel = policy.config, policy.parallel.tp_size
        tied = policy.module.share_embeddings_and_output_weights
        matrices = {name: each.numel() for name, each in policy.module.named_parameters() if each.dim() == 2}
        # The embedding is a look-up; tied, its weight is that of the output layer.
        self._weights = sum(size for name, size in matrices.items() if tied or not name.startswith("embedding."))
        self._attention = 6 * config.num_layers * config.num_attention_heads // tensor_parallel * config.kv_channels
        self._device = policy.parallel.device
        self._peak = peak_tflops(torch.cuda.get_device_name(self._device)) if self._on_cuda and config.bf16 else None

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def operations(self, batch: StepBatch) -> float:
        """Return the operations of training this rank's rows, padding included."""
        lengths = np.concatenate([np.diff(row.cu_seqlens) for row in batch.micro_batches]).astype(np.float64)
        return float(6.0 * self._weights * lengths.sum() + self._attention * np.square(lengths).sum())

    def metrics(self, batch: StepBatch, seconds: float) -> dict[str, float]:
        """Return ``train/tflops``; on CUDA the peak of this step's memory, and ``train/mfu`` for a known device in bfloat16."""
        rate = self.operations(batch) / seconds / 1e12
        found = {"train/tflops": rate}
        if self._peak is not None:
            found["train/mfu"] = rate / self._peak
        if self._on_cuda:
            found["train/peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        return found


def peak_tflops(name: str) -> float | None:
    """Return the dense bfloat16 peak of the device ``name`` in TFLOP/s; None = not known."""
    return next((peak for part, peak in PEAK_TFLOPS if part in name.upper()), None)
