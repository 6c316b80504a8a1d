"""A run whose model, prompts and held-out set are names of a hub: it trains, and goes on at its commits."""

import json
from pathlib import Path

import pytest
import yaml

from tests import hub_kit
from tests.launched import tidemill
from tests.whole.prepared import made
from tests.whole.running import SMOKE, UP_LIMIT_S
from tidemill.launch.settings.run_config import CONFIG_FILE

CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n---\n"
TOKEN = "hf_of_this_test"


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_run_of_names_is_resumed_at_its_commits(tmp_path: Path) -> None:
    prepared = made(SMOKE) / "prepared"
    rows = (prepared / "prompts.jsonl").read_bytes()
    settings = yaml.safe_load(SMOKE.read_text()) | {
        "prepare": None,
        "model": {"path": "org/tiny"},
        "data": {"path": "org/sums/main/train"},
        "eval": {"every": 2, "sets": {"held-out": {"path": "org/sums/main/train@[0:4]"}}},
    }
    settings["learner"]["steps"] = 2
    (tmp_path / "names.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}\n")
    with hub_kit.serving() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        model = hub.repo("org/tiny")
        model.token = TOKEN
        first = model.commit(hub_kit.content(prepared / "model"))
        hub.repo("org/sums", "dataset").commit({"README.md": CARD, "main/train-00000-of-00001.jsonl": rows})

        def run(*words: str) -> None:
            output = tmp_path / "up.log"
            process = tidemill("up", "names.yaml", *words, output=output, cwd=tmp_path, environment=environment)
            try:
                assert process.wait(UP_LIMIT_S) == 0, output.read_text()[-3000:]
            finally:
                process.kill()

        run()
        model.commit({"config.json": b"{}"})
        hub.repo("org/sums", "dataset").commit({"README.md": CARD, "main/train-00000-of-00001.jsonl": rows[:100]})
        run("--resume", "--set", "learner.steps=4")
    root = tmp_path / "runs/names"
    assert yaml.safe_load((root / CONFIG_FILE).read_text())["model"]["path"] == f"org/tiny@{first}"
    summary = json.loads((root / "summary.json").read_text())
    assert (summary["steps"], summary["samples_lost"], summary["books_balance"]) == (4, 0, True)
    kept = [file for file in root.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert not kept and TOKEN not in (tmp_path / "up.log").read_text()
