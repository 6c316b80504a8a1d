"""The training data of a step in files: fields, equality with the numbers of the step, layouts, and memory; with real
Megatron.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.algorithm_settings import algorithm_of
from tests.bus_kit import make_episode
from tests.debug_kit import VOCAB, rollout
from tests.integration.critic_ranks import build
from tests.integration.debug_ranks import STEP_LAYOUTS, packed
from tests.integration.debug_ranks import main as two_ranks
from tests.integration.megatron_ranks import OPTIMIZER
from tests.learner_steps import make_batches, make_samples, run_ranks
from tidemill.learner.algorithms.sections import EntropyConfig, KLConfig
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
from tidemill.learner.debug.collector import LOGITS_POSITIONS, Collector
from tidemill.learner.debug.comparison import compare_train
from tidemill.learner.debug.rollout_file import save_rollout
from tidemill.learner.debug.train_file import TrainDump, critic_path, read, read_train, record_path
from tidemill.learner.layout import parallel
from tidemill.learner.trainer.backups import OtherModels, WeightBackup
from tidemill.learner.trainer.trainer import Trainer

FILES = "t_{step}_{rank}.safetensors"
COMPARED = ("old_log_probs", "current_log_probs", "policy_importance_ratio")


@pytest.fixture
def make(here: parallel.Parallel, model_dir: Path, tmp_path: Path) -> Any:
    """Return a function that makes a trainer, with a collector that writes below ``tmp_path``."""

    def build(
        *, saves: bool = True, reference: bool = False, path: str = FILES, **algorithm: Any
    ) -> tuple[Trainer, Any]:
        policy = build_policy(model_dir, dtype="float32", parallel=here)
        config = algorithm_of(**algorithm)
        trainer = Trainer(
            policy,
            MegatronOptimizer(policy, OPTIMIZER, steps=400),
            config,
            max_lag=2,
            others=OtherModels(reference=WeightBackup(policy) if reference else None),
            collector=Collector(str(tmp_path / path), here) if saves else None,
        )
        return trainer, policy

    return build


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}


def of(dump: TrainDump, name: str, step: int = 0) -> list[Any]:
    return list(dump.steps[step].debug_data[name])


def test_a_dump_has_every_field_and_the_step_the_same_numbers(make: Any, tmp_path: Path) -> None:
    samples = make_samples(vocab=VOCAB)
    batch = make_batches(samples, max_tokens=60, minibatches=2)[0]
    # With an entropy bonus no sample is without gradient: the trainer that saves nothing leaves none out, either.
    algorithm = {"correction": "decoupled", "entropy": EntropyConfig(coef=0.01)}
    plain, _ = make(saves=False, **algorithm)
    trainer, policy = make(**algorithm)
    digest = policy.digest()
    metrics = trainer.train(batch)
    assert numbers(metrics) == numbers(plain.train(batch))
    assert policy.digest() != digest
    dump = read_train(tmp_path / "t_3_0.safetensors")
    header = read(tmp_path / "t_3_0.safetensors")[0]
    assert header["rollout_id"] == header["step"] == 3
    assert (dump.kind, dump.rollout_id, dump.rank, dump.role, dump.num_steps) == ("train", 3, 0, "actor", 2)
    assert dump.parallel_info == {
        f"{axis}_{what}": int(what == "size") for axis in ("dp", "tp", "pp", "cp") for what in ("rank", "size")
    }
    assert {name: dump.metrics[name] for name in dump.metrics} == {name: metrics[name] for name in dump.metrics}
    assert np.mean([one.grad_norm for one in dump.steps]) == pytest.approx(metrics["train/grad_norm"])
    assert sum(one.loss_dict["loss"] for one in dump.steps) / 2 == pytest.approx(metrics["train/loss"])
    seen = set()
    for number in range(2):
        ids = dump.steps[number].debug_data["sequence_ids"].tolist()
        seen |= set(ids)
        for place, sequence in enumerate(ids):
            sample = samples[sequence]
            length = sample.response_length
            assert of(dump, "unconcat_tokens", number)[place].tolist() == sample.tokens.tolist()
            assert (of(dump, "response_lengths", number)[place], of(dump, "total_lengths", number)[place]) == (
                length,
                len(sample.tokens),
            )
            np.testing.assert_array_equal(of(dump, "rollout_log_probs", number)[place], sample.rollout_log_probs)
            assert of(dump, "loss_masks", number)[place].tolist() == [1] * length
            assert len(set(of(dump, "advantages", number)[place].tolist())) == 1
            current, old = (of(dump, name, number)[place] for name in ("current_log_probs", "old_log_probs"))
            np.testing.assert_allclose(
                of(dump, "policy_importance_ratio", number)[place], np.exp(current - old), rtol=1e-6
            )
            assert (of(dump, "tis_importance_weights", number)[place] > 0).all()
    assert seen == set(range(len(samples)))
    data = dump.steps[0].debug_data
    assert data["logits_sample"].shape[1] == VOCAB and len(data["logits_sample"]) <= LOGITS_POSITIONS * len(
        batch.micro_batches
    )


def test_log_probs_and_logits_are_those_of_the_model(make: Any, tmp_path: Path) -> None:
    """The saved log-probs of every response are those of the trainer's own pass; a row of logits gives its token's
    log-prob.
    """
    samples = make_samples(vocab=VOCAB, temperature=(0.7, 1.3, 0.4))
    batch = make_batches(samples, max_tokens=60)[0]
    trainer, _ = make(reference=True, kl=KLConfig(coef=0.01))
    want = trainer.log_probs(batch)
    trainer.train(batch)
    dump, record = read_train(tmp_path / "t_3_0.safetensors"), read_train(record_path(tmp_path / "t_3_0.safetensors"))
    by_sequence = {}
    for row, values_T in zip(batch.micro_batches, want, strict=True):
        for sequence in np.unique(row.sequence_T[row.sequence_T >= 0]):
            by_sequence[int(sequence)] = values_T[
                torch.from_numpy((row.sequence_T == sequence) & row.loss_mask_T)
            ].numpy()
    for name, one in (("current_log_probs", dump), ("ref_log_probs", dump), ("log_probs", record)):
        for sequence, values in zip(one.steps[0].debug_data["sequence_ids"].tolist(), of(one, name), strict=True):
            np.testing.assert_array_equal(values, by_sequence[sequence])
    assert compare_train(dump, record, 0.0).first is None
    assert "tis_importance_weights" not in record.steps[0].debug_data and record.steps[0].grad_norm is None
    first = dump.steps[0].debug_data
    logits = torch.from_numpy(first["logits_sample"][0]).log_softmax(-1)
    place = first["total_lengths"][0] - first["response_lengths"][0]
    assert (first["logits_sequences"][0], first["logits_positions"][0]) == (first["sequence_ids"][0], place)
    token = int(first["unconcat_tokens"][0][place])
    assert float(logits[token]) == pytest.approx(float(first["current_log_probs"][0][0]), abs=1e-5)


@pytest.mark.parametrize(
    ("correction", "compared"), [("bypass", "rollout_log_probs"), ("decoupled", "current_log_probs")]
)
def test_the_ratio_is_against_the_policy_that_the_loss_compares_with(
    make: Any, tmp_path: Path, correction: str, compared: str
) -> None:
    make(correction=correction)[0].train(make_batches(make_samples(vocab=VOCAB))[0])
    data = read_train(tmp_path / "t_3_0.safetensors").steps[0].debug_data
    for ratio, current, anchor in zip(
        data["policy_importance_ratio"], data["current_log_probs"], data[compared], strict=True
    ):
        np.testing.assert_allclose(ratio, np.exp(current - anchor), rtol=1e-5)
    record = read_train(record_path(tmp_path / "t_3_0.safetensors")).steps[0].debug_data
    for old, first in zip(
        data["old_log_probs"], record["log_probs"], strict=True
    ):  # with one minibatch, the algorithm needs none
        np.testing.assert_array_equal(old, first)


def test_without_a_policy_to_compare_with_the_ratio_is_against_the_old_one(make: Any, tmp_path: Path) -> None:
    """Also in the second minibatch, where the policy has moved, and with ``loglinear``, which computes no old
    log-probs.
    """
    for correction in ("tis", "a3po"):
        make(correction=correction)[0].train(make_batches(make_samples(vocab=VOCAB), minibatches=2)[0])
        file = tmp_path / "t_3_0.safetensors"
        before = read_train(record_path(file)).steps[0].debug_data
        by_sequence = dict(zip(before["sequence_ids"].tolist(), before["log_probs"], strict=True))
        for number, step in enumerate(read_train(file).steps):
            data = step.debug_data
            for sequence, old, current, ratio in zip(
                data["sequence_ids"].tolist(), *(of(read_train(file), name, number) for name in COMPARED), strict=True
            ):
                np.testing.assert_array_equal(old, by_sequence[sequence])
                np.testing.assert_allclose(ratio, np.exp(current - old), rtol=1e-6)
            assert (np.concatenate(data["policy_importance_ratio"]) == 1).all() == (number == 0), correction


ASKED_FOR = {
    *("unconcat_tokens", "response_lengths", "total_lengths", "loss_masks"),
    *("advantages", "returns", "old_log_probs", "ref_log_probs", "values"),
    *("current_log_probs", "current_entropy", "policy_importance_ratio", "tis_importance_weights", "logits_sample"),
}
"""Fields of ``debug_data`` in slime's page on debugging."""
MORE = {"sequence_ids", "sample_ids", "rollout_log_probs", "logits_sequences", "logits_positions"}
"""Further ones of every dump."""


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_dump_with_reference_and_critic_has_all_fields_of_slimes(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path, minibatches: int
) -> None:
    built = build(model_dir, here, saves=f"{tmp_path}/{FILES}", kl=KLConfig(coef=0.1))
    built.train(3, here, minibatches=minibatches)
    file = tmp_path / "t_3_0.safetensors"
    header, dump = read(file)[0], read_train(file)
    assert {"rollout_id", "rank", "role", "num_steps", "steps", "parallel_info"} <= header.keys()
    assert all(one.keys() == {"step_id", "loss_dict", "grad_norm"} for one in header["steps"])
    assert dump.num_steps == minibatches
    for step in dump.steps:
        assert step.debug_data.keys() == ASKED_FOR | MORE
        assert len({len(step.debug_data[name]) for name in (ASKED_FOR | {"sequence_ids"}) - {"logits_sample"}}) == 1, (
            "one for each sequence"
        )
    of_critic = read_train(critic_path(file))
    assert (of_critic.role, of_critic.num_steps) == ("critic", minibatches)
    for step in of_critic.steps:
        assert {"values", "returns", "advantages", "ref_log_probs", "current_values"} <= step.debug_data.keys()
    record = read_train(record_path(file))
    assert {"log_probs", "response_lengths", "total_lengths"} <= record.steps[0].debug_data.keys()


