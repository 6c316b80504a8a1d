"""Scores of teachers: bounds in samples, place in batches, effect on the loss, and the settings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import data_kit
from tests.algorithm_settings import algorithm_of
from tests.bus_kit import make_sample
from tests.check_kit import write_model, write_run
from tests.learner_steps import make_batches, make_samples
from tests.refusals import refusal
from tidemill.actors.config import Teachers, chosen
from tidemill.actors.errors import EngineFailed
from tidemill.actors.teachers import request_of, scores_in
from tidemill.bus.errors import WireError
from tidemill.bus.section import read
from tidemill.bus.wire.codec import decode_sample, encode_sample
from tidemill.bus.wire.invariants import MIN_LOG_PROB, check_sample
from tidemill.bus.wire.messages import SCHEMA, Sample, SequenceSize
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.learner.algorithms.aggregation import Denominators
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.algorithms.kl import top_k_divergence
from tidemill.learner.algorithms.objective import Objective
from tidemill.learner.algorithms.tokens import Tokens
from tidemill.learner.batch.batch import MicroBatch
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.failures import describe_invalid
from tidemill.learner.buffer.sample_index import index_of
from tidemill.learner.feed.feed_messages import decode_batch, encode_batch
from tidemill.learner.kernels import logprobs

R = 8
SCORED = make_sample(
    teacher_log_probs=np.linspace(-2, -0.1, R, dtype=np.float32),
    teacher_top_ids=np.arange(2 * R, dtype=np.int32),
    teacher_top_log_probs=np.linspace(-3, -0.2, 2 * R, dtype=np.float32),
)


def with_value(array: Any, where: int, value: float) -> Any:
    changed = array.copy()
    changed[where] = value
    return changed


def test_scores_travel_in_a_message_of_the_first_schema() -> None:
    """A reader that ignores them misreads nothing."""
    found = decode_sample(encode_sample(SCORED))
    check_sample(found, vocab_size=100)
    assert (found.schema, found.teacher_top_k, found.extra) == (SCHEMA, 2, {})
    for name in ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(SCORED, name))
    assert encode_sample(
        replace(SCORED, teacher_log_probs=None, teacher_top_ids=None, teacher_top_log_probs=None)
    ) == encode_sample(make_sample()), "without scores the bytes are those of earlier releases"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"teacher_log_probs": np.zeros(R - 1, np.float32)}, "teacher_log_probs"),
        ({"teacher_log_probs": None}, "teacher_log_probs"),
        ({"teacher_log_probs": with_value(SCORED.teacher_log_probs, 3, 1e-3)}, "teacher_log_probs[3]"),
        ({"teacher_log_probs": with_value(SCORED.teacher_log_probs, 4, np.nan)}, "teacher_log_probs[4]"),
        ({"teacher_log_probs": with_value(SCORED.teacher_log_probs, 4, 1.01 * MIN_LOG_PROB)}, "teacher_log_probs[4]"),
        (
            {
                "loss_mask": with_value(SCORED.loss_mask, 6, 0),
                "rollout_log_probs": with_value(SCORED.rollout_log_probs, 6, 0),
            },
            "teacher_log_probs[6]",
        ),
        ({"teacher_top_ids": None}, "teacher_top_ids, teacher_top_log_probs"),
        ({"teacher_top_ids": np.zeros(2 * R + 1, np.int32)}, "teacher_top_ids, teacher_top_log_probs"),
        ({"teacher_top_ids": with_value(SCORED.teacher_top_ids, 5, 100)}, "teacher_top_ids[5]"),
        ({"teacher_top_ids": with_value(SCORED.teacher_top_ids, 5, -1)}, "teacher_top_ids[5]"),
        ({"teacher_top_log_probs": with_value(SCORED.teacher_top_log_probs, 5, np.inf)}, "teacher_top_log_probs[5]"),
    ],
)
def test_scores_out_of_bounds_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as caught:
        check_sample(replace(SCORED, **change), vocab_size=100)
    assert caught.value.field == field


def scored(sample: Sample, top_k: int) -> Sample:
    """Return the sample with scores that name their tokens: -(token + 1) / 1000, and listed ids token + 0, 1, ..."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    log_probs = np.where(sample.loss_mask, -(tokens + 1) / 1000, 0).astype(np.float32)
    ids = (tokens[:, None] + np.arange(top_k)).astype(np.int32)
    top = (
        {"teacher_top_ids": ids.ravel(), "teacher_top_log_probs": (-ids.ravel() / 1000).astype(np.float32)}
        if top_k
        else {}
    )
    return replace(sample, teacher_log_probs=log_probs, **top)


