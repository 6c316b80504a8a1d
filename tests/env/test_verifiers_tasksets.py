"""Tasksets of verifiers, unmodified, in an interpreter that has nothing of ours, on a real engine: tokens, rewards,
refusals.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from tests.engine_serving import log_probs_of, scores
from tests.episode_kit import stage, task
from tests.reciting_model import write_chains
from tests.tiny_models import EOS, write_tiny_model
from tidemill.actors.engines.responses import GenerationFailed
from tidemill.actors.episodes.children import Children
from tidemill.actors.episodes.port import ProgramFailed
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.section import Sections, read
from tidemill.bus.wire.codec import check_sample
from tidemill.bus.wire.messages import Sample, Status
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.cli.main import main

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--verifiers-python")
    if not found:
        pytest.skip("want --verifiers-python PYTHON, an interpreter that has verifiers (make test-env)")
    return str(Path(found).absolute())


@pytest.fixture(scope="module", autouse=True)
def tasksets_are_found() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("verifiers") / "model", max_position_embeddings=1024)


@asynccontextmanager
async def playing(
    python: str, model_dir: Path, name: str, /, **options: Any
) -> AsyncIterator[tuple[ProgramRollout, Any]]:
    """Give the rollout of a taskset, and the model's own address for comparisons."""
    config = read(
        Sections[RolloutConfig], {"it": {"use": f"verifiers:{name}", "options": options, "python": python}}, "rollouts"
    )["it"]

    async def none(client: object) -> None:
        raise AssertionError("no program of this process is played")

    async with stage(model_dir, none) as scene:
        config = replace(config, python=python, max_calls_in_flight=4)
        async with Children(config, model=str(model_dir)) as children:
            await children.load()
            yield ProgramRollout(scene.gateway, children, config), scene


