"""The sampled text of the first step's report: which tokens it is of, and a model directory without a tokenizer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.bus_kit import make_episode
from tests.learner_steps import make_batches, make_samples
from tests.tiny_models import tiny_tokenizer
from tidemill.bus.wire.messages import Sample
from tidemill.learner.debug.report import PROMPT_CHARACTERS, RESPONSE_CHARACTERS, excerpt


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def written(prompt: str, response: str) -> Sample:
    """Return a sample of these texts."""
    ids = [tiny_tokenizer().encode(text).ids for text in (prompt, response)]
    length = len(ids[1])
    sample = make_samples(vocab=300, groups=1, group_size=1)[0]
    return replace(
        sample,
        tokens=np.array(ids[0] + ids[1], np.int32),
        response_length=length,
        rollout_log_probs=np.linspace(-0.5, 0, length).astype(np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=(sample.spans[1]._replace(num_tokens=length),),
        sampling=replace(sample.sampling, max_new_tokens=length),
    )


def test_the_text_is_the_prompts_end_and_the_responses_beginning(model_dir: Path) -> None:
    sample = written("a question of many words, " * 9 + "what is 2 + 2?\n", "It is four. " + "And so on; " * 40)
    found = excerpt(make_batches([sample], pad_to=8)[0], model_dir)
    assert found is not None and not found.missing
    assert found.prompt.endswith(" words, what is 2 + 2?\n") and 24 < len(found.prompt) <= PROMPT_CHARACTERS
    assert found.response.startswith("It is four. And so on; ") and 60 < len(found.response) <= RESPONSE_CHARACTERS
    assert found.log_prob_mean == pytest.approx(-0.25)


def test_the_response_begins_with_the_first_sampled_token(model_dir: Path) -> None:
    """Of an episode of several turns, too; demonstrations are passed over, and a batch without samples has no text."""
    batch = make_batches([make_episode(index=0, group_size=1, reward=1.0)], step=8)[0]
    found = excerpt(batch, model_dir)
    assert found is not None and found.log_prob_mean < 0
    row = batch.micro_batches[0]
    first = int(row.loss_mask_T.argmax()) + 1
    tokens = row.tokens_T[: row.cu_seqlens[1]].tolist()
    texts = [tiny_tokenizer().decode(part, skip_special_tokens=False) for part in (tokens[:first], tokens[first:])]
    assert [found.prompt, found.response] == texts
    assert excerpt(replace(batch, demonstration_N=np.ones(1, np.bool_)), model_dir) is None


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    batch = make_batches([written("2 + 2?", "4, I think")])[0]
    found = excerpt(batch, tmp_path)
    assert found is not None and (found.prompt, found.response, found.log_prob_mean) == ("", "", pytest.approx(-0.25))
    assert found.missing == f"{tmp_path}/tokenizer.json: no such file"
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = excerpt(batch, tmp_path)
    assert broken is not None and broken.missing.startswith(f"{tmp_path}/tokenizer.json: ")