def rows_of(micro_batch: MicroBatch, top_k: int) -> None:
    """Check every score of a row by the target that it belongs to."""
    mask_T, targets_T = micro_batch.loss_mask_T, micro_batch.targets_T
    np.testing.assert_allclose(micro_batch.teacher_log_probs_T, np.where(mask_T, -(targets_T + 1) / 1000, 0), atol=1e-6)
    ids_TK = np.where(mask_T[:, None], targets_T[:, None] + np.arange(top_k), 0)
    np.testing.assert_array_equal(micro_batch.teacher_top_ids_TK, ids_TK.ravel())
    np.testing.assert_allclose(micro_batch.teacher_top_log_probs_TK, (-ids_TK / 1000).ravel(), atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 3])
def test_scores_stand_beside_their_targets_in_every_row(top_k: int) -> None:
    samples = [scored(one, top_k) for one in make_samples(vocab=50)]
    samples[2] = replace(samples[2], loss_mask=with_value(samples[2].loss_mask, 0, 0))
    samples[2] = scored(
        replace(samples[2], rollout_log_probs=samples[2].rollout_log_probs * samples[2].loss_mask), top_k
    )
    for batch in make_batches(samples, data_parallel=2, max_tokens=64, pad_to=4):
        assert batch.teacher_top_k == top_k
        for row in batch.micro_batches:
            rows_of(row, top_k)
        again = decode_frames(encode_batch(batch))
        for row, wanted in zip(again.micro_batches, batch.micro_batches, strict=True):
            for name in ("teacher_log_probs_T", "teacher_top_ids_TK", "teacher_top_log_probs_TK"):
                np.testing.assert_array_equal(getattr(row, name), getattr(wanted, name))


def decode_frames(frames: list[Any]) -> Any:
    import msgpack

    return decode_batch(msgpack.unpackb(frames[0]), frames[1:])


def test_scores_of_several_sequences_keep_their_order() -> None:
    one, two = make_samples(vocab=50)[:2]
    both = replace(
        one,
        tokens=np.concatenate([one.tokens, two.tokens]),
        response_length=one.response_length + two.response_length,
        rollout_log_probs=np.concatenate([one.rollout_log_probs, two.rollout_log_probs]),
        loss_mask=np.concatenate([one.loss_mask, two.loss_mask]),
        spans=(*one.spans, *two.spans),
        sequences=(
            SequenceSize(len(one.tokens), one.response_length),
            SequenceSize(len(two.tokens), two.response_length),
        ),
        teacher_log_probs=np.concatenate([scored(one, 0).teacher_log_probs, scored(two, 0).teacher_log_probs]),  # type: ignore[list-item]
        group_size=1,
    )
    (batch,) = make_batches([both], max_tokens=1 << 20)
    rows_of(batch.micro_batches[0], 0)


def test_samples_without_scores_have_none_in_their_batch() -> None:
    samples = make_samples(vocab=50)
    for some in (samples, [scored(samples[0], 0), *samples[1:]]):
        (batch,) = make_batches(some)
        assert len(batch.micro_batches[0].teacher_log_probs_T) == 0, "half of the scores are none"


