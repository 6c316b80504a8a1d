"""The table of memory agrees with a rank: the bytes of its tensors, and of those that the layers keep for the backward
pass.
"""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.examples import rarely, some
from tests.learner_steps import run_ranks
from tests.megatron_world import one_rank
from tests.rank_sizes import rank_parameters
from tests.tiny_models import write_tiny_model
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.devices.memory_table import memory_rows, optimizer_bytes, parameters
from tidemill.launch.devices.rank_memory import Activations, buffer_elements
from tidemill.launch.settings.config_loader import load
from tidemill.learner.backends.megatron import groups
from tidemill.learner.backends.megatron.cpu_shim import megatron_device, plain_torch
from tidemill.learner.backends.megatron.groups import Replicas
from tidemill.learner.backends.megatron.layers.attention import PackedParams
from tidemill.learner.backends.megatron.layers.kernels import Kernels, Wanted
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.offload import OffloadedAdam
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.backends.megatron.optimizer_pieces import whole_pieces
from tidemill.learner.backends.megatron.state import stage
from tidemill.learner.checkpoints.staged_files import HostCopies
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import RECOMPUTE, OptimizerConfig
from tidemill.learner.settings.lora import TARGETS, LoraConfig, Tuning
from tidemill.learner.trainer.backups import OtherModels, WeightBackup, initial_weights

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOKENS = 96
DTYPES = ("float32", "bfloat16")
ADAPTED = (TARGETS, ("q_proj", "o_proj"), ("k_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def world() -> Iterator[Parallel]:
    with one_rank() as joined:
        yield joined


def kept_bytes(policy: MegatronPolicy) -> int:
    """Return the bytes that the forward pass of two packed sequences keeps for its backward pass, weights not counted.

    The result is among them: the loss keeps it.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # which keeps it alive: no address is used twice
        return tensor

    row = packed_row(np.array([0, TOKENS // 2, TOKENS], np.int32), torch.arange(TOKENS) % (TOKENS // 2))
    tokens_T, params = torch.arange(TOKENS) % 200 + 3, PackedParams.of(row)
    more = {"fp32_output": False} if policy.config.bf16 else {}
    with megatron_device(), saved_tensors_hooks(keep, lambda tensor: tensor), plain_torch():
        keep(policy.ddp(tokens_T[None], row.position_ids_T[None], None, packed_seq_params=params, **more))
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


@pytest.mark.parametrize(
    ("family", "dtype", "tied"), some(product(["qwen3", "qwen2", "llama", "glm4"], DTYPES, [True, False]), 5)
)
def test_the_table_agrees_with_a_rank(world: Parallel, tmp_path: Path, family: str, dtype: str, tied: bool) -> None:
    model_dir = write_tiny_model(tmp_path, family, tied=tied, num_hidden_layers=3, **SIZES)
    shape = ModelShape.read(model_dir)
    policy = build_policy(model_dir, dtype=dtype, parallel=world)
    assert (
        sum(parameter.numel() for parameter in policy.module.parameters())
        == parameters(shape)
        == rank_parameters(shape, 1)
    )
    assert sum(buffer.grad_data.nbytes for buffer in policy.ddp.buffers) == 4 * parameters(shape)
    assert kept_bytes(policy) == TOKENS * Activations(dtype=dtype).kept_per_token(shape)

    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=2)
    optimizer.zero_grad()
    with megatron_device():
        optimizer.step(1, loss=0.0)
    inner = optimizer.inner.optimizer
    state = [
        tensor
        for values in inner.state.values()
        for tensor in values.values()
        if torch.is_tensor(tensor) and tensor.dim()
    ]
    mains = [] if dtype == "float32" else [parameter for group in inner.param_groups for parameter in group["params"]]
    assert sum(tensor.nbytes for tensor in (*state, *mains)) == optimizer_bytes(parameters(shape), dtype)

    proximal, copies = WeightBackup(policy), HostCopies()
    (tmp_path / "step-1").mkdir()
    stage(
        tmp_path / "step-1",
        step=1,
        policy=policy,
        optimizer=optimizer,
        others=OtherModels(proximal=proximal),
        copies=copies,
    )
    config = load([], (f"learner.dtype={dtype}", "weights.push_every=2")).config
    (row,) = (row for row in memory_rows(shape, config, cuda=False) if "for checkpoints" in row.part)
    assert copies.bytes == row.bytes


@pytest.mark.parametrize(("name", "dtype"), [("muon", "bfloat16"), ("sgd", "float32"), *rarely([("muon", "float32")])])
def test_the_table_agrees_with_the_state_of_another_optimizer(
    world: Parallel, tmp_path: Path, name: str, dtype: str
) -> None:
    """Also of the embedding and the norms, which Muon updates as Adam does."""
    model_dir = write_tiny_model(tmp_path, "qwen3", num_hidden_layers=2, tied=False, **SIZES)
    config = load([], (f"learner.optimizer.name={name}", f"learner.dtype={dtype}")).config
    table = memory_rows(ModelShape.read(model_dir), config, cuda=False)
    words = {"muon": "Muon: momentum of matrices, Adam's two moments of others", "sgd": "SGD: momentum"}[name]
    (row,) = (row for row in table if row.part.startswith(words))
    policy = build_policy(model_dir, dtype=dtype, parallel=world)
    optimizer = MegatronOptimizer(policy, config.learner.optimizer, steps=2)
    optimizer.zero_grad()
    with megatron_device():
        optimizer.step(1, loss=0.0)
    inner = optimizer.inner.optimizer
    tensors = [
        *(tensor for state in inner.state.values() for tensor in state.values()),
        *(weight for group in inner.param_groups for weight in group["params"] if dtype != "float32"),
    ]
    assert sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor) and tensor.dim()) == row.bytes


@pytest.mark.parametrize(
    ("family", "dtype", "recompute"), some(product(["qwen3", "llama", "glm4"], DTYPES, ["selective", "full"]), 5)
)
def test_the_table_agrees_with_a_rank_that_recomputes(
    world: Parallel, tmp_path: Path, family: str, dtype: str, recompute: str
) -> None:
    model_dir = write_tiny_model(tmp_path, family, tied=True, num_hidden_layers=3, **SIZES)
    shape = ModelShape.read(model_dir)
    policy = build_policy(model_dir, dtype=dtype, parallel=world, kernels=Wanted(recompute=recompute))
    activations = Activations(dtype=dtype, recompute=recompute)
    assert kept_bytes(policy) == TOKENS * activations.kept_per_token(shape)
    assert 0 < activations.again_per_token(shape) < Activations(dtype=dtype).kept_per_token(shape) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_agrees_with_a_fused_activation(world: Parallel, tmp_path: Path, dtype: str) -> None:
    """Megatron's, without the compiler that makes one kernel of it: the tensors that it keeps are the same."""
    model_dir = write_tiny_model(tmp_path, "qwen3", num_hidden_layers=3, tied=True, **SIZES)
    shape = ModelShape.read(model_dir)
    policy = build_policy(model_dir, dtype=dtype, parallel=world)
    assert Kernels(fused_activation=True).arguments() == {"bias_activation_fusion": True}
    policy.config.bias_activation_fusion = True
    with torch.compiler.set_stance("force_eager"):
        assert kept_bytes(policy) == TOKENS * Activations(dtype=dtype).kept_per_token(shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_agrees_with_a_rank_that_trains_adapters(world: Parallel, tmp_path: Path, dtype: str) -> None:
    """Weights, gradients and the copies of a checkpoint to the byte."""
    model_dir = write_tiny_model(tmp_path, "qwen3", tied=True, num_hidden_layers=3, **SIZES)
    shape = ModelShape.read(model_dir)
    given = (f"learner.dtype={dtype}", "learner.lora.rank=4", "learner.algorithm.kl.coef=0.1", "weights.push_every=2")
    config = load([], given).config
    rows = {
        row.part.split(",")[0]: row.bytes for row in memory_rows(shape, config, cuda=False) if row.process == "rank"
    }
    policy = build_policy(model_dir, dtype=dtype, parallel=world, tuning=Tuning.of(config.learner))
    assert sum(parameter.nbytes for parameter in policy.module.parameters()) == rows["weights"]
    assert sum(buffer.grad_data.nbytes for buffer in policy.ddp.buffers) == rows["gradients"]
    proximal, reference, copies = WeightBackup(policy), initial_weights(policy), HostCopies()
    assert sum(copy.nbytes for copy in reference.tensors.values()) == rows["reference model"]
    assert sum(copy.nbytes for copy in proximal.tensors.values()) == rows["weights of the last version"]
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=2)
    optimizer.zero_grad()
    with megatron_device():
        optimizer.step(1, loss=0.0)
    (tmp_path / "step-1").mkdir()
    stage(
        tmp_path / "step-1",
        step=1,
        policy=policy,
        optimizer=optimizer,
        others=OtherModels(proximal=proximal),
        copies=copies,
    )
    assert copies.bytes == rows["copy of weights and the optimizer's state"]


@pytest.mark.parametrize(("family", "dtype", "targets"), some(product(["qwen3", "llama"], DTYPES, ADAPTED), 5))
def test_the_table_agrees_with_the_activations_of_a_rank_that_trains_adapters(
    world: Parallel, tmp_path: Path, family: str, dtype: str, targets: tuple[str, ...]
) -> None:
    model_dir = write_tiny_model(tmp_path, family, tied=True, num_hidden_layers=3, **SIZES)
    lora = LoraConfig(rank=4, targets=targets)
    policy = build_policy(model_dir, dtype=dtype, parallel=world, tuning=Tuning(lora=lora))
    table = Activations(dtype=dtype, lora=lora).kept_per_token(ModelShape.read(model_dir))
    assert kept_bytes(policy) == pytest.approx(TOKENS * table, rel=0.05)


def measured(model_dir: Path, dtype: str, out: Path) -> None:
    """Write the sizes of this rank, one of two that share the model, to ``out/rank-<r>.json``."""
    joined = groups.join(tensor_parallel_size=2, device=torch.device("cpu"), seed=0)
    policy = build_policy(model_dir, dtype=dtype, parallel=joined)
    found = {
        "parameters": sum(parameter.numel() for parameter in policy.module.parameters()),
        "none": kept_bytes(policy),
    }
    for recompute in ("selective", "full"):
        found[recompute] = kept_bytes(
            build_policy(model_dir, dtype=dtype, parallel=joined, kernels=Wanted(recompute=recompute))
        )
    (out / f"rank-{joined.rank}.json").write_text(json.dumps(found))
    groups.leave()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "bfloat16"), *rarely([("qwen3", "float32"), ("qwen2", "float32"), ("qwen2", "bfloat16")])],
)
def test_the_table_agrees_with_two_ranks_that_share_the_model(tmp_path: Path, family: str, dtype: str) -> None:
    model_dir = write_tiny_model(tmp_path / "model", family, tied=False, vocab_size=304, num_hidden_layers=3, **SIZES)
    shape = ModelShape.read(model_dir)
    for found in run_ranks(measured, (model_dir, dtype), world=2, out=tmp_path):
        assert found["parameters"] == rank_parameters(shape, 2)
        for recompute in RECOMPUTE:
            activations = Activations(dtype=dtype, tensor_parallel=2, recompute=recompute)
            assert found[recompute] == TOKENS * activations.kept_per_token(shape), recompute


