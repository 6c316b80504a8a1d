"""Settings and logs of a run on its page: what is shown, and what never is."""

import json
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.page_kit import HOSTILE, SHOWN
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.page.configuration import HIDDEN, MAX_SETTINGS, configuration_of
from tidemill.launch.page.export import _without_logs
from tidemill.launch.page.lanes import Lane, process_of
from tidemill.launch.page.ledger import RunLedger, audit_words
from tidemill.launch.page.logs import MAX_FILES, MAX_LINE, MAX_LINES, MAX_READ_BYTES, PRIVATE, RunLogs
from tidemill.launch.settings.config_loader import from_map, to_map
from tidemill.launch.settings.run_config import RunConfig
from tidemill.launch.settings.run_row import to_row


def by_path(row: Any) -> dict[str, dict[str, Any]]:
    return {setting["path"]: setting for setting in configuration_of(row)["settings"]}


def test_changed_settings_come_first_and_all_have_default_and_meaning() -> None:
    config = from_map({"learner": {"steps": 7, "optimizer": {"lr": 0.002}}, "run": "r"}, "test")
    settings = configuration_of(to_map(config))["settings"]
    first = [setting["path"] for setting in settings if setting["changed"]]
    assert [setting["path"] for setting in settings][: len(first)] == first
    assert {"run", "learner.steps", "learner.optimizer.lr"} <= set(first) and "learner.group_size" not in first
    assert len(settings) > 300 and all(setting["meaning"] for setting in settings)
    steps = by_path(to_map(config))["learner.steps"]
    assert (steps["value"], steps["default"]) == ("7", str(RunConfig().learner.steps))
    assert not [path for path, setting in by_path(to_row(RunConfig())).items() if setting["changed"]]


def test_entries_of_maps_have_the_meaning_of_the_reference() -> None:
    rollouts = {"sums": {"use": "multi_turn", "budget": {"turns": 2}}}
    settings = by_path(to_map(from_map({"run": "r", "rollouts": rollouts}, "test")))
    assert settings["rollouts.sums.use"]["meaning"].startswith("`multi_turn`")
    assert settings["rollouts.sums.use"]["default"] is None


SECRETS = {
    "api_key": "sk-one",
    "headers": {"Authorization": "Bearer sk-two"},
    "password": "sk-three",
    "nested": [{"hf_token": "sk-four"}],
    "judge-url": "https://user:sk-five@judge:8000/v1?signature=sk-six",
    "connection": "AccountKey=sk-seven;more",
    "X-Api-Key": "sk-a",
    "api_keys": ["sk-b", "sk-c"],
    "apikeys": "sk-d",
    "api_key2": "sk-e",
    "authToken": "sk-f",
    "openai_key": "sk-g",
    "account_key": "sk-h",
    "bearer": "sk-i",
    "pwd": "sk-j",
    "api key": "sk-k",
    "token": {"value": "sk-l", "of": [{"x": "sk-m"}]},
    "OPENAIToken": "sk-n",
    "command": ["judge", "--token", "sk-o", "--api-key=sk-p", "HF_TOKEN=sk-q"],
    "line": "judge --token sk-r --auth-token=sk-s -H 'Authorization: Bearer sk-t'",
    "sshkey": "sk-4",
    "commands": [
        "docker run -e API_KEY=sk-5 img",
        "x --env=DB_PASSWORD=sk-6 -x SECRET=sk-7 -v -token sk-8",
        "y --header bearer sk-9 --password 'sk-10 sk-11' --env={'a_key': 'sk-12'}",
    ],
    "requests": ["--env=API_KEY=sk-13", "-H", "X-Api-Key: sk-14", "--header", "Authorization: Basic sk-15"],
    "json": '{"api_key": "sk-16", "b": ["sk"]}',
    "address": "https://sk-u@h/v1",
    "a list": ["https://sk-v@h/v1@x,https://sk-w@h2"],
    "cut": "x" * 1982 + " https://user:sk-x@h",
    "https://sk-y:sk-z@h": {"x": 1},
    "nested-2": [{"https://sk-1:sk-2@h": [{"token": {"x": "sk-3"}}]}],
}


def test_no_secret_is_shown() -> None:
    row = {"actor": {"reward_options": SECRETS, "url": "nats://a:sk-eight@h:4222"}, "bus": {"kv_tokens": 5}}
    text = json.dumps(configuration_of(row))
    assert "sk-" not in text and HIDDEN in text
    settings = by_path(row)
    assert settings["actor.reward_options.api_key"]["value"] == HIDDEN
    assert "judge:8000/v1" in settings["actor.reward_options.judge-url"]["value"]
    assert settings["bus.kv_tokens"]["value"] == "5", "tokens of a model are no secret"