def test_the_gradient_is_that_of_the_divergence_of_the_current_student() -> None:
    """Mean over the student's own tokens, a second minibatch: the student has moved since the step began."""
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    teacher_V = torch.tensor([1.0, 0.2, -0.7, 0.4, 0.0], dtype=torch.float64).log_softmax(0)
    log_probs_V = logits_V.log_softmax(0)
    now_V = log_probs_V.detach()
    tokens = Tokens(
        mask_T=torch.ones(5, dtype=torch.bool),
        sample_T=torch.arange(5),
        num_samples=5,
        rollout_T=now_V,
        lag_T=torch.zeros(5, dtype=torch.int64),
        advantages_T=torch.zeros(5, dtype=torch.float64),
        old_T=torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0], dtype=torch.float64).log_softmax(0),
        reference_T=torch.zeros(5, dtype=torch.float64),
        teacher_T=teacher_V,
    )
    objective = Objective(algorithm_of(correction="tis", advantage="none", distill={"coef": 0.5, "teacher": "engine"}))
    assert not objective.config.needs_reference
    loss = objective.token_loss(
        log_probs_V,
        objective.advised(tokens, log_probs_V),
        objective.coupled([tokens], summed=lambda x: x, gathered=lambda x: x),
    )
    (got_V,) = torch.autograd.grad((now_V.exp() * loss.loss_T).sum(), logits_V, retain_graph=True)
    divergence = (log_probs_V.exp() * (log_probs_V - teacher_V)).sum()
    (wanted_V,) = torch.autograd.grad(0.5 * divergence, logits_V)
    torch.testing.assert_close(got_V, wanted_V, atol=1e-12, rtol=0)


def test_rewards_give_no_advantage_with_none() -> None:
    rewards_N, groups_N = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1, 1, 1])
    lengths_N = torch.tensor([2, 2, 2])
    assert Objective(AlgorithmConfig(advantage="none")).advantages(
        rewards_N, groups_N, lengths_N, lengths_N
    ).tolist() == [0.0, 0.0, 0.0]


def test_a_learner_that_needs_scores_takes_no_samples_without_them() -> None:
    bare = make_samples(vocab=50)[0]
    found = []
    for sample in (bare, scored(bare, 0), scored(bare, 2), replace(bare, response_length=bare.response_length)):
        source = DataSource(data_kit.rules(teacher=True, teacher_top_k=2), created="c")
        source.version(1, 1)
        source.version(2, 2)
        found.append(source.add(index_of(9, replace(sample, run=source.rules.run)), 0.0).reason)
    assert found == ["teacher_log_probs", "teacher_log_probs", "", "teacher_log_probs"]
    assert data_kit.rules(teacher=False).digest == data_kit.rules().digest
    assert "want the scores of a teacher" in describe_invalid(index_of(9, bare), "teacher_log_probs")


# ---- answers


RESPONSE = np.array([7, 8, 9], np.int32)


def answer(**changes: Any) -> Any:
    entries = [[None, 5, None], [-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]]
    tops = [None, *([[-0.25, 3, None], [-1.0, 4, None]] for _ in range(3))]
    return {"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": tops, **changes}}


