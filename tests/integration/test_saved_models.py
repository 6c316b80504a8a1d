"""Models saved beside training: the weights of their step, whatever happens afterwards; a disk that refuses one ends
nothing.
"""

import logging
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.feeder_kit import KEYS
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.checkpoints import disk
from tidemill.learner.feed.feeder_settings import RankPlaces
from tidemill.learner.layout import parallel
from tidemill.learner.ranks.saved_models import SavedModels, prune
from tidemill.learner.ranks.weight_parts import WeightParts
from tidemill.learner.settings.lora import LoraConfig, Tuning
from tidemill.weightstore.config import WeightsConfig


class Held(SavedModels):
    """Writes a model only when ``go`` is set."""

    go: threading.Event

    def _write(self, *arguments: object) -> None:
        assert self.go.wait(LIMIT_S)
        super()._write(*arguments)  # type: ignore[arg-type]


def held(policy: MegatronPolicy, directory: Path, *, keep: int = 0) -> Held:
    places = RankPlaces(
        run="r",
        bus_url="",
        feeder_url="",
        feeder_keys=KEYS,
        model_dir=directory / "model",
        checkpoints=directory / "checkpoints",
        snapshots=directory / "snapshots",
        final_dir=directory / "final",
    )
    parts = WeightParts(policy, places, WeightsConfig())
    with parts.open():  # nothing is served where one rank has all weights
        models = Held(policy, parts, places, every=2, keep=keep)
    models.go = threading.Event()
    return models


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)], ids=["whole", "adapters"])
def test_the_weights_are_those_of_the_step_although_training_goes_on(
    here: parallel.Parallel, tmp_path: Path, lora: LoraConfig
) -> None:
    policy = build_policy(
        write_tiny_model(tmp_path / "model"), dtype="float32", parallel=here, tuning=Tuning(lora=lora)
    )
    wanted = {name: tensor.clone() for name, tensor in policy.export()}
    models = held(policy, tmp_path)
    models.after(1, checkpointed=False)  # not due
    models.after(2, checkpointed=False)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.fill_(1.0)
    models.go.set()
    models.after(3, checkpointed=True)  # waits for the one before
    models.wait()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["step-2", "step-3"]
    saved = load_file(tmp_path / "models" / "step-2" / "model.safetensors")
    assert saved.keys() == wanted.keys() and all(torch.equal(saved[name], wanted[name]) for name in saved)
    if lora.rank:
        matrices = load_file(tmp_path / "models" / "step-2" / "adapter" / "adapter_model.safetensors")
        assert all(torch.count_nonzero(tensor) == 0 for name, tensor in matrices.items() if "lora_B" in name)


def test_a_disk_that_refuses_a_model_is_logged_and_ends_nothing(
    here: parallel.Parallel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build_policy(write_tiny_model(tmp_path / "model"), dtype="float32", parallel=here)
    (tmp_path / "models").write_text("a file where the directory should be")
    models = held(policy, tmp_path)
    models.go.set()
    with caplog.at_level(logging.ERROR):
        models.after(2, checkpointed=False)
        models.wait()
    assert "the model of step 2 is not saved" in caplog.text


def test_the_newest_are_kept_and_those_with_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (4, 8, 10):
        disk.commit(disk.staging(checkpoints, step=step, epoch=1), b"")
    disk.staging(checkpoints, step=6, epoch=1)  # its ranks still write
    root = tmp_path / "models"
    for name in ("step-2", "step-4", "step-6", "step-8", "step-10", "step-12.part"):
        (root / name).mkdir(parents=True)
    prune(root, checkpoints, keep=0)
    assert len(list(root.iterdir())) == 6
    prune(root, checkpoints, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["step-10", "step-12.part", "step-4", "step-6", "step-8"]
