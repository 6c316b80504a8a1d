"""The main job with pushes by handles: every version read out of the learner's memory."""

import re
from pathlib import Path

from tests.whole.running import assert_books_balance, up


def test_a_run_pushes_by_handles(tmp_path: Path) -> None:
    settings = ("weights.transport=handles", "weights.verify=always", "up.engines=2", "weights.min_engines=2")
    with up(tmp_path, "learner.steps=6", *settings) as run:
        assert run.wait() == 0, run.log[-4000:]
    assert_books_balance(run.summary, max_lag=2)
    assert run.summary["pushes"] >= 5
    logs = {log.name: log.read_text() for log in (run.directory / "logs").glob("*.log")}
    pushed = [line for log in logs.values() for line in re.findall(r"pushed version=.*", log)]
    assert len(pushed) >= 5, pushed
    for line in pushed[2:]:  # before that an engine may still be loading version 0
        assert " engines=2 verified=2 evicted=0 " in line, pushed
    engines = [log for name, log in logs.items() if name.startswith("engine-")]
    assert len(engines) == 2 and all("the learner joined, by handles" in log for log in engines)
    assert not any("no handles for this engine" in log for log in logs.values())
