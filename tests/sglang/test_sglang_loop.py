"""The whole loop on real SGLang: actors ask the servers, the learner pushes to them, the books balance."""

from pathlib import Path

import pytest
import yaml

from tests.sglang.server import ARGUMENTS, ENVIRONMENT
from tests.whole.running import SMOKE, assert_books_balance, up

DIGITS = SMOKE.with_name("digits.yaml")


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    found = request.config.getoption("--sglang-python")
    if not found:
        pytest.skip("needs SGLang: make test-sglang")
    return str(found)


def on_sglang(config: Path, python: str, directory: Path) -> Path:
    """The same run with another engine."""
    values = yaml.safe_load(config.read_text())
    values["engine"] = {
        "kind": "sglang",
        "max_running": 64,
        "sglang": {"python": python, "arguments": ARGUMENTS, "environment": ENVIRONMENT},
    }
    values["run"] = "smoke"
    file = directory / config.name
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.mark.parametrize("servers", [1, 2])
def test_a_run_on_real_servers(python: str, tmp_path: Path, servers: int) -> None:
    """Every push reaches every server while it generates; nothing is aborted, lost or trained twice."""
    settings = (f"up.engines={servers}", "learner.steps=12", "prepare.max_position=1024", "sampling.max_new_tokens=24")
    with up(tmp_path, *settings, config=on_sglang(SMOKE, python, tmp_path)) as run:
        assert run.wait() == 0, run.log[-4000:]
    summary = run.summary
    assert_books_balance(summary, max_lag=2)
    assert summary["steps"] == 12
    assert summary["pushes"] == 12
    assert summary["multi_version_samples"] > 0, "weights changed in the middle of responses"
    for step in run.metrics:
        assert step.get("offpolicy/fresh_logprob_diff_abs", 0.0) < 1e-3, "engine and learner agree on fresh tokens"
    engines = [(run.directory / "logs" / f"engine-{number}.log").read_text() for number in range(servers)]
    assert all("weights updated version=" in log for log in engines)
