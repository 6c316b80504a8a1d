"""The command ``tidemill reward-server``: it serves, it is drained, and it refuses settings that would let any client
in.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.launched import run_tidemill
from tests.waits import LIMIT_S

ROOT = Path(__file__).parents[2]


async def started(*words: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidemill", "reward-server", *words),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def serving(*words: str, **environment: str) -> AsyncIterator[str]:
    """Serve while entered; yields the URL. It is drained at the end."""
    server = await started(*words, "--port", "0", **environment)
    try:
        assert server.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            url = (await server.stdout.readline()).decode().split()[-1]
        yield url
        server.terminate()
        assert await server.wait() == 0
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


async def test_it_serves_until_it_is_drained() -> None:
    body = {"prompt": "p", "response": "PARIS", "label": "Paris"}
    async with (
        serving("exact", "--option", "case_sensitive=false", "--token-env", "SECRET", SECRET="s") as url,
        ClientSession() as session,
    ):
        async with session.post(url, json=body) as response:
            assert response.status == 401
        async with session.post(url, json=body, headers={"Authorization": "Bearer s"}) as response:
            assert await response.json() == {"reward": 1.0}


async def test_it_serves_a_reward_of_groups() -> None:
    one = {"prompt": "p", "response": "r", "label": None, "response_length": 3}
    body = {"samples": [one, {**one, "response_length": 5}], "rewards": [1.0, 1.0]}
    async with serving("relative_length", "--group", "--option", "weight=2") as url, ClientSession() as session:
        async with session.post(url, json=body) as response:
            assert [found["score"] for found in (await response.json())["rewards"]] == [2.0, 0.0]
        async with session.post(url.removesuffix("_group"), json=one) as response:
            assert response.status == 404 and "no reward for /score" in (await response.json())["failed"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("exact", "--host", "0.0.0.0"), 2, "want --token-env VARIABLE, or --insecure"),
        (("exact", "--token-env", "NOT_SET_ANYWHERE"), 2, "want the variable NOT_SET_ANYWHERE set"),
        (("exact", "--option", "strip"), 2, "--option: want KEY=VALUE"),
        (("exact", "--option", "stripp=true"), 78, "nearest: 'strip'"),
        (("exat",), 78, "nearest: 'exact'"),
        (("exact", "--group"), 78, "group reward 'exact': want one of"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], code: int, said: str) -> None:
    ended = run_tidemill("reward-server", *words)
    assert said in ended.errors
    assert ended.returncode == code
