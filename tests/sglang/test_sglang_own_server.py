"""An SGLang server that an engine starts: it ends with the engine, a dead or silent one is detected, and it refuses
other clients.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.sglang.server import ARGUMENTS, config
from tests.tiny_models import PAD
from tests.waits import LIMIT_S, until
from tests.whole.running import ROOT
from tidemill.actors.config import EngineConfig
from tidemill.actors.errors import EngineError, EngineFailed, EngineUnavailable, UpdateRefused
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.arguments import TRIED
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.actors.serving.sglang.server_process import Api, ServerProcess
from tidemill.rewards.model_text import EndTokens

GROUP = "tidemill.actors.serving.sglang.process_group"
PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("sglang.launch_server", marks=pytest.mark.slow),
        "sglang::scheduler",
        pytest.param("sglang::detokenizer", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_is_noticed_and_nobody_of_it_is_left(
    python: str, directories: list[Path], tmp_path: Path, part: str
) -> None:
    """One of its processes is killed: the engine detects it at once; processes that SGLang leaves behind are ended too.

    Before that, requests that go around its proxy are refused.
    """

    async def started() -> None:
        async with started_engine(directories[0], config(python, log=str(tmp_path / "sglang.log"))) as (engine, whole):
            await engine.probe()
            await engine.load_snapshot(directories[0], 1)
            engine.phase = "serving"
            await _only_the_proxy_asks(engine, whole, tmp_path / "sglang.log")
            begun = asyncio.Event()
            streaming = asyncio.create_task(_stream_for_ever(engine.url, begun))
            await asyncio.wait_for(begun.wait(), LIMIT_S)
            (victim,) = [
                one
                for one in whole
                if part in " ".join(one.cmdline())
                and "tidemill.actors.serving.sglang.process_group" not in one.cmdline()
            ]
            if "::" in part:
                await _until_watched(whole[0].pid, victim.pid)
            victim.kill()
            with pytest.raises(
                EngineFailed, match=r"(?s)ended with code 137" + (f".*{part} .* has ended" if "::" in part else "")
            ):
                await asyncio.wait_for(engine.failed(), LIMIT_S)
            assert not engine.servable
            with pytest.raises(aiohttp.ClientError):  # rather than wait for more
                await asyncio.wait_for(streaming, LIMIT_S)
        await _until_gone([one.pid for one in whole])

    asyncio.run(started())


def test_a_frozen_server_is_given_up_in_time(python: str, directories: list[Path], tmp_path: Path) -> None:
    """The server's scheduler is frozen, while its HTTP side still answers; a pause does not count as frozen; no process
    is left.
    """

    async def started() -> None:
        settings = config(python, log=str(tmp_path / "sglang.log"))
        settings = replace(settings, sglang=replace(settings.sglang, silent_s=20.0))
        async with started_engine(directories[0], settings) as (engine, whole):
            await engine.api.call("POST", "/pause_generation", {"mode": "in_place"})
            polls, failing = _count_polls(engine.api), asyncio.create_task(engine.failed())
            # It answers, and lives on. (The first answer may be of a poll from before the pause.)
            await until(lambda: polls["/server_info"] >= 3, alive=lambda: not failing.done())
            (scheduler,) = [one for one in whole if "sglang::scheduler" in one.cmdline()[0]]
            scheduler.suspend()
            pushes = asyncio.create_task(_join_for_ever(engine))  # there is always an update in progress
            with pytest.raises(EngineFailed, match="has not answered for 20 s"):
                await asyncio.wait_for(failing, LIMIT_S)
            pushes.cancel()
        await _until_gone([one.pid for one in whole])

    asyncio.run(started())


def _count_polls(api: Api) -> Counter[str]:
    """Return a counter of the answers of a server by path."""
    answers, call = Counter[str](), api.call

    async def counted(method: str, path: str, *rest: Any, **named: Any) -> Any:
        answer = await call(method, path, *rest, **named)
        answers[path] += 1
        return answer

    api.call = counted  # type: ignore[method-assign]
    return answers


async def _only_the_proxy_asks(engine: SglangEngine, whole: list[psutil.Process], log: Path) -> None:
    """Other users of this machine cannot: the server requires a key that neither its command line, its log nor the
    proxy reveals.
    """
    async with aiohttp.ClientSession() as session:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/flush_cache", "/abort_request"):
            async with session.post(engine.api.url + path, json=body) as answer:
                assert answer.status == 401, path
        async with session.post(f"{engine.url}/generate", json=body) as answer:
            assert answer.status == 200
        async with session.get(f"{engine.url}/server_info") as answer:
            assert "api_key" not in await answer.text()
    assert log.stat().st_mode & 0o077 == 0  # noqa: ASYNC240
    words = [word for one in whole for word in one.cmdline()]
    (file,) = {words[place + 1] for place, word in enumerate(words) if word == "--config"}
    assert not os.path.exists(file), "it has been read"  # noqa: ASYNC240
    assert not [word for word in words if "api-key" in word]


async def _stream_for_ever(url: str, begun: asyncio.Event) -> None:
    """Read a stream to its end; a normal end fails the test."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
        async for line in response.content:
            assert b"[DONE]" not in line
            begun.set()


