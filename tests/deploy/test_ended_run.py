"""A run of processes started one by one, as a launcher starts them: drained, resumed, ended and audited."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.chaos.parts import parts
from tests.launched import run_tidemill
from tests.whole.prepared import made
from tests.whole.running import SMOKE, until_step
from tidemill.launch.run.run_end import end_of

STEPS = 12


@pytest.fixture(autouse=True)
def prepared(fork_server: None) -> None:
    """Make model and prompts once, before an event loop that must not be blocked runs."""
    made(SMOKE)


@pytest.mark.slow
async def test_a_run_is_drained_resumed_and_ends_with_its_workers_and_an_audit(tmp_path: Path) -> None:
    with parts(tmp_path, f"learner.steps={STEPS}", "learner.checkpoint_every=3", "up.require_reward=0") as run:
        await run.begin()
        workers = [run.start(role, words=["--until-end"]) for role in ("engine", "actor")]
        learner = run.start("learner", words=["--drained-code", "99"])
        audit = ["audit", "--bus", run.url, "--run", "smoke", "--summary", str(tmp_path / "summary.json")]
        async with run.bus() as bus:
            await until_step(bus, 3)
            learner.process.send_signal(signal.SIGTERM)
            assert await learner.code() == 99, learner.log
            assert await end_of(bus) is None
            assert [worker.process.returncode for worker in workers] == [None, None]
            early = await asyncio.to_thread(run_tidemill, *audit)
            assert "the run goes on" in early.out, early.output
            assert await run.start("learner", words=["--drained-code", "99"]).code() == 0
            assert [await worker.code() for worker in workers] == [0, 0]
            end = await end_of(bus)
            assert end is not None and (end.step, end.reason) == (STEPS, "learner.steps")
        ended = await asyncio.to_thread(run_tidemill, *audit, "--wait")
        assert ended.returncode == 0, ended.output
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["steps"] == STEPS and summary["ended_by"] == "learner.steps"
        assert summary["samples_trained"] == 32 * STEPS
        assert (summary["samples_lost"], summary["samples_trained_twice"], summary["books_balance"]) == (0, 0, True)
        assert summary["not_checked"] == [] and "restarts" not in summary and "seconds" not in summary
        run.root.joinpath("checkpoints").rename(tmp_path / "elsewhere")
        without = await asyncio.to_thread(run_tidemill, *audit)
        assert without.returncode == 0 and "not checked: trimmed samples" in without.out, without.output
        assert (
            await asyncio.to_thread(run_tidemill, *audit, "--checkpoints", str(tmp_path / "elsewhere"))
        ).returncode == 0
