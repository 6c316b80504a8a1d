"""`tidemill data import`: recordings and lines from outside as rows; their samples are the recorded ones again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import data_kit
from tidemill.bus.streams.readers import StoredSample
from tidemill.bus.wire.codec import encode_sample
from tidemill.bus.wire.messages import Sample, Sampling, SequenceSize, Status
from tidemill.launch.cli.main import main
from tidemill.launch.samples.recording import Origin, RecordingWriter
from tidemill.learner.data import DataConfig
from tidemill.learner.prompts.prompt_file import PromptFile
from tidemill.learner.prompts.responses import Recordings

WARM = Sampling(temperature=0.7, max_new_tokens=8)


def record(path: Path, *samples: Sample | bytes) -> Path:
    with path.open("wb") as file:
        recorder = RecordingWriter(file, Origin(run="r", created="2026"))
        for seq, one in enumerate(samples, 1):
            data = one if isinstance(one, bytes) else encode_sample(one)
            recorder.add(StoredSample(seq=seq, subject="s", headers={}, data=data, stored_s=0.0))
        recorder.close()
    return path


def imported(tmp_path: Path, *files: Path) -> PromptFile:
    out = tmp_path / "rows.jsonl"
    assert main(["data", "import", *map(str, files), "-o", str(out)]) == 0
    data = DataConfig(
        path=str(out), shuffle=False, rollout="recorded", responses_key="responses", metadata_key="metadata"
    )
    recordings = Recordings(
        lambda prompt, **_: [ord(letter) for letter in prompt], rollouts={"recorded"}, end_ids=(), max_tokens=99
    )
    return PromptFile(data.used, tokenize=lambda prompt: [0], max_tokens=99, shuffle=False, recordings=recordings)


def test_every_sample_of_a_recording_comes_back_token_by_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = data_kit.task(1, sampling=WARM, label="x", metadata={"a": 1}), data_kit.task(2, sampling=WARM)
    partly = replace(data_kit.sample(first, 1), loss_mask=np.array([1, 0, 1], np.uint8))
    partly = replace(
        partly, rollout_log_probs=partly.rollout_log_probs * partly.loss_mask, reward={"score": 1.0, "form": 0.5}
    )
    kept = [
        replace(data_kit.sample(first, 0), label="x", metadata={"a": 1}, status=Status.TRUNCATED),
        replace(partly, label="x"),
        data_kit.sample(second, 1),
    ]
    two = (SequenceSize(3, 1), SequenceSize(3, 2))
    left_out: list[Sample | bytes] = [
        replace(kept[0], attempt="b"),
        data_kit.sample(data_kit.eval_task(3), 0),
        replace(data_kit.sample(second, 0), status=Status.FAILED, metadata={"error": "e"}),
        replace(
            data_kit.sample(second, 0),
            sequences=two,
            spans=data_kit.sample(second, 0, ((0, 1), (0, 2))).spans,
            rollout="r",
        ),
        b"damaged",
    ]
    prompts = imported(tmp_path, record(tmp_path / "a.tide", *kept, *left_out))
    said = capsys.readouterr().out
    assert "2 rows, 3 responses; left out: 1 duplicate, 1 eval, 1 failed, 1 invalid, 1 several sequences" in said
    assert "1 rows have one response" in said and "cross-entropy" not in said
    rows = [prompts.at(0, offset) for offset in range(len(prompts))]
    assert [row.row.prompt for row in rows] == [first.prompt, second.prompt]
    assert (rows[0].row.label, rows[0].row.metadata) == ("x", {"a": 1})
    again = [one for row in rows for one in row.recorded]
    for sample, sequence in zip(kept, again, strict=True):
        assert sequence.tokens.tolist() == sample.tokens.tolist()
        assert sequence.loss_mask.tolist() == sample.loss_mask.tolist()
        assert sequence.log_probs is not None
        assert sequence.log_probs.tolist() == sample.rollout_log_probs.tolist(), "the same float32"
        assert (sequence.reward, sequence.truncated) == (sample.reward, sample.status is Status.TRUNCATED)
    assert {one.temperature for row in rows for one in row.row.responses} == {0.7}


def lines(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return path


def test_lines_from_outside_are_grouped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = lines(
        tmp_path / "outside.jsonl",
        {"prompt": "p", "group": 7, "tokens": [5], "log_probs": [-1.5], "reward": 1},
        {"prompt": "q", "response": "yes", "label": "l"},
        {"prompt": "p", "group": 7, "tokens": [6, 7], "log_probs": [-0.5, -0.25], "reward": 0},
        {"prompt": "r", "responses": [{"text": "a"}, "b"]},
        {"prompt": "s", "responses": '[{"text": "c"}, {"text": "d"}]'},
    )
    file.write_text(f"\n{file.read_text()} \n\n")
    prompts = imported(tmp_path, file)
    assert "1 rows have one response" in (said := capsys.readouterr().out)
    assert "3 rows have responses without log_probs" in said
    found = [prompts.at(0, offset).recorded for offset in range(len(prompts))]
    assert [[one.tokens.tolist()[1:] for one in row] for row in found] == [
        [[5], [6, 7]],
        [[*b"yes"]],
        [[*b"a"], [*b"b"]],
        [[*b"c"], [*b"d"]],
    ]
    assert [one.reward for one in found[0]] == [1, 0]
    assert found[1][0].log_probs is None


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"prompt": "p"}, "want one of response, responses, and text, messages or tokens in a line"),
        ({"prompt": "p", "response": "a", "responses": ["b"]}, "want one of response, responses"),
        ({"prompt": "p", "response": "a", "colour": 1}, "got colour"),
        ({"response": "a"}, "want key 'prompt'"),
        ({"prompt": "p", "tokens": [1], "log_probs": [1.0]}, "log_probs, got 1.0"),
        ({"prompt": "other", "group": 1, "response": "a"}, "want the prompt of its group, 'p', got 'other'"),
    ],
)
def test_bad_lines_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], complaint: str
) -> None:
    file = lines(tmp_path / "outside.jsonl", {"prompt": "p", "group": 1, "response": "a"}, values)
    out = tmp_path / "rows.jsonl"
    assert main(["data", "import", str(file), "-o", str(out)]) == 78
    assert complaint in (said := capsys.readouterr().err)
    assert "outside.jsonl:2" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["import", "x.tide", "-o", "rows.jsonl"], "want a recording"),
        (["import", "x.tide", "-o", "rows.parquet"], "--out: want a file that ends in .jsonl"),
        (["import", "empty", "-o", "rows.jsonl"], "empty: want recordings"),
    ],
)
def test_wrong_use_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["data", *arguments]) == 2
    assert complaint in capsys.readouterr().err
