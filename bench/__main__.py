"""``python -m bench [NAME ...]``: run benchmarks by name, all of them without one."""

import importlib
import sys

NAMES = {
    "sample_path": "a sample's way from actor to feeder, against a bare nats-py pipeline",
    "engine": "the built-in engine, against transformers' batched generate",
    "learner_step": "a step of the learner, against plain transformers and torch",
    "push": "a weight push, against a bare torch.distributed.broadcast",
    "loop": "the whole loop, against its slower half",
    "learn": "samples and seconds to reward 0.9, against TRL",
}


def main() -> int:
    wanted = sys.argv[1:] or list(NAMES)
    for name in wanted:
        if name not in NAMES:
            print(f"bench: want some of {', '.join(NAMES)}, got {name!r}", file=sys.stderr)
            return 2
    for name in wanted:
        print(f"== {name}: {NAMES[name]}", flush=True)
        module = importlib.import_module(f"bench.{name}")
        sys.argv = [f"bench {name}"]
        module.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
