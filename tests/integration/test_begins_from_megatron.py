"""Runs that begin with a checkpoint of Megatron's own training, written by plain megatron-core: in ranks, and by
``tidemill convert``.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import plain_megatron
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.tiny_models import write_tiny_model
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.weights import check_megatron, differing
from tidemill.launch.cli.main import main
from tidemill.launch.settings.config_loader import load
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.checkpoints import torch_dist
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.model_files import tensors_in
from tidemill.learner.trainer.backups import reference_weights

VOCAB = 300
_LAYER = re.compile(r"layers\.\d+\.")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the variables that ``tidemill convert`` sets for its process."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    yield


@dataclass(frozen=True, kw_only=True)
class Written:
    """Checkpoints of two models, and directories of the same models with other weights."""

    checkpoints: Path
    """Directories by the layout that has written them."""
    dense: Path
    experts: Path
    base: Path
    base_experts: Path
    digests: Mapping[str, str]
    """Digests of policies that began with them, by both layouts."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("megatron")
    models = [
        write_tiny_model(root / f"{family}-{seed}", family, seed=seed, num_hidden_layers=4, vocab_size=VOCAB)
        for seed in (1, 2)
        for family in ("qwen3", "qwen3_moe")
    ]
    (root / "out").mkdir()
    one, other = run_ranks(plain_megatron.main, tuple(models), world=2, out=root / "out")
    print("seconds of processor time:", one.pop("cpu_s"), other.pop("cpu_s"))
    assert one == other
    return Written(
        checkpoints=root / "out",
        dense=models[0],
        experts=models[1],
        base=models[2],
        base_experts=models[3],
        digests=one,
    )


def weights(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}


def digest(found: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(name.encode())
        total.update(hashlib.sha256(found[name].contiguous().view(torch.uint8).numpy().data).digest())
    return total.hexdigest()


def test_ranks_of_any_layout_begin_with_the_weights(written: Written) -> None:
    """Written with tensor, pipeline, virtual-stage and expert parallelism, loaded with others, bit for bit."""
    for case, found in written.digests.items():
        model = written.experts if case.startswith("ep2") else written.dense
        assert found == digest(weights(model, torch.bfloat16 if case.endswith("bfloat16") else torch.float32)), case
    assert len(written.digests) == 5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tp2", torch.float32),
        pytest.param("pp2", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("vpp2/iter_0000010", torch.float32, marks=pytest.mark.slow),
        ("ep2/iter_0000010", torch.bfloat16),
        pytest.param("ep2 apart/iter_0000010", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_they_are_converted(
    written: Written, tmp_path: Path, name: str, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model, base = (written.experts, written.base_experts) if "ep2" in name else (written.dense, written.base)
    assert main(["convert", str(written.checkpoints / name), str(tmp_path / "out"), "--model", str(base)]) == 0
    assert "the model of step 10" in capsys.readouterr().out
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), weights(model, dtype)
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name].dtype != dtype or not torch.equal(found[name], wanted[name])] == []


def test_other_weights_in_between_leave_the_initial_ones(written: Written) -> None:
    """A reference with weights of its own passes through the model. Weights in bfloat16 are the same ones in
    float32.
    """
    with one_rank() as here:
        policy = build_policy(
            written.base, dtype="float32", parallel=here, megatron_checkpoint=written.checkpoints / "pp2"
        )
        wanted = digest({name: tensor.float() for name, tensor in weights(written.dense, torch.bfloat16).items()})
        assert policy.digest() == wanted
        reference = reference_weights(policy, written.base)
        assert policy.digest() == wanted
        assert torch.equal(
            reference.tensors["decoder.final_layernorm.weight"], weights(written.base)["model.norm.weight"]
        )
        tp2 = written.checkpoints / "tp2"
        critic = build_policy(written.base, dtype="float32", parallel=here, value_head=True, megatron_checkpoint=tp2)
        assert torch.equal(
            critic.module.embedding.word_embeddings.weight, weights(written.dense)["model.embed_tokens.weight"]
        )


# ---- refusals


def checked(model: Path, checkpoint: Path) -> Report:
    config = load([], (f"model.path={model}", f"model.megatron_checkpoint={checkpoint}")).config
    report = Report()
    check_megatron(
        report,
        config,
        tensors_in(model),
        num_layers=json.loads((model / "config.json").read_text())["num_hidden_layers"],
    )
    return report


def test_the_check_accepts_them(written: Written) -> None:
    for name in ("tp2", "pp2", "vpp2/iter_0000010", "ep2/iter_0000010", "ep2 apart/iter_0000010"):
        report = checked(written.base_experts if "ep2" in name else written.base, written.checkpoints / name)
        assert not report.errors, (name, report.errors)
        assert "the run begins with the model's" in report.findings[0].text


def refused(model: Path, checkpoint: Path) -> str:
    """Return the error of the check."""
    (error,) = checked(model, checkpoint).errors
    assert error.text.startswith("model.megatron_checkpoint: want "), error.text
    return error.text


def refused_by_ranks(model: Path, checkpoint: Path) -> str:
    """Return the error with which a rank refuses the checkpoint."""
    with one_rank() as here, pytest.raises(ConfigRefused) as error:
        build_policy(model, dtype="float32", parallel=here, megatron_checkpoint=checkpoint)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        (
            "tp2",
            {"family": "llama", "head_dim": 16},
            "want no tensor that the model in model.path does not have, got decoder.layers.0.self",
        ),
        (
            "tp2",
            {"intermediate_size": 96},
            "mlp.linear_fc2.weight of (32, 96), as the model in model.path has it, got one of (32, 64) in ",
        ),
        ("tp2", {"num_hidden_layers": 5}, "want a tensor decoder.layers.4."),
        ("pp2", {"num_hidden_layers": 5}, "want a tensor decoder.layers.4."),
        (
            "pp2",
            {"num_hidden_layers": 3},
            "want no tensor that the model in model.path does not have, got decoder.layers.3.",
        ),
        ("tp2", {"vocab_size": 400}, "of (400, 32), as the model in model.path has it, got one of (384, 32) in "),
        (
            "ep2/iter_0000010",
            {"family": "qwen3_moe", "num_experts": 4},
            ".experts.linear_fc2.weight of (4, 32, 32), as the model in model.path has it, got one of (8, 32, 32) in ",
        ),
    ],
)
def test_checkpoints_of_other_models_are_refused(
    written: Written, tmp_path: Path, name: str, changes: dict[str, object], text: str
) -> None:
    model = write_tiny_model(tmp_path / "model", **({"num_hidden_layers": 4, "vocab_size": VOCAB} | changes))  # type: ignore[arg-type]
    error = refused(model, written.checkpoints / name)
    assert text in error, error
    assert error.endswith("; give a checkpoint of the model in model.path, or that model's directory")
    assert "want a checkpoint of the model in model.path" in refused_by_ranks(model, written.checkpoints / name)


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (shutil.rmtree, "no such directory"),
        (
            lambda root: (root / torch_dist.TRACKER).unlink(),
            "no latest_checkpointed_iteration.txt beside release; name one of these",
        ),
        (lambda root: (root / torch_dist.TRACKER).write_text("20"), "want iter_0000020, the last iteration by "),
        (
            lambda root: (root / torch_dist.TRACKER).write_text("soon"),
            "want the number of an iteration, or release, got ",
        ),
        (lambda root: (root / "release" / "common.pt").unlink(), "no common.pt: it was not written completely"),
        (lambda root: _shorten(root / "release" / ".metadata"), "with a readable index"),
        (lambda root: _shorten(root / "release" / "__1_0.distcp"), "bytes: it was not written completely"),
        (lambda root: (root / "release" / "__0_0.distcp").unlink(), "no such file"),
        (
            lambda root: (root / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "the format zarr",
        ),
    ],
)
def test_what_is_not_complete_is_refused(
    written: Written, tmp_path: Path, damage: Callable[[Path], object], text: str
) -> None:
    root = shutil.copytree(written.checkpoints / "tp2", tmp_path / "damaged")
    damage(root)
    assert text in (error := refused(written.base, root)), error
    if "completely" in text:
        assert text in refused_by_ranks(written.base, root)


