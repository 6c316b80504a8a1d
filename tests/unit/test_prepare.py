"""Prompt files and tiny models: the same every time, loadable by transformers, never mixed up."""

import functools
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import rarely
from tests.refusals import refusal
from tidemill.launch.settings.prepare import (
    CHARACTERS,
    TASKS,
    PrepareConfig,
    Prepared,
    PreparedOtherwise,
    bpe_tokenizer,
    character_tokenizer,
    gsm8k_prompts,
    prepare,
    prompts,
    solve,
)
from tidemill.launch.settings.run_paths import DATA

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
}
SMALL = PrepareConfig(count=20, model=SIZES)


@functools.cache
def characters() -> Any:
    return character_tokenizer(97)


@functools.cache
def bpe() -> Any:
    return bpe_tokenizer(["a few words to merge, a few words more"], 300)


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("task", "label"), [("largest", "9"), ("copy", "4902"), ("reverse", "2094"), ("sort", "0249")])
def test_solve(task: str, label: str) -> None:
    assert solve(task, "4902") == label


def test_filled_prompts_are_of_one_length_and_mean_the_same() -> None:
    plain, filled = (
        list(prompts(replace(SMALL, task="copy", min_digits=2, max_digits=5, fill=fill))) for fill in (False, True)
    )
    assert {len(row["prompt"]) for row in filled} == {6}
    assert [row["prompt"].replace(".", "") for row in filled] == [row["prompt"] for row in plain]
    assert [row["label"] for row in filled] == [row["label"] for row in plain]


@settings(deadline=None)
@given(st.sampled_from(sorted({*TASKS} - {"walk"})), st.integers(1, 4), st.integers(0, 3), st.integers(0, 1000))
def test_digits_prompts_are_the_same_every_time_and_inside_the_bounds(
    task: str, shortest: int, more: int, seed: int
) -> None:
    config = replace(SMALL, task=task, min_digits=shortest, max_digits=shortest + more, seed=seed)
    rows = list(prompts(config))
    assert rows == list(prompts(config))
    assert len(rows) == config.count
    for row in rows:
        digits = row["prompt"].removesuffix("=")
        if task == "sum":
            one, other = digits.split("+")
            assert all(shortest <= len(number) <= shortest + more for number in (one, other))
            assert row["label"] == str(int(one) + int(other))
            continue
        assert digits.isdigit()
        assert shortest <= len(digits) <= shortest + more
        assert row["label"] == solve(task, digits)


def test_another_seed_gives_other_prompts() -> None:
    assert list(prompts(SMALL)) != list(prompts(replace(SMALL, seed=1)))


def test_gsm8k_is_shipped_whole_and_with_its_licence() -> None:
    rows = list(prompts(PrepareConfig(kind="gsm8k", count=0)))
    assert len(rows) == 7473
    assert rows[0]["prompt"].startswith("Natalia sold clips")
    assert rows[0]["label"] == "72"
    assert len(list(gsm8k_prompts(DATA / "gsm8k/test.jsonl"))) == 1319
    assert len(list(prompts(PrepareConfig(kind="gsm8k", count=5)))) == 5
    from tidemill import launch

    directory = Path(launch.__file__).parent / "data" / "gsm8k"
    assert "MIT License" in (directory / "LICENSE").read_text()
    assert sum(path.stat().st_size for path in directory.iterdir()) < 5_000_000


def test_a_gsm8k_line_without_an_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "two"}\n')
    with refusal(ValueError, place=re.compile(r"bad\.jsonl:2: answer$"), got="'two'"):
        list(gsm8k_prompts(path))


@settings(deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=30))
def test_the_character_tokenizer_has_one_token_a_character_and_loses_nothing(text: str) -> None:
    ids = characters()(text)["input_ids"]
    assert len(ids) == len(text)
    assert characters().decode(ids, skip_special_tokens=True) == text
    assert characters().decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_a_small_vocabulary_refuses_other_characters() -> None:
    tokenizer = character_tokenizer(13)
    assert tokenizer("01=")["input_ids"] == [2, 3, 12]
    with pytest.raises(Exception, match="Missing"):
        tokenizer("1a")


@settings(deadline=None)
@given(st.text(max_size=30))
def test_the_bpe_tokenizer_can_write_any_text(text: str) -> None:
    assert bpe().decode(bpe()(text)["input_ids"]) == text


