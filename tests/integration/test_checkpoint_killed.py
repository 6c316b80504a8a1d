"""A rank is killed -9 while a checkpoint is written beside the training: the one before is used."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.integration import checkpoint_ranks
from tests.integration.checkpoint_ranks import INSTANTS, STEP, VOCAB, built, train
from tests.learner_steps import rank_environment
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.bus.client.addresses import KeptPort
from tidemill.learner.backends.megatron import state
from tidemill.learner.checkpoints import disk

IN_FILE = "in its file"
PAIRS = [
    (rank, instant) for instant in INSTANTS for rank in (0, 1) if rank == 0 or instant in (IN_FILE, "behind its file")
]
"""Rank 0 writes the index, the manifest, and the name of the directory."""


@pytest.mark.parametrize(
    ("rank", "instant"),
    [pytest.param(*pair, marks=[] if pair == (1, IN_FILE) else [pytest.mark.slow]) for pair in PAIRS],
)
def test_the_checkpoint_before_is_used(tmp_path: Path, rank: int, instant: str) -> None:
    """Of two ranks one is killed: the checkpoint has no name, and the state of the one before takes the same next
    step.
    """
    model_dir, root = write_tiny_model(tmp_path / "model", vocab_size=VOCAB), tmp_path / "checkpoints"
    root.mkdir()
    with KeptPort() as port:
        arguments = (model_dir, root, rank, instant, tmp_path)
        children = [
            Forked(
                checkpoint_ranks.killed, arguments, rank_environment(number, 2, port.number), tmp_path / f"{number}.log"
            )
            for number in (0, 1)
        ]
        try:
            assert children[rank].wait(300) == -signal.SIGKILL, children[rank].output.read_text()
        finally:
            for child in children:
                child.kill()
                child.wait(LIMIT_S)
    assert (tmp_path / "died").exists()
    assert [one.step for one in disk.listed(root)] == [STEP], "no other directory has its name"
    unfinished = root / f"step-{STEP + 1}-epoch-1.tmp"
    sizes = {name: (unfinished / name).stat().st_size for name in os.listdir(unfinished) if name.endswith(".distcp")}
    whole = {name: (root / f"step-{STEP}-epoch-1" / name).stat().st_size for name in sizes}
    if instant == IN_FILE:
        assert [name for name in sizes if 0 < sizes[name] < whole[name]], "one of the files is there in part"
    path, corrupt = disk.latest_valid(one.path for one in disk.listed(root))
    assert path is not None and not corrupt and disk.read_state(path) == b"data state"
    with one_rank() as here:
        policy, optimizer, trainer = built(model_dir, here)
        assert state.load(path, policy=policy, optimizer=optimizer) == (STEP, {"kl_scale": 2.5})
        grad_norm = train(trainer, here, STEP + 1)
    for number in (0, 1):
        wanted = json.loads((tmp_path / f"rank-{number}.json").read_text())
        assert grad_norm == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert wanted["reported"] == ([[STEP, str(path)]] if number == 0 else [])
