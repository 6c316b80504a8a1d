"""CPU seconds to write and to load a snapshot of the weights, against safetensors alone, and the speed of the
checksums; in the same run.

``python -m tests.bench.snapshot`` exports a small model as fp32 and as bf16. A snapshot is written with its SHA-256,
and loaded as an engine loads it: every byte hashed, every tensor copied. The other side does the same with safetensors
alone, without checksums.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import tiny_model
from tidemill.weightstore.format.checksums import sha256, sum64
from tidemill.weightstore.store import snapshot_files

Weights = dict[str, Tensor]
ROUNDS = 5


def model(hidden: int) -> Weights:
    made = tiny_model(seed=1, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, vocab_size=4096)
    return {name: tensor.detach().clone() for name, tensor in made.state_dict().items()}


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def load(file: Path, into: Weights) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            into[name].copy_(tensors.get_tensor(name))


def load_verified(directory: Path, into: Weights) -> None:
    snapshot_files.verify(directory)
    load(directory / "model.safetensors", into)


def compare(directory: Path, weights: Weights, title: str) -> None:
    bare = directory / "bare.safetensors"
    seconds: dict[str, list[float]] = {"write": [], "bare write": [], "load": [], "bare load": []}
    into = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    for number in range(1, ROUNDS + 1):
        path = directory / f"v{number}"
        works: dict[str, Callable[[], object]] = {
            "write": lambda: snapshot_files.write(path, weights, version=number, step=number, durable=False),  # noqa: B023
            "bare write": lambda: save_file(weights, bare),
            "load": lambda: load_verified(path, into),  # noqa: B023
            "bare load": lambda: load(bare, into),
        }
        for name, work in works.items():
            seconds[name].append(cpu_s(work))
        assert all(torch.equal(into[name], tensor) for name, tensor in weights.items())
    median = {name: statistics.median(found) for name, found in seconds.items()}
    speed = sum(tensor.nbytes for tensor in weights.values()) / median["load"] / 1e9
    write, load_ = median["write"] / median["bare write"], median["load"] / median["bare load"]
    print(f"{title:9} write {write:.2f}   load {load_:.2f} ({speed:.2f} GB per CPU second)", flush=True)


def checksum_speed(weights: Weights) -> None:
    tensors = list(weights.values())
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    ours, theirs = (
        statistics.median(cpu_s(lambda way=way: [way([tensor]) for tensor in tensors]) for _ in range(5))
        for way in (sum64, sha256)
    )
    print(
        f"checksums of {num_bytes / 1e6:.0f} MB: sum64 {num_bytes / ours / 1e9:.2f} GB per CPU second, "
        f"{theirs / ours:.1f} times SHA-256"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = model(args.hidden)
    print(
        "a snapshot against safetensors alone (ratios; CPU seconds to write, CPU seconds to verify and "
        "load), median of the rounds"
    )
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as name:
            compare(
                Path(name),
                {name: tensor.to(dtype) for name, tensor in weights.items()},
                str(dtype).removeprefix("torch."),
            )
    checksum_speed(weights)


if __name__ == "__main__":
    main()
