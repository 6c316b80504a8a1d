"""Memory and time of log-probs and entropy fused with the output layer, against a linear layer and a loss on its
logits.

Both sides go forward and backward on the same hidden states, weight and targets, taking turns in one process, and add
the weight's gradient to a float32 buffer as Megatron's DistributedDataParallel does. Peak memory is the resident set on
a CPU and the allocator's on CUDA. Values and gradients are compared.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.bench import kept_logits
from tidemill.learner.kernels import logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One output layer with its input, and the gradients of a loss by log-probs and entropies."""

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    grads_2T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Time, memory and results of one forward and backward pass."""

    seconds: float
    cpu_s: float
    there_bytes: int
    """Memory before: the program, inputs, weight, and its gradient buffer."""
    peak_bytes: int
    """Peak of the memory, less that."""


def make_case(
    *, tokens: int, vocab: int, hidden: int, dtype: torch.dtype, entropy: float, device: torch.device
) -> Case:
    """Return a case with random logits of a standard deviation of 4."""
    generator = torch.Generator().manual_seed(0)
    case = Case(
        hidden_TH=torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_(),
        weight_VH=(4 * hidden**-0.5 * torch.randn(vocab, hidden, generator=generator))
        .to(device, dtype)
        .requires_grad_(),
        targets_T=torch.randint(vocab, (tokens,), generator=generator).to(device),
        grads_2T=(torch.randn(2, tokens, generator=generator) * torch.tensor([[1.0], [entropy]])).to(device),
    )
    case.weight_VH.main_grad = torch.zeros(vocab, hidden, device=device)  # type: ignore[attr-defined]
    return case


def fused(case: Case) -> tuple[Tensor, Tensor]:
    return logprobs.log_probs_and_entropy(case.hidden_TH, case.weight_VH, case.targets_T)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    return kept_logits.log_probs_and_entropy(case.hidden_TH @ case.weight_VH.t(), case.targets_T)


def take(case: Case, side: Callable[[Case], tuple[Tensor, Tensor]]) -> tuple[Pass, Mapping[str, Tensor]]:
    """Run one side forward and backward. Returns also values and gradients; the weight's is the buffer, which the next
    pass overwrites.
    """
    main_grad: Tensor = case.weight_VH.main_grad  # type: ignore[attr-defined]
    main_grad.zero_()
    there = reset_peak(case.hidden_TH.device)
    began, cpu_began = time.perf_counter(), time.process_time()
    log_probs_T, entropy_T = side(case)
    torch.autograd.backward([log_probs_T, entropy_T], list(case.grads_2T))
    if case.weight_VH.grad is not None:
        main_grad += case.weight_VH.grad
        case.weight_VH.grad = None
    peak = peak_bytes(case.hidden_TH.device)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert case.hidden_TH.grad is not None
    names = ("log-probs", "entropy", "hidden states' gradient", "weight's gradient")
    results = dict(
        zip(names, (log_probs_T.detach(), entropy_T.detach(), case.hidden_TH.grad.float(), main_grad), strict=True)
    )
    case.hidden_TH.grad = None
    return Pass(seconds=seconds, cpu_s=cpu_s, there_bytes=there, peak_bytes=peak - there), results


def compare(case: Case) -> None:
    """Print the largest difference between the two sides in each value and gradient. Also their warm-up."""
    wanted = {name: tensor.clone() for name, tensor in take(case, plain)[1].items()}
    for name, found in take(case, fused)[1].items():
        difference, largest = float((found - wanted[name]).abs().max()), float(wanted[name].abs().max())
        print(f"{name}: largest difference {difference:.2g}, largest value {largest:.3g}", flush=True)


def reset_peak(device: torch.device) -> int:
    """Forget the highest memory so far. Returns the present one, in bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns the memory that the pass before has freed
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets the peak to the present resident set
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Return the highest memory since ``reset_peak``, when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench output_layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936, help="Qwen3's by default")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--entropy", type=float, default=0.0, help="size of the entropy's gradient beside that of the log-probs"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=logprobs.CHUNK_ELEMENTS, help="logits of one chunk")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logprobs.CHUNK_ELEMENTS = args.chunk
    device, dtype = torch.device(args.device), {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    case = make_case(
        tokens=args.tokens, vocab=args.vocab, hidden=args.hidden, dtype=dtype, entropy=args.entropy, device=device
    )
    print(
        f"T={args.tokens} V={args.vocab} H={args.hidden} {args.dtype} on {args.device}, logits "
        f"{args.tokens * args.vocab:,}"
    )
    compare(case)
    taken: dict[str, list[Pass]] = {"plain": [], "fused": []}
    for _ in range(args.rounds):
        taken["plain"].append(take(case, plain)[0])
        taken["fused"].append(take(case, fused)[0])
    for side, passes in taken.items():
        peak, seconds = max(each.peak_bytes for each in passes), statistics.median(each.seconds for each in passes)
        print(
            f"{side}: peak {peak / 1e6:.0f} MB above {passes[0].there_bytes / 1e6:.0f} MB that are there "
            f"before, {seconds:.2f} s"
        )
    ratio = max(each.peak_bytes for each in taken["fused"]) / max(each.peak_bytes for each in taken["plain"])
    whole = [max(each.there_bytes + each.peak_bytes for each in passes) for passes in taken.values()]
    print(
        f"RATIO peak memory fused / plain: {ratio:.3f}, with inputs, weight, its gradient and the program: "
        f"{whole[1] / whole[0]:.3f}"
    )
    for unit in ("seconds", "cpu_s"):
        ratios = [
            getattr(one, unit) / getattr(other, unit) for one, other in zip(taken["fused"], taken["plain"], strict=True)
        ]
        print(
            f"RATIO {unit} fused / plain: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
