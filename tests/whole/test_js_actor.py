"""A whole run with only the actors of docs/examples/js-actor: one drains, one is killed, one works to the end."""

import asyncio
from pathlib import Path

import pytest

from tests.actor_kit import all_samples, row_until
from tests.js_kit import installed, js_actor
from tests.whole.running import Up, assert_books_balance, limit_records, until_step, up
from tidemill.rewards.builtin.text import digits
from tidemill.rewards.port import RewardRequest

STEPS = 14
RECORDS = 20
"""Records of nine steps, two for each, behind those of a start: the learner waits with more of them until the last
actor has come.
"""


@pytest.mark.slow
def test_a_run_with_actors_in_javascript_loses_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "js"
    directory.mkdir()
    installed(directory)
    with up(tmp_path, "up.actors=0", f"learner.steps={STEPS}", "bus.lease_s=4") as run:
        asyncio.run(asyncio.wait_for(_three_actors(run, directory), 240))
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert summary["books_balance"] and not summary["problems"], summary
    assert summary["samples_invalid"] == 0
    assert summary["steps"] == STEPS
    assert summary["samples_trained"] == STEPS * 8 * 4
    assert summary["tokens_trained"] > summary["samples_trained"]
    assert 0 < summary["reward_last"] < 1


async def _three_actors(run: Up, directory: Path) -> None:
    async with run.bus() as bus:
        live = bus.rows("live")
        await limit_records(bus, RECORDS)
        url = (run.directory / "bus.url").read_text().strip()
        async with js_actor(directory, url, run.run, "js-drained") as actor:
            await actor.meanwhile(until_step(bus, 2))
            await actor.meanwhile(row_until(live, "actor.js-drained", lambda row: row["load"]["samples_published"] > 0))
            assert await actor.drain() == 0
            assert await live.get("actor.js-drained") is None
        async with js_actor(directory, url, run.run, "js-killed") as actor:
            await actor.meanwhile(until_step(bus, 6))
            for sample in await all_samples(bus):
                request = RewardRequest(
                    prompt=sample.prompt, response=sample.response, label=sample.label, status=sample.status
                )
                assert sample.reward == pytest.approx(digits(request)), sample
        async with js_actor(directory, url, run.run, "js-last") as actor:
            await actor.meanwhile(row_until(live, "actor.js-last", lambda row: True))
            await limit_records(bus, -1)
            await actor.meanwhile(asyncio.to_thread(run.wait))
            assert run.wait() == 0, run.log[-4000:]
            assert await actor.drain() == 0  # its bus is gone
