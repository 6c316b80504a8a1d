"""`tidemill up` from a checkpoint of Megatron's own training: first version, reference, final model and a resumed run
have its weights.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.chaos.storm import standing_bus
from tests.integration import plain_megatron
from tests.megatron_world import one_rank
from tests.whole.prepared import made
from tests.whole.running import SMOKE, up
from tidemill.bus.streams.bus import connect
from tidemill.launch.cli.main import main
from tidemill.learner.checkpoints.torch_dist import TRACKER
from tidemill.weightstore.store.registry import VersionRegistry

STANDS_STILL = "learner.optimizer.lr=1e-30"
"""Learning rate with which a step changes no bit of the weights."""


@pytest.mark.slow
def test_a_run_begins_with_a_checkpoint_of_megatron_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = made(SMOKE) / "prepared" / "model"
    other = shutil.copytree(prepared, tmp_path / "other")
    generator = torch.Generator().manual_seed(5)
    wanted = {
        name: one + 0.1 * torch.randn(one.shape, generator=generator)
        for name, one in load_file(prepared / "model.safetensors").items()
    }
    save_file(wanted, other / "model.safetensors", metadata={"format": "pt"})
    checkpoint = tmp_path / "megatron"
    with one_rank() as here:
        plain_megatron.save(
            checkpoint / "iter_0000010", wanted, json.loads((other / "config.json").read_text()), here, dtype="float32"
        )
    (checkpoint / TRACKER).write_text("10")
    settings = (
        f"model.megatron_checkpoint={checkpoint}",
        STANDS_STILL,
        "learner.algorithm.kl.coef=0.1",
        "learner.checkpoint_every=1",
    )

    async def versions() -> dict[int, int]:
        async with standing_bus(tmp_path / "run") as url, connect(url, "smoke", name="test") as bus:
            return await VersionRegistry(bus).steps()

    with up(tmp_path, *settings, "learner.steps=2") as run:
        assert run.wait() == 0, run.log[-4000:]
    assert asyncio.run(versions()) == {1: 0, 2: 1, 3: 2}, "version 0, the model directory's weights, is not published"
    assert f"megatron_checkpoint: {checkpoint / 'iter_0000010'}" in (run.directory / "config.yaml").read_text()
    _move_on(checkpoint)
    arguments = ["up", str(SMOKE), "--resume", "--set", f"directory={run.directory}", "--set", "learner.steps=4"]
    assert main([*arguments, *(word for setting in settings for word in ("--set", setting))]) == 78
    error = capsys.readouterr().err
    assert "weights of iter_0000010 (files " in error and "got " in error and "weights of iter_0000020 (files " in error
    settings = (f"model.megatron_checkpoint={checkpoint / 'iter_0000010'}", *settings[1:])
    with up(tmp_path, *settings, "learner.steps=4", flags=("--resume",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    final = load_file(run.directory / "final" / "model.safetensors")
    assert final.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(final[name], wanted[name])] == []
    assert [line["train/kl_reference"] for line in run.metrics] == [0.0] * 4, (
        "the reference has the same weights, after the resume, too"
    )
    assert max(line["offpolicy/k3"] for line in run.metrics) < 1e-6, "the engine has sampled with them"


def _move_on(checkpoint: Path) -> None:
    """Let the job that has written the checkpoint finish another iteration."""
    shutil.copytree(checkpoint / "iter_0000010", checkpoint / "iter_0000020")
    (checkpoint / TRACKER).write_text("20")
