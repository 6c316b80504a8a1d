"""Log-probs of given tokens by the built-in engine, over real HTTP, against a full forward pass of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine_serving import prompts, serving
from tests.tiny_models import SERVED, tiny_model, write_tiny_model


def body(tokens: Any, start: Any, *, temperature: float = 1.0, top_k: int = 0) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": top_k,
    }


def reference(model: Any, tokens: list[int], temperature: float) -> torch.Tensor:
    """Return the log-softmax that predicts each token but the first, [T - 1, V]."""
    with torch.no_grad():
        return (model(torch.tensor([tokens])).logits[0, :-1].float() / temperature).log_softmax(-1)


@pytest.fixture(params=SERVED)
def teacher(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """Return a model's directory and the model."""
    return write_tiny_model(tmp_path, request.param), tiny_model(request.param)


async def test_scores_are_those_of_a_full_forward_pass_at_the_temperature(teacher: tuple[Path, Any]) -> None:
    model_dir, model = teacher
    given = prompts(9, low=2)
    async with serving(model_dir, max_running=2) as served:
        generating = asyncio.ensure_future(served.generate(given[0], max_new_tokens=60, temperature=0, ignore_eos=True))
        for temperature in (1.0, 0.7):
            status, answers = await served.post(
                "/generate", body(given, [len(one) // 2 for one in given], temperature=temperature, top_k=3)
            )
            assert status == 200, answers
            for tokens, answer in zip(given, answers, strict=True):
                meta, start = answer["meta_info"], len(tokens) // 2
                want_TV = await asyncio.to_thread(reference, model, tokens, temperature)
                assert [entry[1] for entry in meta["input_token_logprobs"]] == tokens[start:]
                assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
                got = [entry[0] for entry in meta["input_token_logprobs"][1:]]
                want = [float(want_TV[place - 1, tokens[place]]) for place in range(start + 1, len(tokens))]
                np.testing.assert_allclose(got, want, atol=1e-4)
                top = want_TV[start:].topk(3, -1)
                listed = meta["input_top_logprobs"][1:]
                values = np.reshape([[one[0] for one in each] for each in listed], (-1, 3))
                np.testing.assert_allclose(values, top.values, atol=1e-4)
                assert [[one[1] for one in each] for each in listed] == top.indices.tolist()
                assert (answer["output_ids"], meta["input_logprobs_temperature"], meta["weight_version"]) == (
                    [],
                    temperature,
                    "0",
                )
        alone = await served.generate(given[0], max_new_tokens=60, temperature=0, ignore_eos=True)
        assert (await generating)["output_ids"] == alone["output_ids"], (
            "responses that are decoded beside it stay as they are"
        )
        assert served.engine.unfinished == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprob_start_len": 9}, "logprob_start_len: want a place in the 4 tokens, got 9"),
        ({"logprob_start_len": [1, 2]}, "logprob_start_len: want one for each of 1 sequences, got 2"),
        ({"input_ids": [3, 4, 9999]}, "input_ids: want token ids in 0 .. 299, got 9999"),
        ({"input_ids": []}, "input_ids: want at least one token"),
        ({"input_ids": None}, "input_ids: want a list of integers"),
        ({"input_ids": [5] * 513}, "longer than the model's context length"),
        ({"top_logprobs_num": 301}, "top_logprobs_num: want at most 300, got 301"),
        ({"return_logprob": False}, "return_logprob, stream: want true and false"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob: unknown parameter"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": -1}}, "temperature: want a number >= 0"),
        ({"sampling_params": {"max_new_tokens": 0, "top_p": 0.5}}, "top_p: not supported"),
        ({"sampling_params": {"max_new_tokens": 3}}, "logprob_start_len: not supported; want -1"),
    ],
)
async def test_a_request_for_scores_that_cannot_be_is_refused(shared: Any, change: dict[str, Any], reason: str) -> None:
    async with serving(shared) as served:
        status, answer = await served.post("/generate", body([3, 4, 5, 6], 1) | change)
        assert status == 400 and reason in answer["error"]["message"], answer
        status, whole = await served.post("/generate", body([5] * 512, 0))
        assert status == 200 and len(whole["meta_info"]["input_token_logprobs"]) == 512, (
            "a sequence may fill the context"
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=300, max_position_embeddings=512)
