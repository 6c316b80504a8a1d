"""Names of a hub: what is fetched into the cache, at which commit, and how each trouble is named."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import hub_kit
from tests.check_kit import write_model
from tests.hub_kit import Hub
from tidemill.launch.hub import repository
from tidemill.launch.hub.errors import HUB, HubRefused, endpoint
from tidemill.launch.settings.hub_names import DATASET, MODEL, MODEL_PATH, HubName, parse
from tidemill.learner.prompts.formats import read_values

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Sums
"""
ROW = b'{"question": "1+1", "answer": "2"}\n'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_kit.serving() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "")  # so that one which a command sets is removed after the test
        monkeypatch.delenv("HF_TOKEN")
        yield served


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return hub_kit.content(write_model(tmp_path / "source"))


def model(text: str) -> HubName:
    name = parse(MODEL, text)
    assert name is not None
    return name


def data(text: str) -> HubName:
    name = parse(DATASET, text)
    assert name is not None
    return name


def fetch(name: HubName, **options: Any) -> repository.Fetched:
    return repository.fetch(name, MODEL_PATH, **options)


def test_a_model_is_fetched_without_pickles_and_code(hub: Hub, files: dict[str, bytes]) -> None:
    others = {"pytorch_model.bin": b"pickle", "modeling.py": b"import os", "onnx/model.safetensors": b"0"}
    commit = hub.repo("org/tiny").commit(files | others)
    fetched = fetch(model("org/tiny"), tokenizer=True)
    assert hub_kit.content(fetched.name.folder) == files
    assert (fetched.name.revision, fetched.num_files, fetched.size_bytes) == (
        commit,
        len(files),
        sum(map(len, files.values())),
    )
    asked = len(hub.requests)
    assert fetch(model("org/tiny"), tokenizer=True).name == fetched.name
    assert [path for _, path, _ in hub.requests[asked:]] == ["/api/models/org/tiny"]


@pytest.mark.parametrize("trouble", ["cut", "stall"])
def test_a_download_goes_on_where_it_was_cut(
    hub: Hub, files: dict[str, bytes], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # whole chunks alone are kept
    weights = files["model.safetensors"] = files["model.safetensors"] + bytes(200_000)
    hub.repo("org/tiny").commit(files)
    getattr(hub, trouble)[weights] = 100_000
    fetched = fetch(model("org/tiny"))
    assert (fetched.name.folder / "model.safetensors").read_bytes() == weights
    first, second = hub.ranges("/large/")
    assert first == "" and 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 100_000


@pytest.mark.parametrize("num_bytes", [-1, 0, 1])
def test_bytes_that_are_not_those_of_the_hub_are_fetched_again(
    hub: Hub, files: dict[str, bytes], num_bytes: int
) -> None:
    weights = files["model.safetensors"]
    hub.repo("org/tiny").commit(files)
    flipped = weights[:-1] + bytes([weights[-1] ^ 1])
    hub.sent[weights] = {-1: weights[:-1], 0: flipped, 1: weights + b"0"}[num_bytes]
    fetched = fetch(model("org/tiny"))
    assert (fetched.name.folder / "model.safetensors").read_bytes() == weights


def gsm8k(**more: bytes) -> dict[str, bytes]:
    names = ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-00000-of-00001", "socratic/train-0")
    return {"README.md": CARD, **{f"{name}.jsonl": ROW for name in names}, **more}


@pytest.mark.parametrize(
    ("name", "inside", "num_files"),
    [
        ("org/sums/main/train", "main/train-*", 2),
        ("org/sums@main/main/test@[0:1]", "main/test-00000-of-00001.jsonl", 1),
        ("org/sums/socratic/train", "socratic/train-0.jsonl", 1),
        ("org/sums/socratic", "socratic/train-0.jsonl", 1),
    ],
)
def test_a_split_is_what_the_card_says(hub: Hub, name: str, inside: str, num_files: int) -> None:
    hub.repo("org/sums", "dataset").commit(gsm8k())
    fetched = fetch(data(name))
    assert (fetched.name.inside, fetched.num_files) == (inside, num_files)
    rows = read_values(fetched.name.folder / inside)
    assert [dict(values) for _, values in rows if isinstance(values, dict)] == [json.loads(ROW)] * num_files
    assert parse(DATASET, str(fetched.name)) == fetched.name


def test_the_only_configuration_may_be_left_out(hub: Hub) -> None:
    card = CARD[: CARD.index(b"- config_name: socratic")] + b"---"
    hub.repo("org/sums", "dataset").commit(gsm8k(**{"README.md": card}))
    assert fetch(data("org/sums/test")).name == fetch(data("org/sums/main/test")).name


@pytest.mark.parametrize(
    ("files", "name", "inside"),
    [
        (["data/train-0-of-1.jsonl", "data/test-0-of-1.jsonl"], "org/sums/test", "data/test-0-of-1.jsonl"),
        (["main/train/00.jsonl", "main/train/01.jsonl"], "org/sums/main/train", "main/train/[0-9]*.jsonl"),
        (["train.jsonl"], "org/sums", "train.jsonl"),
        (["a/x.jsonl", "a/y.jsonl"], "org/sums/a", "a/*.jsonl"),
    ],
)
def test_without_a_card_the_names_of_the_files_say_it(hub: Hub, files: list[str], name: str, inside: str) -> None:
    hub.repo("org/sums", "dataset").commit({file: ROW for file in files})
    assert fetch(data(name)).name.inside == inside


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (gsm8k(), "org/sums/main"),
        (dict.fromkeys(["en/train.jsonl", "en/test.jsonl"], ROW), "org/sums/en"),
        (dict.fromkeys(["data/train-0-of-1.jsonl", "data/validation-0-of-1.jsonl"], ROW), "org/sums/data"),
    ],
)
def test_a_held_out_split_is_never_trained_by_the_way(hub: Hub, files: dict[str, bytes], name: str) -> None:
    """``load_dataset`` takes a configuration without a split; here its test rows would be prompts of training."""
    hub.repo("org/sums", "dataset").commit(files)
    text = refused(data(name))
    assert "want one split of org/sums" in text and "files of several; name one of: org/sums/" in text
    assert fetch(data(f"org/sums@main/{next(file for file in files if file.endswith('.jsonl'))}")).num_files == 1