class _Makes:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self._directory),))


def test_the_check_runs_no_code_of_an_index(written: Written, tmp_path: Path) -> None:
    root = shutil.copytree(written.checkpoints / "tp2", tmp_path / "damaged")
    (root / "release" / ".metadata").write_bytes(pickle.dumps(_Makes(tmp_path / "made")))
    assert "with a readable index" in checked(written.base, root).errors[0].text
    assert not (tmp_path / "made").exists()


def test_a_missing_tensor_is_refused(written: Written, tmp_path: Path) -> None:
    """One that is two for Megatron: the halves of a gated layer."""
    root, name = (
        shutil.copytree(written.checkpoints / "tp2", tmp_path / "damaged"),
        "decoder.layers.mlp.linear_fc1.weight",
    )
    index = root / "release" / ".metadata"
    found = pickle.loads(index.read_bytes())
    del found.state_dict_metadata[name]
    index.write_bytes(pickle.dumps(found))
    assert "want a tensor decoder.layers.0.mlp.linear_fc1.weight of (128, 32), as the model" in (
        error := refused(written.base, root)
    ), error
    assert f"{name} is missing in " in refused_by_ranks(written.base, root)


def test_each_missing_tensor_is_named(written: Written) -> None:
    for name, model in (("pp2", written.base), ("ep2", written.base_experts)):
        shapes, tensors = torch_dist.read_index(written.checkpoints / name / "iter_0000010").shapes, tensors_in(model)
        own = [
            one
            for one in shapes
            if one.startswith(("decoder", "embedding", "output_layer")) and "_extra_state" not in one
        ]
        assert differing(shapes, tensors) is None
        for missing in own:
            found = differing({one: shape for one, shape in shapes.items() if one != missing}, tensors)
            assert found is not None and found[1] == "none", missing
            assert _LAYER.sub("layers.", missing) in _LAYER.sub("layers.", found[0])
