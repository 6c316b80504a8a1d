"""Heads for further tokens (MTP) that are trained: what transformers' own heads compute for each sequence alone, with
gradients for the heads alone.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.backend_learner import BackendLearner, open_learner
from tests.examples import THOROUGH
from tests.families import LENGTHS, VOCAB, place_here, sequences, write_family
from tests.integration.fsdp_family_ranks import different, files_of
from tests.learner_steps import make_samples
from tests.megatron_world import one_rank
from tests.mtp_models import rewrite, write_with_heads
from tests.refusals import refusal
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.sections import KLConfig
from tidemill.learner.backends.fsdp.backend import FsdpBackend
from tidemill.learner.backends.fsdp.model import FsdpModel, Place, open_model
from tidemill.learner.backends.fsdp.self_test import row_of
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.layout.parallel import Parallel
from tidemill.learner.settings.config import LearnerConfig, OptimizerConfig
from tidemill.learner.trainer.exports import write_model
from tidemill.learner.trainer.port import ModelInput
from tidemill.weightstore.format.manifest import Manifest

TRAINED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next")
TRIED = TRAINED if THOROUGH else ("deepseek_v3", "qwen3_next")
HEADS = {"deepseek_v3": 2}
LOG_PROBS, GRADIENTS = 5e-5, 2e-5
"""Largest differences in float32: of a log-prob, in nats, and of a gradient relative to the largest."""


@pytest.fixture(scope="module")
def here() -> Iterator[Parallel]:
    with one_rank() as parallel:
        yield parallel


@pytest.fixture
def place(here: Parallel) -> Place:
    return place_here()


def in_a_row(model: FsdpModel) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each head of a row of sequences, and the gradients of their sum with fixed weights."""
    tokens_T = torch.cat(sequences())

    def finish(hidden_TH: Tensor) -> tuple[Tensor, list[Tensor]]:
        heads, loss = [], hidden_TH.sum() * 0.0
        for depth, states_TH in enumerate(model.further_states(hidden_TH, tokens_T, row_of(LENGTHS)), 1):
            logits_TV = model.head.logits(states_TH, model.head_weight().detach()).float()
            log_probs_T = torch.log_softmax(logits_TV, -1).gather(1, tokens_T.roll(-1 - depth)[:, None])[:, 0]
            parts = [part[: max(0, len(part) - 1 - depth)] for part in log_probs_T.split(LENGTHS)]
            heads.append(torch.cat(parts))
            loss = loss + weighted(heads[-1])
        return loss, [head.detach() for head in heads]

    model.zero_grad()
    loss, heads = model(tokens_T, row_of(LENGTHS), finish)
    loss.backward()
    gradients = {name.removeprefix("transformer."): parameter.grad for name, parameter in model.named_parameters()}
    return heads, {name: grad.full_tensor() for name, grad in gradients.items() if grad is not None}


def weighted(log_probs_T: Tensor) -> Tensor:
    return (log_probs_T * torch.linspace(-1, 1, len(log_probs_T))).sum()