def refused(name: HubName, **options: Any) -> str:
    with pytest.raises(HubRefused) as error:
        fetch(name, **options)
    return str(error.value)


def test_what_a_repository_lacks_is_named(hub: Hub, files: dict[str, bytes]) -> None:
    hub.repo("org/pickles").commit({"config.json": b"{}", "pytorch_model.bin": b"0"})
    assert "with *.safetensors, got pytorch_model.bin; pickles are never read" in refused(model("org/pickles"))
    hub.repo("org/slow").commit({name: data for name, data in files.items() if name != "tokenizer.json"})
    assert "with tokenizer.json, got none" in refused(model("org/slow"), tokenizer=True)
    hub.repo("org/part").commit({"model-00001-of-00002.safetensors": b"0"})
    assert "all 2 files model-* of org/part, got 1 of them" in refused(model("org/part"))
    hub.repo("org/sums", "dataset").commit(gsm8k())
    assert "name one of: org/sums/main/train, org/sums/main/test, org/sums/socratic/train" in refused(data("org/sums"))
    hub.repo("org/csv", "dataset").commit({"train.csv": b"a,b"})
    assert "got files of .csv; try the hub's own conversion, org/csv@refs/convert/parquet" in refused(data("org/csv"))


def test_a_repository_that_cannot_be_had_is_named(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "org/none, which is no path here, and missing on" in refused(model("org/none"))
    secret = hub.repo("org/secret")
    secret.token = "hf_right"
    secret.commit(files)
    assert "set HF_TOKEN" in refused(model("org/secret"))
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "the token is wrong" in (text := refused(model("org/secret"))) and "hf_" not in text
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert fetch(model("org/secret")).num_files == len(files)
    assert "without such a revision" in refused(model("org/secret@v2"))
    gated = hub.repo("org/gated")
    gated.gated = True
    gated.commit(files)
    assert "gated; accept its conditions" in refused(model("org/gated"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "no answer of http://127.0.0.1:9" in (text := refused(model("org/gated"))) and "HF_ENDPOINT" in text


@pytest.mark.parametrize(
    "rubbish",
    [b"<html>Sign in</html>", b"", b"null", b"[]", b"{}", bytes(range(256)), b'{"id": "org/tiny", "siblings": 5}'],
)
def test_an_answer_that_is_no_hubs_is_named(hub: Hub, rubbish: bytes) -> None:
    hub.rubbish = rubbish
    for name in (model("org/tiny"), data("org/sums/train")):
        text = refused(name)
        assert f"an answer of {hub.url} as no hub gives it" in text and "set HF_ENDPOINT to a mirror" in text


def test_the_password_of_a_mirror_is_in_no_message(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/tiny").commit(files)
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", "//team:hf_secret@"))
    said: list[str] = []
    said += [str(fetch(model("org/tiny"), say=said.append)), refused(model("org/none"))]
    monkeypatch.setenv("HF_ENDPOINT", "http://team:hf_secret@127.0.0.1:9")
    said.append(refused(model("org/none")))
    assert len(said) == 4 and "hf_secret" not in "".join(said) and all("://127.0.0.1:" in text for text in said)


@pytest.mark.parametrize(
    "address",
    ["http://[::bad", "hub.example", "http://", "ftp://hub", "http://hub:port", "http://a b", "http:/me:hf_secret@hub"],
)
def test_an_address_that_is_none_is_refused_by_its_variable(address: str) -> None:
    """In a process of its own: the library reads the variable when it is imported."""
    command = [sys.executable, "-m", "tidemill", "data", "check", "org/sums/train"]
    environment = os.environ | {"HF_ENDPOINT": address, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    shown = address.replace("me:hf_secret@", "")
    assert done.returncode != 0 and done.stderr.startswith(
        f"tidemill data: HF_ENDPOINT: want http://HOST[:PORT] or https://HOST[:PORT], got {shown!r}; fix it, or unset"
    ), done.stderr


def test_an_empty_address_is_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "")
    assert endpoint() == HUB


def test_a_cached_branch_is_offered_when_the_hub_is_away(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repo("org/tiny").commit(files)
    fetch(model("org/tiny"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert f"set HF_HUB_OFFLINE=1 to use commit {commit[:12]} in the cache" in refused(model("org/tiny"))
    assert "HF_HUB_OFFLINE" not in refused(model("org/other"))


def test_what_a_cache_lacks_is_not_said_of_the_repository(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tool has fetched a part of the files."""
    from huggingface_hub import hf_hub_download

    cache = os.environ["HF_HUB_CACHE"]
    hub.repo("org/tiny").commit(files)
    hub.repo("org/sums", "dataset").commit(gsm8k())
    where = {"endpoint": hub.url, "cache_dir": cache}
    hf_hub_download("org/tiny", "config.json", **where)
    hf_hub_download("org/sums", "main/test-00000-of-00001.jsonl", repo_type="dataset", **where)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert f"got none in {cache}, which may have a part of it; give a path" in refused(model("org/tiny"))
    text = refused(data("org/sums/main/train"))
    assert f"in {cache}, which may have a part of it; name one of: org/sums/main/test; or give a path" in text


def test_offline_the_last_whole_commit_counts(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/tiny").commit(files)
    fetched = fetch(model("org/tiny"))
    asked = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(model("org/tiny")).name == fetched.name
    assert "not in" in (text := refused(model("org/other"))) and "in offline mode" in text
    assert len(hub.requests) == asked


def test_a_failed_download_is_no_cached_branch(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fetch of the branch that fails leaves the one before it as the last whole one."""
    repo = hub.repo("org/tiny")
    first = repo.commit(files)
    fetch(model("org/tiny"))
    second = repo.commit(files | {"model.safetensors": files["model.safetensors"] + b"0"})
    monkeypatch.setattr(repository, "TRIES", 0)
    hub.sent[repo.commits[second]["model.safetensors"]] = b"0"
    assert "another digest" in refused(model("org/tiny"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(model("org/tiny")).name.revision == first


def test_a_commit_needs_no_hub_once_it_is_here(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repo("org/tiny")
    pinned = fetch(model("org/tiny@" + repo.commit(files))).name
    del hub.repos["model", "org/tiny"]
    assert fetch(pinned).name == pinned
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(pinned).is_offline


def test_a_cache_without_room_or_rights_is_named(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/tiny").commit(files)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    assert "bytes free in" in (text := refused(model("org/tiny"))) and "got 10; free some" in text
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path / "file/cache"))):
        monkeypatch.setenv(name, value)
    assert "want a cache that can be written for org/tiny" in (text := refused(model("org/tiny"))), text
