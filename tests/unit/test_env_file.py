"""Secrets in ``.env``: which lines are read, and that no message has a value."""

import argparse
import os
import stat
from pathlib import Path

import pytest

from tidemill.launch.cli.inputs import read_env_file, read_secrets
from tidemill.launch.settings.yaml_file import SettingsError


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    file = tmp_path / ".env"
    file.write_bytes(text.encode())
    file.chmod(mode)
    return file


def test_secrets_alone_are_read(tmp_path: Path) -> None:
    text = """
# tokens
HF_TOKEN=hf_a#b
export WANDB_API_KEY = 'with a blank'  # of the team
OPENAI_API_KEY="quoted"
AWS_SECRET_ACCESS_KEY=a/b+c=   # a comment
TIDEMILL_LEARNER__STEPS=5
PATH=/elsewhere
"""
    secrets, warning = read_env_file(written(tmp_path, text))
    assert secrets == {
        "HF_TOKEN": "hf_a#b",
        "WANDB_API_KEY": "with a blank",
        "OPENAI_API_KEY": "quoted",
        "AWS_SECRET_ACCESS_KEY": "a/b+c=",
    }
    assert not warning
    assert read_env_file(tmp_path / "none") == ({}, "")


def test_lines_of_other_programs_are_passed_over(tmp_path: Path) -> None:
    """A file that is shared with them, from an editor that writes CRLF and a byte order mark."""
    text = "\ufeffHF_TOKEN=hf_a\r\nGREETING=hello world\r\nJSON={\"a\": 'b'}\r\nHALF='a\r\nAWS_PROFILE=b\r\n"
    assert read_env_file(written(tmp_path, text)) == ({"HF_TOKEN": "hf_a", "AWS_PROFILE": "b"}, "")


def test_values_of_other_programs_may_have_several_lines(tmp_path: Path) -> None:
    """A key in PEM, as python-dotenv reads it: to the quote that ends it; without one the line alone is its."""
    text = """
KEY="-----BEGIN KEY-----
MIIE/ab+c=
HF_TOKEN=inside
it's \\"quoted\\"
-----END KEY-----"  # of another program
export OTHER='
AWS_SECRET_ACCESS_KEY=inside
'
WANDB_API_KEY=b
HALF="a
AWS_PROFILE=c
"""
    assert read_env_file(written(tmp_path, text)) == ({"WANDB_API_KEY": "b", "AWS_PROFILE": "c"}, "")


@pytest.mark.parametrize("line", ["HF_TOKEN='hf_secret", "MIIE/ab+c="])
def test_lines_behind_a_value_of_several_are_numbered_on(tmp_path: Path, line: str) -> None:
    """Our own secrets have one line."""
    with pytest.raises(SettingsError, match=r"\.env:3: want NAME=value"):
        read_env_file(written(tmp_path, f"KEY='a\nb'\n{line}\nb'\n"))


def test_an_empty_variable_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "HF_TOKEN=hf_a\nWANDB_API_KEY=b\nOPENAI_API_KEY=c\n")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("WANDB_API_KEY", "own")
    monkeypatch.setenv("OPENAI_API_KEY", "")  # so that it is removed after the test
    monkeypatch.delenv("OPENAI_API_KEY")
    read_secrets(argparse.Namespace(command="up"), [tmp_path])
    values = [os.environ[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")]
    assert values == ["hf_a", "own", "c"]


@pytest.mark.parametrize(
    "line",
    [
        "hf_secret",
        "HF TOKEN=hf_secret",
        "HF_TOKEN='hf_secret",
        "HF_TOKEN=hf_secret two",
        "=hf_secret",
        "HF_TOKEN=hf_secret\0",
    ],
)
def test_a_malformed_line_is_named_without_its_value(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_env_file(written(tmp_path, f"# first\n{line}\n"))
    assert f"{tmp_path}/.env:2: want NAME=value" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_may_read_is_warned_of(tmp_path: Path, mode: int) -> None:
    secrets, warning = read_env_file(written(tmp_path, "HF_TOKEN=hf_secret\n", mode))
    assert secrets and f"got mode {mode:o}; chmod 600" in warning and "secret" not in warning
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == mode
