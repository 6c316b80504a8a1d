"""The real Megatron on the CPU: it agrees with transformers, for every split of a step, and continues after a
restart.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.algorithm_settings import algorithm_of
from tests.cuda_kernels import RaisingOnCuda
from tests.examples import rarely, some
from tests.integration import megatron_ranks
from tests.integration.megatron_ranks import OPTIMIZER, STEPS, VOCAB
from tests.learner_steps import make_batches, make_samples, run_ranks
from tests.metric_names import undocumented
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.bus.system.functions import Defect, FunctionRefused
from tidemill.bus.wire.messages import Sample, Status
from tidemill.learner.algorithms.advantages import grpo_no_std
from tidemill.learner.algorithms.choices import PRESETS
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.backends.megatron import state
from tidemill.learner.backends.megatron.model import MegatronPolicy, build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.batch.batch import MicroBatch
from tidemill.learner.checkpoints.staged_files import write_staged
from tidemill.learner.errors import ConfigRefused, HookFailed
from tidemill.learner.kernels import logprobs
from tidemill.learner.kernels.packed_rows import packed_row
from tidemill.learner.layout import parallel
from tidemill.learner.layout.sizes import StepFlops
from tidemill.learner.ranks.debugging import Meter, peak_tflops
from tidemill.learner.settings.config import HooksConfig, OptimizerConfig
from tidemill.learner.settings.optimizer import learning_rate
from tidemill.learner.trainer.backups import OtherModels, OtherWeights, WeightBackup, reference_weights
from tidemill.learner.trainer.hooks import NO_HOOKS, BeforeLogProbs, BeforeStep, Hooks
from tidemill.learner.trainer.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def make(here: parallel.Parallel, model_dir: Path) -> Any:
    """Return a function: ``make(**algorithm) -> (trainer, policy, optimizer, proximal)`` with fresh weights."""

    def build(
        *,
        with_proximal: bool = True,
        dtype: str = "float32",
        model: Path = model_dir,
        hooks: HooksConfig = NO_HOOKS,
        **algorithm: Any,
    ) -> tuple[Trainer, MegatronPolicy, MegatronOptimizer, WeightBackup | None]:
        policy = build_policy(model, dtype=dtype, parallel=here)
        optimizer = MegatronOptimizer(policy, OPTIMIZER, steps=10)
        proximal = WeightBackup(policy) if with_proximal else None
        settings = algorithm_of(**({"entropy": {"coef": 0.01}} | algorithm))
        others = OtherModels(proximal=proximal)
        return Trainer(policy, optimizer, settings, max_lag=2, others=others, hooks=hooks), policy, optimizer, proximal

    return build


@pytest.mark.parametrize(
    ("kind", "top_k"), [("forward_kl", 3), ("reverse_kl", 3), ("forward_kl", 1000), ("reverse_kl", 1000)]
)
def test_a_teacher_in_the_learner_is_compared_over_its_most_probable_tokens(
    here: Any, tmp_path: Path, kind: str, top_k: int
) -> None:
    """The loss is the mean divergence between two models of transformers, at the sampling temperature; 1000 = all of
    the vocabulary.
    """
    student, teacher = (write_tiny_model(tmp_path / str(seed), "qwen3", seed=seed) for seed in (0, 1))
    policy = build_policy(student, dtype="float32", parallel=here)
    config = algorithm_of(advantage="none", distill={"coef": 0.5, "loss": kind, "top_k": top_k})
    others = OtherModels(reference=reference_weights(policy, teacher))
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), config, max_lag=2, others=others)
    samples = make_samples(vocab=299, temperature=0.7)
    metrics = trainer.train(make_batches(samples, max_tokens=100)[0])
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student, teacher)]
    found = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        with torch.no_grad():
            at = slice(len(tokens) - sample.response_length - 1, -1)
            student_TV, teacher_TV = (
                model(tokens[None]).logits[0, at].div(0.7).double().softmax(-1) for model in models
            )
        ids_TK = teacher_TV.topk(min(top_k, 299), -1).indices
        ours, its = (
            torch.cat([p_TV.gather(1, ids_TK), 1 - p_TV.gather(1, ids_TK).sum(1, True)], 1)
            for p_TV in (student_TV, teacher_TV)
        )
        first, second = (its, ours) if kind == "forward_kl" else (ours, its)
        found += (
            (first * (first / second).log().nan_to_num(0.0, 0.0, 0.0)).sum(1).tolist()
        )  # of the whole vocabulary the rest is 0 / 0
    assert metrics["train/teacher_top_kl"] == pytest.approx(float(np.mean(found)), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(0.5 * metrics["train/teacher_top_kl"], rel=1e-5)
    assert metrics["train/kl_reference"] > 0.01
    after = [trainer.train(make_batches(samples, max_tokens=100)[0])["train/teacher_top_kl"] for _ in range(3)][-1]
    assert after < 0.98 * metrics["train/teacher_top_kl"], "the student approaches its teacher"


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {}), ("qwen3", {"tied": True}), ("qwen2", {}), ("llama", {}), ("llama", {"tied": True})],
    ids=["qwen3", "qwen3-tied", "qwen2", "llama", "llama-tied"],
)
def test_log_probs_and_weights_are_those_of_transformers(
    here: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Packed rows of many lengths give the log-probs of each sequence alone, at its sampling temperature; export is
    exact.
    """
    directory = write_tiny_model(tmp_path, family, **changes)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    policy = build_policy(directory, dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, OPTIMIZER, steps=10), AlgorithmConfig(), max_lag=2)
    samples = make_samples(vocab=reference.config.vocab_size, temperature=0.7)
    mixed = make_samples(vocab=reference.config.vocab_size, temperature=(0.7, 1.0, 1.4))
    for each in (samples, mixed):
        _compare_log_probs(trainer, each, reference)
    exported = dict(policy.export())
    wanted_weights = {name: tensor for name, tensor in reference.named_parameters()}
    assert exported.keys() == wanted_weights.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, wanted_weights[name]), name