def test_a_prepared_directory_is_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = prepare(
        replace(SMALL, model={**SIZES, "tie_word_embeddings": True, "rope_theta": 500, "max_position_embeddings": 64}),
        tmp_path / "made",
    )
    assert made == Prepared(model=tmp_path / "made" / "model", prompts=tmp_path / "made" / "prompts.jsonl")
    model = AutoModelForCausalLM.from_pretrained(made.model)
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    assert (model.config.vocab_size, model.config.num_hidden_layers, model.config.rope_parameters["rope_theta"]) == (
        len(tokenizer),
        1,
        500.0,
    )
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.eos_token_id) == (0, 1, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rows = [json.loads(line) for line in made.prompts.read_text().splitlines()]
    assert all(tokenizer.decode(tokenizer(row["prompt"])["input_ids"]) == row["prompt"] for row in rows)


def test_preparing_twice_gives_the_same_bytes_and_touches_nothing(tmp_path: Path) -> None:
    for kind in ("gsm8k", *rarely(["digits"])):
        config = replace(SMALL, kind=kind)
        first, second = tmp_path / kind / "a", tmp_path / kind / "b"
        prepare(config, first)
        prepare(config, second)
        assert digests(first) == digests(second)
        before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
        prepare(config, first)
        assert before == {path: path.stat().st_mtime_ns for path in first.rglob("*")}


def test_other_weights_with_another_seed_and_the_random_state_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    want = torch.rand(1)
    torch.manual_seed(7)
    prepare(SMALL, tmp_path / "a")
    assert torch.equal(torch.rand(1), want)
    prepare(replace(SMALL, seed=1), tmp_path / "b")
    assert digests(tmp_path / "a")["model/model.safetensors"] != digests(tmp_path / "b")["model/model.safetensors"]


def test_a_changed_config_is_refused_and_names_what_differs(tmp_path: Path) -> None:
    prepare(SMALL, tmp_path)
    with pytest.raises(
        PreparedOtherwise,
        match="another config: count: there 20, wanted 21, task: there 'reverse', wanted 'copy'; remove the dir",
    ):
        prepare(replace(SMALL, count=21, task="copy"), tmp_path)


def test_a_directory_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with refusal(PreparedOtherwise, directory=tmp_path, reason=re.compile(r"prepared\.json")):
        prepare(SMALL, tmp_path)


def test_a_half_made_directory_is_made_anew(tmp_path: Path) -> None:
    prepare(SMALL, tmp_path)
    whole = digests(tmp_path)
    record = json.loads((tmp_path / "prepared.json").read_text())
    (tmp_path / "prepared.json").write_text(json.dumps({**record, "complete": False}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "prompts.jsonl").unlink()
    prepare(SMALL, tmp_path)
    assert digests(tmp_path) == whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "math"}, {"place": "kind", "got": "'math'"}),
        ({"task": "add"}, {"place": "task", "got": "'add'"}),
        ({"min_digits": 3, "max_digits": 2}, {"place": "min_digits", "got": "3 > 2"}),
        ({"count": 0}, {"place": "count", "got": "0"}),
        ({"model": {"num_hidden_layers": 0}}, {"place": "model.num_hidden_layers", "got": "0"}),
        ({"model": {"hidden_size": "wide"}}, {"place": "model.hidden_size", "got": "'wide'"}),
        ({"model": {"layers": 2}}, {"place": "model", "got": "'layers'"}),
        (
            {"model": {"num_attention_heads": 3}},
            {"place": "model.num_key_value_heads", "got": "2"},
        ),
        ({"model": {"head_dim": 5}}, {"place": "model.head_dim", "got": "5"}),
        ({"model": {"vocab_size": 12}}, {"place": "model.vocab_size", "got": "12"}),
        ({"model": {"vocab_size": 98}}, {"place": "model.vocab_size", "got": "98"}),
        ({"kind": "gsm8k", "model": {"vocab_size": 257}}, {"place": "model.vocab_size", "got": "257"}),
    ],
)
def test_a_wrong_setting_names_the_expected_value(wrong: dict[str, Any], message: dict[str, Any]) -> None:
    with refusal(ValueError, **message):
        PrepareConfig(**wrong)


def test_records_and_digests_have_the_settings_as_before_they_were_named_like_config_json() -> None:
    assert PrepareConfig(model={"rope_theta": 10, "hidden_size": 32}).recorded() == {
        "kind": "digits",
        "task": "reverse",
        "min_digits": 2,
        "max_digits": 5,
        "fill": False,
        "count": 2048,
        "split": "train",
        "seed": 0,
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 128,
        "rope_theta": 10.0,
        "initializer_range": 0.02,
        "tie_embeddings": False,
        "vocab_size": 0,
        "max_position": 512,
    }
