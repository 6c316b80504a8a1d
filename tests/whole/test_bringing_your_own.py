"""docs/bringing_your_own.md is true: its files are those of the example, its commands run, its defaults are the
program's.
"""

import dataclasses
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.forked import Forked
from tests.launched import run_tidemill
from tests.tiny_models import write_tiny_model
from tests.waits import LIMIT_S
from tidemill.bus.wire.messages import Status
from tidemill.launch.settings.run_config import RunConfig
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.registry import load

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/own"
PAGE = (ROOT / "docs/bringing_your_own.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
SMALL = [
    "learner.steps=2",
    "learner.groups_per_step=2",
    "learner.group_size=2",
    "sampling.max_new_tokens=8",
    "learner.checkpoint_every=1",
]


def commands() -> list[list[str]]:
    return [shlex.split(line) for kind, text in BLOCKS if not kind for line in text.splitlines()]


@pytest.mark.parametrize(
    ("kind", "file"), [("yaml", "own.yaml"), ("json", "prompts.jsonl"), ("python", "my_reward.py")]
)
def test_the_files_of_the_page_are_those_of_the_example(kind: str, file: str) -> None:
    shown = next(text for block, text in BLOCKS if block == kind)
    assert shown == (EXAMPLE / file).read_text()


def test_the_defaults_of_the_page_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    for path, shown in rows:
        value: object = RunConfig()
        for name in path.split("."):
            value = getattr(value, name)
        assert str(value) == shown, path
    for path in set(re.findall(r"`((?:model|data|sampling|staleness|learner|bus|engine|actor|up)\.[\w.]+)", PAGE)):
        assert path in set(_paths(RunConfig(), "")), path


def _paths(config: object, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}{field.name}.")


def test_the_fields_of_a_request_are_those_of_the_page() -> None:
    table = PAGE.split("| field of `RewardRequest` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        field.name for field in dataclasses.fields(RewardRequest)
    ]


async def test_the_rewards_of_the_page_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    request = RewardRequest(prompt="What is 3 + 4?", response="It is 7.", label="7", status=Status.COMPLETED)
    parts = await load("my_reward:contains", {"brevity": 0.5})(request)
    assert isinstance(parts, dict)
    assert (parts["right"], parts["score"]) == (1.0, 1.0 + 0.5 * parts["short"])

    async def judge(asked: web.Request) -> web.Response:
        found = await asked.json()
        return web.json_response({"score": float(found["gold"] in found["answer"])})

    app = web.Application()
    app.router.add_post("/", judge)
    async with TestServer(app) as server:
        assert await load("my_reward:judged", {"url": str(server.make_url("/"))})(request) == 1.0


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """They run in a directory of its own with a small random Qwen2, its own tokenizer, data and reward; then the run is
    inspected.
    """
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    write_tiny_model(tmp_path / "my-model", "qwen2")
    told: dict[str, str] = {}
    for program, command, *words in commands():
        assert program == "tidemill"
        settings = [word for setting in SMALL for word in ("--set", setting)] if command == "up" else []
        done = run_tidemill(command, *words, *settings, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.output}"
        told[command] = done.out
    assert "right" in told["tail"] and "What is" in told["tail"], "reward parts and prompt"
    assert "trained in step" in told["show"]
    assert "no dead task" in told["dead"]
    model = next(text for block, text in BLOCKS if block == "python" and "from_pretrained" in text)
    code = f"{model}\nprint(model.config.model_type, len(tokenizer.encode('seven')))"
    program = Forked(_execute, (code,), {}, tmp_path / "loaded", errors=tmp_path / "errors", cwd=tmp_path)
    assert program.wait(LIMIT_S) == 0, (tmp_path / "errors").read_text()
    assert (tmp_path / "loaded").read_text().startswith("qwen2 ")


def _execute(code: str) -> None:
    exec(code, {})