def measured_experts(model_dir: Path, out: Path) -> None:
    """Write the bytes of this rank, one of two over which experts are spread, to ``out/rank-<r>.json``."""
    joined = groups.join(tensor_parallel_size=1, expert_parallel_size=2, device=torch.device("cpu"), seed=0)
    policy = build_policy(model_dir, dtype="float32", parallel=joined, replicas=Replicas(distributed_optimizer=True))
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=2)
    buffers = [*policy.ddp.buffers, *policy.ddp.expert_parallel_buffers]
    optimizer.zero_grad()
    with megatron_device():
        optimizer.step(1, loss=0.0)
    state = [
        tensor
        for one in optimizer.inner.chained_optimizers
        for values in one.optimizer.state.values()
        for tensor in values.values()
        if torch.is_tensor(tensor) and tensor.dim()
    ]
    weights = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in policy.module.parameters()
    }
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    found = {"weights": sum(weights.values()), "gradients": gradients, "Adam": sum(tensor.nbytes for tensor in state)}
    (out / f"rank-{joined.rank}.json").write_text(json.dumps(found))
    groups.leave()


def test_the_table_agrees_with_two_ranks_over_which_experts_are_spread(tmp_path: Path) -> None:
    """Weights and gradients to the byte; each rank has all of the state of its own experts, and a share of the rest."""
    model_dir = write_tiny_model(tmp_path / "model", "qwen3_moe", tied=False, num_hidden_layers=3, **SIZES)
    given = (
        "learner.dtype=float32",
        "learner.data_parallel=2",
        "learner.expert_parallel=2",
        "learner.distributed_optimizer=true",
    )
    table = memory_rows(ModelShape.read(model_dir), load([], given).config, cuda=False)
    rows = {re.split("[,:]", row.part)[0]: row.bytes for row in table if row.process == "rank"}
    ranks = run_ranks(measured_experts, (model_dir,), world=2, out=tmp_path)
    for found in ranks:
        assert (found["weights"], found["gradients"]) == (rows["weights"], rows["gradients"])
    assert 0.99 * rows["Adam"] < sum(found["Adam"] for found in ranks) / 2 <= rows["Adam"]