def test_scores_are_read_from_the_answer_of_sglang() -> None:
    body = request_of(np.array([4, 5, 7, 8, 9], np.int32), 3, temperature=1.0, top_k=2, rid="r")
    assert (body["logprob_start_len"], body["sampling_params"]) == (1, {"max_new_tokens": 0, "temperature": 1.0})
    found = scores_in(answer(), RESPONSE, temperature=1.0, top_k=2, url="u")
    assert (found.log_probs.tolist(), found.top_ids.tolist()) == ([-0.5, -1.5, -2.5], [3, 4] * 3)
    assert found.top_log_probs.tolist() == [-0.25, -1.0] * 3
    low = answer(input_token_logprobs=[[-1e5, 7, None], [-1.5, 8, None], [1e-6, 9, None]])
    assert scores_in(low, RESPONSE, temperature=1.0, top_k=0, url="u").log_probs.tolist() == [MIN_LOG_PROB, -1.5, 0.0]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "cannot be parsed"),
        ([], "cannot be parsed"),
        ({"meta_info": {}}, "cannot be parsed"),
        (answer(input_token_logprobs=[[None, 7, None], [-1.5, 8, None], [-2.5, 9, None]]), "cannot be parsed|finite"),
        (answer(input_token_logprobs=[[-1.5, 8, None], [-2.5, 9, None]]), "want scores of the 3 tokens"),
        (
            answer(input_token_logprobs=[[-0.5, 7, None], [-1.5, 6, None], [-2.5, 9, None]]),
            "want scores of the 3 tokens",
        ),
        (answer(input_token_logprobs=[[-0.5, 7, None], [float("nan"), 8, None], [-2.5, 9, None]]), "finite"),
        (answer(input_token_logprobs=[[-0.5, 7, None], [0.5, 8, None], [-2.5, 9, None]]), "at most 0"),
        (answer(input_top_logprobs=[None]), "cannot be parsed|listed tokens"),
        (answer(input_top_logprobs=[[[-1.0, 2, None]]] * 3), "cannot be parsed"),
        (answer(input_logprobs_temperature="x"), "cannot be parsed"),
    ],
)
def test_any_other_answer_is_a_failure(given: Any, reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        scores_in(given, RESPONSE, temperature=1.0, top_k=2, url="u")


def test_scores_at_another_temperature_are_refused() -> None:
    """SGLang names no temperature: it scores at 1."""
    with refusal(EngineFailed, engine="u", reason=re.compile(r"\b1, .*\b0\.7;")):
        scores_in(answer(), RESPONSE, temperature=0.7, top_k=0, url="u")
    assert (
        len(scores_in(answer(input_logprobs_temperature=0.7), RESPONSE, temperature=0.7, top_k=0, url="u").log_probs)
        == 3
    )


# ---- settings


def test_the_first_teacher_that_applies_scores_a_row() -> None:
    teachers = list(
        read(
            Teachers,
            {
                "math": {"url": "http://a:1/", "when": {"reward": "math"}},
                "rest": {"urls": ["http://b:1", "http://c:1"]},
            },
            "teachers",
        ).values()
    )
    assert [one.servers for one in teachers] == [("http://a:1",), ("http://b:1", "http://c:1")]
    for metadata, name in (({"reward": "math"}, "math"), ({"reward": "code"}, "rest"), ({}, "rest")):
        found = chosen(teachers, metadata)
        assert found is not None and found.name == name
    assert chosen(teachers[:1], {}) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, {"place": "teachers.t.urls"}),
        ({"url": "localhost:3"}, {"place": "teachers.t.url"}),
        ({"url": "ftp://a:3"}, {"place": "teachers.t.url"}),
        ({"urls": [3]}, {"place": "teachers.t.urls[0]", "got": "3"}),
        ({"url": "http://a:99999"}, {"place": "teachers.t.url"}),
        ({"model": 3}, {"place": "teachers.t.model", "got": "3"}),
        ({"url": "http://a:1", "when": "math"}, {"place": "teachers.t.when", "got": "'math'"}),
        ({"url": "http://a:1", "weight": 2}, {"place": "teachers.t.weight"}),
        (7, {"place": "teachers.t", "got": "7"}),
    ],
)
def test_a_wrong_teacher_is_refused_by_name(value: Any, reason: dict[str, Any]) -> None:
    with refusal(ValueError, **reason):
        list(read(Teachers, {"t": value}, "teachers").values())


