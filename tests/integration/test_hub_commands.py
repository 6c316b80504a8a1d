"""Names of a hub in commands: what `check` says, which commit a start has, what other machines get, and `push`."""

import argparse
import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import close_session, constants

from tests import hub_kit
from tests.check_kit import write_model, write_prompts
from tests.hub_kit import Hub
from tests.refusals import refusal
from tidemill.bus.config import BusConfig
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.launch.checks.findings import CheckFailed
from tidemill.launch.cli import main as cli
from tidemill.launch.cli.inputs import loaded_config, with_commits_of_run, with_fetched
from tidemill.launch.cli.push import card
from tidemill.launch.hub.repository import RECORD
from tidemill.launch.run.workers import model_here, tokenizer_here
from tidemill.launch.settings.config_loader import to_map
from tidemill.launch.settings.run_config import CONFIG_FILE
from tidemill.weightstore.store.snapshot_files import MANIFEST


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_kit.serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
        monkeypatch.setenv("HF_TOKEN", "")  # so that one which a command sets is removed after the test
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.chdir(tmp_path)
        served.repo("org/tiny").commit(hub_kit.content(write_model(tmp_path / "source")))
        rows = write_prompts(tmp_path / "rows.jsonl").read_bytes()
        served.repo("org/sums", "dataset").commit({"train.jsonl": rows, "test.jsonl": rows})
        yield served


