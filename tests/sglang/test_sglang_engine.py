"""The Engine port on a real SGLang server: log-probs, spans across pushes, abort, pause, torn pushes, bad input, an end without orphans."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from actors.engine_client import HttpEngine
from actors.errors import BadRequest, EngineFailed
from actors.sglang.api import Api
from actors.sglang.child import ServerChild, command_line, free_port
from actors.sglang.engine import SglangEngine
from bus.messages import LiveRow, Sampling
from tests.contract.test_engine_updates import joined
from tests.engine_serving import LIMIT_S, Served, greedy, log_probs_of, scores, scores_across, told_log_probs
from tests.receiver_app import staged
from tests.sglang.server import ARGUMENTS, ENVIRONMENT, config
from tests.tiny_models import tiny_model, write_tiny_model
from tests.whole.running import ROOT
from weightstore.checksums import Told
from weightstore.errors import ReceiverFailed
from weightstore.http_receiver import HttpReceiver
from weightstore.member import Member

START_S = 300.0
CONTEXT = 4096
TOLERANCE = 1e-3
"""fp32 on both sides."""
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--sglang-python")
    if not found:
        pytest.skip("needs SGLang: make test-sglang")
    return str(found)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), seed=seed, max_position_embeddings=CONTEXT) for seed in range(3)]


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Of versions 0, 1 and 2."""
    return [tiny_model(seed=seed, max_position_embeddings=CONTEXT) for seed in range(3)]


@pytest.fixture(scope="module")
def server(python: str, directories: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests that do not end it; its URL."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "sglang.log"
    words = command_line(python, directories[0], port, {**ARGUMENTS, "dtype": "float32", "max_running_requests": 16})

    async def run(stop: asyncio.Event, ready: asyncio.Event) -> None:
        child, api = ServerChild(words, ENVIRONMENT, log), Api(f"http://127.0.0.1:{port}")
        await child.start()
        try:
            deadline = time.monotonic() + START_S
            while not await api.healthy():
                assert not child.ended.is_set() and time.monotonic() < deadline, child.last_lines(40)
                await asyncio.sleep(0.5)
            ready.set()
            await stop.wait()
        finally:
            await api.close()
            await child.stop()

    with asyncio.Runner() as runner:
        stop, ready = asyncio.Event(), asyncio.Event()

        async def begin() -> "asyncio.Task[None]":
            task = asyncio.create_task(run(stop, ready))
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()
            return task

        async def end(task: "asyncio.Task[None]") -> None:
            stop.set()
            await task

        task = runner.run(begin())
        yield f"http://127.0.0.1:{port}"
        runner.run(end(task))


@asynccontextmanager
async def serving(python: str, server: str, directory: Path, *, pause: str = "in_place") -> AsyncIterator[Served]:
    """A guard of one test in front of the server, with the weights of ``directory`` as version 0."""
    engine = SglangEngine(directory, config(python, url=server, pause=pause), version=-1)
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start())
    try:
        await engine.load_snapshot(directory, 0)
        engine.phase = "serving"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Served(engine, client, session)  # type: ignore[arg-type]
    finally:
        await client.close()
        await engine.close()


async def test_tokens_and_log_probs_are_those_of_a_full_forward_pass(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served:
        answer = await served.generate(PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)
        assert answer["output_ids"][:12] == (await greedy(models[0], PROMPT, 12))[:12]
        for temperature in (1.0, 0.7, 1.3):
            answer = await served.generate(PROMPT, max_new_tokens=48, temperature=temperature, ignore_eos=True)
            wanted = log_probs_of(await scores(models[0], PROMPT, answer["output_ids"]) / temperature, answer["output_ids"])
            assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE
            assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 48}]


