"""A profile on request: begun at the next step, ended after its steps, and written to the directory of the command."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from launch.cli.main import main
from learner.debug.profile_request import ProfileRequest, request_file, take_request, write_request
from learner.debug.profiler import Profiler


def step(profiler: Profiler, number: int) -> None:
    with profiler.around(number):
        torch.randn(64, 64) @ torch.randn(64, 64)


def test_requested_steps_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    profiler = Profiler(tmp_path, on_cuda=False)
    step(profiler, 1)
    assert not (tmp_path / "debug").exists()
    assert main(["debug", "profile", "--run-dir", str(tmp_path), "--steps", "2", "--memory"]) == 0
    assert f"{tmp_path}/debug/profile_<first>_<last>.json.gz" in capsys.readouterr().out
    step(profiler, 2)
    assert not list((tmp_path / "debug").glob("*.gz")) and not request_file(tmp_path).exists()
    step(profiler, 3)
    step(profiler, 4)
    assert sorted(path.name for path in (tmp_path / "debug").iterdir()) == ["profile_2_3.json.gz", "profile_2_3_memory.txt"]
    with gzip.open(tmp_path / "debug" / "profile_2_3.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "aten::mm"]
    assert len(events) == 2  # those of steps 2 and 3
    assert "aten::mm" in (tmp_path / "debug" / "profile_2_3_memory.txt").read_text()


def test_a_profile_that_is_cut_short_is_saved(tmp_path: Path) -> None:
    """The run ends, or the rank is drained, before the last of the steps."""
    profiler = Profiler(tmp_path, on_cuda=False)
    write_request(tmp_path, ProfileRequest(steps=50))
    step(profiler, 7)
    step(profiler, 8)
    profiler.close()
    profiler.close()
    assert [path.name for path in (tmp_path / "debug").iterdir()] == ["profile_7_8.json.gz"]
    assert not torch.autograd.profiler._is_profiler_enabled


def test_wrong_requests_do_not_end_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler(tmp_path, on_cuda=False)
    for text in ("", "[]", '{"steps": 0}', '{"steps": 1, "more": 2}'):
        request_file(tmp_path).parent.mkdir(exist_ok=True)
        request_file(tmp_path).write_text(text)
        step(profiler, 1)
    assert caplog.text.count("profile not begun") == 4 and not request_file(tmp_path).exists()
    write_request(tmp_path, ProfileRequest(steps=3))
    assert take_request(tmp_path) == ProfileRequest(steps=3)
    assert take_request(tmp_path) is None


def test_the_command_refuses_other_directories_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "profile", "--run-dir", str(tmp_path)]) == 2
    assert "--run-dir: want the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["debug", "profile", "--run-dir", str(tmp_path), "--steps", "0"]) == 2
    assert "--steps: want 1..100, got 0" in capsys.readouterr().err