@pytest.fixture
def config(hub: Hub, tmp_path: Path) -> Path:
    settings = {
        "model": {"path": "org/tiny"},
        "data": {"sources": {"sums": {"path": "org/sums/train"}}},
        "eval": {"every": 1, "sets": {"held-out": {"path": "org/sums/test@[0:5]"}}},
        "sampling": {"max_new_tokens": 16},
        "actor": {"reward": "exact"},
        "learner": {"algorithm": {"kl": {"coef": 0.1, "reference": "org/tiny@main"}}},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def arguments(config: Path, *settings: str, bus: str = "") -> argparse.Namespace:
    return argparse.Namespace(command="up", config=[config], set=[*settings], bus=bus)


def commit_of(hub: Hub, name: str, kind: str = "model") -> str:
    return hub.repo(name, kind).refs["main"]


def test_check_says_what_it_found(hub: Hub, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(config)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    for line in (f"org/tiny: commit {commit_of(hub, 'org/tiny')} of {hub.url}", "org/sums/test@[0:5]: commit "):
        assert f"ok      hub       {line}" in out
    assert "held-out: " in out and "test.jsonl@[0:5]: 5 prompts read" in out
    config.write_text(config.read_text().replace("org/tiny", "org/none"))
    assert cli.main(["check", str(config)]) == 78
    errors = capsys.readouterr().err
    assert f"{config}:" in errors and "model.path: want a directory" in errors and "kl.reference" in errors


def test_all_processes_of_a_start_have_one_commit(
    hub: Hub, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEMILL_MODEL__PATH", "org/tiny")
    commit, args = commit_of(hub, "org/tiny"), arguments(config)
    loaded, _ = with_fetched(args, loaded_config(args))
    hub.repo("org/tiny").commit({"config.json": b"{}"})
    folder = str(tmp_path / "cache/models--org--tiny/snapshots" / commit)
    for parsed in (loaded, loaded_config(args)):
        assert (parsed.config.model.path, parsed.config.learner.algorithm.kl.reference) == (folder, folder)
        assert to_map(parsed.config)["model"]["path"] == f"org/tiny@{commit}"
    assert Path(loaded.config.data.used[0].path).is_file()
    assert loaded.origins["data.sources"].startswith(str(config))


def test_a_resumed_run_keeps_its_commit(hub: Hub, config: Path) -> None:
    args = arguments(config)
    began = to_map(with_fetched(args, loaded_config(args))[0].config)
    first = commit_of(hub, "org/tiny")
    other = hub.repo("org/tiny").commit({**hub.repo("org/tiny").commits[first], "note.json": b"{}"})
    args = arguments(config)
    assert to_map(with_fetched(args, loaded_config(args), began)[0].config) == began
    args = arguments(config, f"model.path=org/tiny@{other}")
    with refusal(CheckFailed, got=re.compile("^org/tiny@")):
        with_fetched(args, loaded_config(args), began)
    args = arguments(config)
    assert with_fetched(args, loaded_config(args))[0].config.model.path.endswith(other)


@pytest.mark.parametrize("leads", [True, False])
def test_learners_have_the_commit_in_the_row_of_their_run(
    hub: Hub, config: Path, nats_server: EmbeddedServer, leads: bool
) -> None:
    args = arguments(config, bus=nats_server.url)
    if leads:  # the first start
        loaded = with_commits_of_run(args, loaded_config(args), leads=True)
    else:
        loaded, _ = with_fetched(args, loaded_config(args))

    async def publish() -> None:
        async with connect(nats_server.url, "run", BusConfig(), name="test") as bus:
            await bus.create_layout()
            await bus.rows("run").put("config", to_map(loaded.config))

    asyncio.run(publish())
    hub.repo("org/tiny").commit({"config.json": b"{}"})
    again = arguments(config, bus=nats_server.url)
    assert with_commits_of_run(again, loaded_config(again), leads=leads).config.model.path == loaded.config.model.path
    record = json.loads((loaded.config.root / RECORD).read_text())
    digests = {file: facts["digest"] for file, facts in record["model.path"]["files"].items()}
    assert len(digests["model.safetensors"]) == 64 and len(digests["config.json"]) == 40
    assert list(record["data.sources.sums.path"]["files"]) == ["train.jsonl"]


def test_an_actor_elsewhere_fetches_the_tokenizer_alone(hub: Hub, config: Path, tmp_path: Path) -> None:
    commit = commit_of(hub, "org/tiny")
    folder = Path(tokenizer_here(f"org/tiny@{commit}"))
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    assert tokenizer_here(str(folder)) == str(folder)
    loaded = loaded_config(arguments(config, f"model.path=org/tiny@{commit}"))
    assert loaded.config.model.path == str(folder)
    draining = asyncio.Event()
    draining.set()
    asked = asyncio.run(model_here(loaded.config, "nats://127.0.0.1:9", "engine", tmp_path / "into", draining))
    assert asked is None, "an engine takes the weights from the learner"


@pytest.fixture
def new_session() -> Iterator[None]:
    """Close the library's HTTP client, which has the proxies of its first request, before and after the test."""
    close_session()
    yield
    close_session()


@pytest.mark.usefixtures("new_session")
def test_downloads_go_through_the_proxy(hub: Hub, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    args = arguments(config)
    with_fetched(args, loaded_config(args))
    assert {headers["Host"] for _, _, headers in hub.requests} == {"hub.invalid", "files.invalid"}


def finished_run(config: Path) -> Path:
    args = arguments(config)
    loaded, _ = with_fetched(args, loaded_config(args))
    root = loaded.config.root
    write_model(root / "final")
    (root / "final" / MANIFEST).write_text("{}")
    (root / "final" / "optimizer.pt").write_bytes(b"pickle")
    (root / CONFIG_FILE).write_text(yaml.safe_dump(to_map(loaded.config)))
    summary = {"steps": 4, "samples_trained": 64, "reward_first": 0.25, "reward_last": None, "max_lag_trained": 1}
    evaluation = {"set": "held-out", "step": 4, "mean": 0.5, "mean_low": 0.25, "mean_high": 0.75}
    (root / "summary.json").write_text(json.dumps({**summary, "evaluations": [evaluation]}))
    return root


def test_a_finished_model_is_pushed_with_a_card(
    hub: Hub, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    root = finished_run(config)
    monkeypatch.setattr(
        constants, "ENDPOINT", hub.url
    )  # read at the import of the library, before the server was there
    words = ["push", str(root), "--to-hub", "me/trained"]
    assert cli.main(words) == 78
    assert "want a token that may write to me/trained, got none; set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / ".env").write_text("HF_TOKEN=hf_secret\n")
    assert cli.main(words) == 78
    errors = capsys.readouterr().err
    assert f"no answer of {hub.url}" in errors, "it has no storage by chunks (xet)"
    assert "want a repository of the hub to write to" in errors and "cache" not in errors
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(words) == 78
    assert "got me/trained in offline mode; unset HF_HUB_OFFLINE" in capsys.readouterr().err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert cli.main(words) == 0
    output = capsys.readouterr()
    assert f"{hub.url}/me/trained/commit/" in output.out and "hf_secret" not in output.out + output.err
    repo = hub.repo("me/trained")
    files = repo.commits[repo.refs["main"]]
    text_of_card = files.pop("README.md").decode()
    assert repo.private is True
    assert files == {name: data for name, data in hub_kit.content(root / "final").items() if name in files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert not {MANIFEST, "optimizer.pt"} & files.keys()
    head = yaml.safe_load(text_of_card.split("---")[1])
    assert (head["base_model"], head["datasets"]) == ("org/tiny", ["org/sums"])
    shown = ("| steps | 4,", "| mean reward of the first step | 0.250 |", "| held-out | 4 | 0.500 | 0.250 to 0.750 |")
    assert all(text in text_of_card for text in (*shown, f"`org/tiny` at `{commit_of(hub, 'org/tiny')[:12]}`"))
    assert str(tmp_path) not in text_of_card


def test_a_card_has_no_path_of_this_machine(config: Path, tmp_path: Path) -> None:
    root = finished_run(config)
    values = yaml.safe_load((root / CONFIG_FILE).read_text())
    values["model"]["path"] = values["data"]["sources"]["sums"]["path"] = f"{tmp_path}/mine"
    text = card(values, json.loads((root / "summary.json").read_text()))
    assert text.count("`mine`, of no hub") == 2 and str(tmp_path) not in text and "base_model" not in text


def test_a_run_without_a_model_is_not_pushed(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["push", str(tmp_path), "--to-hub", "me/trained"]) == 78
    assert "want a finished run" in capsys.readouterr().err
    (tmp_path / "me/trained").mkdir(parents=True)
    assert cli.main(["push", str(tmp_path), "--to-hub", "me/trained"]) == 78
    assert "--to-hub: want org/name" in capsys.readouterr().err


def test_secrets_are_in_no_output_and_no_record(
    hub: Hub, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of the environment")
    file = tmp_path / ".env"
    file.write_text("HF_TOKEN=hf_secret\nWANDB_API_KEY=hf_secret\n")
    file.chmod(0o644)
    args = arguments(config)
    assert cli.main(["config", str(config), "--print-config"]) == 0
    output = capsys.readouterr()
    assert "hf_secret" not in output.out + output.err
    assert output.err.count("chmod 600") == 1
    assert os.environ["WANDB_API_KEY"] == "of the environment"
    tokens = {headers.get("Authorization") for _, path, headers in hub.requests if path.startswith("/api/")}
    assert tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in json.dumps(to_map(loaded_config(args).config), default=str)
    file.write_text("HF_TOKEN hf_secret\n")
    assert cli.main(["config", str(config)]) == 78
    assert f"{file}:1: want NAME=value" in (errors := capsys.readouterr().err) and "hf_secret" not in errors