TEACHER = "actor.teachers={t: {url: 'http://127.0.0.1:9'}}"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([TEACHER], "actor.teachers: nothing uses their scores"),
        (
            [
                TEACHER,
                "learner.algorithm.distill.coef=1",
                "learner.algorithm.distill.teacher=reference",
                "learner.algorithm.kl.reference=/m",
            ],
            "nothing uses",
        ),
        (
            [TEACHER, "learner.algorithm.distill.coef=1", "learner.algorithm.distill.top_k=3"],
            "distill.top_k: want 0 with loss: token",
        ),
        (
            ["learner.algorithm.distill.loss=forward_kl", "learner.algorithm.distill.top_k=3"],
            "nothing reads it without coef > 0",
        ),
        (
            ["learner.algorithm.distill.coef=1", "learner.algorithm.distill.teacher=engine"],
            "engine wants actor.teachers",
        ),
        (
            [TEACHER, "learner.algorithm.distill.coef=1", "learner.algorithm.kl.reference=/m"],
            "kl.reference: nothing compares with it",
        ),
        ([TEACHER, "learner.algorithm.distill.coef=1", "actor.teacher_top_k=3"], "actor.teacher_top_k: follows from"),
    ],
)
def test_teachers_and_the_loss_must_fit(tmp_path: Path, settings: list[str], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load([write_run(tmp_path)], settings, {})


def test_teachers_are_the_default_where_there_are_any(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    config = load([file], [TEACHER, "learner.algorithm.distill.coef=1"], {}).config
    assert config.learner.algorithm.needs_teacher and not config.learner.algorithm.needs_reference
    other = load(
        [file], ["actor.teachers={t: {url: 'http://127.0.0.1:8'}}", "learner.algorithm.distill.coef=1"], {}
    ).config
    assert config.digest() == other.digest(), "an address is a place"
    assert load([file], [], {}).config.digest() != config.digest()


def test_listed_tokens_are_asked_for_as_the_loss_needs_them(tmp_path: Path) -> None:
    loss = (
        "learner.algorithm.distill.coef=1",
        "learner.algorithm.distill.loss=reverse_kl",
        "learner.algorithm.distill.top_k=3",
    )
    assert load([write_run(tmp_path)], [TEACHER, *loss], {}).config.actor.teacher_top_k == 3


def test_the_reference_lists_tokens_in_the_learner_and_the_samples_none(tmp_path: Path) -> None:
    loss = (
        "learner.algorithm.distill.coef=1",
        "learner.algorithm.distill.loss=reverse_kl",
        "learner.algorithm.distill.top_k=3",
    )
    file = write_run(tmp_path)
    config = load([file], [*loss, "learner.algorithm.kl.reference=/m"], {}).config
    algorithm = config.learner.algorithm
    assert (algorithm.listed_by_reference, algorithm.listed_by_engine, config.actor.teacher_top_k) == (3, 0, 0)
    assert algorithm.needs_reference and not algorithm.needs_teacher
    algorithm = load([file], [TEACHER, *loss], {}).config.learner.algorithm
    assert (algorithm.listed_by_reference, algorithm.listed_by_engine) == (0, 3)


# ---- top-k


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_divergence_of_listed_tokens_is_that_of_the_joined_outcomes(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_TV = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_TV = torch.randn(4, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    mask_T = torch.tensor([True, True, False, True])
    for top_k in (1, 3, 6):
        ids_TK = teacher_TV.topk(top_k, -1).indices
        student_TV = logits_TV.log_softmax(-1)
        got_T = top_k_divergence(student_TV.gather(1, ids_TK), teacher_TV.gather(1, ids_TK), mask_T, kind=kind)
        joined = []
        for values_TV in (student_TV, teacher_TV):
            p_TV = values_TV.exp()
            listed_TK = p_TV.gather(1, ids_TK)
            rest_T1 = (p_TV.sum(1) - listed_TK.sum(1))[:, None] if top_k < 6 else p_TV[:, :0]
            joined.append(torch.cat([listed_TK, rest_T1], 1))
        student, teacher = joined
        first, second = (teacher, student) if kind == "forward_kl" else (student, teacher)
        wanted_T = (first * (first / second).log()).sum(1) * mask_T
        torch.testing.assert_close(got_T, wanted_T, atol=1e-5 if top_k == 6 else 1e-10, rtol=0)
        got, wanted = (
            torch.autograd.grad(value_T.sum(), logits_TV, retain_graph=True)[0] for value_T in (got_T, wanted_T)
        )
        torch.testing.assert_close(got, wanted, atol=1e-4 if top_k == 6 else 1e-10, rtol=0)


def test_the_loss_has_the_divergence_times_its_coefficient() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_TV = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    teacher_TV = torch.randn(5, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    student_TV, ids_TK = logits_TV.log_softmax(-1), teacher_TV.topk(2, -1).indices
    config = algorithm_of(
        advantage="none", distill={"coef": 0.5, "teacher": "engine", "loss": "forward_kl", "top_k": 2}
    )
    objective, listed_TK = Objective(config), student_TV.gather(1, ids_TK)
    tokens = Tokens(
        mask_T=torch.tensor([True, True, False, True, True]),
        sample_T=torch.tensor([0, 0, 0, 1, 1]),
        num_samples=2,
        rollout_T=student_TV[:, 0],
        lag_T=torch.zeros(5, dtype=torch.int64),
        advantages_T=torch.zeros(5, dtype=torch.float64),
        teacher_T=teacher_TV[:, 0],
        teacher_top_TK=teacher_TV.gather(1, ids_TK),
    )
    assert objective.advised(tokens, student_TV[:, 0]) is tokens, "the sampled token has no advantage of its own"
    denominators = Denominators(
        tokens=4, sequences=2, trainable_N=torch.tensor([2, 2]), constant=6.0, groups_N=torch.tensor([1, 1])
    )
    coupled = objective.coupled([tokens], summed=lambda x: x, gathered=lambda x: x)
    total, _, _ = objective.total(
        student_TV[:, 0], torch.zeros(5, dtype=torch.float64), tokens, denominators, coupled, listed_TK=listed_TK
    )
    assert tokens.teacher_top_TK is not None
    wanted = top_k_divergence(listed_TK, tokens.teacher_top_TK, tokens.mask_T, kind="forward_kl").sum() / 4
    torch.testing.assert_close(total, 0.5 * wanted)


@pytest.mark.parametrize("chunk", [1 << 20, 40])
@pytest.mark.parametrize("count", [1, 5, 23, 40])
def test_the_most_probable_ids_are_those_of_the_plain_logits(
    chunk: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of the vocabulary that are smaller than the list, too; never more than there are."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(4)
    hidden_TH, weight_VH = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (7, 23))
    wanted = (hidden_TH @ weight_VH.t()).sort(dim=1, descending=True).indices[:, :count]
    assert torch.equal(logprobs.most_probable(hidden_TH, weight_VH, count), wanted)


@pytest.mark.parametrize("chunk", [1 << 20, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_listed_ids_are_those_of_a_plain_softmax(
    chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of the vocabulary too; an id listed twice, and the target listed again."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VH = torch.randn(23, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets_T = torch.randint(0, 23, (7,), generator=generator)
    listed_TK = torch.randint(0, 23, (7, 4), generator=generator)
    listed_TK[0, 1], listed_TK[1, 2] = listed_TK[0, 0], targets_T[1]
    outputs = logprobs.listed_log_probs(hidden_TH, weight_VH, targets_T, listed_TK, temperature=temperature)
    plain_TV = (hidden_TH @ weight_VH.t() / temperature).log_softmax(-1)
    wanted = (
        plain_TV.gather(1, targets_T[:, None])[:, 0],
        -(plain_TV.exp() * plain_TV).sum(1),
        plain_TV.gather(1, listed_TK),
    )
    pulls = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in wanted]
    for got, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    for used in (wanted, outputs):
        (hidden_TH.grad, weight_VH.grad) = (None, None)
        sum((one * pull).sum() for one, pull in zip(used, pulls, strict=True)).backward()  # type: ignore[union-attr]
        if used is wanted:
            expected = (hidden_TH.grad, weight_VH.grad)
    for got, want in zip((hidden_TH.grad, weight_VH.grad), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=0)


# ---- checks before the start


def test_a_teacher_of_other_tokens_is_found_before_the_start(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    write_model(tmp_path / "same", num_hidden_layers=2)
    write_model(tmp_path / "small", vocab_size=8)
    found = {}
    for name in ("same", "small", "missing"):
        settings = [f"actor.teachers={{t: {{model: {tmp_path / name}}}}}", "learner.algorithm.distill.coef=1"]
        report = check(load([file], settings, {}), Purpose())
        found[name] = [str(one) for one in report.errors if "teachers" in str(one)]
    assert found["same"] == []
    assert "t: 8 ids" in found["small"][0], found
    assert "missing" in found["missing"][0], found
    report = check(load([file], [TEACHER, "learner.algorithm.distill.coef=1"], {}), Purpose())
    assert [one for one in report.errors if "teachers" in str(one)] == [], "a server may start later"
    assert "a teacher that answers" in " ".join(str(one) for one in report.warnings)


def test_a_row_without_a_teacher_is_found_before_the_start(tmp_path: Path) -> None:
    settings = [
        "actor.teachers={t: {url: 'http://127.0.0.1:9', when: {reward: math}}}",
        "learner.algorithm.distill.coef=1",
    ]
    report = check(load([write_run(tmp_path)], settings, {}), Purpose())
    assert "a teacher that applies to every row" in " ".join(str(one) for one in report.errors)
