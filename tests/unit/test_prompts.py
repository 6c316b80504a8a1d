"""Prompt files: a deterministic order, skipped rows named, errors with file and line."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.refusals import refusal
from tidemill.bus.wire.messages import Prompt
from tidemill.learner.data import Source
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.formats import value_at
from tidemill.learner.prompts.prompt_file import SHORT_CHARS, PromptFile, sampler_seed
from tidemill.learner.prompts.rows import RowRules


def letters(prompt: Prompt) -> Sequence[int]:
    text = prompt if isinstance(prompt, str) else "|".join(f"{turn['role']}:{turn['content']}" for turn in prompt)
    return [ord(letter) for letter in text]


def write(tmp_path: Path, rows: Sequence[dict[str, Any]], suffix: str = ".jsonl") -> Path:
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_file(
    path: Path, keys: tuple[str, str, str] = ("prompt", "label", ""), template: str = "", **changes: Any
) -> PromptFile:
    values: dict[str, Any] = {"tokenize": letters, "max_tokens": 20}
    return PromptFile([Source(path=path, keys=keys, template=template)], **(values | changes))


ROWS = [{"prompt": f"question {number}", "label": number} for number in range(11)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_both_formats_give_the_same_prompts(tmp_path: Path, suffix: str) -> None:
    file = open_file(write(tmp_path, ROWS, suffix), shuffle=False)
    drawn = file.at(0, 3)
    assert (len(file), drawn.row.number, drawn.row.prompt, drawn.row.label) == (11, 3, "question 3", 3)
    assert drawn.tokens.tolist() == letters("question 3")
    assert drawn.tokens.dtype == np.int32


def test_order_is_a_permutation_that_depends_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    orders = {
        (seed, epoch): tuple(open_file(path, seed=seed).order(epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(11)) for order in orders.values())
    assert orders[0, 1] == tuple(open_file(path).order(1).tolist())
    assert orders[0, 0] == (0, 2, 9, 1, 8, 5, 4, 3, 10, 6, 7)  # fixed for all releases: recorded runs depend on it


def test_after_goes_on_into_the_next_pass(tmp_path: Path) -> None:
    file = open_file(write(tmp_path, ROWS))
    drawn = file.after(0, 11)
    assert (drawn.epoch, drawn.offset, drawn.row.number) == (1, 0, int(file.order(1)[0]))


def test_too_long_prompts_are_skipped_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "x" * 30, "label": 0}, {"prompt": "short", "label": 1}, {"prompt": "y" * 21, "label": 2}]
    file = open_file(write(tmp_path, rows), shuffle=False)
    with caplog.at_level(logging.WARNING):
        first = file.after(0, 0)
        second = file.after(0, 2)
    assert (first.offset, second.epoch, second.offset) == (1, 1, 1)
    first_error = f"{tmp_path}/prompts.jsonl:1: want <= 20 tokens (data.max_prompt_tokens), got 30"
    assert len(file.bad_rows) == 2
    assert file.trouble == f"2 of 3 rows left out so far (data.bad_rows), the first: {first_error}"
    assert first_error in caplog.text
    assert len(caplog.records) == 2
    with refusal(PromptError, where=re.compile(r"prompts\.jsonl:3$"), got=21):
        file.at(0, 2)


def test_the_only_short_prompt_is_found_from_every_position(tmp_path: Path) -> None:
    """The next pass has another order: a prompt behind the position may be at the end of the next pass, too."""
    rows = [{"prompt": "short", "label": 0}, *({"prompt": "long " * 9, "label": 0} for _ in range(7))]
    for seed in range(5):
        file = open_file(write(tmp_path, rows), seed=seed)
        for epoch in range(4):
            for offset in range(len(file)):
                assert file.after(epoch, offset).row.prompt == "short"


def test_only_too_long_prompts_are_an_error_not_an_endless_search(tmp_path: Path) -> None:
    file = open_file(write(tmp_path, [{"prompt": "x" * 30, "label": 0}] * 3))
    with refusal(PromptError, where=re.compile(r"prompts\.jsonl:2$")):
        file.after(0, 2)


def test_template_is_put_around_text_and_not_around_messages(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2", "label": 4}, {"prompt": [{"role": "user", "content": "2+2"}], "label": 4}]
    file = open_file(write(tmp_path, rows), shuffle=False, template="Q: {prompt} A:")
    assert file.at(0, 0).row.prompt == "Q: 2+2 A:"
    assert file.at(0, 1).row.prompt == [{"role": "user", "content": "2+2"}]
    assert file.at(0, 1).tokens.tolist() == letters("user:2+2")


def test_keys_can_be_chosen(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a", "more": {"level": 3}}]
    file = open_file(write(tmp_path, rows), keys=("question", "answer", "more"))
    assert (file.at(0, 0).row.label, file.at(0, 0).row.metadata) == ("a", {"level": 3})
    assert open_file(write(tmp_path, rows), keys=("question", "", "")).at(0, 0).row.label is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"prompts\.jsonl: want at least one prompt, got none"),
        (
            '{"prompt": "a", "label": 1}\n{"promt": "b", "label": 1}\n',
            r":2: want key 'prompt' \(data\.prompt_key\), got keys \['label', 'promt'\]",
        ),
        ('{"prompt": "a"}\n', r":1: want key 'label' \(data\.label_key\), got keys \['prompt'\]"),
        ('{"prompt": "a", "label": 1}\n{"prompt": \n', r":2: want a JSON map, got '{\"prompt\":'"),
        ("3\n", r":1: want a JSON map, got a number"),
        ('{"prompt": "", "label": 1}\n', r":1: want text or chat messages"),
        (
            '{"prompt": [{"role": "user"}], "label": 1}\n',
            r":1: want text or text parts in 'prompt\[0\]\.content', got no such key",
        ),
    ],
)
def test_errors_name_file_line_expected_and_actual(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=message):
        open_file(path, rules=RowRules(policy="refuse"))


NESTED = {
    "data": {"messages": [{"role": "user", "content": "1+1="}], "more": {"level": 2}},
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "reward.model": {"a.b": "literal"},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_keys_lead_into_maps(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, [NESTED], suffix)
    row = open_file(path, keys=("data.messages", "reward_model.ground_truth", "data.more")).at(0, 0).row
    assert row.prompt == [{"role": "user", "content": "1+1="}]
    assert (row.label, row.metadata) == ("2", {"level": 2})


def test_a_key_that_is_there_as_it_stands_wins_on_every_level() -> None:
    found = {"a.b.c": 0, "a": {"b.c": 1, "b": {"c": 2}}}
    assert value_at(found, "a.b.c", where="x", setting="s") == 0
    del found["a.b.c"]
    assert value_at(found, "a.b.c", where="x", setting="s") == 1
    del found["a"]["b.c"]  # type: ignore[attr-defined]
    assert value_at(found, "a.b.c", where="x", setting="s") == 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "reward_model.truth",
            r"f:1: want key 'reward_model\.truth' \(s\), got keys \['ground_truth', 'style'\] in 'reward_model'",
        ),
        ("reward_mod.ground_truth", r"got keys \['data', 'reward\.model', 'reward_model'\]$"),
        ("reward_model.ground_truth.x", r"got text in 'reward_model\.ground_truth'"),
        ("data.messages.0", r"got a list in 'data\.messages'"),
        ("reward_model.", r"got keys \['data', 'reward\.model', 'reward_model'\]$"),
        ("", r"want key '' \(s\), got keys"),
    ],
)
def test_a_key_that_leads_nowhere_names_the_keys_where_it_fails(key: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        value_at(NESTED, key, where="f:1", setting="s")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with refusal(PromptError, got="no such file"):
        open_file(tmp_path / "nothing.jsonl")
    (tmp_path / "prompts.csv").write_text("a,b\n")
    with refusal(PromptError, where=re.compile(r"prompts\.csv$"), got="suffix '.csv'"):
        open_file(tmp_path / "prompts.csv")
    (tmp_path / "prompts.parquet").write_text("no parquet")
    with refusal(PromptError, where=re.compile("parquet$")):
        open_file(tmp_path / "prompts.parquet")
    with refusal(PromptError, where="data.template"):
        open_file(write(tmp_path, ROWS), template="no place for it")


def test_the_digest_depends_on_content_order_and_template(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    digests = {
        open_file(path, **changes).digest
        for changes in ({}, {"seed": 1}, {"shuffle": False}, {"template": "{prompt}!"})
    }
    digests.add(open_file(write(tmp_path, ROWS[:-1])).digest)
    assert len(digests) == 5
    assert open_file(write(tmp_path, ROWS)).digest in digests


def test_sampler_seeds_differ_and_stay() -> None:
    seeds = {
        sampler_seed(seed, epoch, offset, reissues)
        for seed in (0, 1)
        for epoch in (0, 1)
        for offset in range(50)
        for reissues in (0, 1)
    }
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 - 2**16 for seed in seeds)
    assert sampler_seed(0, 0, 0, 0) == 1756619545  # fixed for all releases


def test_short_texts_of_a_pass_that_is_drawn_from_need_no_thread(tmp_path: Path) -> None:
    """The order of a pass is made with its first row, and a long text is tokenized for long."""
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": prompt, "label": ""} for prompt in ("short", "x" * (SHORT_CHARS + 1), chat)]
    prompts = open_file(write(tmp_path, rows), shuffle=False, max_tokens=10_000)
    assert not prompts.is_short(0, 0)
    prompts.order(0)
    assert [prompts.is_short(0, offset) for offset in range(4)] == [True, False, False, False]
    assert not prompts.is_short(1, 0)
