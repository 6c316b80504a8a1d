"""The check of the store of checkpoints: packages and settings always, an object that is written where services are
reached.
"""

import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.registry import known_implementations

from tests import flaky_store
from tests.check_kit import write_run
from tests.flaky_store import URL, FlakyFileSystem
from tests.refusals import refusal
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.machine import check_store
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.settings.config_loader import SettingsError, load

flaky = flaky_store.flaky


def checked(directory: Path, url: str, *settings: str, uses_bus: bool = True) -> list[str]:
    """Return the texts of all findings about the store."""
    return check(
        load(write_run(directory), [f"learner.checkpoint.store={url}", *settings]), Purpose(uses_bus=uses_bus)
    ).on("store")


def test_a_store_that_takes_an_object(flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
    (found,) = checked(tmp_path, URL)
    assert found.startswith(f"{URL}/") and found.endswith(": a small object was written, read and removed")
    assert [verb for verb, _ in flaky.done] == ["write", "remove"] and not flaky.store


def test_it_is_left_alone_where_no_service_is_reached(flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
    assert checked(tmp_path, URL, uses_bus=False) == [] and flaky.done == []


def test_a_store_that_refuses_to_be_written(flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
    flaky.fails = staticmethod(lambda verb, path: verb == "write")
    (found,) = checked(tmp_path, URL)
    assert "learner.checkpoint.store: want a place that this process can write to, got flaky://bucket/path/" in found
    assert "503 for https://store.example/bucket/object?***; give its package the credentials" in found


def test_a_store_without_an_answer(flaky: type[FlakyFileSystem], tmp_path: Path) -> None:
    answer, report = threading.Event(), Report()
    flaky.fails = staticmethod(lambda verb, path: answer.wait(60))
    try:
        check_store(
            report, load(write_run(tmp_path), [f"learner.checkpoint.store={URL}"]).config, reach=True, answer_s=0.01
        )
    finally:
        answer.set()
    assert ": no answer within 0 s; " in report.on("store")[0]


def test_a_protocol_without_its_package(tmp_path: Path) -> None:
    packages = {protocol: entry["class"].partition(".")[0] for protocol, entry in known_implementations.items()}
    protocol, package = next((one, package) for one, package in packages.items() if find_spec(package) is None)
    (found,) = checked(tmp_path, f"{protocol}://bucket", uses_bus=False)
    assert f"got no package {package}; install it on every node (pip install {package}), or set local" in found


def test_a_store_of_one_process_or_of_one_machine(tmp_path: Path) -> None:
    (found,) = checked(tmp_path, "memory://bucket")
    assert "want a store that outlives a process" in found
    two = ("learner.data_parallel=2", "learner.nodes=2")
    (found,) = checked(tmp_path, f"file://{tmp_path}/store", *two, uses_bus=False)
    assert "want a store that all nodes reach" in found
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", ["debug.rollout_only=true", "debug.load_rollout=/samples/{step}.msgpack"])
def test_modes_without_weights_have_no_store(tmp_path: Path, mode: str) -> None:
    with refusal(SettingsError, place="--set: learner.checkpoint.store", got="'s3://bucket'"):
        checked(tmp_path, "s3://bucket", mode)


def test_a_password_is_shown_nowhere(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        checked(tmp_path, "s3://key:5ec7e7@bucket/path")
    assert "store: want a URL without a password" in str(refused.value) and "5ec7e7" not in str(refused.value)


def test_the_disk_has_room_for_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2, used=1, free=1))
    report = check(load(write_run(tmp_path), [f"learner.checkpoint.store=file://{tmp_path}/store"]), Purpose())
    assert any("for 4 checkpoints, one being written" in text for text in report.on("disk")), report.on("disk")