def _compare_log_probs(trainer: Trainer, samples: list[Sample], reference: Any) -> None:
    batch = make_batches(samples, max_tokens=100)[0]
    assert len(batch.micro_batches) > 1
    for row, ours_T in zip(batch.micro_batches, trainer.log_probs(batch), strict=True):
        for sample in np.unique(row.sample_T[row.sample_T >= 0]):
            at = np.flatnonzero((row.sample_T == sample) & row.loss_mask_T)
            tokens = torch.from_numpy(samples[sample].tokens).long()
            with torch.no_grad():
                logits = reference(tokens[None]).logits[0] / samples[sample].sampling.temperature
            wanted = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[-len(at) :, 0]
            torch.testing.assert_close(ours_T[at], wanted, atol=2e-5, rtol=0)


def _train(trainer: Trainer, *, max_tokens: int = 1 << 20) -> list[dict[str, float]]:
    batches = [
        make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=max_tokens)[0] for step in STEPS
    ]
    return [trainer.train(batch) for batch in batches]


def _assert_same(ours: list[dict[str, float]], wanted: list[dict[str, float]], *, tolerance: float = 1e-5) -> None:
    assert len(ours) == len(wanted)
    for step, other in zip(ours, wanted, strict=True):
        assert step.keys() == other.keys()
        for name in step.keys() - {"train/step_seconds", "train/tokens_per_second"}:
            assert step[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


def test_loss_and_metrics_do_not_depend_on_how_a_step_is_split(make: Any) -> None:
    whole = _train(make()[0])
    assert whole[0]["train/grad_norm"] > 0
    _assert_same(_train(make()[0], max_tokens=60), whole)  # several micro-batches
    _assert_same(_train(make()[0], max_tokens=1), whole)  # every sequence alone: nothing packed
    batch = make_batches(make_samples(vocab=VOCAB, step=STEPS[0]), step=STEPS[0])[0]
    empty = {item.name: getattr(batch.micro_batches[0], item.name)[:1] for item in fields(MicroBatch)}
    empty |= {
        "cu_seqlens": np.array([0, 1], np.int32),
        "loss_mask_T": np.zeros(1, bool),
        "sample_T": np.array([-1], np.int32),
    }
    padded = replace(batch, micro_batches=(*batch.micro_batches, MicroBatch(**empty)))
    _assert_same([make()[0].train(padded)], whole[:1])


def centred(
    rewards_N: torch.Tensor,
    groups_N: torch.Tensor,
    *,
    truncated_N: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    metadata: Sequence[Mapping[str, Any]],
) -> torch.Tensor:
    """grpo_no_std of a part that is the reward, for samples whose metadata says which they are."""
    assert truncated_N.any() and truncated_N.tolist() == [one["truncated"] for one in metadata]
    assert groups_N.tolist() == [one["task"] for one in metadata]
    return grpo_no_std(parts["right"], groups_N)


def test_an_estimator_of_ones_own_gets_parts_truncation_and_metadata(make: Any) -> None:
    """Those of the samples of policies; the step is the same to the bit as with the built-in estimator that it is made
    of.
    """
    samples = make_samples(vocab=VOCAB)
    samples[6] = replace(samples[6], demonstration=True, rollout_log_probs=np.zeros_like(samples[6].rollout_log_probs))
    samples = [replace(one, status=Status.TRUNCATED if one.index == 1 else Status.COMPLETED) for one in samples]
    metadata = tuple({"task": one.task, "truncated": one.index == 1} for one in samples)
    batch = replace(make_batches(samples)[0], metadata=metadata)
    digests = set()
    for advantage in ("grpo_no_std", f"{__name__}:centred"):
        trainer, policy, _, _ = make(advantage=advantage, sft_coef=0.1)
        assert trainer.train(batch)["train/grad_norm"] > 0
        digests.add(policy.digest())
    assert len(digests) == 1


CALLED: list[tuple[str, int, float]] = []
"""Calls of the hooks below: policy or kind, number, and a sum of the weights."""


def note_pass(moment: BeforeLogProbs) -> None:
    CALLED.append(
        (
            moment.policy,
            moment.batch.step,
            float(moment.chunks[0].decoder.layers[0].mlp.linear_fc1.weight.detach().abs().sum()),
        )
    )


def note_step(moment: BeforeStep) -> None:
    CALLED.append(
        ("step", moment.minibatch, float(moment.chunks[0].decoder.layers[0].mlp.linear_fc1.weight.detach().abs().sum()))
    )
    assert moment.optimizer.param_groups


def fails(moment: BeforeStep) -> None:
    raise RuntimeError("no file")


def two(moment: BeforeStep, more: object) -> None:
    """Take an argument too many."""


def test_hooks_are_called_before_log_probs_and_before_each_step(make: Any) -> None:
    """With the weights that the pass, or the step, begins with; metrics and weights are those without hooks."""
    batch = make_batches(make_samples(vocab=VOCAB), minibatches=2)[0]
    hooks = HooksConfig(before_log_probs=f"{__name__}:note_pass", before_step=f"{__name__}:note_step")
    plain, plain_policy, _, _ = make()
    plain.train(batch)
    CALLED.clear()
    trainer, policy, _, _ = make(hooks=hooks)
    trainer.train(batch)
    assert [call[:2] for call in CALLED] == [("proximal", batch.step), ("step", 0), ("step", 1)]
    assert CALLED[0][2] == CALLED[1][2] != CALLED[2][2]
    assert policy.digest() == plain_policy.digest()


def test_a_hook_that_raises_is_named(make: Any) -> None:
    hooks = HooksConfig(before_step=f"{__name__}:fails")
    trainer, policy, _, _ = make(hooks=hooks)
    before = policy.digest()
    wanted = (
        rf"learner.hooks.before_step: {__name__}:fails failed at step 3: RuntimeError: no file "
        r"\(.*test_megatron_trainer.py, line \d+\)"
    )
    with pytest.raises(HookFailed, match=wanted):
        trainer.train(make_batches(make_samples(vocab=VOCAB))[0])
    assert policy.digest() == before


def test_the_hooks_of_the_examples_log(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    examples = "docs.examples.extending.my_hooks:"
    trainer = make(hooks=HooksConfig(before_log_probs=examples + "log_pass", before_step=examples + "log_norms"))[0]
    with caplog.at_level("INFO", "docs.examples.extending.my_hooks"):
        trainer.train(make_batches(make_samples(vocab=VOCAB, step=10), step=10)[0])
    first, second = [record.getMessage() for record in caplog.records if record.name.endswith("my_hooks")]
    assert first.startswith("log-probs step=10 policy=proximal tokens=") and second.startswith(
        "before step=10 minibatch=0 largest_weight="
    )


@pytest.mark.parametrize(
    ("name", "defect"), [("two", Defect.SIGNATURE), ("none", Defect.NAME), ("CALLED", Defect.KIND)]
)
def test_a_hook_that_cannot_be_called_is_refused_at_the_start(name: str, defect: Defect) -> None:
    with refusal(FunctionRefused, setting="learner.hooks.before_step", path=f"{__name__}:{name}", defect=defect):
        Hooks(HooksConfig(before_step=f"{__name__}:{name}"))


@pytest.mark.parametrize(
    ("wanted", "on_cpu", "on_cuda"),
    [("auto", "float32", "bfloat16"), ("float32", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16")],
)
def test_the_dtype_auto_follows_the_device(make: Any, wanted: str, on_cpu: str, on_cuda: str) -> None:
    assert parallel.choose_dtype(wanted, torch.device("cuda", 0)) == on_cuda
    assert make(dtype=parallel.choose_dtype(wanted, CPU))[1].dtype == on_cpu


def test_megatrons_deterministic_mode_follows_torchs_switch(make: Any) -> None:
    """The rank sets the switch from ``learner.deterministic`` before it builds the model."""
    assert make()[1].config.deterministic_mode is True
    torch.use_deterministic_algorithms(False)
    try:
        assert make()[1].config.deterministic_mode is False
    finally:
        torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_in_chunks_train_what_kept_logits_do(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Over several micro-batches, so the gradients of the output weight add up in Megatron's buffer; the same bits
    every time.
    """
    model = write_tiny_model(tmp_path, vocab_size=VOCAB, tied=tied)
    kept = _train(make(model=model)[0], max_tokens=60)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 5_000)
    digests = set()
    for _ in range(2):
        trainer, policy, _, _ = make(model=model)
        with RaisingOnCuda() as seen:
            _assert_same(_train(trainer, max_tokens=60), kept)
        digests.add(policy.digest())
    assert len(digests) == 1 and seen.found == []
    trainer, policy, _, _ = make(model=model, dtype="bfloat16")
    for step, wanted in zip(_train(trainer, max_tokens=60), kept, strict=True):
        assert step["train/loss"] == pytest.approx(wanted["train/loss"], abs=0.05)
        assert step["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.1)


def test_bfloat16_trains_with_float32_main_weights(make: Any) -> None:
    """Training stays close to float32, and its weights travel in bfloat16."""
    trainer, policy, _, _ = make(dtype="bfloat16")
    for step, wanted in zip(_train(trainer), _train(make()[0]), strict=True):
        assert step["train/loss"] == pytest.approx(wanted["train/loss"], abs=0.05)
        assert step["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.1)
    assert {tensor.dtype for _, tensor in policy.export()} == {torch.bfloat16}


def test_two_ranks_train_what_one_does_and_resume_what_one_has_saved(
    make: Any, model_dir: Path, tmp_path: Path
) -> None:
    """Data and tensor parallel (two processes) against one rank: loss, gradient norm and every metric to 1e-5."""
    trainer, policy, optimizer, proximal = make()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    metrics = []
    for step in STEPS:
        metrics.append(trainer.train(make_batches(make_samples(vocab=VOCAB, step=step), step=step)[0]))
        if step == STEPS[0]:
            write_staged(
                state.stage(
                    checkpoint, step=step, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal)
                )
            )
    results = run_ranks(megatron_ranks.main, (model_dir, checkpoint), world=2, out=tmp_path)
    for layout in ("dp2", "tp2"):
        _assert_skipped_together([result[f"{layout}_skips"] for result in results])
    for result in results:
        _assert_same(result["dp2"]["metrics"], metrics)
        _assert_same(result["tp2"]["metrics"], metrics)
        _assert_same(result["dp2_resumed"]["metrics"], metrics[1:])
        _assert_same(result["tp2_resumed"]["metrics"], metrics[1:])
    for kind in ("dp2", "dp2_resumed", "tp2", "tp2_resumed"):
        assert results[0][kind]["digest"] == results[1][kind]["digest"], kind


def _assert_skipped_together(ranks: list[dict[str, Any]]) -> None:
    """Assert that all ranks skip where one alone had a non-finite loss or gradient, and that the next step is as
    without.
    """
    for rank in ranks:
        assert rank["skipped"] == [0, 1, 0]
        assert rank["digests"][0] == rank["digests"][1] != rank["digests"][2]
        assert rank["digests"][2] == rank["undisturbed"]
        assert rank["norm_of_spoilt_gradient"] is None and not rank["moved_by_it"]
    assert ranks[0]["digests"] == ranks[1]["digests"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_bits(make: Any, tmp_path: Path, dtype: str) -> None:
    """Weights, Adam, proximal copy and random generators come back exactly; the proximal policy is not the present
    one.
    """
    batches = [make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=60)[0] for step in (3, 4, 5)]
    trainer, policy, optimizer, proximal = make(dtype=dtype)
    trainer.train(batches[1])
    proximal.refresh()
    trainer.train(batches[0])
    write_staged(
        state.stage(tmp_path, step=3, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal))
    )
    drawn = (torch.rand(1).item(), np.random.random())
    undisturbed = [trainer.train(batch) for batch in batches[1:]]

    resumed, other, its_optimizer, its_proximal = make(dtype=dtype)
    before = other.digest()
    assert state.load(tmp_path, policy=other, optimizer=its_optimizer, others=OtherModels(proximal=its_proximal)) == (
        3,
        {},
    )
    assert other.digest() != before
    assert (torch.rand(1).item(), np.random.random()) == drawn
    _assert_same([resumed.train(batch) for batch in batches[1:]], undisturbed, tolerance=0)
    assert other.digest() == policy.digest()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"hidden_size": 64}, r"began with .*: .* has the shape \(.*\) in .*, got \("),
        ("llama", {}, r"^model\.path: want the model this run began with "),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    make: Any, here: parallel.Parallel, tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    _, policy, optimizer, _ = make(with_proximal=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_staged(state.stage(checkpoint, step=3, policy=policy, optimizer=optimizer))
    other = build_policy(
        write_tiny_model(tmp_path / "other", family=family, vocab_size=VOCAB, **changes), dtype="float32", parallel=here
    )
    with pytest.raises(ConfigRefused, match=message) as error:
        state.load(checkpoint, policy=other, optimizer=MegatronOptimizer(other, OPTIMIZER, steps=10))
    assert error.value.exit_code == 78


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_run_begins_with_the_weights_of_a_checkpoint_and_a_new_optimizer(
    make: Any, tmp_path: Path, dtype: str
) -> None:
    """The run equals one with a model of these weights from the beginning: also in the main weights of the
    optimizer.
    """
    batches = [make_batches(make_samples(vocab=VOCAB, step=step), step=step, max_tokens=60)[0] for step in (3, 4)]
    trainer, policy, optimizer, proximal = make(dtype=dtype)
    trainer.train(batches[0])
    write_staged(
        state.stage(tmp_path, step=3, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal))
    )

    begun, other, its_optimizer, its_proximal = make(dtype=dtype)
    assert state.load_weights(tmp_path, policy=other, optimizer=its_optimizer) == 3
    its_proximal.refresh()
    assert other.digest() == policy.digest()
    saved = {name: parameter.detach().clone() for name, parameter in other.module.named_parameters()}
    began = begun.train(batches[1])

    alike, twin, twin_optimizer, twin_proximal = make(dtype=dtype)
    with torch.no_grad():
        for name, parameter in twin.module.named_parameters():
            parameter.copy_(saved[name])
    twin_optimizer.inner.reload_model_params()
    twin_proximal.refresh()
    _assert_same([began], [alike.train(batches[1])], tolerance=0)
    assert other.digest() == twin.digest()
    moved = max(
        float((parameter.detach() - saved[name]).abs().max()) for name, parameter in other.module.named_parameters()
    )
    assert 0 < moved < 0.1, "the step was taken from other weights"


def test_the_weights_of_another_model_are_refused(make: Any, tmp_path: Path) -> None:
    _, policy, optimizer, proximal = make()
    (tmp_path / "checkpoint").mkdir()
    write_staged(
        state.stage(
            tmp_path / "checkpoint", step=3, policy=policy, optimizer=optimizer, others=OtherModels(proximal=proximal)
        )
    )
    wider = tmp_path / "wider"
    write_tiny_model(wider, vocab_size=2 * VOCAB)
    _, other, its_optimizer, _ = make(model=wider)
    with refusal(ConfigRefused, field="learner.from_checkpoint"):
        state.load_weights(tmp_path / "checkpoint", policy=other, optimizer=its_optimizer)


def test_the_proximal_policy_is_the_backed_up_one(make: Any) -> None:
    """Old log-probs come from the copy: right after a refresh they are the present ones, later they are not."""
    trainer, policy, _, proximal = make()
    batch = make_batches(make_samples(vocab=VOCAB))[0]
    first = trainer.log_probs(batch)[0]
    trainer.train(batch)
    digest = policy.digest()
    with OtherWeights(policy) as others:
        others.take(proximal)
        assert torch.equal(trainer.log_probs(batch)[0], first)
    assert policy.digest() == digest
    stale = trainer.train(batch)
    assert stale["train/ppo_clip_fraction"] > 0
    proximal.refresh()
    assert trainer.train(batch)["train/ppo_clip_fraction"] == 0


class Copies(TorchDispatchMode):
    """Counts the copies into tensors, by the number of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_place", [False, True], ids=["on the CPU", "as on a device"])
def test_own_weights_go_away_once_and_come_back_once(make: Any, in_place: bool) -> None:
    """With a proximal policy and a reference: one copy out, one in for each of the two, one back; on the CPU none."""
    _, policy, _, proximal = make()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(1.0)
    reference, other = WeightBackup(policy), policy.digest()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(1.0)
    places = [parameter.data_ptr() for parameter in policy.module.parameters()]
    size, own = sum(parameter.numel() for parameter in policy.module.parameters()), policy.digest()
    others, copies = OtherWeights(policy, in_place=in_place), Copies()
    for _ in range(2):  # the second time, the copy on the host is there already
        with copies:
            others.__enter__()
            others.take(proximal)
        assert policy.digest() not in (own, other)
        with copies:
            others.take(reference)
        assert policy.digest() == other
        if in_place:
            assert places == [parameter.data_ptr() for parameter in policy.module.parameters()]
        with copies:
            others.__exit__()
        assert policy.digest() == own
        assert places == [parameter.data_ptr() for parameter in policy.module.parameters()]
    assert copies.elements == (2 * 4 * size if in_place else 0)


def test_own_weights_come_back_after_an_error(make: Any) -> None:
    _, policy, _, proximal = make()
    with torch.no_grad():
        next(policy.module.parameters()).add_(1.0)
    own = policy.digest()
    with pytest.raises(KeyError), OtherWeights(policy) as others:
        others.take(proximal)
        assert policy.digest() != own
        raise KeyError
    assert policy.digest() == own


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_operations_of_a_step_are_those_that_torch_counts(make: Any, tmp_path: Path, tied: bool) -> None:
    """Matrix products are counted by torch in the forward pass, a third of training; attention by its formula."""
    model = write_tiny_model(tmp_path, vocab_size=VOCAB, tied=tied)
    trainer, policy, _, _ = make(model=model, with_proximal=False)
    batch = make_batches(make_samples(vocab=VOCAB), max_tokens=60)[0]
    counter = FlopCounterMode(display=False)
    with counter:
        trainer.log_probs(batch)
    counted = counter.get_flop_counts()["Global"]
    products = sum(
        count for operation, count in counted.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    lengths = [int(length) for row in batch.micro_batches for length in np.diff(row.cu_seqlens)]
    config = policy.config
    pairs = sum(length * (length + 1) for length in lengths)
    attention = 6 * pairs * config.num_layers * config.num_attention_heads * config.kv_channels
    meter = Meter(policy, StepFlops.read(model))
    trainer.train(batch)
    total = meter.operations(batch.step, trainer.spans)
    assert total == 3 * products + attention
    assert meter.metrics(batch.step, trainer.spans, 2.0) == {"train/tflops": pytest.approx(total / 2e12)}
    critic = StepFlops.read(model, value_head=True)
    alone, both = (
        Meter(policy, StepFlops.read(model), critic, warmup_steps=batch.step - one).operations(
            batch.step, trainer.spans
        )
        for one in (0, 1)
    )
    assert 0 < alone < total and both == alone + total
    assert not undocumented({"train/tflops", "train/mfu", "train/peak_memory_bytes"})


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize("correction", some(PRESETS, 5))
def test_every_correction_trains_and_names_its_metrics(make: Any, correction: str) -> None:
    metrics = _train(make(correction=correction, with_proximal=False)[0])[-1]
    assert ("offpolicy/tis_weight_mean" in metrics) == (AlgorithmConfig(correction=correction).weight.level != "none")
    assert all(np.isfinite(value) for value in metrics.values())
    assert not undocumented(metrics)
    assert metrics["offpolicy/lag_share/0"] + metrics["offpolicy/lag_share/1"] == pytest.approx(1)


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone(make: Any) -> None:
    """Equal rewards give no gradient: only the decay changes weights."""
    trainer, policy, _, _ = make(entropy={"coef": 0.0})
    before = {name: tensor.clone() for name, tensor in policy.export()}
    batch = make_batches(make_samples(vocab=VOCAB))[0]
    batch.rewards_N[:] = 1
    assert trainer.train(batch)["train/grad_norm"] == 0
    rate = learning_rate(OPTIMIZER, 3, 10)
    for name, tensor in policy.export():
        kept = 1.0 if "norm" in name else 1 - rate * OPTIMIZER.weight_decay
        torch.testing.assert_close(tensor, before[name] * kept, atol=0, rtol=1e-6)


def test_the_learning_rate_warms_up_and_decays() -> None:
    def rates(decay: str) -> list[float]:
        config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, lr_decay=decay)
        return [learning_rate(config, step, 6) for step in range(1, 8)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.775, 0.55, 0.325, 0.1])
    assert rates("cosine") == pytest.approx(
        [0.5, 1, 1, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1 + 0.9 * (1 - 0.5**0.5) / 2, 0.1]
    )


def test_a_schedule_by_tokens_goes_on_behind_a_checkpoint(here: parallel.Parallel, model_dir: Path) -> None:
    config = OptimizerConfig(lr=1e-3, warmup_tokens=10**6)
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    trainer = Trainer(policy, MegatronOptimizer(policy, config, steps=10), AlgorithmConfig(), max_lag=2)
    first, second = (make_batches(make_samples(vocab=VOCAB, step=step), step=step)[0] for step in (3, 4))
    assert trainer.train(first)["train/lr"] == pytest.approx(1e-9 * first.num_tokens)
    again = Trainer(policy, MegatronOptimizer(policy, config, steps=10), AlgorithmConfig(), max_lag=2)
    again.restore(trainer.numbers)
    for each in (trainer, again):
        assert each.train(second)["train/lr"] == pytest.approx(1e-9 * (first.num_tokens + second.num_tokens))
    with refusal(ConfigRefused, field="learner.optimizer.warmup_tokens, lr_decay_tokens", got="> 0"):
        again.restore({"kl_scale": 1.0})


def test_the_coefficient_of_the_entropy_bonus_adapts_and_goes_on_behind_a_checkpoint(
    here: parallel.Parallel, model_dir: Path
) -> None:
    """Above any entropy of the model, the target is never reached; below all, the bonus is never applied again."""
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    batches = [make_batches(make_samples(vocab=VOCAB, step=step), step=step)[0] for step in (3, 4, 5)]

    def trainer(**entropy: float) -> Trainer:
        algorithm = algorithm_of(entropy={"coef": 0.01} | entropy)
        return Trainer(policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-12), steps=10), algorithm, max_lag=2)

    fixed, low = trainer(), trainer(target=99.0, delta=0.25, coef_max=0.4)
    found = [low.train(batch) for batch in batches]
    assert [metrics["train/entropy_coef"] for metrics in found] == [0.01, pytest.approx(0.26), 0.4]
    plain = fixed.train(batches[1])
    assert "train/entropy_coef" not in plain and set(fixed.numbers) == {"kl_scale", "trained_tokens"}
    bonus = (0.26 - 0.01) * found[1]["train/entropy"]
    assert found[1]["train/loss"] == pytest.approx(plain["train/loss"] - bonus, abs=1e-4), (
        "the weights stay as they are"
    )
    again = trainer(target=99.0, delta=0.25, coef_max=0.4)
    again.restore(low.numbers)
    assert again.adaptive.entropy_bonus == low.adaptive.entropy_bonus
    assert again.train(batches[0])["train/entropy_coef"] == 0.4
    high = trainer(target=1e-3)
    assert [high.train(batch)["train/entropy_coef"] for batch in batches] == [0.01, 0, 0]
    again.restore(high.numbers)
    assert again.train(batches[0])["train/entropy_coef"] == 0
    again.restore(fixed.numbers)  # of a run that had no target: it begins with the settings'
    assert not undocumented(found[0])


def test_running_baselines_go_on_behind_a_checkpoint_and_repeat_its_steps(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path
) -> None:
    """A restart takes steps 4 and 5 again from the checkpoint of step 3, and has the same bits. The roles are those of
    the samples.
    """
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    batches = []
    for step in (3, 4, 5):
        (batch,) = make_batches(make_samples(vocab=VOCAB, step=step), step=step)
        batches.append(replace(batch, metadata=tuple({"player": number % 2} for number in range(len(batch.rewards_N)))))

    def trainer(**settings: Any) -> tuple[Trainer, MegatronOptimizer]:
        optimizer = MegatronOptimizer(policy, OptimizerConfig(lr=1e-12), steps=10)
        algorithm = algorithm_of(**({"advantage": "rae", "rae": {"role": "player", "decay": 0.5}} | settings))
        return Trainer(policy, optimizer, algorithm, max_lag=2), optimizer

    first, optimizer = trainer()
    first.train(batches[0])
    rewards_N = batches[0].rewards_N.astype(float)
    for role in (0, 1):
        share = 1 - 0.5 ** len(rewards_N[role::2])
        assert first.adaptive.baselines[str(role)] == pytest.approx(share * rewards_N[role::2].mean(), rel=1e-12)
    write_staged(state.stage(tmp_path, step=3, policy=policy, optimizer=optimizer, numbers=first.numbers))
    wanted = [first.train(batch) for batch in batches[1:]]
    again, optimizer = trainer()
    again.restore(state.load(tmp_path, policy=policy, optimizer=optimizer)[1])
    for batch, metrics in zip(batches[1:], wanted, strict=True):
        found = again.train(batch)
        assert {name for name, value in metrics.items() if found[name] != value} <= {
            "train/step_seconds",
            "train/tokens_per_second",
        }
    assert again.adaptive.baselines == first.adaptive.baselines and again.numbers == first.numbers
    assert wanted[0]["train/baseline_mean"] != wanted[1]["train/baseline_mean"]
    plain, _ = trainer(advantage="grpo", rae={"role": "", "decay": 0.95})
    plain.restore(first.numbers)  # of a run with baselines, which this one has no use for
    assert not plain.adaptive.baselines and "train/baseline_mean" not in plain.train(batches[0])
    with refusal(ValueError, place=re.compile(r"rae\.role$"), got="'palyer'"):
        trainer(rae={"role": "palyer"})[0].train(batches[0])


def test_a_discounted_return_trains_late_tokens_more(here: parallel.Parallel, model_dir: Path) -> None:
    """The loss of a token is minus its advantage at a ratio of 1: at gamma 0 the last token of each response alone has
    one.
    """
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    (batch,) = make_batches(make_samples(vocab=VOCAB, step=3), step=3)

    def loss(gamma: float) -> float:
        algorithm = AlgorithmConfig(correction="none", advantage="reinforce", gamma=gamma)
        trainer = Trainer(policy, MegatronOptimizer(policy, OptimizerConfig(lr=1e-12), steps=10), algorithm, max_lag=2)
        return trainer.train(batch)["train/loss"]

    for gamma in (0.0, 0.7, 1.0):
        returns = [
            reward * gamma**left
            for reward, tokens in zip(batch.rewards_N, batch.trainable_N, strict=True)
            for left in range(tokens)
        ]
        assert loss(gamma) == pytest.approx(-sum(returns) / batch.num_tokens, rel=1e-5)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=30))
