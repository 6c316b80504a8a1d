"""The table of memory over settings. That it agrees with a real rank is tested in
tests/integration/test_memory_table.py.
"""

import math
import re
from dataclasses import replace

import pytest

from tests.rank_sizes import rank_parameters
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.launch.cli.main import main
from tidemill.launch.devices.demand import ModelSize, want_of
from tidemill.launch.devices.fsdp_memory import fsdp_rows
from tidemill.launch.devices.memory_table import SENDER, MemoryRow, memory_rows, parameters
from tidemill.launch.devices.shapes import Device, Node
from tidemill.launch.settings.config_loader import load

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SHAPE = ModelShape.of(QWEN3_8B, where="Qwen3-8B")
MIXTURE = ModelShape.of(
    QWEN3_8B
    | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4},
    where="Qwen3-30B-A3B",
)
COPIES = (SENDER, "2 copies of its part")


def rows(*settings: str, cuda: bool = True) -> dict[tuple[str, str], MemoryRow]:
    config = load([], ("learner.dtype=bfloat16", "engine.dtype=bfloat16", *settings)).config
    return {
        (row.process, re.split(",| of [0-9]| of the weights", row.part)[0]): row
        for row in memory_rows(SHAPE, config, cuda=cuda)
    }


def test_a_known_model() -> None:
    assert parameters(SHAPE) == 8_190_735_360  # Qwen3's model card: 8.2B
    found = rows()
    assert found["rank", "weights"].bytes == 2 * 8_190_735_360
    assert found["rank", "gradients"].bytes == 4 * 8_190_735_360
    assert found["rank", "Adam: two moments and main weights"].bytes == 12 * 8_190_735_360
    assert not [part for _, part in found if part.startswith("reference")]


def test_tensor_parallelism_divides_all_but_the_norms() -> None:
    norms = SHAPE.num_layers * (2 * SHAPE.hidden + 2 * SHAPE.head_dim) + SHAPE.hidden
    assert rank_parameters(SHAPE, 4) == (parameters(SHAPE) - norms) // 4 + norms
    one, four = rows(), rows("learner.tensor_parallel=4")
    kept = ("rank", "activations kept for the backward pass")
    assert one[kept].bytes / 4 < four[kept].bytes < one[kept].bytes / 2  # the norms' part is whole on every rank


def test_copies_are_on_the_host_of_an_accelerator() -> None:
    settings = ("learner.algorithm.kl.coef=0.1", "weights.push_every=2")
    for cuda in (True, False):
        found = rows(*settings, cuda=cuda)
        assert found["rank", "reference model"].on_host is cuda
        assert (("rank", "own weights") in found) is cuda, "on the CPU parameters only point to the copies"
        assert not found["rank", "weights"].on_host
    assert rows("weights.transport=handles", "weights.staging=cuda")[COPIES].on_host is False


@pytest.mark.parametrize(
    ("settings", "layers", "ends"),
    [
        ((), 36, 2),
        (("learner.tensor_parallel=4",), 9, 2),
        (("learner.tensor_parallel=4", "weights.senders_per_stage=1"), 36, 2),
        (("learner.tensor_parallel=4", "weights.senders_per_stage=3"), 12, 2),
        (("learner.pipeline_parallel=2",), 18, 1),
        (("learner.pipeline_parallel=2", "learner.tensor_parallel=2"), 9, 1),
        (("learner.pipeline_parallel=2", "learner.virtual_pipeline=18", "learner.tensor_parallel=2"), 9, 1),
        (("learner.pipeline_parallel=2", "learner.last_stage_layers=12"), 24, 1),
        (("learner.data_parallel=8",), 36, 2),
    ],
)
def test_the_copies_for_pushes_are_divided_among_the_ranks_that_send(
    settings: tuple[str, ...], layers: int, ends: int
) -> None:
    """The largest part: so many layers, and embedding or output projection, or both."""
    tensors = {name: math.prod(shape) for name, shape in SHAPE.tensors().items()}
    layer, end = sum(size for name, size in tensors.items() if ".layers.0." in name), SHAPE.vocab_size * SHAPE.hidden
    norm = (
        SHAPE.hidden if ends == 2 or "learner.last_stage_layers=12" not in settings else 0
    )  # the larger stage is the first one there
    assert rows(*settings)[COPIES].bytes == 2 * 2 * (layers * layer + ends * end + norm)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ((), 1),
        (("up.engines=8",), 8),
        (("up.engines=8", "weights.group='3'"), 3),
        (("up.engines=8", "weights.group=all"), 1),
        (("weights.backend=nccl", "up.engines=2"), 2),
        (("weights.backend=gloo",), 0),
        (("weights.transport=handles",), 0),
        (("learner.colocated=true",), 0),
    ],
)
def test_processes_that_send_over_nccl_have_a_context_and_two_buckets(settings: tuple[str, ...], groups: int) -> None:
    """A bucket has one tensor at least: the embedding of Qwen3-8B has 1.2 GB, a bucket 0.256."""
    found = [row for (_, part), row in rows(*settings).items() if part.startswith("processes")]
    each = 500_000_000 + 2 * 2 * SHAPE.vocab_size * SHAPE.hidden
    assert [(row.process, row.bytes, row.on_host) for row in found] == [(SENDER, groups * each, False)] * bool(groups)
    assert not any(part.startswith("processes") for _, part in rows(*settings, cuda=False))