def test_a_secret_of_any_type_is_hidden_and_what_only_sounds_like_one_is_not() -> None:
    options = {"password": 12345678, "pwd": 1.5, "max_tokens": 512, "use_token": True, "token": "", "tokenizer": "gpt"}
    options |= {"command": ["--max-tokens", "512", "--no-auth", "--tokenizer", "gpt"]}
    options |= {"line": "x --max-tokens 512 --no-auth --y"}
    shown = {path.rpartition(".")[2]: line["value"] for path, line in by_path({"actor": {"o": options}}).items()}
    assert (shown["password"], shown["pwd"], shown["max_tokens"], shown["use_token"]) == (HIDDEN, HIDDEN, "512", "true")
    assert (shown["token"], shown["tokenizer"], shown["line"]) == ("''", "gpt", options["line"])
    assert shown["command"] == "[--max-tokens, '512', --no-auth, --tokenizer, gpt]"
    config = {"run": "r", "data": {"sources": {"sums": {"path": "x", "prompt_key": "text"}}}}
    lines = by_path(to_map(from_map(config, "test")))
    assert HIDDEN not in json.dumps(lines) and lines["data.sources.sums.prompt_key"]["value"] == "text"


def test_a_row_of_any_shape_is_shown_as_text() -> None:
    """Any client of the bus may have written it."""
    many = {str(number): {"x": ["y"]} for number in range(6000)}
    row = {HOSTILE: HOSTILE, "n": None, "e": {}, "long": {"x" * 9000: ["y" * 100_000] * 900}, "deep": many}
    settings = configuration_of(row)["settings"]
    assert len(settings) == MAX_SETTINGS and max(len(setting["value"]) for setting in settings) <= 2000
    assert json.loads(json.dumps(settings[0]))["path"].startswith(SHOWN[:40])
    assert "\u202e" not in json.dumps(settings, ensure_ascii=False)
    assert configuration_of({}) == {"settings": []}


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "learner.log").write_text("".join(f"line {number}\n" for number in range(500)))
    (tmp_path / "engine-0.log").write_bytes(HOSTILE.replace("\n", " ").encode() + b"\n\xff half")
    (tmp_path / "secret.env").write_text("TIDEMILL_BUS_PASSWORD=sk-one")
    (tmp_path / "trap.log").symlink_to(tmp_path / "secret.env")
    return tmp_path


def test_the_newest_lines_of_a_log(logs: Path) -> None:
    answer = RunLogs(logs).as_map("", [])
    assert answer["logs"] == ["engine-0", "learner"], "a link may lead anywhere"
    assert answer["name"] == "learner"
    assert answer["lines"] == [f"line {number}" for number in range(500 - MAX_LINES, 500)]
    whole = (logs / "learner.log").read_text()
    assert whole[answer["before_bytes"] :] == "\n".join(answer["lines"]) + "\n"


def test_lines_are_escaped_and_cut_and_have_no_password(logs: Path) -> None:
    lines = RunLogs(logs).as_map("engine-0", [])["lines"]
    assert lines[0].startswith(SHOWN[:40]) and "\u202e" not in lines[0] and lines[1] == "\ufffd half"
    text = "\x1b[31mred\x1b[0m nats://learner:sk-one@h:4222\n" + "x" * 9000 + "\n"
    (logs / "engine-0.log").write_text(text)
    coloured, long = RunLogs(logs).as_map("engine-0", [])["lines"]
    assert coloured == "red nats://***@h:4222" and len(long) == MAX_LINE
    (logs / "engine-0.log").write_text("y" * 3 * MAX_READ_BYTES + "\nend")
    assert RunLogs(logs).as_map("engine-0", [])["lines"] == ["end"], "the beginning of the part that is read is no line"


@pytest.mark.parametrize("name", ["trap", "../secret.env", "secret.env", "/etc/passwd", "..", "learner.log", "x" * 99])
def test_a_name_leads_to_no_other_file(logs: Path, name: str) -> None:
    (logs.parent / "outside.log").write_text("sk-one")
    for asked in (name, f"../{logs.parent.name}/outside", "../outside"):
        answer = RunLogs(logs).as_map(asked, [])
        assert answer["lines"] is None and "sk-" not in json.dumps(answer)


def test_a_log_that_is_not_here_has_its_place_and_no_row_leads_to_a_file(logs: Path) -> None:
    here = socket.gethostname()
    row = LiveRow(role="learner", id="learner", host=here, pid=1, phase="working", log=str(logs / "learner.log"))
    other = LiveRow(role="engine", id="e9", host="gpu-7", pid=1, phase="serving", log="/runs/r/logs/e9.log\u202e")
    trap = LiveRow(role="actor", id="a", host=here, pid=1, phase="serving", log=str(logs / "secret.env"))
    answer = RunLogs(logs).as_map("e9", [row, other, trap])
    assert (answer["lines"], "sk-" in json.dumps(answer)) == (None, False)
    assert answer["elsewhere"] == [
        {"process": "engine e9", "host": "gpu-7", "path": r"/runs/r/logs/e9.log\u202e"},
        {"process": "actor a", "host": here, "path": str(logs / "secret.env")},
    ]
    for directory in (None, logs / "none"):
        answer = RunLogs(directory).as_map("", [row])
        assert (answer["logs"], answer["lines"], len(answer["elsewhere"])) == ([], None, 1)


