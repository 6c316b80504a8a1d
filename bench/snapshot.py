"""Bytes and CPU seconds of a delta against the full snapshot of the same version, after real optimizer steps; in the same run.

``python -m bench.snapshot`` trains a small model with AdamW (fp32 masters, gradients of a language-model loss) at several learning rates,
exports it as fp32 and as bf16, and writes, reads, verifies and applies each version both ways. Reading the full one is what an engine does:
every byte hashed, every tensor copied. Also the speed of the checksums a push is verified with, against SHA-256.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tests.tiny_models import tiny_model
from weightstore import delta, snapshot
from weightstore.checksums import sha256, sum64

Weights = dict[str, Tensor]
RATES = (1e-6, 1e-5, 1e-4)
WARM_UP_STEPS = 5


def trained(rate: float, steps: int, hidden: int) -> list[Weights]:
    """The fp32 weights after each of the last ``steps`` steps, and before."""
    model = tiny_model(
        seed=1, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, vocab_size=4096, initializer_range=0.02
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(WARM_UP_STEPS + steps + 1):
        if step >= WARM_UP_STEPS:
            found.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        tokens = torch.randint(0, 4096, (4, 64), generator=generator)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def load_full(directory: Path, into: Weights) -> None:
    snapshot.verify(directory)
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            into[name].copy_(tensors.get_tensor(name))


def load_delta(directory: Path, base: Weights, into: Weights) -> None:
    info = delta.read(directory)
    assert info is not None
    for name, tensor in base.items():
        into[name].copy_(tensor)
    delta.apply(directory, info, into)


def compare(directory: Path, versions: list[Weights], title: str) -> None:
    full_s, delta_s, full_load_s, delta_load_s, sizes, changed = [], [], [], [], [], []
    total = sum(tensor.numel() for tensor in versions[0].values())
    for number, (base, new) in enumerate(pairwise(versions), 1):
        full, difference = directory / f"v{number}", directory / f"v{number}-delta"
        full_s.append(cpu_s(lambda: snapshot.write(full, new, version=number, step=number, durable=False)))  # noqa: B023
        delta_s.append(cpu_s(lambda: delta.write(difference, base, new, base_version=number - 1, version=number, step=number)))  # noqa: B023
        info = delta.read(difference)
        assert info is not None
        sizes.append(sum(path.stat().st_size for path in difference.iterdir()) / sum(path.stat().st_size for path in full.iterdir()))
        changed.append(sum(change.changed for change in info.changes) / total)
        one, other = ({name: torch.empty_like(tensor) for name, tensor in new.items()} for _ in range(2))
        full_load_s.append(cpu_s(lambda: load_full(full, one)))  # noqa: B023
        delta_load_s.append(cpu_s(lambda: load_delta(difference, base, other)))  # noqa: B023
        assert all(torch.equal(other[name], tensor) and torch.equal(one[name], tensor) for name, tensor in new.items())
    write, load = statistics.median(delta_s) / statistics.median(full_s), statistics.median(delta_load_s) / statistics.median(full_load_s)
    size, share = statistics.median(sizes), statistics.median(changed)
    print(f"{title:22} {share:8.2%} changed   size {size:.4f} (1/{1 / size:.0f})   write {write:.2f}   load {load:.2f}", flush=True)


def checksum_speed(weights: Weights) -> None:
    tensors = list(weights.values())
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    ours, theirs = (statistics.median(cpu_s(lambda: [way([tensor]) for tensor in tensors]) for _ in range(5)) for way in (sum64, sha256))  # noqa: B023
    print(f"checksums of {num_bytes / 1e6:.0f} MB: sum64 {num_bytes / ours / 1e9:.2f} GB per CPU second, {theirs / ours:.1f} times SHA-256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=384)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("delta against full snapshot (ratios; size, CPU seconds to write, CPU seconds to read, verify and apply), median of the steps")
    for rate in RATES:
        versions = trained(rate, args.steps, args.hidden)
        for dtype in (torch.float32, torch.bfloat16):
            exported = [{name: tensor.to(dtype) for name, tensor in weights.items()} for weights in versions]
            with tempfile.TemporaryDirectory() as name:
                compare(Path(name), exported, f"lr {rate:g}, {str(dtype).removeprefix('torch.')}")
    checksum_speed(versions[0])


if __name__ == "__main__":
    main()
