"""LoRA: adapters train the same numbers in every layout, change no weight of the model, and are PEFT's tensors in a
file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.integration import megatron_lora
from tests.integration.gradients import Gradients, differing, load
from tests.integration.megatron_lora import (
    ATTENTION,
    DIVIDED,
    IN_REPLICAS,
    LORA,
    OF_EXPERTS,
    OPTIMIZER,
    RESUMED,
    SAVED,
    SHARED,
    SHARED_RESUMED,
    STEPS,
    VOCAB,
    WAYS,
    gradients,
    learner,
    saved,
    take,
    trained,
)
from tests.learner_steps import make_batches, make_samples, run_ranks
from tests.megatron_world import one_rank
from tests.same_metrics import TIMES
from tests.tiny_models import write_tiny_model
from tidemill.launch.devices.shapes import adapter_tensors
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import groups, state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout import parallel
from tidemill.learner.layout.model_files import tensors_in
from tidemill.learner.settings.lora import TARGETS, LoraConfig, Tuning, adapter_refusals
from tidemill.learner.trainer.backups import OtherWeights, initial_weights, reference_weights
from tidemill.learner.trainer.exports import write_adapter
from tidemill.learner.trainer.trainer import Trainer
from tidemill.weightstore.format.adapters import CONFIG, WEIGHTS

SOME = LoraConfig(rank=3, alpha=6, targets=("q_proj", "v_proj", "up_proj", "down_proj"))


@pytest.fixture
def here() -> Iterator[parallel.Parallel]:
    with one_rank() as joined:
        yield joined


def close(ours: Mapping[str, float], wanted: Mapping[str, float], tolerance: float = 1e-5) -> None:
    names = wanted.keys() - TIMES
    assert {name: ours[name] for name in names} == pytest.approx(
        {name: wanted[name] for name in names}, rel=tolerance, abs=tolerance
    )


def lora_policy(model_dir: Path, here: parallel.Parallel, lora: LoraConfig, *, filled: bool = True) -> MegatronPolicy:
    """Return a policy with adapters; ``filled``: their second matrices are random, as after some steps."""
    policy = build_policy(model_dir, dtype="float32", parallel=here, tuning=Tuning(lora=lora))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in policy.module.named_parameters():
        if filled and ".lora_B" in name:
            parameter.data.normal_(generator=generator, std=0.3)
    return policy


def wrote(directory: Path, policy: MegatronPolicy, model_dir: Path) -> None:
    """Write the policy's adapters."""
    assert policy.adapters is not None
    write_adapter(directory, dict(policy.adapters.export()), policy.adapters.config, model_dir)


def with_adapter(model_dir: Path, adapter: Path) -> Any:
    """Return transformers' model with the adapters of a directory in PEFT's format, added by hand."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    config, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert module.rpartition(".")[2] in config["target_modules"]
        product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
        parameters[f"{module}.weight"].data += config["lora_alpha"] / config["r"] * product
    return model


def log_probs(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("family", "tied", "lora"),
    [("qwen3", True, LORA), ("qwen2", False, SOME), ("llama", False, LORA), ("qwen3", False, SOME)],
)
def test_the_model_with_adapters_is_that_of_transformers(
    here: Any, tmp_path: Path, family: str, tied: bool, lora: LoraConfig
) -> None:
    """Merged weights and a directory of PEFT's agree with it; an adapter directory begins a policy with the same."""
    model_dir = write_tiny_model(tmp_path / "model", family, tied=tied, vocab_size=VOCAB)
    policy = lora_policy(model_dir, here, lora)
    wrote(tmp_path / "adapter", policy, model_dir)
    again = lora_policy(model_dir, here, replace(lora, adapter=str(tmp_path / "adapter")), filled=False)
    assert policy.digest() == again.digest() and again.adapters is not None and again.adapters.loaded
    by_hand = with_adapter(model_dir, tmp_path / "adapter")
    for name, tensor in policy.export():
        torch.testing.assert_close(tensor, dict(by_hand.named_parameters())[name].data, atol=1e-6, rtol=0)
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)
    samples = make_samples(vocab=VOCAB)
    [row] = (batch := make_batches(samples)[0]).micro_batches
    [ours_T] = trainer.log_probs(batch)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for number, sample in enumerate(samples[:4]):
        at = torch.from_numpy((row.sample_T == number) & row.loss_mask_T)
        wanted = log_probs(by_hand, tokens := torch.from_numpy(sample.tokens).long())[-int(at.sum()) :]
        torch.testing.assert_close(ours_T[at], wanted, atol=1e-4, rtol=0)
        assert (log_probs(base, tokens)[-int(at.sum()) :] - wanted).abs().max() > 0.01, (
            "the adapters do nothing: the test shows nothing"
        )