def test_a_cut_line_shows_no_part_of_a_password(logs: Path) -> None:
    filled = "x" * (MAX_LINE - 20)
    (logs / "engine-0.log").write_text(f"{filled} nats://a:sk-one{'y' * 4 * MAX_LINE}@h\n{filled} ws://sk-two@h\n")
    assert "sk-" not in json.dumps(RunLogs(logs).as_map("engine-0", []))


def test_of_many_logs_the_one_of_the_learner_is_found(logs: Path) -> None:
    for number in range(MAX_FILES + 100):
        (logs / f"actor-{number}.log").touch()
    answer = RunLogs(logs).as_map("", [])
    assert (answer["name"], len(answer["lines"]), len(answer["logs"])) == ("learner", MAX_LINES, MAX_FILES)
    assert RunLogs(logs).as_map("learner", [])["lines"]


class OpenFolder(RunLogs):
    """Names a file that is gone when it is opened."""

    def _files(self) -> Iterator[str]:
        return iter(["gone"])


def test_a_log_that_cannot_be_read_has_the_reason(logs: Path) -> None:
    answer = OpenFolder(logs).as_map("gone", [])
    assert answer["lines"] is None and "No such file" in answer["reason"]
    assert RunLogs(logs).as_map("x", [])["reason"] == "no log of x is on this machine"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Yield a directory that every user may enter: the directories of tests are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_without_a_token_only_logs_are_shown_that_every_user_may_read(open_directory: Path) -> None:
    folder = open_directory / "run" / "logs"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    log = folder / "learner.log"
    log.write_text("one\n")
    for mode, parent, is_shown in ((0o644, 0o755, True), (0o640, 0o755, False), (0o644, 0o750, False)):
        log.chmod(mode)
        folder.parent.chmod(parent)
        answer = RunLogs(folder).as_map("learner", [], may_read=lambda: False)
        assert (answer["lines"], answer["reason"]) == ((["one"], "") if is_shown else (None, PRIVATE))
        assert RunLogs(folder).as_map("learner", [])["lines"] == ["one"]


def test_a_process_leads_to_its_log_only_if_that_is_here(logs: Path) -> None:
    row = LiveRow(role="actor", id="a", host=socket.gethostname(), pid=1, phase="serving", log=str(logs / "a.log"))
    assert RunLogs(logs).name_of(row) == "a"
    for changes in ({"host": "gpu-7"}, {"log": "/elsewhere/a.log"}, {"log": str(logs / "a.env")}, {"log": ""}):
        assert RunLogs(logs).name_of(replace(row, **changes)) == ""
    fleet = _without_logs({"lanes": [process_of(Lane(row), (), "a")]})
    assert fleet["lanes"][0]["lane"] == "actor a" and str(logs) not in json.dumps(fleet), "of an exported file"
    assert RunLogs(None).name_of(row) == RunLogs(None).name_of(replace(row, log="a.log")) == ""


CHECKED = {"state": "checked", "lost": 0, "twice": 0, "problems": [], "at_seq": 9}


@pytest.mark.parametrize(
    ("audit", "tone"),
    [
        (CHECKED, "good"),
        (CHECKED | {"lost": 1}, "badly"),
        (CHECKED | {"twice": 2}, "badly"),
        (CHECKED | {"lost": None}, "badly"),
        (CHECKED | {"problems": ["step 3 has two plans"]}, "badly"),
        ({"state": "failed", "words": "the bus does not answer"}, "badly"),
        ({"state": "too large", "words": "too many samples to read here"}, "badly"),
        ({"state": "a later word"}, "badly"),
        ({"state": "not yet"}, "mute"),
        ({"state": "running"}, "mute"),
    ],
)
def test_only_a_check_that_has_ended_without_a_finding_is_good(audit: dict[str, Any], tone: str) -> None:
    words = audit_words(audit)
    assert words["tone"] == tone and bool(words["notes"]) is ("words" in audit or audit["state"] == "checked")
    assert words["text"].startswith({"good": "✓", "badly": "✕", "mute": "◌"}[tone])


def test_a_balance_that_is_not_known_is_neither_good_nor_bad() -> None:
    ledger = RunLedger()
    assert ledger.as_map()["balance"] | {"words": ""} == {
        "ok": None,
        "words": "",
        "difference": None,
        "tone": "mute",
        "text": "— balance: no feeder reports its counts",
    }
    tones = []
    for published in (3, 4):
        ledger.feeder = {"published": published, "trained": 3}
        tones.append((ledger.as_map()["balance"]["tone"], ledger.as_map()["balance"]["text"]))
    assert tones == [("good", "✓ balance: published = sum"), ("badly", "✕ 1 samples without a disposition")]
