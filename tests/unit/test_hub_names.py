"""Names of a hub in settings: their form, their place in the cache, and what a run records of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refusal
from tidemill.launch.settings import hub_names
from tidemill.launch.settings.config_loader import from_map, to_map
from tidemill.launch.settings.hub_names import DATASET, MODEL, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("kind", "text", "parts"),
    [
        (MODEL, "org/name", ("org/name", "", "", "")),
        (MODEL, "Qwen/Qwen3-0.6B@refs/pr/1", ("Qwen/Qwen3-0.6B", "refs/pr/1", "", "")),
        (DATASET, "org/name/main/train", ("org/name", "", "main/train", "")),
        (DATASET, "org/name@refs/convert/parquet/main/train", ("org/name", "refs/convert/parquet", "main/train", "")),
        (DATASET, "org/name@v1/main/train@[0:10]", ("org/name", "v1", "main/train", "@[0:10]")),
        (DATASET, f"org/name@{COMMIT}/main/train-*.parquet", ("org/name", COMMIT, "main/train-*.parquet", "")),
        (DATASET, "org/name@main/data/x.jsonl", ("org/name", "main", "data/x.jsonl", "")),
    ],
)
def test_a_name_has_parts(kind: str, text: str, parts: tuple[str, ...]) -> None:
    name = parse(kind, text)
    assert name is not None and (name.repo, name.revision, name.inside, name.rows) == parts
    assert str(name) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MODEL, "name"),
        (MODEL, "/org/name"),
        (MODEL, "a/b/c"),
        (MODEL, "../name"),
        (MODEL, "./name"),
        (MODEL, "http://host/name"),
        (DATASET, "org/rows.jsonl"),
        (DATASET, "org/name/rows.parquet"),
        (DATASET, "org/name/../../rows"),
        (DATASET, "python:module:function"),
        (DATASET, "here/name/train"),
        (MODEL, "here/name"),
    ],
)
def test_a_path_is_no_name(kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse(kind, text) is None


def values(**model: Any) -> dict[str, Any]:
    sets = {"held-out": {"path": f"org/sums@{COMMIT}/test-*.jsonl@[0:5]"}}
    return {"run": "r", "directory": "runs/r", "model": model, "eval": {"every": 1, "sets": sets}}


def test_a_commit_in_the_cache_is_a_directory_here_and_a_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    given = values(path=f"org/tiny@{COMMIT}")
    assert from_map(given, "test").model.path == f"org/tiny@{COMMIT}", "not in the cache"
    for folder in ("models--org--tiny", "datasets--org--sums"):
        (tmp_path / folder / "snapshots" / COMMIT).mkdir(parents=True)
    config = from_map(given, "test")
    assert config.model.path == f"{tmp_path}/models--org--tiny/snapshots/{COMMIT}"
    assert config.eval.sets["held-out"].path == f"{tmp_path}/datasets--org--sums/snapshots/{COMMIT}/test-*.jsonl@[0:5]"
    written = to_map(config)
    assert written["model"]["path"] == f"org/tiny@{COMMIT}"
    assert written["eval"]["sets"]["held-out"]["path"] == f"org/sums@{COMMIT}/test-*.jsonl@[0:5]"
    digest = config.digest()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "of another machine"))
    assert from_map(given, "test").digest() == digest
    assert to_map(config)["model"]["path"] == config.model.path, "a directory that is not of this cache stays one"


def test_the_cache_is_where_the_library_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("~/hub", "$HOME/hub"):
        monkeypatch.setenv("HF_HUB_CACHE", text)
        assert hub_names.cache() == tmp_path / "hub"


def test_files_that_prepare_makes_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # A checkout may have a directory runs
    made = {"directory": "runs/r", "prepare": {"kind": "digits"}, "data": {"path": "runs/r/prepared/prompts"}}
    assert hub_names.names_in(made) == {}
    assert list(hub_names.names_in(made | {"prepare": None})) == ["data.path"]


def test_a_run_keeps_its_commit() -> None:
    began, other = parse(MODEL, f"org/tiny@{COMMIT}"), parse(MODEL, f"org/other@{COMMIT}")
    branch, commit = parse(MODEL, "org/tiny@v1"), parse(MODEL, f"org/tiny@{COMMIT[::-1]}")
    assert branch is not None and commit is not None
    assert hub_names.kept(branch, began) == began
    assert hub_names.kept(branch, other) == branch == hub_names.kept(branch, None)
    with refusal(ValueError, got=re.compile("^org/tiny@")):
        hub_names.kept(commit, began)