def test_packed_rows_find_every_token_and_waste_less_than_half(lengths: list[int]) -> None:
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    row = packed_row(cu_seqlens, torch.arange(sum(lengths)))
    places = sum(count * width for count, width in row.buckets)
    assert places < 2 * sum(lengths)
    assert sum(count for count, _ in row.buckets) == len(lengths)
    if row.take_P is not None and row.give_T is not None:
        assert len(row.take_P) == places
        assert torch.equal(row.take_P[row.give_T], torch.arange(sum(lengths)))


SPOILT = {
    "a reward that is no number": {"reward": np.nan},
    "a reward beyond float32": {"reward": np.inf},
    "a gradient whose square is beyond float32": {"reward": 1e25, "advantage": "reinforce"},
}


@pytest.mark.parametrize("dtype", ["float32", *rarely(["bfloat16"])])
@pytest.mark.parametrize("case", SPOILT)
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(make: Any, case: str, dtype: str) -> None:
    """The step after it ends with the bits of a run without it: weights, moments and step counts are those of
    before.
    """
    good, bad, last = (make_batches(make_samples(vocab=VOCAB, step=step), step=step)[0] for step in (3, 4, 5))
    changes = dict(SPOILT[case])
    bad.rewards_N[0] = changes.pop("reward")
    trainer, policy, _, _ = make(dtype=dtype, **changes)
    trainer.train(good)
    digest = policy.digest()
    skipped = trainer.train(bad)
    assert (skipped["train/skipped_minibatches"], skipped["train/tokens"]) == (1, 0)
    assert skipped["train/lr"] == learning_rate(OPTIMIZER, 4, 10)
    assert not {"train/loss", "train/grad_norm"} & skipped.keys()
    assert not undocumented(skipped)
    assert policy.digest() == digest
    metrics = trainer.train(last)

    undisturbed, other, _, _ = make(dtype=dtype, **changes)
    undisturbed.train(good)
    _assert_same([metrics], [undisturbed.train(last)], tolerance=0)
    assert metrics["train/skipped_minibatches"] == 0
    assert policy.digest() == other.digest()


