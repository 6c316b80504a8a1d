"""`tidemill up` on several sources for one pass: rewards, limits and slices by source, the best checkpoint, and the end
of the prompts.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.launched import run_tidemill
from tests.whole.prepared import made
from tests.whole.running import SMOKE, assert_books_balance, up
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.messages import Kind
from tidemill.learner.checkpoints import disk

HELD = 4


def rows(path: Path, first: int, count: int, **columns: object) -> Path:
    path.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "label": f"{n}", **columns}) + "\n" for n in range(first, first + count))
    )
    return path


async def prompts_of(directory: Path, name: str) -> Counter[tuple[object, int, float]]:
    """Return how many training tasks of each reward, length limit and temperature are in the streams of a run that has
    ended.
    """
    server = EmbeddedServer(directory / "bus", BusConfig())
    await asyncio.to_thread(server.start)
    try:
        async with connect(server.url, name, name="test") as bus:
            tasks = [task async for task in bus.tasks.scan() if task.kind is Kind.TRAIN and not task.reissues]
    finally:
        await asyncio.to_thread(server.stop)
    return Counter(
        (task.metadata.get("reward"), task.sampling.max_new_tokens, task.sampling.temperature) for task in tasks
    )


@pytest.mark.slow
def test_one_pass_over_three_sources(tmp_path: Path) -> None:
    """12 rows, half of 8 and a slice of 6: 22 prompts in three steps of 8, 8 and 6."""
    short = rows(tmp_path / "short.jsonl", 50, 20, limits={"max_new_tokens": 3, "temperature": 0.8})
    sources = {
        "plain": {"path": str(rows(tmp_path / "plain.jsonl", 10, 12)), "reward": "copied"},
        "half": {
            "path": str(rows(tmp_path / "half.jsonl", 30, 8, grader="exactly")),
            "weight": 0.5,
            "reward_key": "grader",
        },
        "short": {
            "path": f"{short}@[4:10]",
            "sampling_key": "limits",
        },
    }
    parts = {
        "copied": {"reward": "digits", "when": {"reward": "copied"}},
        "exactly": {"reward": "exact", "when": {"reward": "exactly"}},
        "all": {"reward": "digits", "weight": 0.5},
    }
    held = {"path": str(rows(tmp_path / "held.jsonl", 80, HELD)), "samples": 2, "reward": "copied"}
    settings = {
        "prepare": None,
        "model": {"path": str(made(SMOKE) / "prepared" / "model")},
        "data": {"sources": sources},
        "actor": {"reward": "", "reward_parts": parts},
        "learner": {"steps": 100, "num_epochs": 1, "checkpoint_every": 0},
        "eval": {"every": 1, "sets": {"held": held}, "best": "held/mean"},
    }
    config = tmp_path / "sources.yaml"
    config.write_text(json.dumps(settings))
    with up(tmp_path, config=[SMOKE, config], flags=("--fresh",)) as run:
        assert run.wait() == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert (summary["steps"], summary["ended_by"]) == (3, "all prompts of 1 pass are used (learner.num_epochs)")
    assert summary["samples_trained"] == 22 * 4
    assert "ended after step 3: all prompts" in run.log
    assert asyncio.run(prompts_of(run.directory, summary["run"])) == {
        ("copied", 6, 1.0): 12,
        ("exactly", 6, 1.0): 4,
        (None, 3, 0.8): 6,
    }
    scored = {line["version"]: line["mean"] for line in summary["evaluations"]}
    assert {0, 3} <= scored.keys()
    best = max((value, -version) for version, value in scored.items() if version)
    assert (summary["best"]["value"], summary["best"]["version"]) == (best[0], -best[1])
    assert disk.verify(Path(summary["best"]["directory"])) is not None
    assert "best checkpoint held/mean" in run.log
    shown = run_tidemill("status", "--run-dir", str(run.directory)).output
    assert "best checkpoint held/mean" in shown
    assert "the run is done after step 3: all prompts of 1 pass are used" in " ".join(shown.split())
