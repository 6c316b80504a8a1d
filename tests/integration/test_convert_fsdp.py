"""``tidemill convert`` for checkpoints of FSDP2: the model that the ranks had, bit for bit, and back."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.examples import THOROUGH
from tests.integration.fsdp_state_ranks import BASE, LORA, OF_EXPERTS, SAVED, STEPS, Kind, opened, trained, write_model
from tests.integration.test_convert import assert_equal, committed, weights
from tests.learner_steps import run_ranks
from tests.megatron_world import joined, one_rank
from tests.refusals import refusal
from tidemill.launch.cli.main import main
from tidemill.learner.errors import ConfigRefused

KINDS = {
    "qwen3": Kind(learner=BASE),
    "qwen3, bfloat16, adapters": Kind(learner=replace(BASE, lora=LORA), dtype="bfloat16"),
    "qwen3_moe": Kind(learner=replace(BASE, backend="fsdp"), family="qwen3_moe"),
    "olmo3, bfloat16": Kind(learner=BASE, family="olmo3", dtype="bfloat16"),
    **(
        {
            "lfm2": Kind(learner=BASE, family="lfm2"),
            "gpt_oss, adapters of experts": Kind(learner=replace(BASE, lora=OF_EXPERTS), family="gpt_oss"),
        }
        if THOROUGH
        else {}
    ),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the variables that the command sets for its process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    yield


def two_ranks(models: dict[str, Path], root: Path, out: Path) -> None:
    """Train each kind for two steps on this rank, one of two, and save its checkpoint and the model that it had."""
    with joined() as here:
        for name, kind in KINDS.items():
            learner = opened(models[kind.family], here, kind)
            trained(learner, kind, STEPS[:2])
            if here.rank == 0:
                (root / name / "saved").mkdir(parents=True)
            torch.distributed.barrier()
            learner.save(root / name / "saved", SAVED)
            exported = dict(learner.policy.export())
            adapter = {} if learner.policy.adapters is None else dict(learner.policy.export_adapters())
            if here.rank == 0:
                save_file(exported, root / name / "wanted.safetensors")
                (root / name / "adapter").mkdir()
                save_file(adapter, root / name / "adapter/wanted.safetensors")
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps({}))


class World:
    """Checkpoints of two ranks, and models."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = {
            family: write_model(root / family, family) for family in {kind.family for kind in KINDS.values()}
        }
        (root / "kinds").mkdir()
        (root / "out").mkdir()
        run_ranks(two_ranks, (self.models, root / "kinds"), world=2, out=root / "out", timeout_s=300)
        self.checkpoints = {name: committed(root / "kinds" / name, "saved") for name in KINDS}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_fsdp_is_the_model_that_its_ranks_had(
    world: World, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And back: the checkpoint of the converted model converts to the same bits, and begins a policy with them."""
    kind, checkpoint, there = KINDS[name], world.checkpoints[name], tmp_path / "there"
    model = ("--model", str(world.models[kind.family]))
    assert main(["convert", str(checkpoint), str(there), *model]) == 0
    assert f"there: the model of step {SAVED}" in capsys.readouterr().out
    wanted = weights(checkpoint.parent)
    assert_equal(weights(there), wanted)
    assert {tensor.dtype for tensor in wanted.values()} == {getattr(torch, kind.dtype)}
    assert (there / "config.json").is_file()
    assert main(["debug", "weights", str(checkpoint), str(there), *model]) == 0
    assert_equal(weights(there / "adapter"), weights(checkpoint.parent / "adapter"))
    assert (there / "adapter/adapter_config.json").is_file() is bool(kind.learner.lora.rank)
    assert main(["convert", str(there), str(tmp_path / "back"), "--backend", "fsdp"]) == 0
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "again"), *model]) == 0
    assert_equal(weights(tmp_path / "again"), wanted)
    with one_rank() as here:
        learner = opened(world.models[kind.family], here, replace(kind, learner=BASE))
        assert learner.backend.load_weights(tmp_path / "back", policy=learner.policy, optimizer=learner.optimizer) == 0
        assert_equal({part: tensor.clone() for part, tensor in learner.policy.export()}, wanted)
        with refusal(ConfigRefused, place=str(tmp_path / "back"), got="weights alone (tidemill convert)"):
            learner.load(tmp_path / "back")


def test_a_directory_becomes_a_checkpoint_of_the_backend_that_auto_takes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for family, backend in (("olmo3", "fsdp"), ("qwen3", "megatron")):
        assert main(["convert", str(world.models[family]), str(tmp_path / family)]) == 0
        assert f"with learner.backend: {backend}" in capsys.readouterr().out


def test_a_checkpoint_of_fsdp_that_cannot_be_converted_is_refused_in_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = str(world.checkpoints["qwen3"]), str(tmp_path / "out")

    def refused(*words: str, want: str) -> None:
        capsys.readouterr()  # transformers shows progress when it saves a model
        assert main(["convert", *words]) == 2
        error = capsys.readouterr().err
        assert want in error and error.count("\n") == 1, error

    model = ("--model", str(world.models["qwen3"]))
    refused(
        checkpoint, out, *model, "--bridge", "my_bridge:Pond", want="--bridge: want none with learner.backend: fsdp"
    )
    refused(checkpoint, out, *model, "--backend", "megatron", want="--backend: want none without a model directory")
    wide = write_model(tmp_path / "wide", "qwen3", intermediate_size=96)
    refused(checkpoint, out, "--model", str(wide), want="--model: want a checkpoint of the model in model.path: model.")
    trained_base = ("--model", str(world.models["olmo3"]))
    refused(str(world.checkpoints["qwen3, bfloat16, adapters"]), out, *trained_base, want="model.path: want")
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        refused(str(tmp_path), out, want=f"{tmp_path}/config.json: want a JSON map, got ")
    assert not Path(out).exists()