async def _join_for_ever(engine: SglangEngine) -> None:
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    body = {
        "master_address": host,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "timeout_s": 2.0,
    }
    async with listening:
        while True:
            with pytest.raises(UpdateRefused):
                await engine.updates.run_shielded(engine.updates.join(body))


@asynccontextmanager
async def started_engine(
    directory: Path, settings: EngineConfig
) -> AsyncIterator[tuple[SglangEngine, list[psutil.Process]]]:
    """Start an engine with a server of its own; yield it and all processes of the server."""
    engine = SglangEngine(directory, settings, authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    others = {one.pid for one in psutil.Process().children()}
    await engine.start()
    try:
        (keeper,) = [one for one in psutil.Process().children() if one.pid not in others and GROUP in one.cmdline()]
        whole = [keeper, *keeper.children(recursive=True)]
        assert len(whole) >= 4
        yield engine, whole
    finally:
        await engine.close()


def test_a_server_ends_with_the_process_that_started_it(python: str, directories: list[Path], tmp_path: Path) -> None:
    """The process is killed, and cannot end the server itself."""
    program = (
        "import asyncio; from pathlib import Path\n"
        "from tidemill.actors.serving.sglang.engine import SglangEngine; from tests.sglang.server import config\n"
        "async def run():\n"
        f"    engine = SglangEngine(Path({str(directories[0])!r}), config({python!r}, "
        f"log={str(tmp_path / 'sglang.log')!r}))\n"
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


PASSED_ON = {
    "max_total_tokens": 3000,
    "page_size": 4,
    "schedule_conservativeness": 0.5,
    "stream_interval": 3,
    "max_queued_requests": 64,
    "decode_log_interval": 7,
    "max_running_requests": 5,
    "context_length": 64,
    "chunked_prefill_size": 32,
    "max_prefill_tokens": 640,
    "schedule_policy": "random",
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.45,
    "random_seed": 7,
    "watchdog_timeout": 555,
}
"""Arguments with values that are not those of the shipped configuration."""
SHOWN_ELSEWHERE = {"tp_size", "enable_return_routed_experts", "enable_memory_saver", "api_key"}
"""Arguments of other tests: a run on two ranks, test_sglang_routing, colocated servers on a GPU, the test below."""


def test_arguments_that_are_passed_on_have_an_effect(python: str, directories: list[Path], tmp_path: Path) -> None:
    """The arguments of the user, and the argument with the end of turn that no file of the model names."""
    model = _without_named_turn(directories[0], tmp_path / "model")
    assert {*ARGUMENTS, *PASSED_ON} | SHOWN_ELSEWHERE == TRIED.keys()

    async def run() -> None:
        settings = config(python, log=str(tmp_path / "sglang.log"))
        settings = replace(settings, sglang=replace(settings.sglang, arguments=ARGUMENTS | PASSED_ON))
        server = await ServerProcess.open(model, settings)
        try:
            info = await server.api.call("GET", "/server_info")
            given = ARGUMENTS | PASSED_ON
            assert {name: info[name] for name in given} == given
            assert info["internal_states"][0]["memory_usage"]["token_capacity"] == 3000
            prompt = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
            for _ in range(2):
                answer = await server.api.call("POST", "/generate", prompt)
                assert answer["meta_info"]["cached_tokens"] == 0, "disable_radix_cache"
            with pytest.raises(EngineError, match="64"):
                await server.api.call("POST", "/generate", prompt | {"input_ids": [5] * 80})
            await _ends_with_the_turn(server.api, EndTokens.read(model))
        finally:
            await server.close()
        assert " INFO" not in (tmp_path / "sglang.log").read_text(), "log_level"

    asyncio.run(run())


SCHEDULING = {
    "schedule_conservativeness": 0.0,
    "max_queued_requests": 2,
    "stream_interval": 5,
    "page_size": 8,
    "decode_log_interval": 4,
    "max_total_tokens": 320,
    "max_running_requests": 2,
    "log_level": "info",
    "api_key": "tm-of-this-test",
}
RESERVED = 0.7
"""Share of its ``max_new_tokens`` that a running request keeps free, at a conservativeness of 1.

Source: SGLANG_INIT_NEW_TOKEN_RATIO.
"""


def test_arguments_of_the_scheduler_have_an_effect(python: str, directories: list[Path], tmp_path: Path) -> None:
    """Two requests run together although the server has no room for the end of both; the queue has a bound."""
    log = tmp_path / "sglang.log"

    async def run() -> None:
        settings = config(python, log=str(log))
        settings = replace(settings, sglang=replace(settings.sglang, arguments=ARGUMENTS | SCHEDULING))
        server = await ServerProcess.open(directories[0], settings)
        try:
            assert await _cached(server.api) == 32, "page_size: whole pages of a prompt of 38 tokens"
            # A reader that waited for a core gets two parts as one.
            assert await _parts_of_a_stream(server, tokens=20) <= 5, "stream_interval"
            new_tokens = 220
            assert 2 * len(PROMPT) + new_tokens * (1 + RESERVED) > SCHEDULING["max_total_tokens"]
            sampling = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            body = {"input_ids": PROMPT, "sampling_params": sampling}
            answers = await asyncio.gather(
                *(server.api.call("POST", "/generate", body) for _ in range(5)), return_exceptions=True
            )
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert 1 <= len(refused) <= 3, "max_queued_requests: two run and two wait, or two came before any ran"
            for answer in refused:
                assert isinstance(answer, EngineUnavailable) and "queue is full" in str(answer)
        finally:
            await server.close()
        lines = [line for line in log.read_text().splitlines() if "Decode batch" in line]
        assert any("#running-req: 2" in line for line in lines), "schedule_conservativeness"
        assert len(lines) >= new_tokens // SCHEDULING["decode_log_interval"], "decode_log_interval"

    asyncio.run(run())


async def _cached(api: Api) -> int:
    """Return the number of prompt tokens that the second of two equal requests has from the cache."""
    body = {"input_ids": list(range(5, 43)), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    for _ in range(2):
        answer = await api.call("POST", "/generate", body)
    return int(answer["meta_info"]["cached_tokens"])


async def _parts_of_a_stream(server: ServerProcess, *, tokens: int) -> int:
    """Return the number of parts in which a response of ``tokens`` tokens comes."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {SCHEDULING['api_key']}"}) as session:
        async with session.post(server.api.url + "/generate", json=body) as response:
            assert response.status == 200
            return sum([line.startswith(b"data: {") async for line in response.content])


def _without_named_turn(directory: Path, copy: Path) -> Path:
    """Return a copy of a model whose files name another end token than the one behind an answer in its chat
    template.
    """
    shutil.copytree(directory, copy)
    other = json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"][PAD]
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": other},
        "generation_config.json": {"eos_token_id": other},
        "tokenizer_config.json": {"eos_token": PAD},
    }
    for name, values in changes.items():
        content = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
        (copy / name).write_text(json.dumps(content | values))
    return copy


async def _ends_with_the_turn(api: Api, tokens: EndTokens) -> None:
    """A response ends with each of the end tokens: the bias makes it the first token sampled, of three."""
    assert tokens.turn is not None
    assert tokens.turn not in tokens.named
    for end in tokens.ids:
        params = {"max_new_tokens": 3, "temperature": 0, "logit_bias": {str(end): 1000}}
        answer = await api.call("POST", "/generate", {"input_ids": PROMPT, "sampling_params": params})
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


def test_a_server_that_cannot_start_is_told_with_its_last_lines(
    python: str, directories: list[Path], tmp_path: Path
) -> None:
    async def refused() -> None:
        wrong = config(python, log=str(tmp_path / "refused.log"))
        wrong = replace(wrong, sglang=replace(wrong.sglang, arguments={**ARGUMENTS, "no_such_argument": 1}))
        engine = SglangEngine(directories[0], wrong, authority=Authority(unguarded=True))
        await asyncio.to_thread(engine.load)
        try:
            with pytest.raises(EngineFailed, match=r"(?s)ended with code .*no-such-argument"):
                await engine.start()
        finally:
            await engine.close()

    asyncio.run(refused())


async def _until_watched(keeper: int, pid: int) -> None:
    """Wait until the keeper of the server's processes has a pidfd of this one. Source: proc(5), fdinfo."""
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: any(f"Pid:\t{pid}\n" in info for info in _descriptors(keeper)))


def _descriptors(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield file.read_text()


async def _until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
