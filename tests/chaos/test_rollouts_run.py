"""`tidemill up` on episodes of two model calls, with its actor killed in the middle: Megatron trains every sequence,
once.
"""

import asyncio
import json
from pathlib import Path

from tests.chaos.auditor import judge
from tests.chaos.storm import standing_bus
from tests.launched import run_tidemill
from tests.waits import until
from tests.whole.running import SMOKE, assert_books_balance, kill, live, until_step, up
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Kind, Sample


async def test_episodes_are_trained_once_though_their_actor_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "two.yaml"
    killed, held = tmp_path / "killed", tmp_path / "killed.held"
    options = {
        "tries": 2,
        "held_from": 48,
        "until": str(killed),
    }  # of 12 steps with 8 tasks each: no end before the kill
    rollout = {
        "use": "agent:tests.rollout_programs:Tries",
        "options": options,
        "again": "replay",
        "budget": {"total_tokens": 400},
    }
    rows = [{"prompt": f"{n}=", "label": f"{n}", "r": "single_turn" if n % 2 else None} for n in range(10, 18)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {
        "every": 6,
        "sets": {"held": {"path": str(tmp_path / "held.jsonl"), "rollout_key": "r", "samples": 2}},
    }
    config.write_text(json.dumps({"rollouts": {"two": rollout}, "data": {"rollout": "two"}, "eval": evaluation}))
    with up(tmp_path, "learner.steps=12", "bus.lease_s=3", "run=smoke", config=[SMOKE, config]) as run:
        async with run.bus() as bus:
            await until_step(bus, 3)
            await until(held.exists)
            kill((await live(bus, "actor")).pid)
            killed.touch()
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["samples_trained"]) == (12, 12 * 32)
    evaluations = [json.loads(line) for line in (run.directory / "evaluations.jsonl").read_text().splitlines()]
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
        held = await evaluated(url, run.run, 16 * len(evaluations))
        words = ("tail", "--bus", url, "--run", run.run, "--last", "60", "--json")
        shown = (await asyncio.to_thread(run_tidemill, *words)).output
    assert {one["version"] for one in evaluations} >= {0, 12} and all(one["prompts"] == 8 for one in evaluations), (
        evaluations
    )
    assert {(int(str(sample.prompt)[:2]) % 2, len(sample.sizes)) for sample in held} == {(0, 2), (1, 1)}
    log = (run.directory / "logs" / "actor-0.log").read_text()
    assert "episode goes on task=" in log, "the next actor reads what the killed one has stored"
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    samples = [
        one
        for one in map(json.loads, filter(lambda line: line.startswith("{"), shown.splitlines()))
        if one["kind"] == "train"
    ]
    assert samples and all(sample["rollout"] == "two" for sample in samples), shown[:2000]
    assert all(len(sample["sequences"]) == 2 for sample in samples)


async def evaluated(url: str, run: str, number: int) -> list[Sample]:
    """Return the first samples of kind eval."""
    found: list[Sample] = []
    async with connect(url, run, name="reader") as bus:
        async for received in bus.samples.read(None, kinds=(Kind.EVAL,)):
            assert isinstance(received.sample, Sample), received
            found.append(received.sample)
            if len(found) == number:
                break
    return found