class Doubles(TorchDispatchMode):
    """Tensors in float64 stay so, where transformers casts its norms, angles, routers and scores to float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def alone(
    directory: Path,
    heads: int,
    rows: list[Tensor],
    *,
    last: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the same of transformers' heads, which get each sequence alone. ``last``: tokens of each that count."""
    main = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    main.to(dtype).train()
    config = main.config
    config.num_mtp_layers = heads
    if getattr(config, "layer_types", None):
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mtp_mlp_layer_types = ["sparse"] * heads
    # transformers names the layers of the releases, which have more.
    layers = range(config.num_hidden_layers, config.num_hidden_layers + heads)
    main._keys_to_ignore_on_load_unexpected = ["^mtp.*", *(rf"model\.layers\.{layer}\..*" for layer in layers)]
    mtp: Any = MtpModel.from_pretrained(main).to(dtype)
    of_heads: list[list[Tensor]] = [[] for _ in range(heads)]
    for number, tokens_T in enumerate(rows):
        states = main.base_model(input_ids=tokens_T[None], use_cache=False).last_hidden_state.detach()
        for place in range(min(heads, len(tokens_T) - 2)):
            states, length = states[:, : len(tokens_T) - 1 - place], len(tokens_T) - 1 - place
            embedded = main.get_input_embeddings()(tokens_T[None, 1 + place :]).detach()
            positions = torch.arange(1 + place, 1 + place + length)[None]
            states = mtp.forward_layer(place, states, positions, None, inputs_embeds=embedded)
            logits = states[0, :-1] @ main.lm_head.weight.detach().t()
            targets_T = tokens_T[2 + place :, None]
            log_probs_T = torch.log_softmax(logits, -1).gather(1, targets_T)[:, 0]
            of_heads[place].append(log_probs_T if last is None else log_probs_T[-last[number] :])
    log_probs = [torch.cat(parts) for parts in of_heads]
    sum(map(weighted, log_probs)).backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in mtp.layers.named_parameters()}
    return [head.detach() for head in log_probs], {name: grad for name, grad in gradients.items() if grad is not None}


def name_alone(name: str, layers: int) -> str:
    """Return the name in transformers' heads of a parameter of ours."""
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    if name.startswith("mtp."):
        name = name.removeprefix("mtp.")
        if not name.startswith("layers."):
            return f"0.{names[name.split('.')[0]]}.weight"
        return name.replace("layers.0.", "0.mtp_block.")
    number, part = name.removeprefix("model.layers.").split(".", 1)
    part = part.replace("shared_head.norm", "post_norm")
    outer = part.startswith(("eh_proj", "enorm", "hnorm", "post_norm"))
    return f"{int(number) - layers}.{part if outer else f'mtp_block.{part}'}"


@pytest.mark.parametrize("family", TRIED)
def test_heads_of_a_row_are_those_of_transformers_for_each_sequence(family: str, place: Place, tmp_path: Path) -> None:
    heads = HEADS.get(family, 1)
    directory = write_with_heads(tmp_path / "model", family, heads=heads)
    model = open_model(directory, dtype="float32", place=place, further=True)
    assert model.num_further == heads
    log_probs, gradients = in_a_row(model)
    wanted, wanted_gradients = alone(directory, heads, sequences())
    for head, wanted_head in zip(log_probs, wanted, strict=True):
        torch.testing.assert_close(head, wanted_head, rtol=0, atol=LOG_PROBS)
    layers = model.config.num_hidden_layers
    moved = {name_alone(name, layers): grad for name, grad in gradients.items() if torch.count_nonzero(grad)}
    assert moved.keys() == {name for name, grad in wanted_gradients.items() if torch.count_nonzero(grad)}
    largest = max(float(grad.abs().max()) for grad in wanted_gradients.values())
    assert max(float((moved[name] - wanted_gradients[name]).abs().max()) for name in moved) < GRADIENTS * largest
    exported, files = dict(model.export()), files_of(directory)
    assert different(exported, {name: files[name] for name in exported}) == []
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    assert all(name.endswith(copies) for name in files.keys() - exported.keys())


LOSS = 1e-6
"""Largest difference of the mean loss in float32 from one in float64, in nats. It is 1e-7."""
UNCLIPPED = OptimizerConfig(lr=1e-3, eps=1e-4, clip_grad=0.0)


def learner_of(
    model: Path, here: Parallel, factor: float, optimizer: OptimizerConfig = UNCLIPPED, **settings: Any
) -> BackendLearner:
    config = LearnerConfig(steps=10, optimizer=optimizer, mtp_loss_scaling_factor=factor, backend="fsdp", **settings)
    return open_learner(FsdpBackend(), model, here, config)


