"""Configurations of the package are found by name, and have the package's data in any directory."""

from pathlib import Path

import pytest

from tidemill.launch.cli import main as cli
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.launch.settings.run_paths import CONFIGS, DATA, PACKAGE, config_file, names


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_wins_over_a_name_and_a_directory_does_not(elsewhere: Path) -> None:
    assert config_file("digits") == CONFIGS / "digits.yaml"
    (elsewhere / "digits").mkdir()
    assert config_file("digits") == CONFIGS / "digits.yaml"
    (elsewhere / "smoke").write_text("run: mine")
    assert load(config_file("smoke")).config.run == "mine"


@pytest.mark.parametrize("text", ["digts", "../configs/digits", "digits.yaml", "launch/configs/digits.yaml"])
def test_an_unknown_name_is_refused_with_the_names(text: str, elsewhere: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load(config_file(text))
    assert all(name in str(error.value) for name in names())
    assert str(error.value).endswith("did you mean digits?")


@pytest.mark.parametrize("name", ["real", "gsm8k_smollm2"])
def test_data_of_a_shipped_configuration_is_the_packages(name: str, elsewhere: Path) -> None:
    """A directory of the user's with the same path is not read."""
    mine = elsewhere / "launch/data" / ("real" if name == "real" else "gsm8k") / "train.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("wrong")
    config = load(config_file(name)).config
    paths = [config.data.path, *(entry.path for entry in config.eval.sets.values())]
    assert all(Path(path).is_file() and Path(path).is_relative_to(DATA) for path in paths)


def test_in_the_repository_its_paths_stay_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the record of a run can be moved with its repository."""
    monkeypatch.chdir(PACKAGE.parent)
    assert load(config_file("real")).config.data.path == "launch/data/real/train.jsonl"


@pytest.mark.parametrize("model", [[], ["--model", "a: b # c"]])
def test_a_run_of_the_pretrained_model_has_its_files_beside_it(model: list[str], elsewhere: Path) -> None:
    assert cli.main(["init", "real", *model]) == 0
    config = load(Path("run.yaml")).config
    assert config.model.path == (model[1] if model else load(config_file("real")).config.model.path)
    assert Path(config.data.path).read_bytes() == (DATA / "real/train.jsonl").read_bytes()
    assert "launch/" not in Path("run.yaml").read_text()
