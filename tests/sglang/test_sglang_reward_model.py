"""The reward ``reward_model`` on a real SGLang server: its outputs are those of transformers."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_kinds import sglang_server
from tests.tiny_models import tiny_config, write_tiny_tokenizer
from tests.unit.test_rewards_http import request
from tidemill.bus.system.limits import ProcessLimits
from tidemill.rewards.scorers import opened


def write_reward_model(directory: Path, family: str) -> Path:
    """Write a random reward model of one output, with a bias of zeros where SGLang has one (docs/rewards.md)."""
    from transformers import AutoModelForSequenceClassification

    write_tiny_tokenizer(directory)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=1)).float().save_pretrained(directory)
    if family == "qwen3":
        file = directory / "model.safetensors"
        save_file(load_file(file) | {"score.bias": torch.zeros(1)}, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
async def test_its_outputs_are_those_of_transformers(python: str, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    reward_model = write_reward_model(tmp_path / "model", family)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).float().eval()
    responses = ["four", "five", "a longer answer, of several words.", "", "12" * 20]
    prompts = ["two and two?", [{"role": "system", "content": "be short"}, {"role": "user", "content": "what is 2+2?"}]]

    def run() -> list[float]:
        with sglang_server(python, reward_model, tmp_path / "log", dtype="float32", is_embedding=True) as url:
            return asyncio.run(score(url))

    async def score(url: str) -> list[float]:
        options = {"url": url, "model": str(reward_model), "scale": 2.0, "offset": 0.25}
        async with opened("reward_model", options, ProcessLimits()) as scorer:
            found = await asyncio.gather(
                *(scorer(request(response, prompt=prompt)) for prompt in prompts for response in responses)
            )
        return [one["score"] for one in found]

    found = await asyncio.to_thread(run)
    for number, (prompt, response) in enumerate((prompt, response) for prompt in prompts for response in responses):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], return_dict=False)
        with torch.inference_mode():
            want = 2.0 * (model(torch.tensor([ids])).logits[0, 0].item() - 0.25)
        assert found[number] == pytest.approx(want, abs=1e-3), json.dumps(messages)
    assert len({round(one, 3) for one in found}) == len(found), "it tells responses apart"