def test_new_adapters_change_nothing_and_training_changes_only_them(here: Any, model_dir: Path) -> None:
    base = build_policy(model_dir, dtype="float32", parallel=here)
    ours = learner(model_dir, here)
    assert ours.policy.digest() == base.digest()
    before = {name: parameter.clone() for name, parameter in ours.policy.module.named_parameters()}
    assert take(ours, STEPS[0], here)["train/grad_norm"] > 0
    take(ours, STEPS[1], here)
    changed = {
        name for name, parameter in ours.policy.module.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    assert ours.policy.digest() != base.digest()
    assert sum(buffer.grad_data.numel() for buffer in ours.policy.ddp.buffers) == sum(
        before[name].numel() for name in changed
    )


class Products(TorchDispatchMode):
    """Shapes of the factors of all matrix products in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[torch.Size, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            first, second = args[-2:]
            self.factors.append((first.shape, second.shape))
        return func(*args, **(kwargs or {}))


FROZEN = pytest.mark.parametrize(
    "tuning", [Tuning(lora=LORA), Tuning(freeze=("layers",))], ids=["adapters", "frozen layers"]
)


@FROZEN
def test_a_frozen_weight_has_no_gradient(here: Any, model_dir: Path, tuning: Tuning) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here, tuning=tuning)
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)
    with Products() as products:
        assert trainer.train(make_batches(make_samples(vocab=VOCAB))[0])["train/grad_norm"] > 0
    frozen = {tuple(weight.shape) for weight in policy.module.parameters() if not weight.requires_grad}
    factors = {tuple(second) for _, second in products.factors}
    assert any(shape in frozen or shape[::-1] in frozen for shape in factors), "no product with a frozen weight"
    assert not [pair for pair in products.factors if (pair[0][-2], pair[1][-1]) in frozen]


@FROZEN
def test_a_frozen_weight_multiplies_all_tokens_at_once(here: Any, model_dir: Path, tuning: Tuning) -> None:
    """Also if the strides of [T, 1, H] are those of a transposition, where torch.matmul takes them one by one."""
    layer = build_policy(model_dir, dtype="float32", parallel=here, tuning=tuning).module.decoder.layers[0]
    for module in (layer.mlp.linear_fc1, layer.mlp.linear_fc2):
        input_T1H = torch.randn(1, 7, module.weight.shape[1]).transpose(0, 1).requires_grad_()
        with Products() as products:
            out, _ = module(input_T1H)
            out.backward(torch.randn(1, 7, len(module.weight)).transpose(0, 1))
        assert len(products.factors) >= 2 and all(len(first) == 2 for first, _ in products.factors)
        assert input_T1H.grad is not None and input_T1H.grad.shape == input_T1H.shape


def test_recomputation_trains_the_same(here: Any, model_dir: Path) -> None:
    """Without a gradient of the frozen embedding's output, a recomputed layer would have none."""
    wanted = trained(model_dir, here, WAYS["plain"])
    for name in ("recompute full", "recompute selective"):
        ours = trained(model_dir, here, WAYS[name])
        assert ours["norms"] == pytest.approx(wanted["norms"], rel=1e-5)  # sums of gradients in another order
        for one, other in zip(ours["metrics"], wanted["metrics"], strict=True):  # type: ignore[call-overload]
            close(one, other)


def test_the_reference_is_the_model_without_adapters(here: Any, model_dir: Path, tmp_path: Path) -> None:
    """The KL is the same to the bit with a copy of all weights; another directory is a reference, too, with no trace of
    it left.
    """
    runs = []
    for whole in (False, True):
        ours = learner(model_dir, here, whole=whole)
        runs.append([take(ours, step, here) for step in STEPS])
    for one, other in zip(*runs, strict=True):
        assert {name: one[name] for name in one.keys() - TIMES} == {name: other[name] for name in other.keys() - TIMES}
    assert runs[0][-1]["train/kl_reference"] > 1e-4 > abs(runs[0][0]["train/kl_reference"])
    other = write_tiny_model(tmp_path / "other", seed=8, vocab_size=VOCAB)
    policy = lora_policy(model_dir, here, LORA)
    digest, off = policy.digest(), initial_weights(policy)
    backup = reference_weights(policy, other)
    assert policy.digest() == digest
    assert (
        len(off.tensors) == len(backup.tensors.keys() & off.tensors.keys())
        and sum(map(torch.count_nonzero, off.tensors.values())) == 0
    )
    seen = []
    with OtherWeights(policy) as others:
        for one in (off, backup, off):
            others.take(one)
            seen.append(policy.digest())
    base, foreign = (
        build_policy(directory, dtype="float32", parallel=here).digest() for directory in (model_dir, other)
    )
    assert (seen, policy.digest()) == ([base, foreign, base], digest)


@dataclass(frozen=True, kw_only=True)
class World:
    """Results of training."""

    one: Mapping[str, Any]
    """Of one rank."""
    ranks: list[dict[str, Any]]
    """Of each of two ranks."""
    gradients: tuple[Gradients, Mapping[str, float]]
    """The gradient of each matrix in one step of one rank, from adapters without zeros, and the metrics of the step."""
    model_dir: Path
    out: Path
    """With the checkpoints of two ranks."""


def in_layouts(
    body: Callable[[Path, Path, LoraConfig, Path], None],
    model_dir: Path,
    lora: LoraConfig,
    places: pytest.TempPathFactory,
) -> World:
    """Train on one rank, and in the layouts of ``body`` from the beginning and from a checkpoint of one rank."""
    out, checkpoint = places.mktemp("out"), places.mktemp("checkpoint")
    with one_rank() as joined:
        saved(model_dir, joined, checkpoint, lora=lora)
        one = trained(model_dir, joined, WAYS["plain"], lora=lora)
        resumed = trained(model_dir, joined, WAYS["plain"], checkpoint, lora=lora)
        adapter = places.mktemp("adapter")
        wrote(adapter, lora_policy(model_dir, joined, lora), model_dir)
        filled = replace(lora, adapter=str(adapter))
        found = gradients(model_dir, joined, WAYS["plain"], filled)
    ranks = run_ranks(body, (model_dir, checkpoint, filled), world=2, out=out)
    return World(one={"plain": one, "resumed": resumed}, ranks=ranks, gradients=found, model_dir=model_dir, out=out)


@pytest.fixture(scope="module")
def world(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return in_layouts(megatron_lora.main, model_dir, LORA, tmp_path_factory)


@pytest.fixture(scope="module")
def world_of_experts(tmp_path_factory: pytest.TempPathFactory) -> World:
    changes = {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    model_dir = write_tiny_model(tmp_path_factory.mktemp("mixture"), "qwen3_moe", vocab_size=VOCAB, **changes)
    return in_layouts(megatron_lora.experts, model_dir, ATTENTION, tmp_path_factory)


LAYOUTS = (
    *(f"dp2 {name}" for name in SHARED),
    *(f"dp2 {name}, resumed" for name in SHARED_RESUMED),
    *(f"{layout} {name}" for layout, (_, ways) in DIVIDED.items() for name in ways),
    *(f"{layout} plain, resumed" for layout in RESUMED),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_what_one_rank_does(world: World, layout: str) -> None:
    """Also from a checkpoint of one rank, in another layout and with another optimizer; and its base is known by the
    same digest.
    """
    compared(world, layout)


@pytest.mark.parametrize(
    "layout", [f"{layout} {name}" for layout, (_, ways) in OF_EXPERTS.items() for name in (*ways, "plain, resumed")]
)
def test_every_layout_of_a_mixture_trains_what_one_rank_does(world_of_experts: World, layout: str) -> None:
    """Experts spread over ranks, and virtual stages."""
    compared(world_of_experts, layout)


@pytest.mark.parametrize(
    "layout",
    [
        *(f"dp2 {name}" for name in IN_REPLICAS),
        *(f"{layout} {name}" for layout, (_, ways) in DIVIDED.items() for name in ways),
    ],
)
def test_every_matrix_has_the_gradient_of_one_rank(world: World, layout: str) -> None:
    same_gradients(world, layout)


@pytest.mark.parametrize("layout", [f"{layout} {name}" for layout, (_, ways) in OF_EXPERTS.items() for name in ways])
def test_every_matrix_in_a_mixture_has_the_gradient_of_one_rank(world_of_experts: World, layout: str) -> None:
    same_gradients(world_of_experts, layout)


def same_gradients(world: World, layout: str) -> None:
    wanted, metrics = world.gradients
    found = [load(world.out, layout, rank) for rank in (0, 1)]
    of_all = {name: tensor for ours, _ in found for name, tensor in ours.items()}
    assert differing(of_all, wanted) == {}
    for ours, theirs in found:
        assert all(torch.equal(tensor, of_all[name]) for name, tensor in ours.items())
        close(theirs, metrics, 2e-5)


@pytest.mark.parametrize("layout", SAVED)
def test_one_rank_goes_on_from_spread_experts_and_virtual_stages(
    world_of_experts: World, here: Any, layout: str
) -> None:
    world = world_of_experts
    same(trained(world.model_dir, here, WAYS["plain"], world.out / layout, lora=ATTENTION), world.one["resumed"])


def compared(world: World, layout: str) -> None:
    for rank in world.ranks:
        same(rank[layout], world.one["resumed" if layout.endswith("resumed") else "plain"])


def same(ours: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for step, other in zip(ours["metrics"], wanted["metrics"], strict=True):
        close(step, other, 2e-5)
    assert ours["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    assert ours["base"] == wanted["base"]


def test_a_checkpoint_has_the_adapters_and_belongs_to_their_model(here: Any, model_dir: Path, tmp_path: Path) -> None:
    ours = learner(model_dir, here)
    take(ours, STEPS[0], here)
    digest = ours.policy.digest()
    (tmp_path / "saved").mkdir()
    write_staged(state.stage(tmp_path / "saved", step=STEPS[0], policy=ours.policy, optimizer=ours.optimizer))
    entries = state.dist_checkpointing.load_tensors_metadata(str(tmp_path / "saved"))
    assert entries and all("lora_" in name for name in entries)
    fresh = learner(model_dir, here)
    assert state.load_weights(tmp_path / "saved", policy=fresh.policy, optimizer=fresh.optimizer) == STEPS[0]
    assert fresh.policy.digest() == digest
    other = write_tiny_model(tmp_path / "other", seed=8, vocab_size=VOCAB)
    refused: list[tuple[Path, LoraConfig, str]] = [
        (other, LORA, "model.path: want .* in .*saved, got"),
        (model_dir, replace(LORA, alpha=4), "learner.lora.alpha: want .*: 8.0 in .*saved, got 4.0"),
        (model_dir, LoraConfig(), "learner.lora.rank: want .*saved has only adapters, got 0"),
    ]
    for directory, lora, message in refused:
        policy = build_policy(directory, dtype="float32", parallel=here, tuning=Tuning(lora=lora))
        optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
        for loads in (state.load, state.load_weights):
            with pytest.raises(ConfigRefused, match=message):
                loads(tmp_path / "saved", policy=policy, optimizer=optimizer)


def test_adapter_directories_that_do_not_fit_are_refused(here: Any, model_dir: Path, tmp_path: Path) -> None:
    policy = lora_policy(model_dir, here, SOME)
    wrote(tmp_path, policy, model_dir)
    fits = replace(SOME, adapter=str(tmp_path))
    assert adapter_refusals(fits) == [] == adapter_refusals(SOME)
    for field in ("rank", "alpha"):
        [refused] = adapter_refusals(replace(fits, **{field: 9}))
        assert str(refused).startswith(f"learner.lora.{field}: want {getattr(SOME, field):g}")
    [refused] = adapter_refusals(replace(fits, targets=("q_proj",)))
    assert "learner.lora.targets" in str(refused)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    assert "use_dora: want False" in str(adapter_refusals(fits)[0])
    of_experts = {"target_parameters": ["mlp.experts.down_proj"], "peft_version": "0.18.1"}
    (tmp_path / CONFIG).write_text(json.dumps(config | of_experts))
    version, targets = map(str, adapter_refusals(fits))
    assert "peft_version: want 0.19 or newer" in version and "learner.lora.targets" in targets
    new = config | of_experts | {"peft_version": "0.19.0"}
    (tmp_path / CONFIG).write_text(json.dumps(new))
    assert adapter_refusals(replace(fits, targets=(*SOME.targets, "experts.down_proj"))) == []
    assert replace(SOME, targets=(*SOME.targets, "experts.down_proj")).peft(str(model_dir.resolve())) == new | {
        "target_parameters": ["experts.down_proj"]
    }
    assert "adapter_config.json" in str(adapter_refusals(replace(fits, adapter=str(tmp_path / "nothing")))[0])
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(iter(tensors))
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, "got 'no such tensor'"),
        (tensors | {name: tensors[name][:, :-1].contiguous()}, "want the shape"),
        (tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 4)}, "and no others"),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        with pytest.raises(ConfigRefused, match=message):
            lora_policy(model_dir, here, fits)


EXISTING = {
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
    "glm4_moe": TARGETS,
    "qwen2_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("o_proj", "gate_proj", "up_proj", "down_proj"),
}
"""The targets that a family with other layers has."""


@pytest.mark.parametrize(("family", "queries"), [(family, 24) for family in EXISTING] + [("deepseek_v3", None)])
def test_the_check_knows_the_layers_that_have_adapters(
    here: Any, tmp_path: Path, family: str, queries: int | None
) -> None:
    changes = {"q_lora_rank": queries} if family == "deepseek_v3" else {}
    model_dir = write_tiny_model(tmp_path, family, vocab_size=VOCAB, **changes)
    found = {}
    tensors = tensors_in(model_dir)
    for targets in (EXISTING[family], TARGETS):
        found[targets] = set(adapter_tensors(tensors, LoraConfig(rank=2, targets=targets)))
    assert found[TARGETS] == found[EXISTING[family]]
    policy = lora_policy(model_dir, here, LoraConfig(rank=2, targets=EXISTING[family]), filled=False)
    assert policy.adapters is not None
    names = {name.removeprefix("base_model.model.").removesuffix(".weight") for name, _ in policy.adapters.export()}
    assert names == found[TARGETS]


def in_stages(model_dir: Path, out: Path) -> None:
    """Write the adapters of each of two stages: their number, or the refusal."""
    joined = groups.join(tensor_parallel_size=1, pipeline_parallel_size=2, device=torch.device("cpu"), seed=0)
    found: dict[str, object] = {}
    tunings = {
        "all": Tuning(lora=LoraConfig(rank=2)),
        "dense": Tuning(lora=LoraConfig(rank=2, targets=("up_proj",))),
        "frozen": Tuning(freeze=(r"layers[.]0[.]", "embed")),
    }
    for name, tuning in tunings.items():
        try:
            policy = build_policy(model_dir, dtype="float32", parallel=joined, tuning=tuning)
            found[name] = len(policy.adapters.names("A")) if policy.adapters is not None else None
        except ConfigRefused as refused:
            found[name] = str(refused)
    groups.leave()
    (out / f"rank-{joined.rank}.json").write_text(json.dumps(found))


def test_stages_agree_on_the_layers_that_are_trained(tmp_path: Path) -> None:
    """The first layer of this model has an MLP, and the second experts: a target that one stage lacks is not
    refused.
    """
    model_dir = write_tiny_model(tmp_path / "model", "glm4_moe", vocab_size=VOCAB)
    first, last = run_ranks(in_stages, (model_dir,), world=2, out=tmp_path)
    assert (first.pop("all"), last.pop("all")) == (7, 4)
    assert first == last, "a rank that is refused alone leaves the others waiting"
    assert "lower learner.pipeline_parallel, got 'none in stage 1'" in first["dense"]
    assert "which leave none in stage 0" in first["frozen"]
