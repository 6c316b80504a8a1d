"""``tidemill data check`` names all bad rows, up to a bound."""

import json
from pathlib import Path

import pytest

from tests.check_kit import write_model, write_prompts, write_run
from tidemill.launch.cli import main as cli


def test_all_bad_rows_are_named_up_to_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "gold": 1}\n' + "3\n" * 4 + '{"prompt": "b"}\n')
    assert cli.main(["data", "check", str(file), "--set", "data.label_key=gold", "--most", "2"]) == 78
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{file}:1: prompt 'a' label 1"
    assert lines[1:3] == [f"{file}:{line}: want a JSON map, got a number" for line in (2, 3)]
    assert lines[3:] == [f"{file}: 3 more bad rows", f"{file}: 1 prompts, 5 errors"]
    assert cli.main(["data", "check", f"{file}@[0:1]", "--set", "data.label_key=gold"]) == 0


def test_a_configuration_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "label": 1}\n')
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{sources: {{a: {{path: {tmp_path}/a.jsonl}}, b: {{path: {tmp_path}/none.jsonl}}}}}}\n")
    assert cli.main(["data", "check", str(config)]) == 78
    out = capsys.readouterr().out
    assert "a.jsonl: 1 prompts, 0 errors" in out
    assert "none.jsonl: want a file of prompts, got no such file" in out


def test_rows_are_shown_as_the_model_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", chat_template=False)
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ "
        "m.content }}{% endfor %} <eos>"
    )
    row = {
        "prompt": [{"role": "user", "content": "what is one"}],
        "label": "1",
        "tools": [{"name": "plus"}],
        "r": "sums",
    }
    file = write_prompts(
        tmp_path / "prompts.jsonl",
        row,
        row | {"tools": None},
        {"prompt": "the answer", "label": "1", "tools": None, "r": None},
    )
    words = [
        "data",
        "check",
        str(file),
        "--preview",
        "3",
        "--set",
        "data.tools_key=tools",
        "--set",
        "data.reward_key=r",
    ]
    assert cli.main([*words, "--set", f"model.path={tmp_path}/model"]) == 0
    one, two, three, _ = capsys.readouterr().out.splitlines()
    assert one.endswith(
        "metadata {'reward': 'sums', 'tools': [{'type': 'function', 'function': {'name': 'plus'}}]} 5 tokens "
        "'plus what is one <eos>'"
    )
    assert two.endswith("metadata {'reward': 'sums'} 4 tokens 'what is one <eos>'")
    assert three.endswith("prompt 'the answer' label '1' 2 tokens 'the answer'")
    assert cli.main(words) == 0
    assert "tokens" not in capsys.readouterr().out, "no model, no tokens"
    assert cli.main([*words, "--set", f"model.path={tmp_path}/none"]) == 0
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert cli.main([*words, "--set", f"model.path={tmp_path}/model"]) == 78


def test_every_recorded_conversation_is_made_into_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path)
    good = [{"role": "user", "content": "what is one"}, {"role": "assistant", "content": "two <eos>"}]
    rows = [{"prompt": good, "label": "1"}] * 2
    file = write_prompts(
        tmp_path / "prompts.jsonl", *rows, {"prompt": good[:1], "label": "1"}, {"prompt": good * 2, "label": "1"}
    )
    words = ["data", "check", str(run), "--set", "rollouts={answers: {use: dataset}}", "--set", "data.rollout=answers"]
    assert cli.main([*words, "--set", "learner.algorithm.correction=sft"]) == 78
    shown, third, last = capsys.readouterr().out.splitlines()
    assert shown.endswith("5 tokens 'what is one two <eos>', 2 of them trained: 'two <eos>'")
    assert third.startswith(f"{file}:3: want responses in data.responses_key, or chat messages")
    assert last == f"{file}: 3 prompts, 1 errors"
    only_last = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "<eos>", "chat_template": only_last}))
    assert cli.main([*words, "--set", "learner.algorithm.correction=sft"]) == 78
    assert f"{file}:4: want a chat template that writes message 2" in capsys.readouterr().out
