"""Evaluations beside training, of several sets, are those of `tidemill eval` with the weights of their version."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launched import run_tidemill
from tests.whole.running import up

EVERY, STEPS = 2, 4
PARTS = {
    "digits": {"reward": "digits", "when": {"reward": "digits"}},
    "short": {"reward": "length", "options": {"target": 2}},
}


@pytest.mark.slow
def test_evaluations_of_each_version_are_those_of_the_command_alone(tmp_path: Path) -> None:
    """Sets with rewards, lengths and temperatures of their own, each version of which is scored before a step goes
    on.
    """
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"prompt": f"{n}=", "label": f"{n}"}) + "\n" for n in range(10, 22)))
    sets: dict[str, Any] = {
        "sampled": {"path": str(held), "samples": 3, "reward": "digits"},
        "greedy": {
            "path": str(held),
            "temperature": 0.0,
            "max_new_tokens": 5,
            "limit": 7,
            "reward": "other",
            "passes_at": 0.0,
        },
    }
    settings = (
        f"learner.steps={STEPS}",
        f"eval.every={EVERY}",
        f"eval.sets={json.dumps(sets)}",
        "actor.reward=''",
        f"actor.reward_parts={json.dumps(PARTS)}",
        "data.reward=digits",
        "learner.save_hf_every=1",
        f"learner.keep_hf={STEPS}",
        "eval.exact=true",
    )
    with up(tmp_path, *settings) as run:
        assert run.wait() == 0, run.log[-4000:]
    lines = [json.loads(line) for line in (run.directory / "evaluations.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == sorted([*range(0, STEPS + 1, EVERY)] * len(sets))
    config = run.directory / "config.yaml"
    first = Path(yaml.safe_load(config.read_text())["model"]["path"])
    for version in range(0, STEPS + 1, EVERY):
        model = run.directory / f"models/step-{version}" if version else first
        done = run_tidemill("eval", str(model), "--config", str(config), "--json")
        assert done.returncode == 0, done.output
        alone = {one["set"]: one for one in map(json.loads, done.out.splitlines())}
        beside = {one["set"]: one | {"version": 0, "step": 0} for one in lines if one["version"] == version}
        assert alone == beside and alone.keys() == sets.keys(), version
    means = {(line["set"], line["version"]): line["mean"] for line in lines}
    assert len(set(means.values())) > len(sets), f"some scores have changed with the weights: {means}"
