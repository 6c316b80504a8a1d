"""Body of one rank of two, each on a "node" with a directory of its own: saves with TP2, or loads with TP2 and DP2. Run
by the test.
"""

import json
import os
from pathlib import Path
from typing import Any

from tests.chaos.dying import die_at
from tests.learner_steps import make_batches, make_samples
from tests.megatron_world import joined
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints import manifest as manifests
from tidemill.learner.checkpoints import remote_files
from tidemill.learner.checkpoints.remote_files import CheckpointFiles, Peer, PeerClient
from tidemill.learner.feed.feed_keys import FeedKeys
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.layout import parallel
from tidemill.learner.ranks.checkpoints import Checkpoints
from tidemill.learner.settings.config import CheckpointConfig, OptimizerConfig
from tidemill.learner.trainer.trainer import Trainer

VOCAB = 300
STEP = 3


class Reports:
    """The feeder's end of ``checkpointed``."""

    def __init__(self) -> None:
        self.checkpoints: list[tuple[int, str]] = []

    def checkpointed(self, step: int, directory: str) -> None:
        self.checkpoints.append((step, directory))


def places(model_dir: Path, root: Path, node: int) -> RankPlaces:
    return RankPlaces(
        run="r",
        bus_url="",
        feeder_url="",
        feeder_keys=FeedKeys(feeder_public="", ranks_public=""),
        model_dir=model_dir,
        checkpoints=root,
        node=node,
        snapshots=root,
        final_dir=root,
    )


def built(model_dir: Path, here: parallel.Parallel) -> tuple[MegatronPolicy, MegatronOptimizer, Trainer]:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=3e-3), steps=10)
    return policy, optimizer, Trainer(policy, optimizer, AlgorithmConfig(), max_lag=2)


def train(trainer: Trainer, here: parallel.Parallel, step: int) -> float:
    batches = make_batches(make_samples(vocab=VOCAB, step=step), step=step, data_parallel=here.dp_size, max_tokens=200)
    return trainer.train(batches[here.dp_rank])["train/grad_norm"]


def save(model_dir: Path, roots: list[Path], store: str, out: Path) -> None:
    """Save the state after a step in the background, and train on at once. Every node's directory is a root of its
    own.
    """
    with joined(tensor_parallel_size=2) as here:
        found = _saved(model_dir, roots[here.rank], store, here)
    (out / f"rank-{here.rank}.json").write_text(json.dumps(found))


def _saved(model_dir: Path, root: Path, store: str, here: parallel.Parallel) -> dict[str, Any]:
    policy, optimizer, trainer = built(model_dir, here)
    reports = Reports()
    saved = Checkpoints(
        places(model_dir, root, here.rank),
        reports.checkpointed,
        MegatronBackend(),
        policy,
        optimizer,
        config=CheckpointConfig(store=store),
        timeout_s=60,
    )
    train(trainer, here, STEP)
    saved.begin(STEP, 1, b"data state", numbers={"kl_scale": 2.5})
    grad_norm = train(trainer, here, STEP + 1)  # beside the writing: the weights of before are saved
    saved.collect(wait=True)
    return {"digest": policy.digest(), "grad_norm": grad_norm, "reported": reports.checkpoints}


INSTANTS = {
    "in its file": ("torch.distributed.checkpoint.filesystem:_write_item", 12),
    "behind its file": ("tidemill.learner.checkpoints.disk:digest", 1),
    "before the index": ("tidemill.learner.checkpoints.staged_files:Staged.finish", 1),
    "before the manifest": ("tidemill.learner.checkpoints.disk:write_manifest", 1),
    "before the name": ("tidemill.learner.checkpoints.disk:publish", 1),
}
"""Instants of the writing of a checkpoint: the function, and the number of its call on which the rank is killed."""


def killed(model_dir: Path, root: Path, rank: int, instant: str, out: Path) -> None:
    """Save the state after a step, and take the next one; then ``rank`` is killed -9 at an instant of the writing of
    its state.
    """
    with joined(tensor_parallel_size=2) as here:
        policy, optimizer, trainer = built(model_dir, here)
        reports, config = Reports(), CheckpointConfig()
        saved = Checkpoints(
            places(model_dir, root, 0),
            reports.checkpointed,
            MegatronBackend(),
            policy,
            optimizer,
            config=config,
            timeout_s=300,
        )
        train(trainer, here, STEP)
        saved.begin(STEP, 1, b"data state", numbers={"kl_scale": 2.5})
        saved.collect(wait=True)
        grad_norm = train(trainer, here, STEP + 1)
        (out / f"rank-{here.rank}.json").write_text(
            json.dumps({"grad_norm": grad_norm, "reported": reports.checkpoints})
        )
        if here.rank == rank:
            where, nth = INSTANTS[instant]
            die_at(where, nth, "KILL", out / "died")
        saved.begin(STEP + 1, 1, b"later data state", numbers={"kl_scale": 3.5})
        saved.collect(wait=True)


def load(model_dir: Path, roots: list[Path], urls: list[str], layouts: list[int], out: Path) -> None:
    """Load on each node from its own disk and the other's server, with each number of tensor-parallel ranks, and repeat
    the next step.
    """
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for tensor_parallel in layouts:
        with joined(tensor_parallel_size=tensor_parallel) as here:
            found[f"tp{tensor_parallel}"] = _loaded(
                model_dir, roots[rank], [Peer(node=1 - rank, url=urls[1 - rank])], here
            )
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


def _loaded(model_dir: Path, root: Path, peers: list[Peer], here: parallel.Parallel) -> dict[str, Any]:
    client = PeerClient(peers)
    directory = root / f"step-{STEP}-epoch-1"
    remote_files.complete(directory, client)
    files = CheckpointFiles(directory, manifests.read(directory).files, client)
    policy, optimizer, trainer = built(model_dir, here)
    try:
        step, numbers = state.load(directory, policy=policy, optimizer=optimizer, files=files)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assert (step, numbers) == (STEP, {"kl_scale": 2.5})
    return {"grad_norm": train(trainer, here, STEP + 1), "digest": policy.digest(), "fetched": files.fetched_bytes}
