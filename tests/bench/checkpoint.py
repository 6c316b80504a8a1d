"""Seconds for which a step waits for its checkpoint: written in the background, against written at once; same process,
same model.

``python -m tests.bench checkpoint`` trains one rank on the CPU and takes a checkpoint every few steps, in both ways by
turns. *Stall* is the time from the end of the step to the beginning of the next; *whole* is the time of all steps with
their checkpoints, against the same steps without one: the time that the writing takes from the steps that it runs
beside.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.integration.checkpoint_ranks import VOCAB, Reports, built, places, train
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.ranks.checkpoints import Checkpoints
from tidemill.learner.settings.config import CheckpointConfig

STEPS = 2
"""Steps behind each checkpoint."""
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--directory", help="on the disk to measure; the default may be in memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, one_rank() as here:
        root = Path(directory)
        model = write_tiny_model(
            root / "model",
            vocab_size=VOCAB,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
        )
        policy, optimizer, trainer = built(model, here)
        ways = {
            name: Checkpoints(
                places(model, root / name, 0),
                Reports().checkpointed,
                MegatronBackend(),
                policy,
                optimizer,
                config=CheckpointConfig(background=background),
                timeout_s=600,
            )
            for name, background in (("at once", False), ("background", True))
        }
        stall: dict[str, list[float]] = {name: [] for name in ways}
        whole: dict[str, list[float]] = {name: [] for name in (*ways, "none")}
        step = 0
        for number in range(ROUNDS + 1):  # the first one warms up: Adam's moments, the host copy, the page cache
            for name in ("none", *ways):
                began = time.monotonic()
                if name in ways:
                    ways[name].begin(step, number, b"state", numbers={"kl_scale": 1.0})
                    stalled = time.monotonic() - began
                for _ in range(STEPS):
                    step += 1
                    train(trainer, here, step)
                seconds = time.monotonic() - began
                if name in ways:
                    ways[name].collect(wait=True)
                    shutil.rmtree(root / name)
                if number:
                    whole[name].append(seconds)
                    if name in ways:
                        stall[name].append(stalled)
        size = ways["background"].copied_bytes
    _report({name: statistics.median(found) for name, found in stall.items()}, whole, size)


def _report(stall: dict[str, float], whole: dict[str, list[float]], size: int) -> None:
    none = statistics.median(whole["none"])
    print(f"state of {size / 1e6:.0f} MB, {none / STEPS:.2f} s a step")
    for name, seconds in stall.items():
        more = statistics.median(whole[name]) - none
        print(f"{name:11} stall {seconds:.3f} s   {STEPS} steps with it take {more:+.2f} s ({more / none:+.0%})")
    print(f"stall in the background / at once: {stall['background'] / stall['at once']:.2f}", flush=True)


if __name__ == "__main__":
    main()