async def test_the_port_gets_what_it_asks_for(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        made = await served.client.generate(np.array(PROMPT, np.int32), Sampling(max_new_tokens=8, temperature=0.0), id="one")
        states = [one async for one in served.client.stream(np.array(PROMPT, np.int32), Sampling(max_new_tokens=8, temperature=0.0))]
        info = await served.client.info()
        assert await served.client.healthy()
    assert made.finish in ("length", "stop") and made.id == "one"
    assert states[-1].tokens.tolist() == made.tokens.tolist()
    assert [len(one.tokens) for one in states] == sorted(len(one.tokens) for one in states)
    assert (info.version, info.vocab_size, info.max_context) == (0, 299, CONTEXT)


@pytest.mark.parametrize("pause", ["in_place", "retract"])
async def test_one_request_lives_through_pushes_and_says_which_weights_made_what(
    python: str, server: str, directories: list[Path], models: list[Any], pause: str
) -> None:
    """Three sets of weights in one response; the log-probs of each stretch are those of its weights."""
    async with serving(python, server, directories[0], pause=pause) as served, joined(served, timeout_s=60) as push:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1200, "ignore_eos": True}, "return_logprob": True}
        asked = asyncio.create_task(served.post("/generate", body))
        for version in (1, 2):
            await asyncio.sleep(0.4)
            await push.whole(models[version], version)
        status, answer = await asked
    assert status == 200, answer
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1", "2"], spans
    assert spans[-1]["end"] == 1200
    tokens, told = answer["output_ids"], told_log_probs(answer)
    if pause == "in_place":
        made = [(models[int(span["version"])], span["end"] - span["start"]) for span in spans]
        wanted = log_probs_of(await scores_across(made, PROMPT, tokens), tokens)
    else:
        by_version = [log_probs_of(await scores(model, PROMPT, tokens), tokens) for model in models]
        wanted = np.concatenate([by_version[int(span["version"])][span["start"] : span["end"]] for span in spans])
    assert np.abs(told - wanted).max() < TOLERANCE


