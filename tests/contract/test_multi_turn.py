"""The rollout ``multi_turn`` on a real engine: trained tokens and context, protocols, environments and ends."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.engine_serving import log_probs_of, scores
from tests.episode_kit import Client, stage, task
from tests.refusals import refusal
from tests.tiny_models import write_tiny_model
from tests.waits import turn
from tests.web_server import web_server
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.port import EpisodeResult, ProgramFailed
from tidemill.actors.episodes.programs.multi_turn import MultiTurn, Played
from tidemill.actors.episodes.programs.sum_game import SumGame
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.section import Sections, read
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Sample, Status
from tidemill.bus.wire.task_settings import Budget

GAMES = "tests.child_games"
ANYTHING = r"([\s\S]*)"
"""A call, whatever the model generates."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("multi_turn") / "model", max_position_embeddings=1024)


async def made(model_dir: Path, rollout: MultiTurn, prompt: Any = "hello", **options: Any) -> tuple[Sample, Any]:
    """Play one episode; return its sample and the model."""

    async def program(client: Client) -> Any:
        return await rollout.run({"prompt": prompt, "label": "l"}, client.base_url, client.api_key)

    async with stage(model_dir, program) as scene:
        sample = (await scene.rollout.sample(task(**options), 0, "n0")).sample
    check_sample(sample)
    return sample, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


async def test_results_of_tools_are_context_and_the_rest_has_the_log_probs_of_a_forward_pass(model_dir: Path) -> None:
    rollout = MultiTurn(tools=[f"{GAMES}:told"], protocol="text", max_turns=3, call=ANYTHING, result="[{result}]")
    sample, model = await made(model_dir, rollout)
    assert sample.turns is not None and len(sample.turns.at) == 3
    assert len(sample.sizes) == 1, "one sequence: each prompt begins with the ids of the one before"
    (size,) = sample.sizes
    ids = sample.tokens.tolist()
    context, response = ids[: -size.response_length], ids[-size.response_length :]
    want = log_probs_of((await scores(model, context, response)) / 0.8, response)
    mask = sample.loss_mask == 1
    np.testing.assert_allclose(sample.rollout_log_probs[mask], want[mask], atol=1e-4)
    assert not sample.rollout_log_probs[~mask].any()
    assert int((~mask).sum()) > 2 * len("[the") // 4, "two results stand between the turns"
    assert mask.sum() == sample.turns.tokens.sum()


async def test_an_environment_gives_each_turn_its_reward(model_dir: Path) -> None:
    for protocol in ("text", "chat"):
        rollout = MultiTurn(
            protocol=protocol, environment=f"{GAMES}:Game", environment_options={"actions": 3}, max_tokens=5
        )
        sample, _ = await made(model_dir, rollout)
        assert sample.turns is not None
        assert [(number, reward) for number, reward in sample.turns.rewards] == [(0, 1.0), (1, 2.0), (2, 3.0)]
        assert sample.score == 6.0
        assert sample.status is Status.COMPLETED


async def test_a_turn_has_at_most_max_tokens_and_ends_at_a_stop_string(model_dir: Path) -> None:
    def answers(sample: Sample) -> list[str]:
        return [str(message["content"]) for message in sample.transcript if message["role"] == "assistant"]

    game: dict[str, Any] = {"protocol": "chat", "environment": f"{GAMES}:Game", "environment_options": {"actions": 3}}
    plain, _ = await made(model_dir, MultiTurn(**game))
    assert plain.turns is not None and plain.turns.tokens.max() > 2
    letters = sorted(set("".join(answers(plain))))
    short, _ = await made(model_dir, MultiTurn(**game, max_tokens=2))
    assert short.turns is not None and 0 < short.turns.tokens.max() <= 2
    stopped, _ = await made(model_dir, MultiTurn(**game, stop=letters[:4]))
    assert any(set(answer) & set(letters[:4]) for answer in answers(plain))
    assert not any(set(answer) & set(letters[:4]) for answer in answers(stopped))


