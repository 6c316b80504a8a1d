"""The main job itself, whole: `tidemill up launch/configs/digits.yaml` ends with a model that solves the task."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole.running import ROOT, assert_books_balance, up

SOLVE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, prompts = sys.argv[1], json.loads(sys.argv[2])
tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
out = model.generate(**inputs, do_sample=False, max_new_tokens=6, pad_token_id=tokenizer.pad_token_id)
print(json.dumps(tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)))
"""


@pytest.mark.slow
def test_the_main_job_solves_its_task(tmp_path: Path) -> None:
    with up(tmp_path, config=ROOT / "launch/configs/digits.yaml") as run:
        assert run.wait() == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert summary["reward_last"] >= 0.9
    assert summary["multi_version_samples"] > 0
    assert summary["seconds"] < 240
    rows = [json.loads(line) for line in (run.directory / "prepared/prompts.jsonl").read_text().splitlines()[-64:]]
    command = [sys.executable, "-c", SOLVE, str(run.directory / "final"), json.dumps([row["prompt"] for row in rows])]
    answers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    solved = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True))
    assert solved >= 0.9 * len(rows), list(zip(answers, rows, strict=True))[:5]