def test_the_first_step_of_a_run_may_be_skipped(make: Any) -> None:
    """Adam has no state yet, and the next step is its first."""
    bad, good = (make_batches(make_samples(vocab=VOCAB, step=step), step=step)[0] for step in (3, 4))
    bad.rewards_N[0] = np.inf
    (trainer, policy, _, _), (undisturbed, other, _, _) = make(), make()
    assert trainer.train(bad)["train/skipped_minibatches"] == 1
    _assert_same([trainer.train(good)], [undisturbed.train(good)], tolerance=0)
    assert policy.digest() == other.digest()


def test_of_several_minibatches_only_the_spoilt_one_is_skipped(make: Any) -> None:
    samples = make_samples(vocab=VOCAB)
    batch = make_batches(samples, minibatches=2)[0]
    spoilt = int(np.flatnonzero(batch.minibatches_N == 0)[0])
    batch.rewards_N[spoilt] = np.nan
    trainer, policy, _, _ = make(with_proximal=False)
    digest = policy.digest()
    metrics = trainer.train(batch)
    assert metrics["train/skipped_minibatches"] == 1
    assert metrics["train/tokens"] == batch.trainable_N[batch.minibatches_N == 1].sum()
    assert metrics["train/grad_norm"] > 0
    assert {name for name, value in metrics.items() if not np.isfinite(value)} == {
        "train/reward_mean",
        "train/reward_std",
    }
    assert policy.digest() != digest