def measured_shares(model_dir: Path, dtype: str, offload: bool, out: Path) -> None:
    """Write the sizes of this rank, one of two replicas with a share of the optimizer's state each, to
    ``out/rank-<r>.json``.
    """
    joined = groups.join(tensor_parallel_size=1, device=torch.device("cpu"), seed=0)
    policy = build_policy(model_dir, dtype=dtype, parallel=joined, replicas=Replicas(distributed_optimizer=True))
    optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-3), steps=2, offload=offload)
    optimizer.zero_grad()
    with megatron_device():
        optimizer.step(1, loss=0.0)
    pieces = optimizer.sharded(policy.module.sharded_state_dict(), is_loading=True)["optimizer_pieces"]
    sizes = {piece.data.untyped_storage().data_ptr(): piece.data.untyped_storage().nbytes() for piece in pieces}
    weights = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in policy.module.parameters()
    }
    found = {
        "weights": sum(weights.values()),
        "gradients": sum(buffer.grad_data.untyped_storage().nbytes() for buffer in policy.ddp.buffers),
        "state": sum(sizes.values()),
    }
    (out / f"rank-{joined.rank}.json").write_text(json.dumps(found))
    groups.leave()


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "bfloat16"), *rarely([("qwen3", "float32")])])
def test_the_table_agrees_with_two_replicas_that_share_the_optimizer(
    tmp_path: Path, family: str, dtype: str, offload: bool
) -> None:
    """Weights and gradients to the byte, padding included; the shares together have the state of every weight once."""
    model_dir = write_tiny_model(tmp_path / "model", family, tied=False, num_hidden_layers=3, **SIZES)
    shape = ModelShape.read(model_dir)
    padded = buffer_elements(shape.tensors(), 1, 2)
    assert padded > parameters(shape), "the sizes need no padding: the test shows nothing"
    ranks = run_ranks(measured_shares, (model_dir, dtype, offload), world=2, out=tmp_path)
    for found in ranks:
        assert found["weights"] == padded * (4 if dtype == "float32" else 2)
        assert found["gradients"] == padded * 4
        assert 0 < found["state"] <= optimizer_bytes(padded // 2, dtype)
    assert sum(found["state"] for found in ranks) == optimizer_bytes(parameters(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_agrees_with_an_offloaded_optimizer(world: Parallel, tmp_path: Path, dtype: str) -> None:
    """The host's part to the byte; and on the device, besides it, a block of it at a time."""
    shape = ModelShape.read(model_dir := write_tiny_model(tmp_path, "qwen3", tied=True, num_hidden_layers=3, **SIZES))
    policy = build_policy(model_dir, dtype=dtype, parallel=world)
    block = 1 << 12
    adam = OffloadedAdam(policy.ddps, whole_pieces(policy.ddp), distributed=False, clip_grad=1.0, block=block)
    held = [flat for each in adam.blocks for flat in each.host.values()]
    assert sum(flat.nbytes for flat in held) == optimizer_bytes(parameters(shape), dtype)
    assert max(sum(flat.nbytes for flat in each.host.values()) for each in adam.blocks) == optimizer_bytes(block, dtype)
