"""The environment ``openenv`` against a server that OpenEnv itself makes, in an interpreter of its own."""

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.actors.episodes.programs.environments import OpenEnv

SERVER = Path(__file__).with_name("openenv_server.py")


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start the server; it has two places."""
    python = request.config.getoption("--openenv-python")
    if not python:
        pytest.skip("want --openenv-python PYTHON, an interpreter that has openenv (make test-env)")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [python, str(SERVER), str(listening.fileno())]
        with subprocess.Popen(command, pass_fds=(listening.fileno(),)) as process:
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            finally:
                process.kill()


async def begun(url: str, wait_seconds: float = 60.0) -> tuple[OpenEnv, str]:
    """Begin a session; the server may not be up yet."""
    game = OpenEnv(url, observation="text", first="{observation}", reset={"start": 1}, wait_seconds=wait_seconds)
    try:
        return game, await game.reset({"prompt": "Count.", "metadata": {"reset": {"seed": 7}}})
    except RuntimeError:
        await game.close()
        raise


async def test_an_episode(url: str) -> None:
    game, text = await begun(url)
    assert text == "at 1"
    assert await game.step("4 and 3") == ("at 8", 8.0, False)
    assert await game.step("2") == ("at 10", 10.0, True)
    await game.close()


async def test_an_answer_that_is_no_action_is_shown_the_error(url: str) -> None:
    game = OpenEnv(url, action="", observation="text", invalid_reward=-1.0)
    await game.reset({"prompt": "p"})
    told, reward, done = await game.step('{"words": "4"}')
    assert "message" in told and (reward, done) == (-1.0, False)
    assert (await game.step('{"message": "4"}'))[1:] == (4.0, False)
    await game.close()


async def test_an_environment_that_fails_fails_the_episode(url: str) -> None:
    game, _ = await begun(url)
    with pytest.raises(RuntimeError, match="the environment failed: boom"):
        await game.step("boom")
    await game.close()


async def test_a_full_server_is_waited_for(url: str) -> None:
    first, _ = await begun(url)
    second, _ = await begun(url)
    with pytest.raises(RuntimeError, match=r"no session of the environment within 0 s: Server at capacity"):
        await begun(url, wait_seconds=0)
    waiting = asyncio.create_task(begun(url))
    await first.close()
    third, text = await waiting
    assert text == "at 1"
    for game in (second, third):
        await game.close()
