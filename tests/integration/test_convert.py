"""``tidemill convert``: checkpoints of any layout as model directories and back, bit for bit; damaged and foreign files
in one line.
"""

import asyncio
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor

from tests.engine_serving import serving
from tests.integration.megatron_lora import STEPS, learner, take
from tests.integration.megatron_ranks import VOCAB
from tests.integration.megatron_sharding import WAYS, saved
from tests.integration.megatron_sharding import learner as whole_learner
from tests.integration.megatron_sharding import take as take_step
from tests.integration.test_lora_run import assert_merged
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import until
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.main import main
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.cpu_shim import megatron_device
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.state import StagedSave
from tidemill.learner.backends.megatron.weights import OTHER_NAMES
from tidemill.learner.checkpoints import disk
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.lora import LoraConfig
from tidemill.learner.settings.optimizer import OptimizerConfig


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the variables that the command sets for its process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    yield


def weights(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [
        name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ] == []


def committed(root: Path, name: str) -> Path:
    """Add state and manifest to a saved checkpoint, as a run does."""
    return disk.commit((root / name).rename(root / "step-3-epoch-1.tmp"), b"state", extra={"step": 3})


def two_ranks(model_dir: Path, tensor_parallel: int, way: str, dtype: str, out: Path) -> None:
    """Train a step on this rank, one of two, and save checkpoint and digest."""
    here = groups.join(tensor_parallel_size=tensor_parallel, device=torch.device("cpu"), seed=0)
    trainer, policy, optimizer = whole_learner(model_dir, here, dtype, WAYS[way], OptimizerConfig(lr=1e-2))
    take_step(trainer, 3, here)
    saved(out / "saved", policy, optimizer)
    digest = policy.digest()
    groups.leave()
    (out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(digest))


@pytest.mark.parametrize(
    ("tensor_parallel", "way", "dtype"),
    [(2, "plain", "float32"), (1, "distributed, offload", "bfloat16")],
    ids=["tp2", "dp2-shares-bf16"],
)
def test_a_checkpoint_of_two_ranks_is_the_model_that_they_had(
    model_dir: Path, tmp_path: Path, tensor_parallel: int, way: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And back: the checkpoint of the converted model converts to the same bits, and begins a policy with them."""
    digest = run_ranks(two_ranks, (model_dir, tensor_parallel, way, dtype), world=2, out=tmp_path)[0]
    checkpoint = committed(tmp_path, "saved")
    assert main(["convert", str(checkpoint), str(tmp_path / "there"), "--model", str(model_dir)]) == 0
    assert "there: the model of step 3" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "again"), "--model", str(model_dir)]) == 0
    for sides in ((checkpoint, tmp_path / "there"), (tmp_path / "back", checkpoint)):
        assert main(["debug", "weights", *map(str, sides), "--model", str(model_dir)]) == 0
        assert "tensors, all equal" in capsys.readouterr().out, "debug weights"
    assert main(["debug", "weights", str(checkpoint), str(model_dir), "--model", str(model_dir)]) == 1  # it was trained
    assert "DIFFERS in" in capsys.readouterr().out
    there, again = weights(tmp_path / "there"), weights(tmp_path / "again")
    assert_equal(there, again)
    assert next(iter(there.values())).dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    assert (tmp_path / "there" / "tokenizer.json").is_file()
    with one_rank() as here:
        policy = build_policy(model_dir, dtype=dtype, parallel=here)
        optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-2), steps=2)
        disk.verify(tmp_path / "back")
        assert state.load_weights(tmp_path / "back", policy=policy, optimizer=optimizer) == 0
        assert policy.digest() == digest
        with refusal(ConfigRefused, field=str(tmp_path / "back"), got=re.compile("^weights alone")):
            state.load(tmp_path / "back", policy=policy, optimizer=optimizer)


def test_a_checkpoint_of_adapters_is_a_merged_model_and_the_adapters(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run" / "checkpoints"
    run.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(f"run: r\nmodel: {{path: {model_dir}}}\n")
    with one_rank() as here:
        ours = learner(model_dir, here, lora=LoraConfig(rank=2, alpha=4, targets=("q_proj", "v_proj", "down_proj")))
        take(ours, STEPS[0], here)
        (run / "saved").mkdir()
        write_staged(state.stage(run / "saved", step=3, policy=ours.policy, optimizer=ours.optimizer))
        wanted = {name: tensor.clone() for name, tensor in ours.policy.export()}
    checkpoint = committed(run, "saved")
    assert main(["convert", str(checkpoint), str(tmp_path / "out")]) == 0  # the model is the run's
    assert_equal(weights(tmp_path / "out"), wanted)
    assert_merged(tmp_path / "out", model_dir)
    capsys.readouterr()
    assert main(["debug", "weights", str(checkpoint), str(tmp_path / "out")]) == 0
    adapted = [
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in ("mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj")
    ]
    assert main(["debug", "weights", str(model_dir), str(checkpoint), "--json"]) == 1
    differs = json.loads(capsys.readouterr().out.splitlines()[-1])["differs"]
    assert [line.partition(":")[0] for line in differs] == adapted


async def test_an_engine_is_compared_with_a_checkpoint(
    model_dir: Path, nats_server: EmbeddedServer, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by its address, and those of a run: a stale tensor in the engine is named, with its layer."""
    run, name = tmp_path / "run", "model.layers.1.mlp.up_proj.weight"
    checkpoint = run / "checkpoints" / "step-3-epoch-1"
    checkpoint.parent.mkdir(parents=True)
    assert main(["convert", str(model_dir), str(checkpoint)]) == 0
    (run / "config.yaml").write_text(
        f"run: {run_id}\nmodel: {{path: {model_dir}}}\nbus: {{url: '{nats_server.url}'}}\n"
    )
    async with (
        serving(model_dir, version=3) as served,
        connect(nats_server.url, run_id, BusConfig(), name="test", wait_s=60) as bus,
    ):
        await bus.create_layout()
        row = LiveRow(role="engine", id="e0", host="test", pid=1, phase="serving", version=3, address=served.engine.url)

        async def compared() -> list[tuple[int, str]]:
            """Return exit code and output of both comparisons."""
            found = []
            for words in ([served.engine.url, str(checkpoint)], ["--run-dir", str(run), "--model", str(checkpoint)]):
                capsys.readouterr()
                code = await asyncio.to_thread(main, ["debug", "weights", *words])
                found.append((code, capsys.readouterr().out))
            return found

        async with HeartbeatPublisher(bus, row, every_s=0.2) as heartbeat:
            await until(lambda: heartbeat.written_s >= 0)
            for code, shown in await compared():
                assert code == 0 and "all equal" in shown, shown
            assert f"engine e0, version 3, and {checkpoint}: " in shown
            served.engine.updates.weights.named[name][3, 5] += 0.5
            for code, shown in await compared():
                assert code == 1 and "DIFFERS in 1 of" in shown and f"  {name} (float32): want sum64" in shown, shown


def megatrons(
    model_dir: Path, directory: Path, vocab: int, *, family: str = "qwen3", keys: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Write a checkpoint as Megatron's own training does, with a padded vocabulary. Returns its weights by Hugging Face
    names.

    ``keys``: other ends of keys.
    """
    padded = write_tiny_model(directory.with_name("padded"), family, vocab_size=vocab, seed=4)
    directory.mkdir()
    with one_rank() as here:
        policy = build_policy(padded, dtype="float32", parallel=here)
        strategy = StagedSave()
        model = policy.module.sharded_state_dict()
        there = {tensor.key for tensor in model.values()}
        for tensor in model.values():
            for end, other in (keys or {}).items():
                layer = tensor.key.removesuffix(end)
                if layer != tensor.key and (
                    "mlp" not in end or f"{layer}mlp.router.weight" in there
                ):  # dense layers fuse this norm
                    tensor.key = layer + other
        assert bool(keys) == bool({tensor.key for tensor in model.values()} - there)
        content = {"model": model, "iteration": 70, "checkpoint_version": 3.0, "args": Namespace(lr=1.0)}
        with megatron_device():
            dist_checkpointing.save(content, str(directory), strategy)
        assert strategy.staged is not None
        strategy.staged.finish([strategy.staged.write()])
        return {name: tensor.clone() for name, tensor in policy.export()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_checkpoint_of_megatron_with_transformer_engine(tmp_path: Path, family: str) -> None:
    """Its layers fuse other norms, so the norms of mixtures and of latent attention have other keys."""
    model_dir, checkpoint = write_tiny_model(tmp_path / "model", family), tmp_path / "iter_0000070"
    wanted = megatrons(model_dir, checkpoint, vocab=320, family=family, keys=OTHER_NAMES)
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--model", str(model_dir)]) == 0
    size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    assert_equal(
        weights(tmp_path / "out"),
        {name: tensor[:size] if tensor.shape[0] == 320 else tensor for name, tensor in wanted.items()},
    )


def test_a_checkpoint_of_megatron_itself(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = megatrons(model_dir, tmp_path / "iter_0000070", vocab=320)
    assert main(["convert", str(tmp_path / "iter_0000070"), str(tmp_path / "out"), "--model", str(model_dir)]) == 0
    assert "the model of step 70" in capsys.readouterr().out
    assert_equal(
        weights(tmp_path / "out"),
        {name: tensor[:VOCAB] if tensor.shape[0] == 320 else tensor for name, tensor in wanted.items()},
    )


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_of_a_run_is_converted_from_another_working_directory(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's configuration has the paths as they were given, relative to the directory in which it was started."""
    project, elsewhere = tmp_path / "a project", tmp_path / "elsewhere"
    run = project / "runs/mine"
    elsewhere.mkdir()
    shutil.copytree(model_dir, run / "prepared/model")
    assert main(["convert", str(model_dir), str(run / "checkpoints/step-0-epoch-1")]) == 0
    (run / "config.yaml").write_text("run: mine\ndirectory: runs/mine\nmodel: {path: runs/mine/prepared/model}\n")
    for cwd, name in ((project, "here"), (elsewhere, "there")):
        monkeypatch.chdir(cwd)
        assert main(["convert", str(run / "checkpoints/step-0-epoch-1"), name]) == 0, capsys.readouterr().err
        assert_equal(weights(cwd / name), weights(model_dir))
    (run / "config.yaml").write_text(f"run: mine\ndirectory: {run}\nmodel: {{path: prepared/model}}\n")
    capsys.readouterr()
    assert main(["convert", str(run / "checkpoints/step-0-epoch-1"), "again"]) == 2
    assert "got none at 'prepared/model'" in capsys.readouterr().err


def test_what_cannot_be_converted_is_refused_in_one_line(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str, want: str) -> None:
        capsys.readouterr()  # transformers shows progress when it saves a model
        assert main(["convert", *words]) == 2
        error = capsys.readouterr().err
        assert want in error and error.count("\n") == 1, error

    out, back = str(tmp_path / "out"), tmp_path / "back"
    assert main(["convert", str(model_dir), str(back)]) == 0
    capsys.readouterr()
    refused(
        str(tmp_path / "nothing"),
        out,
        want="nothing: want a checkpoint (metadata.json, .metadata, common.pt) or a model directory",
    )
    refused(str(back), str(model_dir), want="want a directory that does not exist yet, got one that does")
    refused(str(back), out, want="--model: want the model directory of")
    other: Any = write_tiny_model(tmp_path / "other", vocab_size=VOCAB, num_hidden_layers=3)
    refused(
        str(back),
        out,
        "--model",
        str(other),
        want="--model: want a checkpoint of the model in model.path: decoder.layers",
    )
    for name in ("common.pt", ".metadata", "__0_0.distcp"):
        damaged = shutil.copytree(back, tmp_path / f"damaged-{name}")
        cut_short(damaged / name)
        refused(str(damaged), out, "--model", str(model_dir), want=f"damaged-{name}/{name}: want ")
        assert main(["debug", "weights", str(damaged), str(model_dir), "--model", str(model_dir)]) == 2
        assert f"damaged-{name}/{name}: want " in capsys.readouterr().err
        (damaged / "manifest.json").unlink()  # as Megatron's own have none
        refused(str(damaged), out, "--model", str(model_dir), want="want a readable torch_dist checkpoint, got")
    assert not Path(out).exists()
