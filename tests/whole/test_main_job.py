"""The main job itself, whole: `tidemill up launch/configs/digits.yaml` ends with a model that solves the task, on both
backends by one curve.
"""

import json
import subprocess
import sys
from statistics import mean

import pytest

from tests.whole.running import ROOT, Up, assert_books_balance, up

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


OVER = 5
"""Consecutive steps over which a mean reward is taken."""
STEPS_APART, MEANS_APART = 10, 0.04
"""Largest differences of two curves: in the step that reaches a reward, and in their mean reward. Four asynchronous
runs, two of each backend, were up to 4 steps and 0.013 apart.
"""


@pytest.fixture(scope="module")
def main_jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Up]:
    """Return the main job on each backend, ended."""
    runs = {}
    for backend in ("megatron", "fsdp"):
        settings = (f"learner.backend={backend}",)
        with up(tmp_path_factory.mktemp(backend), *settings, config=ROOT / "launch/configs/digits.yaml") as run:
            assert run.wait() == 0, run.log[-4000:]
        runs[backend] = run
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_main_job_solves_its_task(main_jobs: dict[str, Up], backend: str) -> None:
    run = main_jobs[backend]
    assert f"backend={backend} reason=" in "".join(path.read_text() for path in run.directory.glob("logs/*"))
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


@pytest.mark.slow
def test_both_backends_learn_by_one_curve(main_jobs: dict[str, Up]) -> None:
    megatrons, fsdps = ([line["train/reward_mean"] for line in run.metrics] for run in main_jobs.values())
    assert len(megatrons) == len(fsdps)
    assert abs(mean(megatrons) - mean(fsdps)) < MEANS_APART
    for reward in (0.5, 0.75, 0.9):
        assert abs(step_with(megatrons, reward) - step_with(fsdps, reward)) <= STEPS_APART, reward


def step_with(curve: list[float], reward: float) -> int:
    """Return the first step that ends ``OVER`` steps with a mean reward."""
    means = [mean(curve[step - OVER : step]) for step in range(OVER, len(curve) + 1)]
    assert max(means) >= reward, means[-1]
    return OVER + next(place for place, value in enumerate(means) if value >= reward)
