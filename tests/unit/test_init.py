"""`tidemill init` writes the files of a run that every check accepts, and overwrites nothing."""

from pathlib import Path

import pytest

from tests.check_kit import write_model
from tests.tree import ROOT
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.init import CONFIG, KINDS, MAKE_MODEL, OF_MODELS
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


def test_the_model_of_the_example_is_made_as_by_the_makefile(capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(REAL)", REAL_MODEL)
    assert cli.main(["init", "real"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert len(MAKE_MODEL) == 3 and all(f"\t{command}\n" in makefile and command in lines for command in MAKE_MODEL)
    assert load(Path(CONFIG)).config.model.path == REAL_MODEL


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