def test_the_placement_counts_processes_that_send_over_nccl() -> None:
    config = load([], ("learner.dtype=bfloat16", "weights.group='4'")).config
    node = Node(devices=(Device(index=0, uuid="GPU-0"),))
    small = ModelSize({"model.layers.0.mlp.up_proj.weight": (1000, 1000)})
    want = want_of(config, node, learner=True, engines=9, size=small)
    assert (want.memory_group, want.engines_together) == (500_000_000 + 2 * 256_000_000, 4)


def test_a_critic_is_one_more_model_with_a_value_head() -> None:
    ppo = "learner.algorithm.advantage=gae"
    one, both = rows("learner.tensor_parallel=2"), rows("learner.tensor_parallel=2", ppo)
    lm_head, head = SHAPE.vocab_size * SHAPE.hidden, SHAPE.hidden
    assert both["rank", "critic: weights"].bytes == one["rank", "weights"].bytes - 2 * (lm_head // 2 - head)
    assert both["rank", "critic: Adam: two moments and main weights"].bytes == 6 * both["rank", "critic: weights"].bytes
    copy = ("rank", "copy of weights and the optimizer's state")
    assert both[copy].bytes == one[copy].bytes + 7 * both["rank", "critic: weights"].bytes
    kept = ("rank", "activations kept for the backward pass")
    assert both[kept] == one[kept], "policy and critic take turns"
    average = rows("learner.algorithm.kl.coef=0.1", "learner.algorithm.kl.reference_ema=0.9")
    assert (
        average["rank", "reference model"].bytes
        == 2 * average["rank", "weights"].bytes
        == average[copy].bytes - rows()[copy].bytes
    )


def test_replicas_divide_the_optimizer_and_nothing_else() -> None:
    one, eight = rows("learner.data_parallel=8"), rows("learner.data_parallel=8", "learner.distributed_optimizer=true")
    assert [part for _, part in one if part.startswith("Adam")] == ["Adam: two moments and main weights"]
    state = ("rank", "Adam: two moments and main weights")
    assert one[state].bytes == 12 * parameters(SHAPE) == 8 * eight[state].bytes, "Qwen3-8B needs no padding"
    assert "1/8" in eight[state].part
    for part in ("weights", "gradients"):
        assert eight["rank", part].bytes == one["rank", part].bytes
    assert rows("learner.distributed_optimizer=true") == rows(), "one replica has all"


def test_an_overlapped_reduction_needs_a_gradient_in_the_output_weights_place() -> None:
    """Its weight is not the embedding's on its stage, and its gradient is added where it is summed
    (``logprobs.py``).
    """
    part, two = ("rank", "gradient of the output weight"), "learner.data_parallel=2"
    assert rows(two)[part].bytes == 151_936 * 4096 * 2
    assert rows("learner.context_parallel=2", "learner.tensor_parallel=2")[part].bytes == 151_936 // 2 * 4096 * 2
    assert part in rows(two, "learner.overlap_grad_reduce=always", cuda=False)
    for settings in (
        (),
        (two, "learner.overlap_grad_reduce=never"),
        (two, "learner.pipeline_parallel=2", "learner.virtual_pipeline=2"),
    ):
        assert part not in rows(*settings)
    assert part not in rows(two, cuda=False)
    tied = replace(SHAPE, tied=True)
    for stages, found in ((1, False), (2, True)):
        config = load([], (two, "learner.dtype=bfloat16", f"learner.pipeline_parallel={stages}")).config
        assert any(row.part.startswith(part[1]) for row in memory_rows(tied, config, cuda=True)) is found


def test_an_offloaded_optimizer_is_on_the_host_but_for_a_block() -> None:
    state, block = ("rank", "Adam: two moments and main weights"), ("rank", "Adam's state of one block")
    for cuda in (True, False):
        found = rows("learner.offload_optimizer=true", cuda=cuda)
        assert found[state].on_host is cuda and found[state].bytes == 12 * parameters(SHAPE)
        assert found[block].bytes == 12 << 26 and not found[block].on_host
    assert block not in rows()


def test_the_placement_counts_what_the_table_counts() -> None:
    node = Node(devices=tuple(Device(index=number, uuid=f"GPU-{number}") for number in range(2)))
    size = ModelSize({"model.layers.0.mlp.up_proj.weight": (4_000_000_000,)})
    needs = {}
    for settings in ((), ("learner.distributed_optimizer=true",), ("learner.offload_optimizer=true",)):
        config = load([], ("learner.dtype=bfloat16", "learner.data_parallel=2", *settings)).config
        needs[settings] = want_of(config, node, learner=True, engines=0, size=size).memory_rank
    assert list(needs.values()) == [72_000_000_000, 48_000_000_000, 24_000_000_000 + (12 << 26)], (
        "an offloaded optimizer has a block here"
    )


@pytest.mark.parametrize(("at_most", "senders"), [(0, 4), (1, 1), (2, 2)])
def test_the_placement_counts_a_rank_of_fsdp_as_its_table_does(at_most: int, senders: int) -> None:
    """Every weight is divided over the four ranks, each of which sends its share of the layers."""
    node = Node(devices=tuple(Device(index=number, uuid=f"GPU-{number}") for number in range(4)))
    size = ModelSize(SHAPE.tensors(), backend="fsdp")
    staging = ("weights.transport=handles", "weights.staging=cuda")
    sending = ("learner.data_parallel=4", f"weights.senders_per_stage={at_most}", *staging)
    config = load([], ("learner.dtype=bfloat16", *sending)).config
    table = [row for row in fsdp_rows(size.tensors, config, cuda=True) if not row.on_host]
    want = want_of(config, node, learner=True, engines=0, size=size)
    assert want.senders == senders
    assert want.memory_rank == sum(row.bytes for row in table if row.process == "rank")
    assert 12 * parameters(SHAPE) / 4 < want.memory_rank < 12 * parameters(SHAPE) / 2
    [copies] = [row.bytes for row in table if "copies of its part" in row.part]
    assert want.memory_sender == copies
    layer = sum(math.prod(shape) for name, shape in SHAPE.tensors().items() if ".layers.0." in name)
    ends = 2 * SHAPE.vocab_size * SHAPE.hidden + SHAPE.hidden
    assert copies == 2 * 2 * (36 // senders * layer + ends)


def test_fsdp_counts_the_state_of_the_optimizer_that_it_has() -> None:
    tensors = SHAPE.tensors()
    ends = sum(math.prod(shape) for name, shape in tensors.items() if "embed" in name or "lm_head" in name)
    matrices = sum(math.prod(shape) for shape in tensors.values() if len(shape) == 2) - ends
    elements = parameters(SHAPE)
    wanted = {"sgd": ("SGD: momentum", elements), "muon": ("Muon: momentum of matrices", 2 * elements - matrices)}
    for name, (words, state) in wanted.items():
        config = load([], ("learner.backend=fsdp", f"learner.optimizer.name={name}")).config
        [row] = [row for row in fsdp_rows(tensors, config, cuda=True) if row.part.startswith(words)]
        assert row.bytes == 4 * state


def test_a_rank_of_two_copies_has_twice_as_much() -> None:
    tensors, needs = SHAPE.tensors(), []
    for copies in (1, 2):
        of_four = ("learner.backend=fsdp", "learner.data_parallel=4", f"learner.fsdp_replicas={copies}")
        rows = fsdp_rows(tensors, load([], ("learner.dtype=bfloat16", *of_four)).config, cuda=True)
        needs.append({row.part.split(",")[0]: row.bytes for row in rows if row.process == "rank"})
    divided = ("weights", "gradients", "Adam: two moments")
    assert all(needs[1][part] == pytest.approx(2 * needs[0][part], rel=1e-6) for part in divided)


def test_experts_are_spread_over_their_ranks_and_never_split() -> None:
    """Qwen3-30B-A3B by hand: 48 layers of 128 experts of 3 x 2048 x 768. An expert's state is divided over its own
    copies alone.
    """
    shape = MIXTURE
    experts = 48 * 128 * 3 * 2048 * 768
    others = parameters(shape) - experts
    node = Node(devices=tuple(Device(index=number, uuid=f"GPU-{number}") for number in range(8)))

    def needed(*settings: str) -> int:
        config = load([], ("learner.dtype=bfloat16", "learner.distributed_optimizer=true", *settings)).config
        found = want_of(config, node, learner=True, engines=0, size=ModelSize(shape.tensors())).memory_rank
        table = [row for row in memory_rows(shape, config, cuda=True) if re.match("weights|gradients|Adam", row.part)]
        assert sum(row.bytes for row in table if row.process == "rank") == found
        return found

    spread = needed("learner.data_parallel=8", "learner.expert_parallel=8")
    assert spread == pytest.approx((2 + 4 + 12) * experts / 8 + (2 + 4 + 12 / 8) * others, rel=1e-3)
    assert spread < 80e9 < needed("learner.data_parallel=8") / 2
    split = needed("learner.tensor_parallel=4", "learner.sequence_parallel=true", "learner.data_parallel=2")
    assert split == pytest.approx((2 + 4 + 12 / 8) * experts + (2 + 4 + 12 / 2) * others / 4, rel=1e-3)


def test_fsdp_counts_adapters_of_experts() -> None:
    """Of rank 8, by hand; divided over four ranks by experts."""
    adapters = 48 * 128 * 8 * ((2048 + 2 * 768) + (768 + 2048))
    of_four = ("learner.backend=fsdp", "learner.data_parallel=4", "learner.lora.rank=8")
    config = load([], (*of_four, "learner.lora.targets=[experts.gate_up_proj,experts.down_proj]")).config
    rows = {row.part.split(",")[0]: row.bytes for row in fsdp_rows(MIXTURE.tensors(), config, cuda=True)}
    assert rows["gradients"] == 4 * adapters // 4
    assert rows["Adam: two moments"] == 2 * rows["gradients"]
    assert rows["weights"] - 4 * parameters(MIXTURE) / 4 == pytest.approx(rows["gradients"], rel=1e-3)


def test_the_placement_counts_the_critic_at_its_own_size() -> None:
    config = load([], ("learner.dtype=bfloat16", "learner.algorithm.advantage=gae")).config
    policy, critic = (
        {f"model.layers.{layer}.mlp.up_proj.weight": (1_000_000,) for layer in range(layers)} for layers in (8, 2)
    )
    size = ModelSize(policy, critic)
    node = Node(devices=(Device(index=0, uuid="GPU-0"),))
    assert want_of(config, node, learner=True, engines=0, size=size).memory_rank == 18 * 10_000_000


@pytest.mark.parametrize("tokens", [1024, 8192])
def test_logits_never_grow_beyond_a_chunk(tokens: int) -> None:
    found = rows(
        f"learner.max_tokens_per_micro_batch={tokens}", "data.max_prompt_tokens=512", "sampling.max_new_tokens=512"
    )
    assert found["rank", "logits"].bytes < tokens * SHAPE.vocab_size


def test_a_sample_longer_than_the_budget_makes_a_longer_row() -> None:
    found = rows(
        "learner.max_tokens_per_micro_batch=100", "data.max_prompt_tokens=3000", "sampling.max_new_tokens=1000"
    )
    assert "4,000 tokens" in found["rank", "activations kept for the backward pass"].part


def test_recomputation_keeps_less_and_computes_one_layer_again() -> None:
    kept, again = ("rank", "activations kept for the backward pass"), ("rank", "activations of one layer")
    plain, selective, full = (rows(f"learner.recompute={choice}") for choice in ("none", "selective", "full"))
    assert again not in plain
    assert plain[kept].bytes - selective[kept].bytes == SHAPE.num_layers * selective[again].bytes
    assert 16 * full[kept].bytes < plain[kept].bytes
    assert full[kept].bytes + full[again].bytes < selective[kept].bytes + selective[again].bytes


def test_the_context_of_the_engines_bounds_a_row() -> None:
    kept = ("rank", "activations kept for the backward pass")
    short = ("engine.max_context=2048", "learner.max_tokens_per_micro_batch=1024")
    assert "2,048 tokens" in rows(*short)[kept].part
    written = (
        *short,
        "data.path=x.jsonl",
        "rollouts.sft.use=dataset",
        "data.rollout=sft",
        "data.responses_key=written",
    )
    assert "40,960 tokens" in rows(*written)[kept].part, "written answers come from no engine"


@pytest.mark.parametrize(
    ("settings", "measured_gb"),
    [
        (("learner.deterministic=false",), 48.77),
        (("learner.deterministic=false", "learner.recompute=full"), 32.85),
    ],
)
def test_the_table_agrees_with_an_h100(settings: tuple[str, ...], measured_gb: float) -> None:
    """The most memory of tensors in a step of Qwen3-1.7B over rows of 8,192 tokens, measured by ``python -m tests.bench
    gpu``.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    shape = ModelShape.of({**QWEN3_8B, **sizes, "tie_word_embeddings": True}, where="Qwen3-1.7B")
    lengths = ("learner.max_tokens_per_micro_batch=8192", "data.max_prompt_tokens=8", "sampling.max_new_tokens=2040")
    config = load([], ("learner.dtype=bfloat16", *lengths, *settings)).config
    on_device = [
        row.bytes for row in memory_rows(shape, config, cuda=True) if row.process == "rank" and not row.on_host
    ]
    assert 0.99 * measured_gb < sum(on_device) / 1e9 < measured_gb


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "launch/configs/digits.yaml", "--memory"]) == 0
    printed = capsys.readouterr().out
    assert "Adam: two moments, float32" in printed and "sum" in printed and "Not counted" in printed


def test_experts_are_spread_and_not_split() -> None:
    values = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    shape = ModelShape.of({**QWEN3_8B, **values}, where="test")
    of_one = 3 * 768 * shape.hidden * shape.num_layers
    assert parameters(shape) - rank_parameters(shape, 1, expert_parallel=4) == 6 * of_one
    routers = shape.num_layers * 8 * shape.hidden
    dense = parameters(shape) - 8 * of_one
    norms = sum(size[0] for name, size in shape.tensors().items() if "norm" in name)
    assert rank_parameters(shape, 2, expert_parallel=2) == (dense - norms - routers) // 2 + norms + routers + 4 * of_one


def test_keys_and_values_of_an_engine_are_its_blocks_in_a_quarter_of_its_memory() -> None:
    token = 2 * 36 * 8 * 128 * 2

    def blocks(*settings: str, engine_memory: int = 0) -> int:
        config = load([], ("engine.dtype=bfloat16", *settings)).config
        table = memory_rows(SHAPE, config, cuda=True, engine_memory=engine_memory)
        return next(row.bytes for row in table if row.part.startswith("keys and values"))

    assert blocks("engine.max_running=3") == 3 * SHAPE.max_positions * token
    assert blocks("engine.max_running=3", engine_memory=4000 * token + 99) == 992 * token
    assert blocks("engine.kv_tokens=4096", engine_memory=4000 * token) == 4096 * token


def test_an_engine_on_the_cpu_has_buffers_of_a_push_and_its_libraries() -> None:
    def parts(*, cuda: bool) -> dict[str, int]:
        return {part: row.bytes for (process, part), row in rows(cuda=cuda).items() if process == "engine"}

    on_cpu = parts(cuda=False)
    assert on_cpu["two buffers of the first push"] == 2 * 64_000_000
    assert set(on_cpu) - set(parts(cuda=True)) == {"two buffers of the first push", "Python and torch"}
