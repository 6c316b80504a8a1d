"""Relative paths of a run's configuration, read from another working directory: the run's own decides."""

from pathlib import Path

import pytest
import yaml

from tidemill.launch.checks.resume import began_with
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.config_loader import load, to_map
from tidemill.launch.settings.run_paths import recorded


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a model, rows, and a run as `tidemill up` leaves it."""
    root = tmp_path / "my project é"
    for name in ("models/m", "data", "runs/digits/prepared/model", "elsewhere"):
        (root / name).mkdir(parents=True)
    (root / "data/rows.jsonl").write_text("{}\n")
    return root


def written(root: Path, **settings: object) -> Path:
    """Write the run's configuration; return its path."""
    values = {"run": "digits", "directory": "runs/digits", **settings}
    file = root / "runs/digits/config.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True))
    return file


def test_paths_are_those_of_the_runs_working_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"a": {"path": "data/rows.jsonl"}, "own": {"path": "python:rows:make"}}
    file = written(
        project, model={"path": "runs/digits/prepared/model"}, data={"sources": sources}, actor={"reward": "models"}
    )
    monkeypatch.chdir(project / "elsewhere")
    for config in (load(file).config, load(Path("../runs/digits/config.yaml")).config, began_with(file)):
        assert config is not None
        assert config.root == project / "runs/digits"
        assert config.model.path == str(project / "runs/digits/prepared/model")
        assert {str(source.path) for source in config.data.used} == {
            str(project / "data/rows.jsonl"),
            "python:rows:make",
        }
        assert config.actor.reward == "models", "the name of a reward is no path, though there is a file of this name"


def test_in_the_runs_working_directory_nothing_changes(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(project, model={"path": "models/m"})
    monkeypatch.chdir(project)
    config = load(file).config
    assert (config.directory, config.model.path) == ("runs/digits", "models/m")


@pytest.mark.parametrize("directory", ["/somewhere/digits", "runs/other", ""])
def test_a_file_that_is_no_runs_own_is_relative_to_the_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    file = written(project, directory=directory, model={"path": "models/m"})
    monkeypatch.chdir(project / "elsewhere")
    assert load(file).config.model.path == "models/m"


def test_a_path_that_is_not_there_stays_as_it_is_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the error about it names what stands in the file."""
    file = written(project, model={"path": "models/gone"}, learner={"checkpoint": {"store": "s3://bucket/x"}})
    monkeypatch.chdir(project / "elsewhere")
    config = load(file).config
    assert (config.model.path, config.learner.checkpoint.store) == ("models/gone", "s3://bucket/x")


def test_paths_beside_an_absolute_directory_are_recorded_as_absolute_ones(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's working directory does not follow from an absolute ``directory``, so the file in it has no relative
    path.
    """
    file = written(
        project,
        directory=str(project / "runs/digits"),
        model={"path": "models/m"},
        data={"sources": {"a": {"path": "data/rows.jsonl@[0:10]"}, "own": {"path": "python:rows:make"}}},
        rollouts={"game": {"use": "multi_turn", "python": "models/m"}},
    )
    monkeypatch.chdir(project)
    begun = load(file).config
    file.write_text(yaml_file.dump(recorded(to_map(begun))))
    assert begun.model.path == "models/m", "the settings in use are not changed"
    monkeypatch.chdir(project / "elsewhere")
    config = load(file).config
    assert config.model.path == str(project / "models/m")
    assert {str(source) for source in config.data.used} == {f"{project / 'data/rows.jsonl'}@[0:10]", "python:rows:make"}
    assert load(file).config.rollouts["game"].python == str(project / "models/m")


def test_a_recorded_relative_directory_keeps_its_relative_paths(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the project can be moved."""
    monkeypatch.chdir(project)
    values = to_map(load(written(project, model={"path": "models/m"})).config)
    assert recorded(values) == values
