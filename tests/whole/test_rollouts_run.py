"""`tidemill up` on episodes of two model calls, with its actor killed in the middle: Megatron trains every sequence, once."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from tests.chaos.auditor import judge
from tests.chaos.storm import standing_bus
from tests.whole.running import ROOT, SMOKE, assert_books_balance, kill, live, until_step, up


async def test_episodes_are_trained_once_though_their_actor_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "two.yaml"
    rollout = {"use": "agent:tests.rollout_programs:Tries", "options": {"tries": 2}, "again": "replay", "budget": {"total_tokens": 400}}
    config.write_text(json.dumps({"rollouts": {"two": rollout}, "data": {"rollout": "two"}}))
    with up(tmp_path, "learner.steps=12", "bus.lease_s=3", "run=smoke", config=[SMOKE, config]) as run:
        async with run.bus() as bus:
            await until_step(bus, 3)
            kill((await live(bus, "actor")).pid)
        assert await asyncio.to_thread(run.wait) == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert (run.summary["steps"], run.summary["samples_trained"]) == (12, 12 * 32)
    async with standing_bus(run.directory) as url:
        verdict = await judge(url, run.run, run.directory / "checkpoints", {})
        command = [sys.executable, "-m", "launch", "tail", "--bus", url, "--run", run.run, "--last", "20", "--json"]
        shown = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    log = (run.directory / "logs" / "actor-0.log").read_text()
    assert "episode goes on task=" in log, "the next actor reads what the killed one has stored"
    assert not (verdict.lost or verdict.twice or verdict.wrong), verdict
    samples = [json.loads(line) for line in shown.stdout.splitlines() if line.startswith("{")]
    assert samples and all(sample["rollout"] == "two" for sample in samples), shown.stdout[:2000] + shown.stderr
    assert all(len(sample["sequences"]) == 2 for sample in samples)
