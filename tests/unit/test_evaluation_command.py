"""Checks of evaluation sets, and the arguments of ``tidemill eval``. Starts no process."""

import json
from pathlib import Path

import pytest

from tests.check_kit import write_model, write_prompts, write_run
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.eval import _plan
from tidemill.launch.settings.config_loader import load

LONG = " ".join(["one"] * 300)


def checked(tmp_path: Path, *settings: str, **purpose: bool) -> Report:
    return check(load(write_run(tmp_path), ["eval.every=5", *settings]), Purpose(**purpose))


def with_set(path: Path, **changes: object) -> str:
    return f"eval.sets={json.dumps({'held': {'path': str(path), **changes}})}"


def test_the_check_reads_the_sets(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "held.jsonl")
    report = checked(tmp_path, with_set(file, samples=4, limit=5))
    assert not report.errors
    assert report.on("eval") == [f"held: {file}: 20 prompts read, the first 5 are used; 4 responses each"]
    assert checked(tmp_path, with_set(tmp_path / "none.jsonl"), "eval.every=0").on("eval") == [], (
        "no evaluation, no file"
    )


@pytest.mark.parametrize(
    ("row", "changes", "complaint"),
    [
        (None, {}, "eval.sets.held: want a file of prompts, got no such file"),
        ("{", {}, "held.jsonl:1: want a JSON map"),
        ({"question": "what"}, {}, "held.jsonl:1: want key 'prompt'"),
        ({"prompt": "what", "label": "1"}, {"prompt_key": "question"}, "held.jsonl:1: want key 'question'"),
        ({"prompt": LONG, "label": "1"}, {}, "held.jsonl:1: want <= "),
        (
            {"prompt": "what", "label": "1"},
            {"stop_token_ids": [4, 100_000]},
            "eval.sets.held.stop_token_ids: want ids below ",
        ),
        (
            {"prompt": "what", "label": "1"},
            {"max_new_tokens": 256},
            "eval.sets.held.max_new_tokens: want < 256, the model's context, got 256",
        ),
        ({"prompt": "what", "label": "1"}, {"template": "no place"}, "want text with {prompt} in it"),
    ],
)
def test_bad_sets_are_found_before_the_start(
    tmp_path: Path, row: object, changes: dict[str, object], complaint: str
) -> None:
    file = tmp_path / "held.jsonl"
    if row is not None:
        write_prompts(file, row)
    (error,) = [finding.text for finding in checked(tmp_path, with_set(file, **changes)).errors]
    assert complaint in error


def test_without_a_learner_the_evaluation_sets_are_the_only_data(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "held.jsonl")
    settings = (with_set(file), "data.path=/none.jsonl", "learner.data_parallel=64")
    assert "no such file" in checked(tmp_path, *settings).errors[0].text
    report = checked(tmp_path, *settings, trains=False)
    assert not report.errors and report.on("data") == [] and report.on("eval") != [] and report.on("reward") != []


def test_the_arguments_are_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "held out.jsonl")
    words = [
        "eval",
        str(model),
        str(data),
        "--samples",
        "4",
        "--temperature",
        "0.5",
        "--limit",
        "3",
        "--reward",
        "exact",
        "--print-config",
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert f"sets: {{held-out: {{limit: 3, path: {data}, samples: 4, temperature: 0.5}}}}" in shown
    config = tmp_path / "best.yaml"
    config.write_text(
        json.dumps({"eval": {"every": 5, "sets": {"other": {"path": "x"}}, "best": "other/mean", "stop_after": 3}})
    )
    assert cli.main([*words, "--config", str(config)]) == 0, "a score of the run's sets does not stand in the way"
    assert shown.startswith("run: eval ") and "  reward: exact " in shown and f"  path: {model}" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["/none", "{data}"], "MODEL: want a directory with a Hugging Face model (config.json in it), got '/none'"),
        (["{model}"], "want DATA, a file of prompts, or --config with eval.sets"),
        (
            ["{model}", "--config", "{config}", "--samples", "2"],
            "--samples: want it with DATA; without, change eval.sets of --config",
        ),
        (["{model}", "--config", "{config}"], "eval.sets: want at least one held-out set"),
        (["{model}", "{data}", "--samples", "0"], "eval.sets.held.samples: want >= 1, got 0"),
        (["{model}", "{data}", "--dir", "{model}"], "--dir: want an empty directory"),
        (["{model}", "/none.jsonl"], "eval.sets.none: want a file of prompts, got no such file"),
        (["{model}", "{data}", "--reward", "nosuch"], "nosuch"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path)
    values = {"model": tmp_path / "model", "data": write_prompts(tmp_path / "held.jsonl"), "config": config}
    assert cli.main(["eval", *(word.format(**values) for word in words)]) in (2, 78)
    assert complaint in capsys.readouterr().err


def test_a_set_stops_where_it_says_or_where_training_does(tmp_path: Path) -> None:
    held = {"path": str(write_prompts(tmp_path / "held.jsonl"))}
    sets = {
        "as": held,
        "own": {**held, "stop": ["Q:"], "stop_token_ids": [7]},
        "none": {**held, "stop": [], "stop_token_ids": []},
    }
    settings = (
        f"eval.sets={json.dumps(sets)}",
        "eval.every=1",
        "sampling.stop=[END]",
        "sampling.stop_token_ids=[5, 6]",
    )
    plan = _plan(load(write_run(tmp_path), settings).config)
    stops = {one.name: (one.sampling.stop, one.sampling.stop_token_ids) for one in plan.sets}
    assert stops == {"as": (("END",), (5, 6)), "own": (("Q:",), (7,)), "none": ((), ())}


def test_stop_tokens_are_tokens_of_the_model(tmp_path: Path) -> None:
    held = with_set(write_prompts(tmp_path / "held.jsonl"))
    (error,) = [str(one) for one in checked(tmp_path, held, "sampling.stop_token_ids=[4, 100000]").errors]
    assert "sampling.stop_token_ids: want ids below " in error and "got 100000" in error
    assert not checked(tmp_path, held, "sampling.stop_token_ids=[4]").errors