def rows(python: str, tmp_path: Path, taskset: str, *more: str) -> list[dict[str, Any]]:
    out = tmp_path / "prompts.jsonl"
    assert main(["data", "verifiers", taskset, str(out), "--python", python, *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


async def written(python: str, tmp_path: Path, taskset: str, *more: str) -> list[dict[str, Any]]:
    """Return the rows of a prompt file: its writer starts a process, and waits for it."""
    return await asyncio.to_thread(rows, python, tmp_path, taskset, *more)


def asking(row: dict[str, Any], **options: Any) -> Any:
    """Return the task of a row."""
    return replace(task(**options), prompt=row["prompt"], label=row["label"], metadata=row["metadata"])


async def assert_log_probs(sample: Sample, model_dir: Path) -> None:
    """Assert that every trained token has the log-prob of a forward pass over its whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    at, done = 0, 0
    for size in sample.sizes:
        ids = sample.tokens[at : at + size.num_tokens].tolist()
        context, response = ids[: -size.response_length], ids[-size.response_length :]
        want = log_probs_of((await scores(model, context, response)) / 0.8, response)
        region = slice(done, done + size.response_length)
        mask = sample.loss_mask[region] == 1
        assert mask.any()
        np.testing.assert_allclose(sample.rollout_log_probs[region][mask], want[mask], atol=1e-4)
        assert not sample.rollout_log_probs[region][~mask].any()
        at, done = at + size.num_tokens, done + size.response_length


HANGMAN = {"game": "Hangman-v0"}
LETTERS = "aeilmprv"
"""Letters that a model of ``write_guessing_model`` guesses, of the words in ``words``."""


def write_guessing_model(directory: Path) -> Path:
    """Write a model that answers every prompt with a letter in brackets, each of ``LETTERS`` with the same
    probability.
    """
    chains = [["Ċ", "["], *(["[", letter, "]"] for letter in LETTERS), ["]", EOS]]
    return write_chains(directory, chains, added=[], context=4096)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set nltk's word list, from which the games draw; without it nltk downloads one."""
    directory = tmp_path / "nltk/corpora/words"
    directory.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (directory / name).write_text("apple\nriver\nlamp\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a download fails at once


@pytest.mark.usefixtures("words")
async def test_a_taskset_that_verifiers_ships_is_played_as_it_is(python: str, tmp_path: Path) -> None:
    """Hangman of TextArena: prompt, moves and outcome are the game's."""
    guessing = write_guessing_model(tmp_path / "model")
    made_of = await written(
        python, tmp_path, "textarena", "--count", "2", "--options", json.dumps({"taskset": HANGMAN})
    )
    async with playing(python, guessing, "textarena", taskset=HANGMAN) as (rollout, scene):
        samples = [
            (await rollout.sample(asking(row, max_new_tokens=200), number, "n")).sample
            for number, row in enumerate(made_of)
        ]
        texts = [scene.gateway.model.text.decode(sample.tokens.tolist(), skip_special=False) for sample in samples]
    for sample, text in zip(samples, texts, strict=True):
        check_sample(sample)
        assert sample.turns is not None and 2 <= len(sample.turns.at) <= 20, "the game answers, until its end"
        assert "You are playing Hangman." in text and text.count("C00 C01") >= 2, (
            "the board, and the board behind a guess"
        )
        assert isinstance(sample.reward, dict) and 0 <= sample.reward["game_reward"] == sample.reward["score"] <= 1
        await assert_log_probs(sample, guessing)


@pytest.mark.parametrize("renderer", [None, pytest.param("default", marks=pytest.mark.slow)])
async def test_a_taskset_of_one_turn_makes_samples(
    python: str, model_dir: Path, tmp_path: Path, renderer: str | None
) -> None:
    options = {"taskset": {"count": 3}}
    made_of = await written(python, tmp_path, "verifiers_sums", "--options", json.dumps(options))
    assert [(row["prompt"], row["label"]) for row in made_of] == [("0+1=", "1"), ("1+2=", "3"), ("2+3=", "5")]
    more = {} if renderer is None else {"renderer": renderer}
    async with playing(python, model_dir, "verifiers_sums", **options, **more) as (rollout, scene):
        made = await rollout.sample(asking(made_of[1]), 2, "n0")
        again = await rollout.sample(asking(made_of[2]), 0, "n0")
        for metadata, got in (({}, "None"), ({"verifiers": {"taskset": "other"}}, "'other'")):
            with pytest.raises(GenerationFailed, match=f"want a task of verifiers_sums, got {got}"):
                await rollout.sample(asking({"prompt": "x", "label": None, "metadata": metadata}), 0, "n0")
        text = scene.gateway.model.text.decode(made.sample.tokens.tolist(), skip_special=False)
    sample = made.sample
    check_sample(sample)
    assert made.scored and "Add." in text and "1+2=" in text and "2+3=" in str(again.sample.prompt)
    reply = sample.response
    brief = 2 / (1 + len(reply)) if renderer is None else sample.reward["brief"]  # type: ignore[index]
    right = float("3" in reply)
    assert sample.reward == {
        "characters": pytest.approx(2 / brief - 1),
        "right": right,
        "brief": brief,
        "score": pytest.approx(right + brief),
    }
    assert (
        sample.turns is not None
        and len(sample.turns.at) == 1
        and sample.loss_mask.sum() == sample.turns.tokens.sum() > 0
    )
    await assert_log_probs(sample, model_dir)


@pytest.mark.parametrize("renderer", [pytest.param(None, marks=pytest.mark.slow), "default"])
async def test_a_taskset_of_several_turns_makes_samples(
    python: str, model_dir: Path, tmp_path: Path, renderer: str | None
) -> None:
    (row,) = await written(python, tmp_path, "verifiers_talk", "--count", "1")
    more = {} if renderer is None else {"renderer": renderer}
    async with playing(python, model_dir, "verifiers_talk", **more) as (rollout, _):
        sample = (await rollout.sample(asking(row), 1, "n0")).sample
        short = await rollout.sample(asking(row, budget=Budget(turns=2)), 1, "n0")
    check_sample(sample)
    assert sample.turns is not None and len(sample.turns.at) == 3
    assert set(sample.reward) == {"plain", "score"} and 0 <= sample.reward["score"] <= 1  # type: ignore[arg-type, index]
    assert sample.loss_mask.sum() == sample.turns.tokens.sum()
    if renderer is None:
        assert len(sample.sizes) == 1 and (sample.loss_mask == 0).any(), (
            "the gateway has the very ids of what comes back as text"
        )
    await assert_log_probs(sample, model_dir)
    assert short.scored and short.sample.status is Status.TRUNCATED and "plain" in short.sample.reward, (
        "a spent budget is no failure"
    )  # type: ignore[operator]


async def test_agents_that_are_not_trained_are_context_and_two_trained_ones_are_refused(
    python: str, model_dir: Path, tmp_path: Path
) -> None:
    (row,) = await written(python, tmp_path, "verifiers_talk", "--count", "1")
    async with playing(python, model_dir, "verifiers_talk", env={"judged": "context"}) as (rollout, _):
        sample = (await rollout.sample(asking(row), 1, "n0")).sample
    assert sample.turns is not None and len(sample.turns.at) == 3 and set(sample.turns.agent) == {"player"}
    async with playing(python, model_dir, "verifiers_talk", env={"judged": "trained"}) as (rollout, _):
        with pytest.raises(GenerationFailed, match="want one trained agent, run once, got player, judge"):
            await rollout.sample(asking(row), 1, "n0")


async def test_the_tools_of_a_task_are_called(python: str, tmp_path: Path) -> None:
    (row,) = await written(python, tmp_path, "verifiers_ask")
    asked: list[Any] = []
    calls = [call("clock_time_in", '{"city": "Rome"}'), call("clock_time_in", "[1]"), call("clock_date", "{}")]

    async def answer(http: web.Request) -> web.Response:
        asked.append((await http.json(), http.path, http.headers.get("X-Tidemill-Train")))
        message = (
            {"role": "assistant", "content": None, "tool_calls": calls}
            if len(asked) == 1
            else {"role": "assistant", "content": "noon"}
        )
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    application = web.Application()
    application.router.add_post("/e/k/v1/chat/completions", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model = f"http://127.0.0.1:{runner.addresses[0][1]}/e/k/v1"
    config = read(Sections[RolloutConfig], {"it": {"use": "verifiers:verifiers_ask", "python": python}}, "rollouts")[
        "it"
    ]
    try:
        async with Children(replace(config, python=python)) as children:
            result = await children.run("1", base_url=model, api_key="k", task={**row, "kind": "train"})
    finally:
        await runner.cleanup()
    assert result.value == {"asked": 3.0, "score": 3.0} and [train for *_, train in asked] == ["1", "1"]
    assert [tool["function"]["name"] for tool in asked[0][0]["tools"]] == ["clock_time_in"]
    shown = [message["content"] for message in asked[1][0]["messages"] if message["role"] == "tool"]
    assert (
        shown[0] == "noon in Rome" and "want arguments as a JSON map" in shown[1] and "no tool 'clock_date'" in shown[2]
    )


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"{name}{arguments}", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("taskset", "options", "complaint"),
    [
        ("nothing_here", {}, "nothing_here"),
        ("verifiers_sums", {"taskset": {"counts": 3}}, "counts"),
        (
            "verifiers_sums",
            {"agent": {"harness": {"id": "codex"}}},
            "the harness codex needs a container, got the runtime subprocess",
        ),
        ("verifiers_sums", {"env": {"id": "nowhere"}}, "nowhere"),
    ],
)
async def test_what_cannot_be_played_is_refused_at_the_start(
    python: str, model_dir: Path, taskset: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ProgramFailed, match=complaint):
        async with playing(python, model_dir, taskset, **options):
            raise AssertionError("it was loaded")


def test_prompts_that_cannot_be_written_leave_no_file(
    python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prompts.jsonl"
    for given, complaint in (
        (["nothing_here", str(out), "--python", python], "nothing_here"),
        (["verifiers_talk", str(out), "--python", python], "has tasks without end"),
        (["verifiers_sums", str(out), "--python", "/nowhere/python"], "/nowhere/python"),
        (
            ["verifiers_sums", str(out), "--python", python, "--options", '{"tasks": {}}'],
            "options.tasks: no such option",
        ),
        (["verifiers_sums", str(out), "--python", python, "--options", "{"], "--options: want JSON"),
        (["verifiers_sums", str(out), "--python", python, "--count", "-1"], "--count: want a whole number"),
    ):
        assert main(["data", "verifiers", *given]) in (2, 78)
        assert complaint in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_program_needs_nothing_of_ours(python: str) -> None:
    found = (
        "import importlib.util as u; print([n for n in ('bus', 'actors', 'learner', 'torch', 'nats') if "
        "u.find_spec(n)])"
    )
    command = [python, "-c", found]
    done = subprocess.run(
        command, cwd="/", capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_a_taskset_may_print_and_have_texts_that_cannot_be_encoded(
    python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (row,) = await written(python, tmp_path, "verifiers_loud")
    assert (row["prompt"], row["label"]) == ("Say it.", "\ud83d")
    broken = ["--python", python, "--options", '{"taskset": {"broken": true}}']
    assert await asyncio.to_thread(main, ["data", "verifiers", "verifiers_loud", str(tmp_path / "none"), *broken]) in (
        2,
        78,
    )
    assert "no t\ufffdsks" in capfd.readouterr().err, "stderr of another encoding"


async def test_an_environment_that_starts_at_the_second_try_has_one_address(
    python: str, model_dir: Path, tmp_path: Path
) -> None:
    """Each trace is announced twice, too."""
    (row,) = await written(python, tmp_path, "verifiers_loud")
    played = asking({**row, "label": None})
    async with playing(python, model_dir, "verifiers_loud") as (rollout, _):
        with pytest.raises(GenerationFailed, match="its servers are not up yet"):
            await rollout.sample(played, 0, "n0")
        made = await rollout.sample(played, 0, "n1")
    check_sample(made.sample)
    assert made.sample.reward == {"any": 1.0, "score": 1.0}
    done = await asyncio.to_thread(
        subprocess.run, [python, "-c", STARTS, str(HERE.parents[1] / "actors/episodes/programs")], **OUTPUT
    )
    first, second = done.stdout.splitlines()[-1].split()
    assert first == second, "the address is started once"


OUTPUT: Any = {"capture_output": True, "text": True, "check": True}
STARTS = """
import asyncio, sys
sys.path.append(sys.argv[1])
import verifiers_taskset

async def main():
    taskset = verifiers_taskset.Taskset("verifiers_loud")
    urls = []
    for _ in range(2):
        try:
            await taskset._context()
        except RuntimeError:
            pass
        urls.append(taskset._door.url)
    print(*urls)

asyncio.run(main())
"""
"""Prints the address of the model behind each of two starts of the environment."""