async def test_calls_in_messages_need_no_template_that_writes_tools() -> None:
    """A call is a part of the answer, and its result a message of the user."""
    requests: list[Any] = []

    async def answer(http: web.Request) -> web.Response:
        requests.append(await http.json())
        content = "There are 1920." if len(requests) > 1 else "I ask: <call>24*80</call>"
        choice = {"message": {"role": "assistant", "content": content}}
        return web.json_response({"id": f"turn-{len(requests)}", "choices": [choice]})

    rollout = MultiTurn(protocol="messages", tools=["calculator"], system="Calculate.", max_turns=2)
    async with listening({"/v1/chat/completions": answer}) as url:
        played = await rollout.play({"prompt": "24 rows of 80?"}, url + "/v1", "key")
    begin, behind = requests
    assert not begin.get("tools") and not rollout.chat_tools
    assert [message["content"] for message in begin["messages"]] == ["Calculate.", "24 rows of 80?"]
    assert behind["messages"][:2] == begin["messages"]
    assert [(message["role"], message["content"]) for message in behind["messages"][2:]] == [
        ("assistant", "I ask: <call>24*80</call>"),
        ("user", "<result>1920</result>"),
    ]
    assert (played.answers[-1], played.cut) == ("There are 1920.", "")


async def test_the_close_of_an_environment_is_not_cut_short() -> None:
    """The episode is cancelled while its environment is closed, as by its budget or a drain."""

    async def answer(http: web.Request) -> web.Response:
        return web.json_response({"id": "turn-1", "choices": [{"text": "said"}]})

    events = {name: asyncio.Event() for name in ("closing", "go_on", "closed")}
    rollout = MultiTurn(protocol="text", environment=f"{GAMES}:SlowToClose", environment_options=events)
    async with listening({"/v1/completions": answer}) as url:
        playing = asyncio.create_task(rollout.run({"prompt": "hello"}, url + "/v1", "key"))
        await events["closing"].wait()
        playing.cancel()
        await turn()
        events["go_on"].set()
        await asyncio.wait({playing})
        assert playing.cancelled() and events["closed"].is_set()


@pytest.mark.parametrize("protocol", ["text", "chat"])
async def test_it_goes_on_behind_every_state(model_dir: Path, protocol: str) -> None:
    """The environment, its rewards, and the texts of the next request are those of an episode that did not stop."""
    rollout = MultiTurn(protocol=protocol, environment=f"{GAMES}:SavedGame", environment_options={"actions": 3})
    states: list[Any] = []
    asked: list[int] = []

    async def answer(http: web.Request) -> web.Response:
        given = await http.json()
        if http.path == "/state":
            states.append(given["state"])
            return web.json_response({"success": True})
        asked.append(len(str(given.get("prompt") or given.get("messages"))))
        said = f"said {len(asked)}"
        choice = {"message": {"role": "assistant", "content": said}} if protocol == "chat" else {"text": said}
        return web.json_response({"id": f"turn-{len(asked)}", "choices": [choice]})

    async with listening({"/v1/chat/completions": answer, "/v1/completions": answer, "/state": answer}) as url:
        whole = await rollout.run({"prompt": "hello"}, url + "/v1", "key", saves=True)
        requests = list(asked)
        assert whole == {"turn-1": 1.0, "turn-2": 2.0, "turn-3": 3.0} and len(states) == 3
        for place, state in enumerate(json.loads(json.dumps(states)), 1):
            del asked[place:]
            assert await rollout.resume({"prompt": "hello"}, state, url + "/v1", "key") == whole
            assert asked == requests