async def test_what_is_cached_of_older_weights_is_not_used_again(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    prompt = list(range(5, 69))
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=60) as push:
        await served.generate(prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        again = await served.generate(prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True)
        assert again["meta_info"]["cached_tokens"] > 0, "of the same weights it is"
        await push.whole(models[1], 1)
        answer = await served.generate(prompt, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    wanted = log_probs_of(await scores(models[1], prompt, answer["output_ids"]), answer["output_ids"])
    assert np.abs(told_log_probs(answer) - wanted).max() < TOLERANCE


async def test_a_push_that_breaks_off_leaves_nothing_to_be_served_and_a_snapshot_heals_it(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=60) as push:
        tensors = list(models[1].named_parameters())
        assert (await push.begin(1))[0] == 200
        assert (await push.bucket(tensors[:5]))[0] == 200
        status, answer = await push.end(1)
        assert status == 400 and "have not come" in answer["message"]
        assert served.engine.version == -1
        refused = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        assert (await served.post("/generate", refused))[0] == 503
        assert (await served.post("/continue_generation", {}))[0] == 400
        await served.engine.load_snapshot(directories[2], 2)
        answer = await served.generate(PROMPT, max_new_tokens=16, temperature=0.0, ignore_eos=True)
        await push.whole(models[1], 3)
        after = await served.generate(PROMPT, max_new_tokens=16, temperature=0.0, ignore_eos=True)
    for made, model, version in ((answer, models[2], "2"), (after, models[1], "3")):
        wanted = log_probs_of(await scores(model, PROMPT, made["output_ids"]), made["output_ids"])
        assert np.abs(told_log_probs(made) - wanted).max() < TOLERANCE
        assert made["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 16}]


async def test_weights_that_differ_from_what_was_sent_are_not_served(
    python: str, server: str, directories: list[Path], models: list[Any]
) -> None:
    """What the server says it has is compared while it is paused, also of what it keeps fused and padded."""
    sent = {name: tensor.detach() for name, tensor in models[1].state_dict().items()}
    kept = "model.layers.1.self_attn.k_proj.weight"
    other = sent | {kept: sent[kept].clone()}
    other[kept].view(-1).view(torch.uint8)[-1] ^= 1
    staging, flipped = staged(sent), staged(other)
    async with serving(python, server, directories[0]) as served:
        row = LiveRow(role="engine", id="e", host="test", pid=1, phase="serving", address=served.engine.url)
        for check, good in ((flipped.differences, False), (staging.differences, True)):
            receiver = HttpReceiver(served.session, served.engine.url, epoch=1, deadline_s=60.0)
            member = Member(row, receiver, host="127.0.0.1", backend="gloo", deadline_s=60.0)
            try:
                if good:
                    assert (await member.update(2, staging.buckets, check)).verify_s is not None
                else:
                    with pytest.raises(ReceiverFailed, match=r"verify: version 1 .* in 1 tensors: .*q_proj.* \+ .*k_proj"):
                        await member.update(1, staging.buckets, check)
                    assert served.engine.version == -1
            finally:
                await member.close(leave=True)
        assert served.engine.version == 2
        status, answer = await served.post("/weights_checksums")
        assert (status, answer["weight_version"], staging.differences(Told.parse(answer))) == (200, "2", [])
        assert (await served.generate(PROMPT, max_new_tokens=4, temperature=0.0))["meta_info"]["weight_version"] == "2"


async def test_a_replaced_learner_is_refused(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        assert (await served.post("/pause_generation", {"mode": "in_place", "epoch": 5}))[0] == 200
        assert (await served.post("/continue_generation", {"epoch": 4}))[0] == 409
        assert (await served.post("/continue_generation", {"epoch": 5}))[0] == 200


async def test_an_abort_answers_with_what_there_is(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        sampling = Sampling(max_new_tokens=3000, stop_token_ids=())
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "return_logprob": True, "rid": "long"}
        asked = asyncio.create_task(served.post("/generate", body))
        await asyncio.sleep(0.5)
        await served.client.abort("long")
        status, answer = await asked
        assert status == 200 and answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(told_log_probs(answer)) < 3000
        assert sampling.max_new_tokens == 3000


async def test_pause_holds_and_continue_goes_on(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        await served.client.pause()
        asked = asyncio.create_task(served.generate(PROMPT, max_new_tokens=4))
        await asyncio.sleep(0.5)
        assert not asked.done()
        await served.client.resume()
        assert len((await asked)["output_ids"]) <= 4


async def test_what_would_kill_the_server_is_refused_before(python: str, server: str, directories: list[Path]) -> None:
    async with serving(python, server, directories[0]) as served:
        for ids in ([5, 299], [-1], [5, 2**31]):
            with pytest.raises(BadRequest, match=r"want token ids in 0 \.\. 298"):
                await served.client.generate(ids, Sampling(max_new_tokens=2))
        with pytest.raises(BadRequest, match=r"want token ids in 0 \.\. 298"):
            await served.client.generate(PROMPT, Sampling(max_new_tokens=2, stop_token_ids=(400,)))
        with pytest.raises(BadRequest, match="longer than the model's context"):
            await served.client.generate([5] * CONTEXT, Sampling(max_new_tokens=2))
        status, _ = await served.post("/generate", {"input_ids": PROMPT, "text": "x"})
        assert status == 400
        assert len((await served.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2
        assert served.engine.stats()["refused"] == 6


async def test_a_minimum_version_is_waited_for(python: str, server: str, directories: list[Path], models: list[Any]) -> None:
    async with serving(python, server, directories[0]) as served, joined(served, timeout_s=60) as push:
        asked = asyncio.create_task(served.client.generate(PROMPT, Sampling(max_new_tokens=4), min_version=1))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await push.whole(models[1], 1)
        assert {span.version for span in (await asked).spans} == {1}


def test_a_server_that_dies_is_noticed_and_nobody_of_it_is_left(python: str, directories: list[Path], tmp_path: Path) -> None:
    """Its first process is killed: the engine hears of it at once; scheduler and detokenizer, which SGLang leaves behind, are gone too."""

    async def started() -> None:
        engine = SglangEngine(directories[0], config(python, log=str(tmp_path / "sglang.log")))
        await asyncio.to_thread(engine.load)
        others = {one.pid for one in psutil.Process().children()}
        await engine.start()
        try:
            await engine.probe()
            (keeper,) = [one for one in psutil.Process().children() if one.pid not in others and "actors.sglang.keeper" in one.cmdline()]
            whole = [keeper.pid, *(one.pid for one in keeper.children(recursive=True))]
            assert len(whole) >= 4
            keeper.children()[0].kill()
            with pytest.raises(EngineFailed, match="ended with code"):
                await asyncio.wait_for(engine.failed(), 60)
        finally:
            await engine.close()
        await _until_gone(whole)

    asyncio.run(started())


def test_a_server_ends_with_the_process_that_started_it(python: str, directories: list[Path], tmp_path: Path) -> None:
    """Which is killed, and can say nothing to anybody."""
    program = (
        "import asyncio; from pathlib import Path\n"
        "from actors.sglang.engine import SglangEngine; from tests.sglang.server import config\n"
        "async def run():\n"
        f"    engine = SglangEngine(Path({str(directories[0])!r}), config({python!r}, log={str(tmp_path / 'sglang.log')!r}))\n"
        "    engine.load(); await engine.start(); print('up', flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(run())"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "up\n"
            whole = [one.pid for one in psutil.Process(owner.pid).children(recursive=True)]
            assert len(whole) >= 4
        finally:
            owner.kill()
    asyncio.run(_until_gone(whole))


def test_a_server_that_cannot_start_is_told_with_its_last_lines(python: str, directories: list[Path], tmp_path: Path) -> None:
    async def refused() -> None:
        wrong = config(python, log=str(tmp_path / "refused.log"))
        wrong = replace(wrong, sglang=replace(wrong.sglang, arguments={**ARGUMENTS, "no_such_argument": 1}))
        engine = SglangEngine(directories[0], wrong)
        await asyncio.to_thread(engine.load)
        try:
            with pytest.raises(EngineFailed, match=r"(?s)ended with code .*no-such-argument"):
                await engine.start()
        finally:
            await engine.close()

    asyncio.run(refused())


async def _until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)
