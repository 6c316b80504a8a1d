"""A profile on request: begun at the next step, ended after its steps, and written to the directory of the command."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from tests.refusals import refusal
from tidemill.launch.cli.main import main
from tidemill.learner.backends.megatron.backend import MegatronBackend
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.debug.config import DebugConfig, ProfileRequest, request_file, take_request, write_request
from tidemill.learner.layout import parallel
from tidemill.learner.ranks.debugging import Profiler, RankDebug
from tidemill.learner.settings.config import LearnerConfig

CONFIG = {"model": {"path": "m"}, "data": {"path": "d"}, "learner": {"data_parallel": 2, "tensor_parallel": 2}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run whose learner has four ranks."""
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    return tmp_path


def step(profiler: Profiler, number: int, root: Path | None = None) -> None:
    """Take a step as a rank does; ``root``: rank 0 looks there for a request."""
    request = None if root is None else take_request(root, 4)
    if request is not None:
        profiler.request(request)
    with profiler.around(number):
        torch.randn(64, 64) @ torch.randn(64, 64)


def test_requested_steps_are_traced(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler(run_dir, rank=0, on_cuda=False)
    step(profiler, 1, run_dir)
    assert not (run_dir / "debug").exists()
    assert main(["debug", "profile", "--run-dir", str(run_dir), "--steps", "2", "--memory"]) == 0
    assert (
        f"rank 0 profiles its next 2 steps, and writes {run_dir}/debug/profile_rank0_<first>_<last>.json.gz"
        in capsys.readouterr().out
    )
    step(profiler, 2, run_dir)
    assert not list((run_dir / "debug").glob("*.gz")) and not request_file(run_dir).exists()
    step(profiler, 3, run_dir)
    step(profiler, 4, run_dir)
    assert sorted(path.name for path in (run_dir / "debug").iterdir()) == [
        "profile_rank0_2_3.json.gz",
        "profile_rank0_2_3_memory.txt",
    ]
    with gzip.open(run_dir / "debug" / "profile_rank0_2_3.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "aten::mm"]
    assert len(events) == 2  # those of steps 2 and 3
    assert "aten::mm" in (run_dir / "debug" / "profile_rank0_2_3_memory.txt").read_text()


def test_the_rank_that_a_request_names_profiles(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "profile", "--run-dir", str(run_dir), "--steps", "1", "--rank", "2"]) == 0
    assert "rank 2 profiles its next 1 steps" in capsys.readouterr().out
    request = take_request(run_dir, 4)
    assert request == ProfileRequest(steps=1, rank=2)
    for rank in range(4):
        profiler = Profiler(run_dir, rank=rank, on_cuda=False)
        profiler.request(request)
        step(profiler, 5)
    assert [path.name for path in (run_dir / "debug").iterdir()] == ["profile_rank2_5_5.json.gz"]


def test_a_request_waits_for_the_end_of_a_profile(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, rank=0, on_cuda=False)
    for number, request in enumerate((ProfileRequest(steps=2), ProfileRequest(steps=9), ProfileRequest(steps=1)), 1):
        profiler.request(request)  # the third one replaces the second, which has not begun
        if number != 2:
            step(profiler, number)
    step(profiler, 4)
    step(profiler, 5)
    assert sorted(path.name for path in (tmp_path / "debug").iterdir()) == [
        "profile_rank0_1_3.json.gz",
        "profile_rank0_4_4.json.gz",
    ]


def test_a_profile_that_is_cut_short_is_saved(tmp_path: Path) -> None:
    """The run ends, or the rank is drained, before the last of the steps."""
    profiler = Profiler(tmp_path, rank=0, on_cuda=False)
    profiler.request(ProfileRequest(steps=50))
    step(profiler, 7)
    step(profiler, 8)
    profiler.close()
    profiler.close()
    assert [path.name for path in (tmp_path / "debug").iterdir()] == ["profile_rank0_7_8.json.gz"]
    assert not torch.autograd.profiler._is_profiler_enabled


def test_wrong_requests_are_refused_and_removed(tmp_path: Path) -> None:
    for text in (
        "",
        "[]",
        '{"steps": 0}',
        '{"steps": 1, "more": 2}',
        '{"steps": 1, "rank": -1}',
        '{"steps": 1, "rank": 4}',
    ):
        request_file(tmp_path).parent.mkdir(exist_ok=True)
        request_file(tmp_path).write_text(text)
        with refusal(ValueError, place=re.compile(r"profile\.request$")):
            take_request(tmp_path, 4)
        assert not request_file(tmp_path).exists()
    write_request(tmp_path, ProfileRequest(steps=3))
    assert take_request(tmp_path, 1) == ProfileRequest(steps=3)
    assert take_request(tmp_path, 1) is None


def test_the_command_refuses_other_directories_and_numbers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "profile", "--run-dir", str(run_dir / "none")]) == 2
    assert "--run-dir: want the directory of a run" in capsys.readouterr().err
    for option, number, want in (
        ("steps", "0", "1..100"),
        ("rank", "-1", "0 or more"),
        ("rank", "4", "0..3, one of the 4 ranks"),
    ):
        assert main(["debug", "profile", "--run-dir", str(run_dir), f"--{option}={number}"]) == 2
        error = capsys.readouterr().err
        assert f"--{option}: want {want}" in error and f"got {number}" in error
    assert not request_file(run_dir).exists()


def test_a_wrong_request_does_not_end_a_run(
    here: parallel.Parallel, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build_policy(model_dir, dtype="float32", parallel=here)
    tools = RankDebug(
        DebugConfig(),
        LearnerConfig(steps=1),
        backend=MegatronBackend(),
        policy=policy,
        model_dir=model_dir,
        root=tmp_path,
    )
    write_request(tmp_path, ProfileRequest(steps=1, rank=1))
    assert tools.take_request() is None and not request_file(tmp_path).exists()
    assert "profile not begun" in caplog.text and "rank: want 0..0, one of the 1 ranks" in caplog.text
    write_request(tmp_path, ProfileRequest(steps=1))
    assert tools.take_request() == ProfileRequest(steps=1)
