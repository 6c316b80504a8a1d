"""``tidemill data check`` names all bad rows, up to a bound."""

from pathlib import Path

import pytest

from launch.cli import main as cli


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