def test_sequences_of_one_episode_are_apart(make: Any, tmp_path: Path) -> None:
    """Two episodes of two sequences each: responses of 6 tokens, two of them of a tool, and of 2."""
    samples = [make_episode(index=index, group_size=2, reward=float(index)) for index in range(2)]
    make()[0].train(make_batches(samples, step=8)[0])
    data = read_train(tmp_path / "t_8_0.safetensors").steps[0].debug_data
    assert sorted(data["sequence_ids"].tolist()) == [0, 1, 2, 3]
    order = np.argsort(data["sequence_ids"])
    assert data["sample_ids"][order].tolist() == [0, 0, 1, 1]
    assert data["total_lengths"][order].tolist() == [10, 6, 10, 6]
    assert data["response_lengths"][order].tolist() == [6, 2, 6, 2]
    assert data["loss_masks"][order[0]].tolist() == [1, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(data["rollout_log_probs"][order[1]], np.array([-0.1, -0.4], np.float32))
    assert data["unconcat_tokens"][order[1]].tolist() == [1, 2, 8, 9, 54, 55]


def losses(dumps: list[TrainDump]) -> dict[str, float]:
    names = ("train/loss", "train/grad_norm", "train/kl_reference", "offpolicy/logprob_diff_abs", "train/entropy")
    return {name: dumps[0].metrics[name] for name in names if name in dumps[0].metrics}


def test_a_recorded_step_has_the_same_losses_at_another_layout(make: Any, model_dir: Path, tmp_path: Path) -> None:
    """One rank, one rank with many micro-batches, and two ranks in every way: from one file. Logits are those of the
    whole vocabulary.
    """
    file = tmp_path / "rollout_3.msgpack"
    save_rollout(file, rollout())
    found = {}
    for name, max_tokens in (("whole", 1 << 20), ("split", 40), ("as two ranks", 80)):
        make(path=f"{name}_{{step}}_{{rank}}.safetensors")[0].train(
            packed(file, data_parallel=1, max_tokens=max_tokens)[0]
        )
        found[name] = [read_train(tmp_path / f"{name}_3_0.safetensors")]
    ranks = run_ranks(two_ranks, (model_dir, file), world=2, out=tmp_path)
    for name in STEP_LAYOUTS:
        files = [tmp_path / f"{name}_3_{rank}.safetensors" for rank in (0, 1)]
        # Of tensor-parallel ranks the first, because the others have the same values; of stages the last, which has
        # logits.
        writes = [not name.startswith("pp"), not name.startswith("tp")]
        assert [one.exists() for one in files] == writes
        found[name] = [read_train(one) for one, written in zip(files, writes, strict=True) if written]
    for name in ("tp2", "tp2 in sequence", "cp2", "pp2"):  # one replica has the rows of one rank
        for dump in found[name]:
            same = compare_train(dump, found["as two ranks"][0], 1e-4)
            assert same.first is None and "logits_sample" in same.compared, name
            logits = dump.steps[0].debug_data["logits_sample"]
            assert (
                logits.shape == found["as two ranks"][0].steps[0].debug_data["logits_sample"].shape
                and logits.shape[1] == VOCAB
            )
            assert np.abs(logits).min(-1).max() > 0, "zeros of another part of the row"
    for rank in ranks:  # all ranks know the memory of each, and what rank 0 was asked for
        assert rank["memory"] == ranks[0]["memory"]
        assert rank["agreed"] == [{"steps": 3, "memory": True, "rank": 1}, None]
    assert ranks[0]["memory"]["host"] == pytest.approx([rank["own memory"] for rank in ranks], rel=0.05)
    want = found["whole"][0]
    assert want.metrics["train/grad_norm"] > 0
    covered: set[int] = set()
    for name, dumps in found.items():
        assert losses(dumps) == pytest.approx(losses([want]), rel=1e-5, abs=1e-6), name
        for dump in dumps:
            assert compare_train(dump, want, 1e-4).first is None, name
            covered |= set(dump.steps[0].debug_data["sequence_ids"].tolist()) if name == "dp2" else set()
    assert covered == set(range(16))
    assert [dump.parallel_info["dp_rank"] for dump in found["dp2"]] == [0, 1]
    assert found["tp2"][0].parallel_info["tp_size"] == 2


@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_does_not_grow(make: Any, steps: int) -> None:
    """Each step's copies are freed when its files are written: to keep them would take 0.1 MB a step here."""
    trainer, _ = make(path="same_{step}_{rank}.safetensors")
    batch = make_batches(make_samples(vocab=VOCAB, groups=24, group_size=8))[0]
    process, after = psutil.Process(), {}
    for number in range(1, steps + 1):
        trainer.train(batch)
        if number in (20, steps):
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # the allocator keeps up to 20 MB of freed memory, which hid a leak
            after[number] = process.memory_info().rss
    assert after[steps] - after[20] < (steps - 20) * 0.1e6 / 2
