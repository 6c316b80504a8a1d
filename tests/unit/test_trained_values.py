"""Values of trained tokens: which are recorded, in which columns, and how samples get their names."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bus_kit import make_episode, make_sample
from tests.debug_kit import VOCAB
from tests.learner_steps import make_batches, make_samples
from tests.refusals import refusal
from tidemill.bus.errors import WireError
from tidemill.bus.wire.trained_values import TOKEN_BYTES, TrainedStep, by_run, decode_trained, encode_trained
from tidemill.learner.feed.trained_records import _Step
from tidemill.learner.settings.config import RecordConfig
from tidemill.learner.trainer.step_metrics import ValueRecord

ALONE: Any = SimpleNamespace(dp_rank=0, tp_rank=0, cp_rank=0, pp_rank=0, pp_size=1)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def of_rank(**changes: Any) -> TrainedStep:
    """Return a rank's message: two runs in sequence 0 of an episode (tokens 4, 5 and 8), one in sequence 1 (token 14
    of the episode, the fourth of the sequence).
    """
    columns = {
        "owners_R": ints(0, 0, 1),
        "places_R": ints(4, 8, 5),
        "lengths_R": ints(2, 1, 1),
        "log_probs": floats(-0.1, -0.2, -0.3, -0.4),
        "entropies": floats(0.5, 0.6, 0.7, 0.8),
        "advantages": floats(2, 2, 3),
        "weights": floats(1, 0, 1, 0.5),
    }
    return TrainedStep(**{"epoch": 0, "step": 7, "rank": 1, **columns, **changes})


def test_an_episodes_tokens_are_found_at_their_places_in_its_response() -> None:
    """The sequences of the episode have 10 and 6 tokens, of which 6 and 2 are its response."""
    episode, single = make_episode(), make_sample(task=42, index=1, length=3)
    plan: Any = SimpleNamespace(seqs=np.array([901, 905]))
    known = _Step.of(plan, [episode, single])
    place = (known.sequences_M, known.offsets_M, known.samples_N)
    step = of_rank(owners_R=ints(2, 0, 1), places_R=ints(4, 4, 5), lengths_R=ints(2, 1, 1)).named(*place)
    first, second = decode_trained(encode_trained(step)).by_sample()
    assert (first.seq, first.task, first.index, first.rank, first.step) == (901, episode.task, episode.index, 1, 7)
    assert first.places.tolist() == [0, 7]
    assert episode.tokens[[4, 15]].tolist() == [50, 55], "the first token of its response, and the last one"
    np.testing.assert_array_equal(first.log_probs, floats(-0.3, -0.4))
    assert (second.seq, second.task, second.index) == (905, 42, 1)
    assert second.places.tolist() == [1, 2] and second.weights.tolist() == [1, 0]
    assert second.advantages.tolist() == [2, 2], "one value for a run stands for each of its tokens"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("places_R, lengths_R", {"lengths_R": ints(2, 0, 2)}),
        ("places_R, lengths_R", {"places_R": ints(4, -8, 5)}),
        ("lengths_R", {"lengths_R": ints(2, 1, 2)}),
        ("lengths_R", {"lengths_R": ints(2, 2)}),
        ("lengths_R", {"entropies": floats(0.5)}),
        ("advantages", {"advantages": floats(1, 2)}),
        ("weights", {"weights": floats()}),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(field: str, changes: dict[str, Any]) -> None:
    with refusal(WireError, field=field):
        decode_trained(encode_trained(of_rank(**changes)))


def test_a_sequence_that_the_step_does_not_have_is_refused() -> None:
    place = (ints(0, 1), ints(0, 0), np.array([[901, 1, 0], [902, 1, 1]]))
    for owner in (2, -1):
        with refusal(WireError, field="owners_R"):
            of_rank(owners_R=ints(0, 0, owner)).named(*place)
    with refusal(WireError, field="owners_R"):
        replace(of_rank(), seqs=np.array([1]), tasks=np.array([1]), indexes=np.array([0])).check_samples()


def test_a_value_is_written_once_for_a_run_only_where_all_its_tokens_have_it() -> None:
    assert by_run(floats(1, 1, 5), ints(2, 1)).tolist() == [1, 5]
    assert by_run(floats(1, 2, 5), ints(2, 1)).tolist() == [1, 2, 5]


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("most_tokens", [70, 10_000])
def test_the_recorded_samples_are_bounded_and_the_same_when_the_step_is_repeated(
    share: float, most_tokens: int
) -> None:
    samples = make_samples(vocab=VOCAB, groups=32)
    batch = make_batches(samples, max_tokens=60)[0]
    config = RecordConfig(trained=share, step_bytes=most_tokens * TOKEN_BYTES)
    chosen_N = ValueRecord(config, ALONE).chosen(batch)
    again = make_batches(list(samples), max_tokens=200)[0]
    np.testing.assert_array_equal(ValueRecord(config, ALONE).chosen(again), chosen_N)
    assert batch.trainable_N[chosen_N].sum() <= most_tokens
    of_groups = chosen_N.reshape(32, 4)
    cut = of_groups.any(1) & ~of_groups.all(1)
    assert cut.sum() <= (most_tokens == 70), "groups are whole, but for the one at the bound"
    if most_tokens == 10_000:
        assert abs(of_groups.all(1).mean() - share) <= 0.05
    else:
        assert batch.trainable_N[chosen_N].sum() > 40, "the bytes are used"


def test_a_rank_without_the_results_and_a_setting_of_0_record_nothing() -> None:
    batch = make_batches(make_samples(vocab=VOCAB), max_tokens=60)[0]
    for config, rank in (
        (RecordConfig(trained=0.0), ALONE),
        (RecordConfig(), SimpleNamespace(**{**vars(ALONE), "tp_rank": 1})),
        (RecordConfig(), SimpleNamespace(**{**vars(ALONE), "pp_size": 2})),
    ):
        record = ValueRecord(config, rank)
        record.begin(batch)
        assert record.end(batch) is None
