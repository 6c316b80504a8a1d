"""The reward of a reward model on a server: the request it makes, and the answers it takes. ``tests/sglang`` asks a
real server.
"""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.tiny_models import tiny_tokenizer, write_tiny_tokenizer
from tests.unit.test_rewards_http import answering, asking, request
from tidemill.rewards.errors import BadRewardOption, RewardFailed
from tidemill.rewards.judge import RewardModel
from tidemill.rewards.registry import bind


def outputs(*numbers: object) -> web.Response:
    return web.json_response({"embedding": list(numbers), "meta_info": {}})


async def test_the_conversation_is_sent_as_the_models_own_tokens(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    async with (
        answering(lambda number, asked: outputs(2.5)) as (url, asked),
        asking(RewardModel(url, model=str(tmp_path))) as reward,
    ):
        assert await reward(request("four")) == {"score": 2.5, "output": 2.5}
        await reward(request("four", prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]))
        parts = [{"type": "text", "text": "p"}, {"type": "text", "text": ""}]
        await reward(
            request(
                "four", prompt=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": None}]
            )
        )
    texts = [tiny_tokenizer().decode(body["input_ids"], skip_special_tokens=False) for body in asked]
    assert texts[0] == "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
    assert texts[1] == texts[2] == "<|im_start|>system\ns<|im_end|>\n" + texts[0]


async def test_a_tokenizer_that_begins_texts_with_a_token_adds_none(tmp_path: Path) -> None:
    """A template of Llama's kind has written the token already."""
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|im_start|>")
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with (
        answering(lambda number, asked: outputs(1)) as (url, asked),
        asking(RewardModel(url, model=str(tmp_path))) as reward,
    ):
        await reward(request("four"))
    assert asked[0]["input_ids"][:2] == [begin, tokenizer.encode("user", add_special_tokens=False).ids[0]]


async def test_without_a_model_the_text_is_sent() -> None:
    async with answering(lambda number, asked: outputs(1)) as (url, asked), asking(RewardModel(url)) as reward:
        await reward(request("four"))
        with pytest.raises(ValueError, match="needs the option model"):
            await reward(request("four", prompt=[{"role": "user", "content": "p"}]))
    assert asked == [{"text": "pfour"}]


async def test_an_output_is_chosen_scaled_and_bounded() -> None:
    async with answering(lambda number, asked: outputs(0, (5, -50)[number - 1])) as (url, _):
        async with asking(RewardModel(url, index=1, offset=1, scale=0.5, low=-3, high=3)) as reward:
            assert await reward(request()) == {"score": 2.0, "output": 5.0}
            assert await reward(request()) == {"score": -3.0, "output": -50.0}


@pytest.mark.parametrize(
    "answer",
    [{"embedding": []}, {"embedding": ["a"]}, {"embedding": [True]}, {"score": 1}, [], None, {"embedding": None}],
)
async def test_another_answer_fails_the_sample_with_what_came(answer: Any) -> None:
    async with (
        answering(lambda number, asked: web.json_response(answer)) as (url, asked),
        asking(RewardModel(url, retries=1)) as reward,
    ):
        with pytest.raises(RewardFailed, match="want"):
            await reward(request())
    assert len(asked) == 2, "it was asked again"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"url": "host:1"}, "want http"),
        ({"url": "http://h", "low": 1, "high": 1}, "low < high"),
        ({"url": "http://h", "index": -1}, "index >= 0"),
        ({"url": "http://h", "scale": float("nan")}, "finite offset and scale"),
        ({"url": "http://h", "model": "/nowhere"}, "want a directory with tokenizer.json and a chat template"),
        ({"url": "http://h", "modle": "x"}, "modle: no such option"),
    ],
)
def test_options_are_checked_before_the_start(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BadRewardOption, match=wanted):
        bind("reward_model", options)
