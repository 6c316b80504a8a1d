"""The learner's step, pushes, the built-in engine and the whole loop on one device: TFLOP/s, MFU, peak memory, GB/s,
tokens/s; as JSON.

``python -m tests.bench gpu --out gpu.json`` measures the shape of Qwen3-1.7B with random weights, written here;
``--tiny`` shows on a CPU that everything runs. The step of transformers (bfloat16 weights and Adam, the same tokens,
one sequence a row) is taken in the same run.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.bench.push import make_layout, publishing
from tests.learner_steps import make_batches
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_tokenizer
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.actors.serving.engine_process import EngineLimits, EnginePlaces, run_engine
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import LiveView
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Sample, Sampling, Span, Status
from tidemill.bus.wire.rows import Capabilities
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.layout.sizes import StepFlops
from tidemill.weightstore.transport.nccl import own_end

SHAPES = {
    "qwen3-1.7b": {
        "layers": 28,
        "hidden": 2048,
        "intermediate": 6144,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 151_936,
    },
    "qwen3-8b": {
        "layers": 36,
        "hidden": 4096,
        "intermediate": 12_288,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 151_936,
    },
}
"""Sizes of their configurations; the larger one's output layer is not that of its embedding, but here it is."""
TINY = {"layers": 2, "hidden": 32, "intermediate": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 512}
PARTS = ("steps", "pushes", "responses", "whole-run")
TRANSPORTS: dict[str, dict[str, Any]] = {
    "handles-cuda": {"transport": "handles", "staging": "cuda"},
    "handles-host": {"transport": "handles"},
    "gloo": {"backend": "gloo"},
}
"""None of them is the name of a benchmark, with which the options of the next one would begin."""
VARIANTS = ("deterministic", "fast", "varlen", "recompute", "transformers")
START_S = 180.0
"""Time limit in seconds for an engine process to be live."""
KERNELS = {
    "attention": ("flash", "fmha", "attention", "cudnn"),  # before products: flash attention's kernels are of cutlass
    "gemm": ("gemm", "nvjet", "cutlass", "mm", "xmma", "linear"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "reductions": ("reduce", "norm", "softmax", "sum", "logsumexp", "amax"),
    "index": ("index", "gather", "scatter", "embedding"),
}
"""Kinds of kernels by parts of their names, in this order; all others are elementwise."""


# -- the model and a step


def write_model(directory: Path, shape: dict[str, int], positions: int, device: torch.device) -> int:
    """Write a random Qwen3 of this shape in bfloat16, and return its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,  # so every response has its full length
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    write_tiny_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    model.to("cpu").save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_step(lengths: Sequence[int], vocab: int, micro_batches: int) -> StepBatch:
    """Return a step of rows that hold one sequence of each length: a group a row."""
    generator = np.random.default_rng(0)
    samples = []
    for task in range(1, micro_batches + 1):
        for index, length in enumerate(lengths):
            response = length - 8
            samples.append(
                Sample(
                    run="r",
                    task=task,
                    index=index,
                    group_size=len(lengths),
                    attempt="a",
                    prompt="p",
                    tokens=generator.integers(3, vocab, length).astype(np.int32),
                    response_length=response,
                    response="x",
                    rollout_log_probs=np.full(response, -np.log(vocab), np.float32),
                    loss_mask=np.ones(response, np.uint8),
                    spans=(Span(version=2, num_tokens=response),),
                    reward=float(index % 2) if len(lengths) > 1 else 1.0,
                    status=Status.COMPLETED,
                    sampling=Sampling(temperature=1.0, max_new_tokens=response),
                )
            )
    return make_batches(samples, max_tokens=sum(lengths))[0]


def our_step(
    directory: Path, batch: StepBatch, *, deterministic: bool, parallel: Any, **wanted: Any
) -> Callable[[], Any]:
    """Return a step of the learner in bfloat16. ``wanted``: settings about kernels."""
    from tidemill.learner.algorithms.config import AlgorithmConfig
    from tidemill.learner.backends.megatron.layers.kernels import Wanted
    from tidemill.learner.backends.megatron.model import build_policy
    from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
    from tidemill.learner.settings.config import OptimizerConfig
    from tidemill.learner.trainer.trainer import Trainer

    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    policy = build_policy(directory, dtype="bfloat16", parallel=parallel, kernels=Wanted(**wanted))
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-6), steps=1000)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(advantage="reinforce"), max_lag=2)
    return lambda: trainer.train(batch)


def plain_step(directory: Path, batch: StepBatch, device: torch.device) -> Callable[[], Any]:
    """Return a step of transformers with PyTorch's attention and fused AdamW: policy gradient of the same tokens."""
    from transformers import AutoModelForCausalLM

    torch.use_deterministic_algorithms(False)
    model = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
        .to(device)
        .train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for row in batch.micro_batches:
            size = int(row.cu_seqlens[1])
            tokens, targets, mask = (
                torch.from_numpy(values).to(device).view(-1, size)
                for values in (row.tokens_T, row.targets_T, row.loss_mask_T)
            )
            log_probs = (
                model(tokens, use_cache=False).logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            )
            (-(log_probs * mask).sum() / batch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def timed_steps(step: Callable[[], Any], device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step, its peak memory, and the kinds of kernels of one more step."""
    step()
    step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, device) for _ in range(rounds)]
    found: dict[str, Any] = {"seconds": statistics.median(seconds), "seconds_all": seconds}
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found | {"split": split(step, device)}


def timed(work: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def split(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return the seconds of each kind of kernel, or of torch's operations on a CPU, and of none: an idle device."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA] if device.type == "cuda" else [activity.CPU]) as profile:
        wall_s = timed(step, device)
    seconds = dict.fromkeys([*KERNELS, "elementwise"], 0.0)
    for event in profile.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        name = event.key.lower()
        kind = next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "elementwise")
        seconds[kind] += spent / 1e6
    return seconds | {"idle": max(0.0, wall_s - sum(seconds.values())), "wall": wall_s}


def measure_steps(directory: Path, shape: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """Return the results by name, for each length of sequences.

    They are those of the learner with and without deterministic kernels, with flash attention alone and with
    recomputation, and of transformers.
    """
    device, found = args.torch_device, {}
    counted = StepFlops.read(directory)
    with one_rank(device.type) as parallel:
        for length in args.sequence:
            lengths = [length] * max(1, args.row_tokens // length)
            batch = make_step(lengths, shape["vocab"], args.micro_batches)
            work = args.micro_batches * counted.step(lengths)
            steps: dict[str, Callable[[], Callable[[], Any]]] = {
                "deterministic": lambda batch=batch: our_step(directory, batch, deterministic=True, parallel=parallel),  # type: ignore[misc]
                "fast": lambda batch=batch: our_step(directory, batch, deterministic=False, parallel=parallel),  # type: ignore[misc]
                "varlen": lambda batch=batch: our_step(  # type: ignore[misc]
                    directory, batch, deterministic=False, parallel=parallel, attention="varlen"
                ),
                "recompute": lambda batch=batch: our_step(  # type: ignore[misc]
                    directory, batch, deterministic=False, parallel=parallel, recompute="full"
                ),
                "transformers": lambda batch=batch: plain_step(directory, batch, device),  # type: ignore[misc]
            }
            for name, make in steps.items():
                if name not in args.variants:
                    continue
                gc.collect()  # models and optimizers are in cycles, and would count in the next one's peak
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                result = timed_steps(make(), device, args.rounds)
                rate = work / result["seconds"]
                result |= {"tflops": rate / 1e12, "mfu": rate / (args.peak_tflops * 1e12)}
                result["tokens_per_second"] = args.micro_batches * sum(lengths) / result["seconds"]
                found[title := f"{len(lengths)} x {length}, {name}"] = result
                memory = f", peak {result['peak_gb']:.1f} GB" if "peak_gb" in result else ""
                print(
                    (
                        f"{title}: {result['seconds']:.4f} s, {result['tflops']:.0f} TFLOP/s, MFU "
                        f"{result['mfu']:.1%}{memory}"
                    ),
                    flush=True,
                )
                print(
                    "  " + ", ".join(f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in result["split"].items()),
                    flush=True,
                )
    torch.use_deterministic_algorithms(False)
    return found


# -- pushes


async def engine_main(url: str, run: str, model_dir: str, device: str) -> None:
    """Body of the engine's process."""
    own = own_end()
    uuids = (own.uuid,) if own.uuid else ()
    devices = Capabilities(devices=uuids, visible_devices=uuids, nccl=own.nccl if uuids else "")
    places = EnginePlaces(
        bus_url=url, run=run, model_dir=Path(model_dir), bus=BusConfig(), id="engine", devices=devices
    )
    config = EngineConfig(device=device, dtype="bfloat16", max_running=4, max_context=256)
    await run_engine(places, config, asyncio.Event(), factory=BuiltinEngine, limits=EngineLimits())


@contextmanager
def live_engine(url: str, run: str, directory: Path, device: torch.device) -> Iterator[None]:
    """Run an engine process; the block begins when it takes pushes."""
    command = [sys.executable, "-m", "tests.bench.gpu", "--engine", url, run, str(directory), device.type]
    with subprocess.Popen(command) as engine:
        try:
            asyncio.run(until_live(url, run, engine))
            yield
        finally:
            engine.kill()


async def until_live(url: str, run: str, engine: "subprocess.Popen[bytes]") -> None:
    async with asyncio.timeout(START_S), connect(url, run, BusConfig(), name="bench") as bus:
        while not any(row.address for row in await LiveView(bus).alive("engine")):
            if engine.poll() is not None:
                raise SystemExit(f"the engine ended with {engine.returncode}")
            await asyncio.sleep(0.2)


def exported(directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the weights as the learner exports them, in its order: an engine then copies a bucket at once."""
    from tidemill.learner.backends.megatron.model import build_policy

    with one_rank(device.type) as parallel:
        policy = build_policy(directory, dtype="bfloat16", parallel=parallel)
        return {name: tensor.detach().clone() for name, tensor in policy.export()}


def measure_pushes(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s and stall of pushes from the device to an engine process on it, by every transport."""
    device, found = args.torch_device, {}
    tensors = exported(directory, device)
    transports = {name: TRANSPORTS[name] for name in args.transports if device.type == "cuda" or name != "handles-cuda"}
    with tempfile.TemporaryDirectory() as place, EmbeddedServer(Path(place) / "nats", BusConfig()) as server:
        for epoch, (name, settings) in enumerate(transports.items(), 1):
            run = name.replace(" ", "-")
            asyncio.run(make_layout(server.url, run))
            with live_engine(server.url, run, directory, device):
                with publishing(
                    server.url, run, Path(place) / run, epoch, args.bucket_mbytes * 1_000_000, **settings
                ) as publisher:
                    for step in range(2):  # both staging copies, and both of the engine
                        publisher.publish(step, tensors.items(), wait=True).result(0)
                    reports = [
                        publisher.publish(step, tensors.items(), wait=True).result(0)
                        for step in range(2, 2 + args.rounds)
                    ]
            assert all(report.engines == ("engine",) for report in reports), reports
            transfer_s = statistics.median(report.transfer_s for report in reports)
            found[name] = {
                "gb": reports[0].num_bytes / 1e9,
                "transfer_seconds": transfer_s,
                "gb_per_second": reports[0].num_bytes / 1e9 / transfer_s,
                "prepare_seconds": statistics.median(report.prepare_s for report in reports),
                "stall_seconds": statistics.median(max(report.stall_s.values()) for report in reports),
            }
            print(f"push by {name}: {found[name]}", flush=True)
    return found | {"plain copies": copies(sum(tensor.nbytes for tensor in tensors.values()), device, args.rounds)}


def copies(size: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Return GB/s of plain copies of as many bytes: on the device, and between it and pinned host memory. No push can
    be faster.
    """
    here = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    work: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "device": (torch.empty_like(here), here),
        "to host": (host, here),
        "from host": (here, host),
    }
    found = {}
    for name, (target, source) in work.items():
        target.copy_(source)
        found[name] = (
            size / 1e9 / statistics.median(timed(lambda a=target, b=source: a.copy_(b), device) for _ in range(rounds))
        )  # type: ignore[misc]
    return found


# -- the engine


async def measure_engine(directory: Path, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second over HTTP, by the number of responses at a time."""
    found = {}
    for rows in args.rows:
        config = EngineConfig(
            device=args.torch_device.type, dtype="bfloat16", max_running=rows, max_context=32 + args.new_tokens
        )
        engine = BuiltinEngine(directory, config, authority=Authority(unguarded=True))
        await asyncio.to_thread(engine.load)
        client = HttpEngine(await engine.start())
        engine.phase = "serving"
        prompts = np.random.default_rng(0).integers(3, vocab, (rows, 24), dtype=np.int64)
        try:
            seconds = []
            for _ in range(1 + args.rounds):
                began = time.perf_counter()
                sampling = [Sampling(max_new_tokens=args.new_tokens, seed=seed) for seed in range(rows)]
                answers = await asyncio.gather(
                    *(client.generate(prompt, each) for prompt, each in zip(prompts, sampling, strict=True))
                )
                seconds.append(time.perf_counter() - began)
                assert all(len(answer.tokens) == args.new_tokens for answer in answers), "a response ended early"
        finally:
            await client.close()
            await engine.close()
        del engine
        found[str(rows)] = {
            "tokens_per_second": rows * args.new_tokens / statistics.median(seconds[1:]),
            "transformers": rows * args.new_tokens / plain_generation(directory, prompts, args),
        }
    return found


def plain_generation(directory: Path, prompts: NDArray[np.int64], args: argparse.Namespace) -> float:
    """Return the seconds of ``generate`` of transformers for the same prompts, all at once, with as many new tokens."""
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
        .to(args.torch_device)
        .eval()
    )
    tokens = torch.from_numpy(prompts).to(args.torch_device)

    def generate() -> None:
        model.generate(
            tokens, do_sample=True, max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, pad_token_id=0
        )

    model.generate(tokens, do_sample=True, max_new_tokens=2, pad_token_id=0)
    return timed(generate, args.torch_device)


# -- all of it


# -- a whole run


def measure_run(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, waits, pushes and tokens/s of the steps of `tidemill up`, after the first two, with the engine on
    the same device.
    """
    run = directory.parent / "loop"
    prompts = directory.parent / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{number} and more", "label": "0"}) + "\n" for number in range(256))
    )
    settings = {
        "directory": str(run),
        "model": {"path": str(directory)},
        "data": {"path": str(prompts)},
        "sampling": {"max_new_tokens": args.new_tokens},
        "learner": {
            "steps": 2 + args.rounds,
            "groups_per_step": 4 if args.tiny else 16,
            "group_size": 4 if args.tiny else 8,
        },
        "engine": {"max_running": max(args.rows)},
        "actor": {"reward": "exact", "max_samples_in_flight": max(args.rows)},
        "weights": {"transport": "handles"},
    }
    settings["learner"] |= {
        "deterministic": args.torch_device.type == "cpu",
        "optimizer": {"lr": 1e-6},
        "checkpoint_every": 1000,
    }
    config = directory.parent / "loop.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    ended = subprocess.run(
        [sys.executable, "-m", "tidemill", "up", str(config), "--fresh"], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(f"the run ended with {ended.returncode}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][2:]
    names = (
        "train/step_seconds",
        "train/wait_seconds",
        "train/tokens_per_second",
        "train/mfu",
        "push/seconds",
        "push/prepare_seconds",
    )
    return {
        name: statistics.median(step[name] for step in steps) for name in names if all(name in step for step in steps)
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two layers, which shows that everything runs; on a CPU always"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="kinds of steps")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--sequence", type=int, nargs="+", help="tokens of a sequence; each is measured")
    parser.add_argument("--row-tokens", type=int, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", help="responses at a time")
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="transports of pushes"
    )
    parser.add_argument("--bucket-mbytes", type=int, default=0, help="0 = by the transport")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=989.0,
        help="dense bfloat16 of the device: H100 SXM and H200 (NVIDIA's data sheets)",
    )
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.torch_device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    args.tiny |= args.torch_device.type == "cpu"
    defaults = ([64], 64, [1, 4], 16) if args.tiny else ([2048, 8192], 8192, [1, 64, 256], 256)
    for name, value in zip(("sequence", "row_tokens", "rows", "new_tokens"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device == "cuda" and args.torch_device.type != "cuda":
        parser.error("--device cuda: no CUDA device")
    return args


def main() -> None:
    args = arguments()
    if args.engine:
        asyncio.run(engine_main(*args.engine))
        return
    for name, value in {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        os.environ.setdefault(name, value)
    shape = (TINY if args.tiny else SHAPES[args.shape]) | ({"layers": args.layers} if args.layers else {})
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.torch_device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        parameters = write_model(directory, shape, max(512, 32 + args.new_tokens, *args.sequence), args.torch_device)
        found |= {"shape": shape, "parameters": parameters}
        parts: dict[str, Callable[[], Any]] = {
            "steps": lambda: measure_steps(directory, shape, args),
            "pushes": lambda: measure_pushes(directory, args),
            "responses": lambda: asyncio.run(measure_engine(directory, shape["vocab"], args)),
            "whole-run": lambda: measure_run(directory, args),
        }
        for part in args.parts:
            found[part] = parts[part]()
            print(json.dumps({part: found[part]}, indent=1), flush=True)
            if args.out:  # after each part, so that a later one that fails or runs out of time takes nothing away
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