def test_a_step_trains_the_heads_on_the_tokens_of_responses_and_nothing_else(here: Parallel, tmp_path: Path) -> None:
    """Its loss is the mean over both heads and all trained tokens of log-probs of transformers in float64. The model
    becomes what it becomes without it.
    """
    model = write_with_heads(tmp_path / "model", "deepseek_v3", heads=2)
    samples = [  # behind a prompt of one token, the end of the sequence before must predict nothing
        replace(sample, tokens=sample.tokens[-1 - sample.response_length :]) if sample.index % 2 else sample
        for sample in make_samples(vocab=VOCAB)
    ]
    plain, learner = (learner_of(model, here, factor) for factor in (0.0, 0.3))
    tokens, lengths = ([getattr(sample, name) for sample in samples] for name in ("tokens", "response_length"))
    with Doubles():
        rows = [torch.from_numpy(row).long() for row in tokens]
        wanted, _ = alone(model, 2, rows, last=lengths, dtype=torch.float64)
    assert "train/mtp_loss" not in plain.train(3, samples)
    metrics = learner.train(3, samples)
    loss = -torch.cat(wanted).mean()
    assert loss.dtype == torch.float64
    assert metrics["train/mtp_loss"] == pytest.approx(float(loss), abs=LOSS)
    assert metrics["train/shared_tokens"] == 0
    before, trained, without = (files_of(model), *(dict(each.policy.export()) for each in (learner, plain)))
    assert different(trained, before) == sorted({*trained, *before} - {n for n in before if "correction_bias" in n})
    for name, tensor in without.items():
        torch.testing.assert_close(trained[name], tensor, atol=2e-5, rtol=1e-4)
    assert "model.layers.5.eh_proj.weight" in trained and "model.layers.5.eh_proj.weight" not in without
    assert learner.train(4, samples)["train/mtp_loss"] < metrics["train/mtp_loss"]


def test_heads_are_clipped_by_a_norm_of_their_own(here: Parallel, tmp_path: Path) -> None:
    """Theirs is over the limit with this factor. The policy's norm and its clipped steps stay."""
    model, samples = write_with_heads(tmp_path / "model", "deepseek_v3", heads=2), make_samples(vocab=VOCAB)
    sgd = OptimizerConfig(name="sgd", lr=1e-2, momentum=0.0, clip_grad=1.0)
    plain, learner = (learner_of(model, here, factor, sgd) for factor in (0.0, 50.0))
    for step in (3, 4):
        norms = [each.train(step, samples)["train/grad_norm"] for each in (plain, learner)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    before, trained, without = (files_of(model), *(dict(each.policy.export()) for each in (learner, plain)))
    assert different(without, {name: before[name] for name in without})
    for name, tensor in without.items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=1e-5)
    heads = [(trained[name] - before[name]).square().sum() for name in trained.keys() - without.keys()]
    assert 0 < float(sum(heads)) ** 0.5 < 2 * 1e-2 * 1.001, "two steps of the largest norm"


def test_a_reference_has_no_heads(here: Parallel, tmp_path: Path) -> None:
    """Neither in its files, as transformers saves a model, nor in its copy and its checkpoint."""
    model = write_with_heads(tmp_path / "model", "deepseek_v3")
    plain = write_family(tmp_path / "plain", "deepseek_v3", seed=5)
    for reference in ("", str(plain)):
        kl = KLConfig(coef=0.1, reference=reference, reference_ema=0.5)
        learner = learner_of(model, here, 0.3, algorithm=AlgorithmConfig(kl=kl))
        assert different(dict(learner.policy.export()), files_of(model)) == sorted(
            name
            for name in files_of(model)
            if name.endswith(("embed_tokens.weight", "shared_head.head.weight")) and "layers" in name
        )
        copies = learner.reference.weights
        assert copies is not None and copies.tensors and not copies.tensors.keys() & learner.policy.names_of_heads
        assert learner.train(3, make_samples(vocab=VOCAB))["train/mtp_loss"] > 0
        saved = tmp_path / f"saved{len(reference)}"
        saved.mkdir()
        learner.save(saved, 3)
        assert learner_of(model, here, 0.3, algorithm=AlgorithmConfig(kl=kl)).load(saved) == 3


