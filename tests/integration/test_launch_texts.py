"""`tidemill texts` on a real nats-server: responses of the first and the last evaluated version to the same prompt."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests import data_kit
from tests.bus_fixtures import BusOpener
from tests.refusals import refusal
from tidemill.bus.streams.bus import Bus
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.eval import show_texts

ROWS = 6


async def evaluate(bus: Bus, version: int, mark: Any = None) -> None:
    """Publish a response of ``version`` to each row, the last row first, as a set of prompts is evaluated."""
    for row in reversed(range(ROWS)):
        task = replace(data_kit.eval_task(10 * version + row + 1), run=bus.run, prompt=f"prompt {row}")
        place = {"set": "held_out", "version": version, "row": row} if mark is None else mark
        sample = data_kit.sample(task, 0, ((version, 3),), response=f"text {row} of \x1b[1m v{version}")
        reward = {"score": version / 8, "whole": float(row < 3)}
        await bus.samples.publish(replace(sample, metadata={"evaluation": place}, reward=reward))


async def shown(bus: Bus, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = await show_texts(bus, cli.command_parser().parse_args(["texts", *words]))
    return code, capsys.readouterr().out


async def test_both_versions_stand_beside_their_prompt_with_the_means(
    open_bus: BusOpener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    async with open_bus() as bus:
        with refusal(ValueError, got="''"):
            await shown(bus, capsys)
        await evaluate(bus, 0)
        assert (await shown(bus, capsys))[0] == 1, "one version"
        for version in (4, 8):
            await evaluate(bus, version)
        await evaluate(bus, 9, mark={"set": ["held_out"], "version": 9, "row": 0})  # another program's
        code, text = await shown(bus, capsys, "--count", "3")
        rows = [line for line in text.splitlines() if "prompt " in line and " of " in line]
        assert code == 0 and len(rows) == 3, text
        for row, line in zip((0, 2, 5), rows, strict=True):
            before = f"prompt {row}", f"text {row} of \\x1b[1m v0  0.00", f"text {row} of \\x1b[1m v8  1.00"
            assert [part.strip() for part in line.split("│")[1:-1]] == list(before), "no control character is printed"
        assert "6 prompts: score 0.000 -> 1.000, whole 0.500 -> 0.500" in text
        assert len((await shown(bus, capsys, "--jsonl"))[1].splitlines()) == ROWS, "fewer prompts than 10"
        code, text = await shown(bus, capsys, "--set", "held_out", "--count", "0", "--jsonl")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["prompt"] for line in lines] == [f"prompt {row}" for row in range(ROWS)]
        assert lines[5]["after"] == "text 5 of \x1b[1m v8" and lines[5]["reward_before"] == {"score": 0, "whole": 0}
