"""Cost of corrections and diagnostics: a step of the learner with all of them against the same step with a bare PPO
loss.

Same Megatron, same rows, same optimizer, taking turns in one process. The bare step computes log-probs and entropies, a
clipped ratio, the mean over the tokens and nothing else; no weights, no diagnostics, no metrics. ``decoupled`` is the
default; ``everything`` adds rejections, a veto and the ESS-scaled learning rate. For both the parts of a step are
printed as well, so that a ratio near 1 is no noise of the model.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.algorithm_settings import algorithm_of
from tests.bench.learner_step import SHAPES, make_batch, make_model
from tidemill.bus.client.addresses import KeptPort
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.settings.config import OptimizerConfig

ROUNDS = 60
EVERYTHING: dict[str, Any] = {
    "reject": {"rules": ("k3 seq_mean 1.0", "k1 token 0.01 100"), "veto": 1e-6, "opsm": 5.0},
    "ess_lr": 1.0,
}


@functools.cache
def joined() -> Any:
    """Return the groups of a world of one, joined once."""
    from tidemill.learner.backends.megatron.groups import join
    from tidemill.learner.layout.parallel import choose_device

    with KeptPort() as port:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.number))
        return join(tensor_parallel_size=1, device=choose_device("auto"), seed=0)


def steps(directory: Path, batch: StepBatch) -> dict[str, Callable[[], Any]]:
    """Return the steps by name, each with a model of its own."""
    from tidemill.learner.backends.megatron.cpu_shim import megatron_device
    from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
    from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
    from tidemill.learner.trainer.passes import Passes
    from tidemill.learner.trainer.rows import rows_of, step_of
    from tidemill.learner.trainer.trainer import Trainer

    here = joined()

    def trainer(**algorithm: Any) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer]:
        policy = build_policy(directory, dtype="float32", parallel=here)
        optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-6), steps=1_000_000)
        return Trainer(policy, optimizer, algorithm_of(**algorithm), max_lag=2), policy, optimizer

    bare, bare_policy, bare_optimizer = trainer()
    passes = Passes(bare_policy)

    def ppo(row: Any, hidden_TH: Tensor) -> tuple[Tensor, None]:
        log_probs_T, _, _ = passes.read(row, hidden_TH)
        ratio_T = (log_probs_T - log_probs_T.detach()).exp()
        advantages_T = row.seen.advantages_T
        loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.28) * advantages_T)
        return torch.where(row.seen.mask_T, loss_T, 0.0).sum() / batch.num_tokens, None

    def bare_step() -> None:
        rows = bare._with_advantages(rows_of(batch, here), step_of(batch, constant=0.0))
        with megatron_device():
            bare_optimizer.zero_grad()
            bare_policy.run(rows, ppo)
            bare_optimizer.step(batch.step, loss=0.0)

    made: dict[str, Callable[[], Any]] = {"bare": bare_step}
    for name, algorithm in {"decoupled": {}, "everything": EVERYTHING}.items():
        full, _, _ = trainer(**algorithm)
        made[name] = lambda full=full: full.train(batch)
    return made


def compare(shape: str, rounds: int) -> dict[str, float]:
    """Return the median over the rounds of the ratio to the bare step of the same round, and the bare step's median."""
    values = SHAPES[shape]
    batch = make_batch(**{key: values[key] for key in ("sequences", "prompt", "response", "vocab")})
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), layers=values["layers"], hidden=values["hidden"], vocab=values["vocab"])
        made = steps(Path(directory), batch)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 3):
        for name, step in made.items():
            began = time.process_time()
            step()
            if number >= 3:
                times[name].append(time.process_time() - began)
    bare = statistics.median(times["bare"])
    return {"bare_ms": 1e3 * bare} | {
        name: statistics.median(took) / bare for name, took in times.items() if name != "bare"
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for shape in args.shapes:
        found = compare(shape, args.rounds)
        print(f"{shape}: bare PPO step {found.pop('bare_ms'):.1f} CPU ms")
        for name, ratio in found.items():
            print(f"RATIO {shape} {name} / bare: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
