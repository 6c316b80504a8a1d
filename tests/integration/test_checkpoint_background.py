"""Checkpoints that are written beside the training: their content is that of their step, and whatever fails leaves the
one before.
"""

import errno
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.checkpoint_ranks import VOCAB, Reports, built, places, train
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.model import MegatronPolicy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.staged_files import Staged
from tidemill.learner.errors import CheckpointUnwritten, NoCheckpoint
from tidemill.learner.feed.feed_messages import FeedStart
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.ranks.checkpoints import Checkpoints
from tidemill.learner.settings.config import CheckpointConfig
from tidemill.learner.trainer.trainer import Trainer


@dataclass
class Learner:
    """A learner's rank with its checkpoints; the writing waits for ``gate``."""

    here: Parallel
    policy: MegatronPolicy
    optimizer: MegatronOptimizer
    trainer: Trainer
    checkpoints: Checkpoints
    reports: Reports
    root: Path

    def step(self, number: int) -> None:
        train(self.trainer, self.here, number)

    def save(self, number: int) -> None:
        self.checkpoints.begin(number, 1, b"data state %d" % number, numbers={"kl_scale": 1.0})


@pytest.fixture
def make(here: Parallel, tmp_path: Path) -> Any:
    write_tiny_model(tmp_path / "model", vocab_size=VOCAB)
    root = tmp_path / "checkpoints"
    root.mkdir()

    def made(**settings: Any) -> Learner:
        policy, optimizer, trainer = built(tmp_path / "model", here)
        reports = Reports()
        checkpoints = Checkpoints(
            places(tmp_path / "model", root, 0),
            reports.checkpointed,
            MegatronBackend(),
            policy,
            optimizer,
            config=CheckpointConfig(**settings),
            timeout_s=60,
        )
        return Learner(here, policy, optimizer, trainer, checkpoints, reports, root)

    return made


class Gate:
    """Holds up every writing until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = Staged.write

        def held(staged: Staged) -> Any:
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            return write(staged)

        monkeypatch.setattr(Staged, "write", held)


def test_what_is_written_is_the_state_of_its_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more steps are trained before the first byte is written."""
    gate = Gate(monkeypatch)
    learner = make()
    learner.step(1)
    learner.save(1)
    digest = learner.policy.digest()
    assert gate.reached.wait(LIMIT_S)
    for number in (2, 3):
        learner.step(number)
        learner.checkpoints.collect()
    assert learner.reports.checkpoints == [] and disk.listed(learner.root) == []
    gate.open.set()
    learner.checkpoints.collect(wait=True)
    path = learner.root / "step-1-epoch-1"
    assert learner.reports.checkpoints == [(1, str(path))]
    assert disk.verify(path) == {"step": 1, "epoch": 1, "world": 1}
    assert disk.read_state(path) == b"data state 1"
    expected = learner.policy.digest()
    other = make()
    assert state.load(path, policy=other.policy, optimizer=other.optimizer)[0] == 1
    assert other.policy.digest() == digest
    for number in (2, 3):
        other.step(number)
    assert other.policy.digest() == expected, "optimizer and weights go on to the same bits"


def test_the_next_checkpoint_waits_for_the_one_before(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    learner = make()
    learner.save(1)
    assert gate.reached.wait(LIMIT_S)
    threading.Timer(0.2, gate.open.set).start()
    learner.step(2)
    learner.save(2)
    assert [step for step, _ in learner.reports.checkpoints] == [1]
    learner.checkpoints.collect(wait=True)
    assert [step for step, _ in learner.reports.checkpoints] == [1, 2]
    assert [one.step for one in disk.listed(learner.root)] == [2, 1]
    for one in disk.listed(learner.root):
        disk.verify(one.path)


INSTANTS = [
    (Staged, "write"),
    (disk, "digest"),
    (Staged, "finish"),
    (disk, "write_manifest"),
    (disk, "publish"),
]
"""Calls of the thread, in order."""


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("owner", "name"), INSTANTS)
def test_a_failure_at_any_instant_leaves_the_checkpoint_before(
    make: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, background: bool
) -> None:
    """The disk takes no more: the learner ends with the reason, at the next step, and the checkpoint before is as it
    was.
    """
    learner = make(background=background)
    learner.save(1)
    learner.checkpoints.collect(wait=True)

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, full)
    with refusal(
        CheckpointUnwritten,
        directory=re.compile(r"/step-2-epoch-1\.tmp$"),
        reason=re.compile(rf"^rank 0: \[Errno {errno.ENOSPC}\]"),
    ):
        learner.save(2)
        learner.step(2)
        learner.checkpoints.collect(wait=True)
    learner.checkpoints.leave()
    assert [one.step for one in disk.listed(learner.root)] == [1]
    disk.verify(disk.listed(learner.root)[0].path)
    assert [step for step, _ in learner.reports.checkpoints] == [1]


def test_no_copy_is_kept_and_without_background_the_step_waits(make: Any) -> None:
    learner = make(background=False)
    learner.save(1)
    assert [step for step, _ in learner.reports.checkpoints] == [1]
    assert learner.checkpoints.copied_bytes == 0
    copying = make()
    copying.step(1)
    copying.save(2)
    copying.checkpoints.collect(wait=True)
    parameters = sum(parameter.nbytes for parameter in copying.policy.module.parameters())
    assert copying.checkpoints.copied_bytes >= 3 * parameters, "weights and Adam's two moments"
    assert copying.checkpoints.held_bytes == 0, "the copies are given back when they are written"


def test_a_checkpoint_without_weights_is_refused(make: Any, tmp_path: Path) -> None:
    staged = disk.staging(tmp_path, step=2, epoch=1)
    (staged / "no_weights").write_bytes(b"debug.rollout_only")
    path = disk.commit(staged, b"")
    start = FeedStart(epoch=2, checkpoint=str(path), step=2, steps=4, head_version=0, head_step=0, recorded_until=2)
    with refusal(NoCheckpoint, got="one of a run with debug.rollout_only"):
        make().checkpoints.load(start)
