"""End tokens: one definition by four files, and a warning where they disagree."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel

from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.sglang.server_process import command_line, end_of_turn
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.tokens import check_end_tokens
from tidemill.launch.run.feeder_process import eos_ids
from tidemill.rewards.model_text import EndTokens

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA3 = "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
BLANK_BEFORE = "{% for m in messages %}{{ m.role }}: {{ m.content }} </s>\n{% endfor %}"
NEXT_HEADER = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('one user message only') }}"
LONGER = "{% for m in messages %}{{ m.content }}<|end|><|end|>_of_answer{% endfor %}"
ADDED = [
    *("<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end|>", "<|end|><|end|>_of_answer"),
]
ID = {token: number for number, token in enumerate(ADDED)}


def write_files(
    root: Path, *, template: str = "", eos: object = None, config: object = None, generation: object = None
) -> Path:
    """Write a tokenizer with ``ADDED``, and the files that name end tokens; None = that file names none."""
    tokenizer = Tokenizer(WordLevel({token: id for token, id in ID.items()}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(token, special=token != "<|eot_id|>") for token in ADDED])
    tokenizer.save(str(root / "tokenizer.json"))
    values: dict[str, Any] = {"chat_template": template} if template else {}
    (root / "tokenizer_config.json").write_text(json.dumps(values | ({} if eos is None else {"eos_token": eos})))
    (root / "config.json").write_text(json.dumps({} if config is None else {"eos_token_id": config}))
    if generation is not None:
        (root / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return root


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (MISTRAL, "</s>"),
        (GEMMA, "<end_of_turn>"),
        (BLANK_BEFORE, "</s>"),
        (LONGER, "<|end|><|end|>_of_answer"),
        (NEXT_HEADER, None),
        (REFUSES, None),
        ("{{ messages[0].content }}", None),
        ("", None),
    ],
)
def test_the_end_of_turn_is_the_token_behind_an_answer(tmp_path: Path, template: str, turn: str | None) -> None:
    found = EndTokens.read(write_files(tmp_path, template=template, eos="</s>"))
    assert found.turn == (None if turn is None else ID[turn])


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_all_files_name_some_and_those_of_the_configuration_come_first(tmp_path: Path, eos: object) -> None:
    found = EndTokens.read(write_files(tmp_path, template=CHATML, eos=eos, config=6, generation=[3, 6]))
    assert (found.configured, found.tokenizer, found.turn) == ((6, 3), ID["</s>"], ID["<|im_end|>"])
    assert found.ids == (6, 3, ID["</s>"], ID["<|im_end|>"])


def test_the_tokenizers_token_may_stand_in_another_file_or_in_the_vocabulary_alone(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert EndTokens.read(tmp_path).tokenizer == ID["</s>"]
    for model in (BPE(vocab={"a": 0, "</s>": 1}, merges=[]), Unigram([("a", 0.0), ("</s>", -1.0)])):
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        assert EndTokens.read(tmp_path).tokenizer == 1


@pytest.mark.parametrize(
    ("file", "text", "want"),
    [
        ("config.json", '{"eos_token_id": "2"}', {"place": re.compile(r"eos_token_id$")}),
        ("generation_config.json", '{"eos_token_id": [1, null]}', {"place": re.compile(r"eos_token_id$")}),
        ("generation_config.json", '{"eos_token_id": -1}', {"place": re.compile(r"eos_token_id$")}),
        ("tokenizer.json", "[1]", {"place": re.compile(r"tokenizer\.json$"), "got": "[1]"}),
        ("config.json", "[" * 100_000, {"place": re.compile(r"config\.json$")}),
    ],
)
def test_files_that_are_none_are_named(tmp_path: Path, file: str, text: str, want: dict[str, Any]) -> None:
    write_files(tmp_path)
    (tmp_path / file).write_text(text)
    with refusal(ValueError, **want):
        EndTokens.read(tmp_path)


def test_engine_learner_and_alarms_have_the_same(tmp_path: Path) -> None:
    """The base's token in config.json, the tuned model's in its template alone, as LLaMA-Factory leaves them."""
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (tmp_path / "generation_config.json").unlink()
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del values["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values | {"chat_template": CHATML}))
    wanted = EndTokens.read(tmp_path)
    assert wanted.turn is not None and len(wanted.ids) == 2
    assert set(ModelShape.read(tmp_path).eos_ids) == eos_ids(tmp_path) == set(wanted.ids)


def test_sglang_is_given_the_end_of_turn_that_it_does_not_find_by_itself(tmp_path: Path) -> None:
    assert end_of_turn(write_files(tmp_path, template=CHATML, eos="<|im_end|>", config=6)) == {}
    assert end_of_turn(write_files(tmp_path, template=CHATML, eos="<|endoftext|>", config=2)) == {}
    arguments = end_of_turn(write_files(tmp_path, template=CHATML, eos="<|endoftext|>", config=6))
    assert arguments == {"json_model_override_args": {"eos_token_id": [6, ID["<|im_end|>"]]}}
    assert command_line("python", tmp_path, 1, arguments)[-2:] == [
        "--json-model-override-args",
        '{"eos_token_id": [6, 2]}',
    ]


@pytest.mark.parametrize(
    ("files", "warnings"),
    [
        ({"template": CHATML, "eos": "<|im_end|>", "config": 2}, []),
        ({"template": CHATML, "eos": "<|endoftext|>", "config": [2, 6]}, []),
        ({"template": NEXT_HEADER, "eos": "</s>", "config": 4}, []),
        (
            {"template": CHATML},
            ["want the token behind an answer in the chat template among the end tokens of the files, none, got 2"],
        ),
        ({}, ["want a token that ends a response"]),
        ({"template": CHATML, "eos": "<|endoftext|>", "config": 6}, ["among the end tokens of the files, 6, got 2"]),
        (
            {"template": CHATML, "eos": "<|im_start|>", "config": 2},
            ["want the tokenizer's eos_token among eos_token_id"],
        ),
        (
            {"template": CHATML, "eos": "</s>", "config": 6},
            ["want the tokenizer's eos_token", "of the files, 6, 4, got 2"],
        ),
    ],
)
def test_files_that_disagree_are_warned_about(tmp_path: Path, files: dict[str, Any], warnings: list[str]) -> None:
    report = Report({})
    check_end_tokens(report, write_files(tmp_path, **files))
    assert report.errors == [] and len(report.warnings) == len(warnings)
    for finding, part in zip(report.warnings, warnings, strict=True):
        assert part in finding.text, finding.text
