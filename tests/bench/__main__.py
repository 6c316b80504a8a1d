"""``python -m tests.bench [NAME [OPTION ...]] ...``: benchmarks by name, each with its own options; all of them without
a name.

On CPUs, unless a benchmark's option ``--device cuda`` is given, or the benchmark is ``gpu``.
"""

import importlib
import os
import sys
import traceback

NAMES = {
    "sample_path": "a sample's way from actor to feeder, against a bare nats-py pipeline",
    "looking": "publishing and reading while onlookers look, against the same without them",
    "page": "the page of a run at 2,000 samples/s and 200 processes: its server by viewers, and old samples",
    "page_training": "a step of training while a page looks on, against the same run without a page",
    "engine": "the built-in engine, against transformers' batched generate",
    "engine_mixes": "the built-in engine over mixes of requests: CPU and memory, against another checkout",
    "overhead": "corrections and diagnostics, against a step with a bare PPO loss",
    "grouped_experts": "a step with the experts of a rank in one product, against one product for each",
    "learner_step": "a step of the learner, against plain transformers and torch",
    "output_layer": (
        "log-probs fused with the output layer, against a linear layer and a loss on its logits (about 2 minutes)"
    ),
    "mutants": (
        "whether the tests of learner/algorithms see a wrong formula (1,890 mutants, 3 s of CPU each; --sample 4 "
        "for less)"
    ),
    "staleness": "what age does to learning, with and without correction (about 25 minutes on two cores)",
    "push": "a weight push, against a bare torch.distributed.broadcast",
    "adapter_push": "a push of adapters, against a push of merged weights of the same version: bytes and seconds",
    "handles": "a weight push to an engine of this host by handles, against a plain memory copy, and by broadcast",
    "checkpoint": "how long a step waits for a checkpoint in the background, against one that is written at once",
    "stall": "what pushes cost generation: tokens per CPU-second and gaps between tokens",
    "snapshot": "writing and loading a snapshot with its checksums, against safetensors alone",
    "rewards": (
        "samples/s per core of each reward that ships, against a library or its definition, and of a call in "
        "child processes"
    ),
    "episodes": "turns/s of episodes through the gateway, with and without a log, against asking the engine directly",
    "actors": "1,000 actors with 1,000 samples/s of 32 KB: does the feeder keep up, and at what cost",
    "decisions": "what the decisions of the feeder cost for each sample, without a bus",
    "issuing": "how many tasks a second a feeder issues, one after the other and many at once",
    "scaling": "several streams of samples: points, a simulation calibrated with them, and costs (about 5 minutes)",
    "large_samples": "samples of many tokens, with images or experts: in parts, against JetStream's object store",
    "recovery": "how long a run stands still when a process of it is killed, against its first start",
    "soak": "10,000 small steps with every fault in turn: nothing lost, memory flat, files bounded (about an hour)",
    "failover": "how long a cluster of three stands still when a leader is killed (about 2 minutes)",
    "gpu": "step, pushes and engine on one GPU, beside a step of transformers; tiny on a CPU",
    "evaluation": "evaluation beside training, against training without it (about 2 minutes)",
    "digits": "CPU time of the main job by process, against another checkout (--against)",
    "actor_cost": "CPU time of an actor for a sample, against another checkout (--against)",
    "in_flight": "samples in flight: auto against the best fixed number, simulated",
    "loop": "the whole loop, against its slower half",
    "warm_start": "reward against seconds after a warm start, against RL alone in the same time (about 5 minutes)",
    "real": (
        "make real, against TRL: CPU seconds and memory of all processes, held-out score (about 20 minutes a seed); "
        "against another checkout (--against)"
    ),
    "learn": "samples and seconds to reward 0.9, against TRL",
}


def main() -> int:
    wanted = chosen(sys.argv[1:])
    if wanted is None:
        print(
            f"bench: want some of {', '.join(NAMES)}, each with its options behind it, got {sys.argv[1:]}",
            file=sys.stderr,
        )
        return 2
    if not any(
        word == "gpu" or "cuda" in word for word in sys.argv[1:]
    ):  # cuda: as the value of a benchmark's --device
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    failed = [name for name, options in wanted if not runs_well(name, options)]
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def chosen(words: list[str]) -> list[tuple[str, list[str]]] | None:
    """Return the names, each with the arguments up to the next name; None when the first argument is no name."""
    if words and words[0] not in NAMES:
        return None
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word in NAMES:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found or [(name, []) for name in NAMES]


def runs_well(name: str, options: list[str]) -> bool:
    """Run one benchmark; its exception is printed, and the others continue."""
    print(f"== {name}: {NAMES[name]}", flush=True)
    sys.argv = [f"python -m tests.bench {name}", *options]
    try:
        importlib.import_module(f"tests.bench.{name}").main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return not end.code
    except Exception:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
