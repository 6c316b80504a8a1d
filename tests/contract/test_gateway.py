"""Programs that ask the model through the gateway: its replies, its records, and how episodes end."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.engine_serving import log_probs_of, scores
from tests.episode_kit import Client, Program, Stage, chat, said, stage, task
from tests.examples import examples
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S, until
from tidemill.actors.engines.responses import GenerationFailed
from tidemill.actors.episodes.port import EpisodeResult, Unfinished
from tidemill.actors.text.text import Text
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Sample, Status
from tidemill.bus.wire.task_settings import Budget


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("gateway") / "model", max_position_embeddings=1024)


USER = ("user", "What is three plus four?")


async def two_turns(client: Client) -> float:
    first = await client.chat(USER)
    await client.chat(USER, ("assistant", said(first)), ("user", "Are you sure?"))
    return 1.0


async def sampled(model_dir: Path, program: Program, *, index: int = 0, **options: Any) -> Sample:
    """Run one episode, and return its sample, which the bus takes."""
    async with stage(model_dir, program) as scene:
        made = await scene.rollout.sample(task(**options), index, "n0")
    check_sample(made.sample)
    assert decode_sample(encode_sample(made.sample)).sizes == made.sample.sizes
    return made.sample


async def failure(model_dir: Path, program: Program, **options: Any) -> str:
    async with stage(model_dir, program) as scene:
        with pytest.raises(GenerationFailed) as found:
            await scene.rollout.sample(task(**options), 0, "n0")
    return found.value.reason


async def test_two_turns_are_one_sample_with_the_log_probs_of_a_forward_pass(model_dir: Path) -> None:
    async with stage(model_dir, two_turns) as scene:
        sample = (await scene.rollout.sample(task(), 2, "n0")).sample
        check_sample(sample)
        assert sample.turns is not None and len(sample.turns.at) == 2
        assert (sample.rollout, sample.index, sample.status, sample.reward) == ("agent", 2, Status.TRUNCATED, 1.0)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        at, done = 0, 0
        for size in sample.sizes:  # whole sequences, through the model alone
            ids = sample.tokens[at : at + size.num_tokens].tolist()
            context, response = ids[: -size.response_length], ids[-size.response_length :]
            want = log_probs_of((await scores(model, context, response)) / 0.8, response)
            region = slice(done, done + size.response_length)
            mask = sample.loss_mask[region] == 1
            np.testing.assert_allclose(sample.rollout_log_probs[region][mask], want[mask], atol=1e-4)
            assert not sample.rollout_log_probs[region][~mask].any()
            at, done = at + size.num_tokens, done + size.response_length
    assert [message["role"] for message in sample.transcript] == ["user", "assistant", "user", "assistant"]


async def test_an_answer_is_continued_by_the_ids_that_were_sampled(model_dir: Path) -> None:
    told: list[Any] = []

    async def program(client: Client) -> float:
        first = await client.chat(USER, return_token_ids=True)
        second = await client.chat(USER, ("assistant", said(first)), ("user", "Sure?"), return_token_ids=True)
        told.extend([first, second])
        return 0.0

    sample = await sampled(model_dir, program)
    first, second = told
    begin = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    if second["prompt_token_ids"][: len(begin)] == begin:
        assert len(sample.sizes) == 1
    assert sample.turns is not None and sample.turns.id == (first["id"], second["id"])
    assert sample.turns.tokens.tolist() == [len(each["choices"][0]["token_ids"]) for each in told]


async def test_chats_have_the_template_arguments_of_the_task_unless_they_name_their_own(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    template = "{{ mood }}{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    seen: list[list[int]] = []

    async def program(client: Client) -> float:
        for more in ({}, {"chat_template_kwargs": {"mood": "plus"}}):
            seen.append((await client.chat(USER, return_token_ids=True, **more))["prompt_token_ids"])
        status, kept = await client.post("/retrieve_from_text", chat(USER))
        assert status == 200
        seen.append(kept["tokens"])
        return 0.0

    await sampled(directory, program, chat_template_args={"mood": "three "})
    text = Text.read(directory)
    assert text is not None
    three, plus = ([*text.encode(f"{mood}{USER[1]}", add_special=False)] for mood in ("three ", "plus"))
    assert seen == [three, plus, three]


async def test_seeds_make_an_episode_again(model_dir: Path) -> None:
    first, second = await sampled(model_dir, two_turns), await sampled(model_dir, two_turns)
    other = await sampled(model_dir, two_turns, index=1)
    assert first.tokens.tolist() == second.tokens.tolist() != other.tokens.tolist()


async def test_several_answers_are_siblings_and_all_are_trained(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        answer = await client.chat(USER, n=3)
        assert len(answer["choices"]) == 3
        return 0.5

    sample = await sampled(model_dir, program)
    assert len(sample.sizes) == 3 and sample.turns is not None and len(set(sample.turns.id)) == 3
    assert sample.metadata["branched_turns"] == {"forks": 0, "begins": 2} and "untrained_turns" not in sample.metadata


async def test_calls_above_the_limit_of_an_episode_wait(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        await asyncio.gather(*(client.chat(USER, ("user", str(number))) for number in range(6)))
        return 0.5

    async def overlaps(max_calls: int) -> list[bool]:
        async with stage(model_dir, program, max_calls=max_calls) as scene:
            turns = (await scene.rollout.sample(task(), 0, "n0")).sample.turns
        assert turns is not None
        order = np.argsort(turns.begin_s)
        begins, ends = turns.begin_s[order], (turns.begin_s + turns.seconds)[order]
        return list(begins[1:] < ends[:-1] - 1e-4)

    assert not any(await overlaps(1))
    assert any(await overlaps(3))


async def test_the_listed_model_has_the_context_that_is_left_to_an_episode(model_dir: Path) -> None:
    listed: list[Any] = []

    async def program(client: Client) -> float:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with client.session.get(client.root + "/v1/models", headers=headers) as response:
            listed.append(await response.json())
        await client.chat(USER)
        return 0.0

    await sampled(model_dir, program)
    await sampled(model_dir, program, budget=Budget(context=64))
    assert [(each["data"][0]["id"], each["data"][0]["max_model_len"]) for each in listed] == [
        ("model", 1024),
        ("model", 64),
    ]


async def test_seconds_of_tools_are_those_between_the_calls_and_behind_the_last(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        await client.chat(USER)
        await asyncio.sleep(0.2)
        await asyncio.gather(client.chat(USER), client.chat(USER))
        await asyncio.sleep(0.1)
        return 0.5

    sample = await sampled(model_dir, program)
    turns = sample.turns
    assert (
        turns is not None
        and turns.tools_s[0] >= 0.2
        and sample.timings.tools_s == pytest.approx(turns.begin_s[0] + turns.tools_s.sum(), abs=1e-3)
    )
    assert turns.tools_s[1:].max() >= 0.1


async def test_the_sampling_is_that_of_the_task(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        hot = await client.chat(USER, temperature=2.0, top_p=0.1, presence_penalty=1.0, max_tokens=500)
        assert len(hot["choices"][0]["message"]["content"]) >= 0
        assert hot["usage"]["completion_tokens"] <= 12, "the task allows 12 tokens to a response"
        short = await client.chat(USER, ("user", "x"), max_tokens=2)
        assert short["usage"]["completion_tokens"] <= 2
        return 0.0

    sample = await sampled(model_dir, program)
    overridden = ["presence_penalty", "temperature", "top_p"]
    assert sample.metadata == {
        "topic": "sums",
        "overridden_sampling": overridden,
        "branched_turns": {"forks": 0, "begins": 1},
    }


@pytest.mark.parametrize(
    "asked", [{"logit_bias": {"5": 10}}, {"response_format": {"type": "json_object"}}, {"min_tokens": 4}]
)
async def test_what_changes_the_distribution_is_refused(model_dir: Path, asked: dict[str, Any]) -> None:
    async def program(client: Client) -> float:
        status, answer = await client.post("/v1/chat/completions", chat(USER, **asked))
        assert status == 400 and "distribution" in answer["error"]["message"], answer
        await client.chat(USER)
        return 0.0

    assert (await sampled(model_dir, program)).response_length


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by", ["header", "model"])
async def test_an_untrained_call_is_served_as_it_asks_and_is_context_only(
    model_dir: Path, by: str, streamed: bool
) -> None:
    untold: list[str] = []

    async def untrained(client: Client, *messages: tuple[str, str]) -> str:
        """Return the answer to an untrained call without randomness."""
        body = chat(*messages, temperature=0.0, model="a user" if by == "model" else "model", stream=streamed)
        headers = {"Authorization": f"Bearer {client.api_key}", **({"X-Tidemill-Train": "0"} if by == "header" else {})}
        async with client.session.post(client.root + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            if not streamed:
                return said(await response.json())
            lines = [
                line.removeprefix(b"data: ")
                for line in (await response.read()).splitlines()
                if line.startswith(b"data: {")
            ]
        return "".join(choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"])

    async def program(client: Client) -> None:
        first = await untrained(client, USER)
        untold.extend([first, await untrained(client, USER)])
        untold.append(said(await client.chat(USER, ("assistant", first), ("user", "Sure?"), model="model")))
        await untrained(client, ("user", "Was it right?"))
        await client.post("/reward", {"turn": None, "reward": 0.5})

    async with stage(model_dir, program, untrained_models=("a user",)) as scene:
        sample = (await scene.rollout.sample(task(), 0, "n0")).sample
    check_sample(sample)
    first, second, answer = untold
    assert first == second != "", "two answers without randomness"
    assert sample.metadata["untrained_turns"] == {"asked": 3} and "branched_turns" not in sample.metadata
    assert sample.turns is not None and len(sample.turns.at) == 1 and "overridden_sampling" not in sample.metadata
    assert sample.loss_mask.all(), "the untrained answer is in front of the response"
    text = Text.read(model_dir)
    assert text is not None and first in text.decode(sample.tokens[: -sample.response_length].tolist())
    assert sample.response == answer == sample.transcript[-1]["content"], (
        "the answer that is scored is that of the model that is trained"
    )
    assert sample.turns.rewards == ((0, 0.5),)


async def test_a_client_of_openai_chats_streams_and_completes(model_dir: Path) -> None:
    import openai  # on use, as every worker of pytest imports every file of tests

    texts: list[str] = []

    async def program(client: Client) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as model:
            assert (await model.models.list()).data[0].id == "model"
            whole = await model.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "hi"}], logprobs=True
            )
            assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
            stream = await model.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "hey"}], stream=True
            )
            texts.append("".join([part.choices[0].delta.content or "" async for part in stream]))
            await model.completions.create(model="model", prompt="One, two,", max_tokens=5)
        return 1.0

    sample = await sampled(model_dir, program)
    assert sample.turns is not None and len(sample.turns.at) == 3 and texts


async def test_token_ids_in_and_out(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        status, one = await client.post("/generate", {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 4}})
        assert status == 200
        asked = {"token_ids": [3, 4, 5, *one["output_ids"], 9], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
        status, two = await client.post("/inference/v1/generate", asked)
        assert status == 200 and len(two["choices"][0]["logprobs"]["content"]) == len(two["choices"][0]["token_ids"])
        return 1.0

    sample = await sampled(model_dir, program)
    assert len(sample.sizes) == 1 and sample.loss_mask.tolist().count(0) == 1, "the second call extends the first"


async def test_parameters_of_token_ids_in_and_out(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        async def asked(params: Any, **more: Any) -> tuple[int, Any]:
            return await client.post(
                "/inference/v1/generate", {"token_ids": [3, 4, 5], "sampling_params": params, **more}
            )

        status, answer = await asked({"n": 2, "max_tokens": 6, "temperature": 0.1})
        first, second = answer["choices"]
        assert (status, answer["prompt_token_ids"], [first["index"], second["index"]]) == (200, [3, 4, 5], [0, 1])
        assert len(first["token_ids"]) <= 6 and first["token_ids"] != second["token_ids"]
        assert [entry["token"] for entry in first["logprobs"]["content"]] == [
            f"token_id:{token}" for token in first["token_ids"]
        ]
        every = [*range(299)]  # the vocabulary
        _, stopped = await asked({"max_tokens": 6, "stop_token_ids": every})
        assert [(len(one["token_ids"]), one["finish_reason"]) for one in stopped["choices"]] == [(1, "stop")]
        for params, more, reason in (
            ({"min_tokens": 3}, {}, "min_tokens: not supported"),
            ({"logit_bias": {"5": 1}}, {}, "logit_bias"),
            ({"ignore_eos": True}, {}, "ignore_eos"),
            ([], {"stream": True}, "stream"),
            ([1], {}, "sampling_params"),
        ):
            status, refused = await asked(params, **more)
            assert status == 400 and reason in refused["error"]["message"], refused
        return 1.0

    sample = await sampled(model_dir, program)
    assert (
        sample.turns is not None
        and len(sample.turns.at) == 3
        and sample.metadata["overridden_sampling"] == ["temperature"]
    )


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (Budget(turns=1), "turns"),
        (Budget(tokens=3), "tokens"),
        (Budget(context=45), "context"),
        (Budget(total_tokens=60), "total_tokens"),
    ],
)
async def test_a_spent_budget_ends_the_episode_truncated(model_dir: Path, budget: Budget, spent: str) -> None:
    async def program(client: Client) -> float:
        messages = [USER]
        for _ in range(40):
            status, answer = await client.post("/v1/chat/completions", chat(*messages))
            if status != 200:
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
                return 0.25
            messages += [("assistant", said(answer)), ("user", "More.")]
        raise AssertionError("never refused")

    sample = await sampled(model_dir, program, budget=budget)
    assert (sample.status, sample.finish_reason, sample.reward) == (Status.TRUNCATED, f"budget.{spent}", 0.25)
    assert len(sample.tokens) <= (budget.total_tokens or 10**6)
    assert max(size.num_tokens for size in sample.sizes) <= (budget.context or 10**6)
    assert sample.loss_mask.sum() <= (budget.tokens or 10**6)


async def test_an_answer_that_the_models_context_cut_is_truncated(model_dir: Path) -> None:
    """As one that the budget's context cut; a program's own ``max_tokens`` cuts none."""

    async def program(client: Client, left: int) -> float:
        status, answer = await client.post(
            "/generate", {"input_ids": [5] * (1024 - left), "sampling_params": {"max_new_tokens": 4}}
        )
        assert (status, answer["meta_info"]["completion_tokens"]) == (200, min(left, 4))
        return 0.5

    ends = [await sampled(model_dir, partial(program, left=left), seed=seed) for left, seed in ((2, 7), (9, 7))]
    assert [(sample.status, sample.finish_reason) for sample in ends] == [
        (Status.TRUNCATED, "budget.context"),
        (Status.COMPLETED, "stop"),
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_episode_whose_last_answer_is_cut_by_its_length_is_truncated_as_a_single_turn_is(
    model_dir: Path, streamed: bool
) -> None:
    """An earlier answer, a call that is context only, and an answer that the program itself wants short do not
    count.
    """

    async def program(client: Client, calls: Sequence[Mapping[str, Any]]) -> float:
        for number, call in enumerate(calls):
            body = {
                "input_ids": [5, number],
                "sampling_params": call.get("params", {}),
                **({"stream": True} if streamed else {}),
            }
            async with client.session.post(
                client.root + "/generate", json=body, headers=call.get("headers", {})
            ) as answer:
                assert answer.status == 200
                await answer.read()
        return 0.5

    cut: dict[str, Any] = {}
    short, stopped = {"params": {"max_new_tokens": 2}}, {"params": {"stop_token_ids": [*range(299)]}}
    context = {"headers": {"X-Tidemill-Train": "0"}}
    outcomes = []
    for calls in ((short, cut), (cut, short), (cut, stopped), (cut, stopped | context), (stopped, cut | context)):
        sample = await sampled(model_dir, partial(program, calls=calls))
        outcomes.append((sample.status, sample.finish_reason))
    truncated, completed = (Status.TRUNCATED, "length"), (Status.COMPLETED, "stop")
    assert outcomes == [truncated, completed, completed, truncated, completed]


async def test_a_program_may_end_an_episode_at_a_limit_of_its_own(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        await client.chat(USER)
        for limit in (None, 3, "", "a b", "x" * 65):
            status, answer = await client.post("/truncated", {"limit": limit})
            assert (status, answer["error"]["param"]) == (400, "limit")
        for limit in ("moves", "later"):
            assert await client.post("/truncated", {"limit": limit}) == (200, {"success": True})
        return 0.5

    sample = await sampled(model_dir, program)
    assert (sample.status, sample.finish_reason, sample.reward) == (Status.TRUNCATED, "budget.moves", 0.5)

    async def fails(client: Client) -> float:
        await client.post("/truncated", {"limit": "moves"})
        raise RuntimeError("broken")

    assert "broken" in await failure(model_dir, fails), "a limit of its own excuses no error"


async def test_a_program_that_fails_at_its_spent_budget_is_truncated_not_failed(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        while True:
            await client.chat(USER)

    async with stage(model_dir, program) as scene:
        made = await scene.rollout.sample(task(budget=Budget(turns=2)), 0, "n")
    assert made.sample.status is Status.TRUNCATED and not made.scored, "the actor's reward scores it"


async def test_many_calls_at_once_keep_the_budget(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", chat(USER)) for _ in range(12)))
        assert {status for status, _ in answers} == {200, 400}
        return 0.0

    sample = await sampled(model_dir, program, budget=Budget(total_tokens=200, tokens=40))
    assert len(sample.tokens) <= 200 and sample.loss_mask.sum() <= 40


async def test_keys(model_dir: Path) -> None:
    async with stage(model_dir, two_turns) as scene:
        await scene.rollout.sample(task(), 0, "n")
        (client,) = scene.programs.clients
        ended, _ = await client.post("/v1/chat/completions", chat(USER))
        url = scene.gateway.url
        statuses = []
        for headers in ({}, {"Authorization": "Bearer no"}, {"x-api-key": client.api_key}):
            async with scene.session.post(f"{url}/v1/chat/completions", json=chat(USER), headers=headers) as response:
                statuses.append(response.status)
                assert response.headers["x-should-retry"] == "false"
        assert (ended, statuses) == (410, [401, 401, 410])


async def test_a_key_in_a_header_is_as_good_as_one_in_the_path(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        url = client.root[: client.root.index("/e/")]
        for headers in ({"Authorization": f"Bearer {client.api_key}"}, {"x-api-key": client.api_key}):
            async with client.session.post(f"{url}/v1/chat/completions", json=chat(USER), headers=headers) as response:
                assert response.status == 200
        return 1.0

    sample = await sampled(model_dir, program)
    assert sample.turns is not None and len(sample.turns.at) == 2


async def test_rewards_of_turns(model_dir: Path) -> None:
    async def by_id(client: Client) -> dict[str, float]:
        first = await client.chat(USER)
        second = await client.chat(USER, ("assistant", said(first)), ("user", "Sure?"))
        return {second["id"]: 2.0, first["id"]: -0.5}

    async def told(client: Client) -> None:
        first = await client.chat(USER)
        await client.chat(USER, ("assistant", said(first)), ("user", "Sure?"))
        assert (await client.post("/reward", {"turn": first["id"], "reward": -0.5}))[0] == 200
        assert (await client.post("/reward", {"turn": None, "reward": 2.0}))[0] == 200
        for wrong in (
            {"turn": 9, "reward": 1},
            {"turn": 0, "reward": "x"},
            {"turn": 0, "reward": 1e9},
            {"turn": True, "reward": 1},
        ):
            assert (await client.post("/reward", wrong))[0] == 400

    for program in (by_id, told):
        sample = await sampled(model_dir, program)
        assert sample.turns is not None
        assert (sample.turns.rewards, sample.reward) == (((0, -0.5), (1, 2.0)), 1.5)


async def test_parts_faults_and_mixtures(model_dir: Path) -> None:
    async def parts(client: Client) -> dict[str, float]:
        await client.chat(USER)
        return {"score": 1.0, "style": 0.5}

    async def fault(client: Client) -> EpisodeResult:
        await client.chat(USER)
        return EpisodeResult(fault=-1.0)

    async def mixture(client: Client) -> dict[str, float]:
        return {(await client.chat(USER))["id"]: 1.0, "style": 0.5}

    assert (await sampled(model_dir, parts)).reward == {"score": 1.0, "style": 0.5}
    lost = await sampled(model_dir, fault)
    assert (lost.reward, lost.status) == (-1.0, Status.COMPLETED)
    assert "both" in await failure(model_dir, mixture)


async def test_episodes_without_a_sampled_token_fail(model_dir: Path) -> None:
    async def silent(client: Client) -> float:
        return 1.0

    async def broken(client: Client) -> float:
        raise KeyError("environment")

    async def refused(client: Client) -> float:
        status, _ = await client.post("/v1/chat/completions", {"messages": 5})
        raise RuntimeError(f"status {status}")

    reason = await failure(model_dir, refused)
    assert "status 400" in reason and "messages" in reason, "and why"
    assert "got none" in await failure(model_dir, silent)
    assert "environment" in await failure(model_dir, broken)


async def test_an_episode_that_takes_too_long_fails(model_dir: Path) -> None:
    async def stuck(client: Client) -> float:
        await client.chat(USER)
        await asyncio.Event().wait()
        return 1.0

    assert "within 0.2 s" in await failure(model_dir, stuck, budget=Budget(seconds=0.2))


async def test_the_clock_stands_still_while_an_engine_is_waited_for(model_dir: Path) -> None:
    """No engine serves the version within a second: the episode is handed back, and none of that second is of its
    budget.
    """
    async with stage(model_dir, two_turns, timeout_s=1.0) as scene:
        running = asyncio.create_task(
            scene.rollout.sample(replace(task(budget=Budget(seconds=60.0)), min_version=1), 0, "n")
        )
        await until(lambda: scene.gateway.open_episodes, every_s=0)
        (open,) = scene.gateway.open_episodes.values()
        clock = open.episode.clock
        await until(lambda: clock.num_stops or running.done(), every_s=0)
        assert not running.done(), "it has not stopped"
        stopped_at_s = clock.seconds
        while not running.done() and clock.num_stops:
            assert clock.seconds == stopped_at_s
            await asyncio.sleep(0.01)
        with refusal(Unfinished, partial=None, turns=0):
            await running


async def test_a_drain_hands_back_an_episode_wherever_it_is(model_dir: Path) -> None:
    for place in ("tool", "call"):
        here = asyncio.Event()

        async def program(client: Client, here: asyncio.Event = here, place: str = place) -> float:
            await client.chat(USER)
            here.set()
            if place == "call":
                while True:
                    await client.chat(USER)
            await asyncio.Event().wait()
            return 1.0

        async with stage(model_dir, program) as scene:
            running = asyncio.create_task(scene.rollout.sample(task(), 0, "n"))
            await here.wait()
            if place == "tool":
                scene.rollout.interrupt()
            await scene.responses.cut_short()
            with pytest.raises(Unfinished):
                await running
            scene.rollout.interrupt()
            with pytest.raises(Unfinished):
                await scene.rollout.sample(task(), 1, "n")


async def test_a_client_that_comes_again_is_given_the_same_answer(model_dir: Path) -> None:
    async def program(client: Client) -> float:
        body = chat(USER, max_tokens=12)
        asked = asyncio.create_task(client.post("/v1/chat/completions", body))
        await until(lambda: any(open.running for open in scene.gateway.open_episodes.values()), every_s=0.001)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: any(open.abandoned for open in scene.gateway.open_episodes.values()), every_s=0.001)
        status, _ = await client.post("/v1/chat/completions", body)
        assert status == 200
        return 1.0

    async with stage(model_dir, program) as scene:
        await scene.served.post("/pause_generation", {"mode": "in_place"})

        async def resumed() -> None:
            await until(lambda: any(open.abandoned for open in scene.gateway.open_episodes.values()), every_s=0.001)
            await scene.served.post("/continue_generation", {})

        resuming = asyncio.create_task(resumed())
        sample = (await scene.rollout.sample(task(), 0, "n")).sample
        await resuming
    assert sample.turns is not None and len(sample.turns.at) == 1


@pytest.fixture(scope="module")
def loop_scene(model_dir: Path) -> Iterator[tuple[asyncio.AbstractEventLoop, Stage, Client]]:
    """One open episode for many hostile requests."""
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[tuple[Stage, Client]] = loop.create_future()
    end = asyncio.Event()

    async def program(client: Client) -> float:
        ready.set_result((scenes[0], client))
        await end.wait()
        await client.chat(USER)
        return 1.0

    scenes: list[Stage] = []

    async def main() -> Sample:
        async with stage(model_dir, program) as scene:
            scenes.append(scene)
            return (await scene.rollout.sample(task(), 0, "n")).sample

    running = loop.create_task(main())
    scene, client = loop.run_until_complete(ready)
    yield loop, scene, client
    end.set()
    check_sample(loop.run_until_complete(running))
    loop.close()


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "n", "stop", "max_tokens"]), inner)
    ),
    max_leaves=5,
)
NAMES = [
    "messages",
    "prompt",
    "input_ids",
    "token_ids",
    "sampling_params",
    "n",
    "stop",
    "max_tokens",
    "stream",
    "tools",
    "turn",
    "reward",
    "model",
]


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4).map(lambda found: json.dumps(found).encode())
    | st.binary(max_size=40),
    path=st.sampled_from(
        [
            "/v1/chat/completions",
            "/v1/completions",
            "/generate",
            "/inference/v1/generate",
            "/reward",
            "/retrieve_from_text",
        ]
    ),
)
def test_hostile_requests_are_refused_and_the_episode_goes_on(
    loop_scene: tuple[asyncio.AbstractEventLoop, Stage, Client], body: bytes, path: str
) -> None:
    loop, scene, client = loop_scene

    async def ask() -> int:
        async with scene.session.post(
            client.root + path, data=body, timeout=aiohttp.ClientTimeout(LIMIT_S)
        ) as response:
            await response.read()
            return response.status

    assert loop.run_until_complete(ask()) in (200, 400)