@pytest.mark.parametrize("cut", [(0, 5, 6), tuple(range(16))], ids=["some", "all"])
def test_masked_truncated_samples_train_nothing(make: Any, cut: tuple[int, ...]) -> None:
    samples = make_samples(vocab=VOCAB)
    truncated = [replace(one, status=Status.TRUNCATED) if place in cut else one for place, one in enumerate(samples)]
    untrained = [
        replace(one, loss_mask=np.zeros_like(one.loss_mask)) if place in cut else one
        for place, one in enumerate(truncated)
    ]
    trainer, policy, _, _ = make(mask_truncated=True, with_proximal=False)
    other, wanted, _, _ = make(with_proximal=False)
    _assert_same(
        [trainer.train(make_batches(truncated)[0])], [other.train(make_batches(untrained)[0])], tolerance=1e-12
    )
    assert policy.digest() == wanted.digest()
    assert other.train(make_batches(truncated)[0])["train/tokens"] == sum(one.response_length for one in samples)


def test_the_rate_of_vcpo_is_whole_from_its_base_on(make: Any) -> None:
    def rate(**settings: Any) -> float:
        return _train(make(with_proximal=False, **settings)[0])[0]["train/lr"]

    share = rate(ess_lr=1.0) / rate()
    assert 0 < share < 1
    assert rate(ess_lr=share**2 / 2) == rate()
    assert rate(ess_lr=0.9) == pytest.approx(rate() * min(1.0, share / 0.9**0.5))