async def test_calls_that_hang_are_reported_and_with_too_many_the_child_is_replaced() -> None:
    """Until then they delay no other call: more hang than asyncio's pool has threads."""
    asked: list[str] = []

    async def answer(http: web.Request) -> web.Response:
        prompt = str((await http.json())["prompt"])
        asked.append(prompt)
        said = (
            "no call"
            if "[" in prompt
            else "<call>calculator:6*7</call>"
            if prompt == "calculate"
            else "<call>hangs:x</call>"
        )
        return web.json_response({"id": f"turn-{len(asked)}", "choices": [{"text": said}]})

    hung: list[str] = []
    count = min(32, (os.cpu_count() or 1) + 4) + 1
    options = {
        "tools": ["calculator", f"{GAMES}:hangs"],
        "protocol": "text",
        "call": "<call>(?P<tool>[a-z]+):(?P<argument>.*?)</call>",
        "result": "[{result}]",
        "tool_seconds": 4.0,
        "max_hung_calls": count,
    }
    config = RolloutConfig(use="multi_turn", options=options, processes=1, episodes_per_child=count + 2)
    pool = Children(config, note_hung=hung.append)
    async with listening({"/v1/completions": answer}) as url, pool:

        async def play(prompt: str, number: int) -> EpisodeResult:
            return await pool.run(f"{number}.0.a", base_url=f"{url}/v1", api_key="k", task={"prompt": prompt})

        await asyncio.gather(*(play("hang", number) for number in range(count)))
        assert len(hung) == pool.counters.hung == count, "shown to the model, and reported"
        assert hung[-1] == f"tool 'hangs': no result within 4 s; calls that hang in this process: {count}"
        await play("calculate", count)
        assert any("[42]" in prompt for prompt in asked), asked
        with refusal(ProgramFailed, got=re.compile(rf"^{count + 1}, .*'hangs'"), ended=False) as found:
            await play("hang", count + 1)
        assert not found.value.ended, "its own answers may be the cause"
        await play("calculate", count + 2)
        assert (pool.counters.started, pool.counters.killed) == (2, 1)


async def test_only_what_has_a_state_can_resume() -> None:
    assert not hasattr(MultiTurn(environment=f"{GAMES}:Game"), "resume")
    assert hasattr(MultiTurn(tools=["calculator"]), "resume")
    config = RolloutConfig(use="multi_turn", options={"environment": f"{GAMES}:Game"}, again="resume")
    async with Children(config) as children:
        with refusal(ProgramFailed, reason=re.compile(r"TypeError: again: .*\bresume\(data, state, \*\*extra\)")):
            await children.load()


async def test_a_spent_budget_is_the_end_and_is_trained(model_dir: Path) -> None:
    rollout = MultiTurn(tools=[f"{GAMES}:told"], protocol="text", max_turns=50, call=ANYTHING)
    sample, _ = await made(model_dir, rollout, budget=Budget(turns=3))
    assert sample.status is Status.TRUNCATED
    assert sample.turns is not None and len(sample.turns.at) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [f"{GAMES}:halved"], "protocol": "text", "call": ANYTHING},
        {"tools": [f"{GAMES}:halved_error"], "protocol": "text", "call": ANYTHING},
        {"environment": f"{GAMES}:HalvedGame"},
    ],
    ids=["result", "error", "observation"],
)
async def test_halves_of_characters_of_tools_and_environments_end_no_episode(
    model_dir: Path, options: dict[str, Any]
) -> None:
    sample, _ = await made(model_dir, MultiTurn(max_turns=2, **options))
    assert sample.turns is not None and len(sample.turns.at) == 2
    assert decode_sample(encode_sample(sample)).transcript == sample.transcript
    assert "\ufffd" in str(sample.transcript)


async def test_an_answer_without_a_call_is_the_end(model_dir: Path) -> None:
    sample, _ = await made(model_dir, MultiTurn(tools=["calculator"], protocol="text", call="never(.*)"))
    assert sample.turns is not None and len(sample.turns.at) == 1