def test_a_row_without_predicted_tokens_takes_part_in_the_backward_pass(here: Parallel, tmp_path: Path) -> None:
    """Other ranks gather the heads in theirs. Log-probs are those of the predicted tokens alone."""
    policy = learner_of(write_with_heads(tmp_path / "model", "deepseek_v3", heads=2), here, 0.3).policy
    row = ModelInput(tokens_T=torch.cat(sequences()), packed=row_of(LENGTHS))
    places = torch.arange(sum(LENGTHS))

    def finish(number: int, row: ModelInput, hidden_TH: Tensor) -> tuple[Tensor, list[int]]:
        heads = list(policy.further_log_probs(row, hidden_TH, lambda depth: places < number * depth))
        return torch.stack([log_probs_N.sum() for log_probs_N in heads]).sum(), list(map(len, heads))

    for number, lengths in ((3, [3, 6]), (0, [1, 1])):
        policy.root.zero_grad()
        assert policy.run([row], partial(finish, number)) == [lengths]
        gradients = {name: weight.grad for name, weight in policy.named_tensors() if name in policy.names_of_heads}
        norms = [gradients[f"model.layers.{head}.eh_proj.weight"] for head in (4, 5)]
        assert [norm is not None and bool(norm.full_tensor().any()) for norm in norms] == [number > 0] * 2
        assert None not in norms


def test_a_checkpoint_with_trained_heads_becomes_a_model_with_them(
    here: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no checkpoint of a run that does not train them."""
    model = write_with_heads(tmp_path / "model", "qwen3_next")
    learner = learner_of(model, here, 0.3)
    learner.train(3, make_samples(vocab=VOCAB))
    (tmp_path / "saved").mkdir()
    learner.save(tmp_path / "saved", 3)
    policy, step = FsdpBackend().read_model(tmp_path / "saved", model, here)
    assert step == 3 and policy.digest() == learner.policy.digest() and policy.root.num_further == 1
    tensors = dict(policy.export())
    write_model(tmp_path / "there", tensors, version=-1, step=3, model_dir=model, manifest=Manifest.of(tensors.items()))
    assert files_of(tmp_path / "there").keys() == files_of(model).keys()
    with refusal(ConfigRefused, field="learner.mtp_loss_scaling_factor"):
        learner_of(model, here, 0.0).load(tmp_path / "saved")


def without_heads(directory: Path) -> Path:
    return write_family(directory, "qwen3_next")


def with_two_heads(directory: Path) -> Path:
    """Qwen's names have one head alone; more are another structure."""
    write_with_heads(directory, "qwen3_next")
    files = files_of(directory)
    more = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in files.items() if "mtp.l" in name}
    rewrite(directory, files | more)
    return directory


def test_patterns_that_freeze_all_of_the_heads_are_refused(here: Parallel, tmp_path: Path) -> None:
    model = write_with_heads(tmp_path / "model", "qwen3_next")
    with refusal(ConfigRefused, field="learner.optimizer.freeze", want=re.compile("weights of the heads")):
        learner_of(model, here, 0.3, replace(UNCLIPPED, freeze=("embed", r"^mtp\.")))
    learner_of(model, here, 0.3, replace(UNCLIPPED, freeze=(r"mtp\.layers",)))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (without_heads, "0 for a model without heads"),
        (with_two_heads, "0 for qwen3_next, whose heads"),
        (lambda directory: write_with_heads(directory, "nemotron_h"), "0 for nemotron_h, whose heads"),
        (lambda directory: write_with_heads(directory, "deepseek_v32"), "0 for deepseek_v32, whose heads"),
    ],
)
def test_heads_that_are_not_known_here_are_kept_and_not_trained(
    make: Callable[[Path], Path], want: str, place: Place, tmp_path: Path
) -> None:
    with refusal(ConfigRefused, field="learner.mtp_loss_scaling_factor", want=re.compile(want)):
        open_model(make(tmp_path / "model"), dtype="float32", place=place, further=True)