@asynccontextmanager
async def scripted(*answers: Any, cuts: list[Any] | None = None) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve chat answers in their order: the tiny model of these tests calls no tool by name. ``cuts``: gets reports of
    truncation.
    """
    asked: list[Any] = []

    async def answer(http: web.Request) -> web.Response:
        asked.append(await http.json())
        return web.json_response({"id": f"turn-{len(asked)}", "choices": [{"message": answers[len(asked) - 1]}]})

    async def truncated(http: web.Request) -> web.Response:
        assert cuts is not None
        cuts.append(await http.json())
        return web.json_response({"success": True})

    async with listening({"/v1/chat/completions": answer, "/truncated": truncated}) as url:
        yield f"{url}/v1", asked


@asynccontextmanager
async def listening(posts: Mapping[str, Any]) -> AsyncIterator[str]:
    """Serve handlers by path, and give the URL."""
    application = web.Application()
    for path, handler in posts.items():
        application.router.add_post(path, handler)
    async with web_server(application) as url:
        yield url


def calling(*calls: tuple[str, object]) -> dict[str, Any]:
    made = []
    for number, (name, given) in enumerate(calls):
        function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        made.append({"id": f"c{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": None, "tool_calls": made}


async def test_chat_calls_tools_until_an_answer_has_no_call() -> None:
    done = {"role": "assistant", "content": "It is 5."}
    first = calling(("calculator", {"expression": "2+3"}), ("nosuch", {}), ("calculator", "{rubbish"))
    async with scripted(first, calling(("python", {"code": "print(7)"})), done) as (url, asked):
        python = {"use": "python", "options": {"seconds": 60.0}}  # the limit includes the start of an interpreter
        rollout = MultiTurn(tools=["calculator", python], system="Be brief.")
        played = await rollout.play({"prompt": "2+3?"}, url, "key")
    assert rollout.reward({}, played) is None
    assert played.answers == ["", "", "It is 5."]
    assert played.ids == ["turn-1", "turn-2", "turn-3"]
    assert [call[2] for call in played.calls] == [
        "5",
        "Error: no tool 'nosuch'; there are calculator, python",
        "Error: want a map of arguments, got str",
        "7\n",
    ]
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["calculator", "python"]
    assert [message["role"] for message in asked[2]["messages"]] == [
        *("system", "user", "assistant", "tool", "tool", "tool", "assistant", "tool"),
    ]
    assert asked[1]["messages"][3] == {"role": "tool", "tool_call_id": "c0", "content": "5"}
    assert asked[1]["messages"][2] == first, "what the model said goes back as it is"


@pytest.mark.parametrize("nested", [True, False])
async def test_a_row_offers_its_own_tools_as_it_describes_them(nested: bool) -> None:
    function = {"name": "calculator", "description": "Sums.", "parameters": {"type": "object", "properties": {}}}
    row = {"type": "function", "function": function}
    data = {"prompt": "2+3?", "metadata": {"tools": [row if nested else function]}}
    first = calling(("calculator", {"expression": "2+3"}), ("python", {"code": "print(7)"}))
    async with scripted(first, {"role": "assistant", "content": "5"}) as (url, asked):
        played = await MultiTurn(tools=["calculator", "python"]).play(data, url, "key")
    assert asked[0]["tools"] == [row]
    assert [call[2] for call in played.calls] == ["5", "Error: no tool 'python'; there are calculator"]
    with refusal(ValueError, place="tools of the data row", got="'calculator'"):
        await MultiTurn(tools=["python"]).play(data, url, "key")


async def test_a_failed_call_may_end_the_episode() -> None:
    async with scripted(calling(("calculator", {"expression": "x"}))) as (url, asked):
        played = await MultiTurn(tools=["calculator"], errors="end").play({"prompt": "?"}, url, "key")
    assert len(asked) == 1 and played.calls[0][2].startswith("Error: ")


@pytest.mark.parametrize("last_calls", [True, False])
async def test_max_turns_cut_an_episode_whose_last_answer_has_calls(last_calls: bool) -> None:
    again = calling(("calculator", {"expression": "1"}))
    cuts: list[Any] = []
    async with scripted(again, again if last_calls else {"role": "assistant", "content": "1"}, cuts=cuts) as (
        url,
        asked,
    ):
        played = await MultiTurn(tools=["calculator"], max_turns=2).play({"prompt": "?"}, url, "key")
    assert len(asked) == 2 and len(played.calls) == 1
    assert cuts == ([{"limit": "max_turns"}] if last_calls else [])


@pytest.mark.parametrize(
    ("options", "max_turns", "limit"),
    [
        ({"tools": [f"{GAMES}:told"], "call": ANYTHING}, 2, "budget.max_turns"),
        ({"tools": [f"{GAMES}:told"], "call": "never(.*)"}, 1, "length"),
        ({"environment": f"{GAMES}:Game", "environment_options": {"actions": 3}}, 2, "budget.max_turns"),
        ({"environment": f"{GAMES}:Game", "environment_options": {"actions": 3}}, 3, "length"),
    ],
)
async def test_an_episode_that_max_turns_cut_is_truncated(
    model_dir: Path, options: dict[str, Any], max_turns: int, limit: str
) -> None:
    sample, _ = await made(model_dir, MultiTurn(protocol="text", max_turns=max_turns, **options))
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, limit), (
        "answers of a random model are cut by their length"
    )
    assert sample.turns is not None and len(sample.turns.at) == max_turns


@pytest.mark.parametrize(
    ("options", "max_new_tokens", "ending"),
    [
        ({}, 3, (Status.TRUNCATED, "length")),
        ({"max_tokens": 3}, 12, (Status.TRUNCATED, "budget.max_tokens")),
        (
            {"environment": f"{GAMES}:Game", "environment_options": {"actions": 1}, "max_tokens": 3},
            12,
            (Status.COMPLETED, "stop"),
        ),
    ],
    ids=["task", "turn", "move"],
)
async def test_an_episode_whose_last_answer_is_cut_by_its_length_is_truncated(
    model_dir: Path, options: dict[str, Any], max_new_tokens: int, ending: tuple[Status, str]
) -> None:
    sample, _ = await made(
        model_dir, MultiTurn(protocol="text", call="never(.*)", **options), max_new_tokens=max_new_tokens
    )
    assert sample.turns is not None and sample.turns.finish == ("length",)
    assert (sample.status, sample.finish_reason) == ending


async def test_the_sum_game_ends_with_its_second_turn_and_is_not_cut() -> None:
    said = iter(("4+5", "009"))

    async def answer(http: web.Request) -> web.Response:
        text = next(said)
        return web.json_response({"id": text, "choices": [{"text": text}]})

    async with listening({"/v1/completions": answer}) as url:  # a report of truncation would be an error
        played = await SumGame().play({"prompt": "4+5="}, url + "/v1", "key")
    assert played.answers == ["4+5", "009"] and not played.cut


def test_the_sum_game_rewards_the_call_and_the_answer() -> None:
    game, data = SumGame(), {"prompt": "12+7.=", "label": "19"}
    assert game.reward(data, Played(answers=["12+7", "019"])) == {"score": 1.0, "call": 1.0, "answer": 1.0}
    assert game.reward(data, Played(answers=["12+7", "018"]))["answer"] == pytest.approx(3 / 4)
    assert game.reward(data, Played(answers=["19"]))["answer"] == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocol": "sse"}, {"place": "protocol", "got": "'sse'"}),
        ({"tools": ["calculator"], "environment": "m:C"}, {"place": "environment", "got": "both"}),
        ({"max_turns": 0}, {"got": "0, 10.0, 0"}),
        ({"result": "x"}, {"place": "result"}),
        ({"call": "("}, {"place": "call"}),
        ({"call": "x", "protocol": "text", "tools": ["calculator"]}, {"place": "call"}),
        ({"errors": "ignore"}, {"place": "errors", "got": "'ignore'"}),
        ({"environment": f"{GAMES}:NO_CLASS"}, {"place": "environment"}),
        ({"environment": "Game"}, {"place": "environment", "got": "'Game'"}),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: dict[str, Any]) -> None:
    with refusal(ValueError, **words):
        MultiTurn(**options)


def test_it_is_a_rollout_by_name() -> None:
    assert (
        read(Sections[RolloutConfig], {"a": {"use": "multi_turn"}}, "rollouts")["a"].program
        == "tidemill.actors.episodes.programs.multi_turn:MultiTurn"
    )
    assert (
        read(Sections[RolloutConfig], {"a": {"use": "multi_turn", "python": "/usr/bin/python3"}}, "rollouts")[
            "a"
        ].python
        == "/usr/bin/python3"
    )
    with refusal(ValueError, place="rollouts.a.use", got="'multiturn'"):
        read(Sections[RolloutConfig], {"a": {"use": "multiturn"}}, "rollouts")
