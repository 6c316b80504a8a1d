"""From settings to the wants of a placement, and from places to the environment of processes; the check before a start
shows both.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.check_kit import VALUES, write_model, write_run
from tests.gpu_kit import environment, fake_nvidia_smi, row, uuid_of
from tests.refusals import refusal
from tests.tiny_models import EXPERTS
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.launch.checks.devices import PLACEMENT
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import size_here
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main as cli
from tidemill.launch.devices import demand, visible
from tidemill.launch.devices.demand import ModelSize, devices_of, engine_variables, rank_variables, want_of
from tidemill.launch.devices.placement import place
from tidemill.launch.devices.shapes import EnginePlace, Node, PlacementRefused, RankPlace
from tidemill.launch.devices.visible import nccl_of, this_node
from tidemill.launch.run import learner_nodes, learner_process
from tidemill.launch.run.learner_process import place_ranks
from tidemill.launch.run.workers import refuse_small_devices, take_devices
from tidemill.launch.settings.config_loader import SettingsError, load
from tidemill.launch.settings.run_config import ModelConfig, RunConfig
from tidemill.learner.settings.config import LearnerConfig
from tidemill.weightstore.config import WeightsConfig

GB = 1_000_000_000


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """This machine with four GPUs, as its nvidia-smi shows them."""
    path = fake_nvidia_smi(tmp_path / "bin", 4)
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return this_node(os.environ)


@pytest.fixture
def none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine without GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sglang(**arguments: Any) -> EngineConfig:
    return EngineConfig(kind="sglang", sglang=SglangConfig(arguments=arguments))


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        (EngineConfig(), 1),
        (EngineConfig(device="cpu"), 0),
        (sglang(), 1),
        (sglang(tp_size=4), 4),
        (sglang(**{"tensor-parallel-size": 2}), 2),
        (sglang(tp_size=2, pp_size=2, dp_size=2), 8),
        (sglang(tp_size=4, dp_size=4, enable_dp_attention=True), 4),
        (sglang(device="cpu", tp_size=2), 0),
        (EngineConfig(kind="sglang", sglang=SglangConfig(url="http://x:1")), 0),
    ],
)
def test_an_engine_has_as_many_devices_as_ranks(engine: EngineConfig, count: int) -> None:
    assert devices_of(engine) == count


def test_memory_is_the_least_that_a_process_needs(four: Node) -> None:
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": (GB,) for layer in range(8)}

    def wanted(**settings: Any) -> tuple[int, int, int, int]:
        learner = LearnerConfig(dtype=settings.get("dtype", "bfloat16"), tensor_parallel=settings.get("tp", 1))
        weights = WeightsConfig(transport="handles", staging=settings.get("staging", "host"))
        config = RunConfig(
            learner=learner, weights=weights, engine=settings.get("engine", EngineConfig(dtype="bfloat16"))
        )
        want = want_of(config, four, learner=True, engines=1, size=ModelSize(tensors))
        return want.memory_rank // GB, want.memory_sender // GB, want.memory_engine // GB, want.bucket_bytes // GB

    assert wanted() == (144, 0, 32, 2)
    assert wanted(tp=4, dtype="float32", staging="cuda") == (32, 16, 32, 4), "each of four ranks stages a quarter"
    assert wanted(engine=replace(sglang(tp_size=2), dtype="bfloat16"))[2] == 8


@pytest.mark.parametrize(
    ("engine", "where"),
    [
        (sglang(base_gpu_id=1), "engine.sglang.arguments.base_gpu_id"),
        (sglang(**{"gpu-id-step": 2}), "engine.sglang.arguments.gpu_id_step"),
        (
            EngineConfig(kind="sglang", sglang=SglangConfig(environment={"CUDA_VISIBLE_DEVICES": "1"})),
            "engine.sglang.environment.CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_devices_in_the_arguments_of_sglang_are_refused(four: Node, engine: EngineConfig, where: str) -> None:
    """They would be the same for all engines. Without devices here they are none of our business."""
    config = RunConfig(engine=engine)
    with refusal(PlacementRefused, cure=re.compile(r"\bengine\.devices\b")) as caught:
        want_of(config, four, learner=True, engines=1)
    assert caught.value.where == where
    want_of(config, replace(four, devices=()), learner=True, engines=1)


def test_the_environment_of_ranks(four: Node) -> None:
    config = RunConfig(learner=LearnerConfig(data_parallel=2))
    places = place([four], want_of(config, four, learner=True, engines=0)).ranks
    both = f"{uuid_of(0)},{uuid_of(1)}"
    for local, one in enumerate(places):
        assert rank_variables(four, one, config, {}) == {
            "CUDA_VISIBLE_DEVICES": both,
            "LOCAL_RANK": str(local),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "NCCL_ALGO": "Ring",
        }
    colocated = RunConfig(learner=LearnerConfig(colocated=True), weights=WeightsConfig(overlap=False))
    shared = RunConfig(weights=WeightsConfig(transport="handles", staging="cuda"))
    for other in (colocated, shared):
        assert "PYTORCH_ALLOC_CONF" not in rank_variables(four, places[0], other, {})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "PYTORCH_ALLOC_CONF" not in rank_variables(four, places[0], config, {name: "x"})
    beside_sglang = rank_variables(four, places[0], RunConfig(engine=sglang()), {"NCCL_NVLS_ENABLE": "1"})
    assert beside_sglang["NCCL_CUMEM_ENABLE"] == "0" and "NCCL_NVLS_ENABLE" not in beside_sglang, "the user's own stays"
    assert "NCCL_ALGO" not in rank_variables(four, places[0], config, {"NCCL_ALGO": "Tree"})
    assert "NCCL_ALGO" not in rank_variables(four, places[0], RunConfig(), {}), "one rank sums nothing over NCCL"
    without_program = RunConfig(learner=LearnerConfig(data_parallel=2, device="cuda"))
    assert rank_variables(Node(), RankPlace(rank=0, node=0, local_rank=0), without_program, {}) == {"NCCL_ALGO": "Ring"}
    loose = RunConfig(learner=LearnerConfig(data_parallel=2, deterministic=False))
    assert "NCCL_ALGO" not in rank_variables(four, places[0], loose, {})
    on_cpu = RankPlace(rank=0, node=0, local_rank=0)
    assert rank_variables(four, on_cpu, config, {}) == {"CUDA_VISIBLE_DEVICES": ""}
    assert rank_variables(replace(four, devices=()), on_cpu, config, {}) == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: True"])
def test_segments_that_a_colocated_process_cannot_release_are_refused(
    four: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """torch-memory-saver looks at the old name alone. By the check, the learner, and the engine with SGLang."""
    monkeypatch.setenv(name, value)
    why = rf"{name}: want no expandable_segments with learner.colocated: .*, got '{value}'; unset {name}"
    settings = ("learner.colocated=true", "weights.overlap=false")
    (error,) = checked(tmp_path, *settings).errors
    assert re.match(why, error.text)
    assert (
        not checked(tmp_path).errors
        and not checked(tmp_path, *settings, "learner.device=cpu", "engine.device=cpu").errors
    )
    colocated = RunConfig(learner=LearnerConfig(colocated=True), weights=WeightsConfig(overlap=False))
    with pytest.raises(PlacementRefused, match=why):
        place_ranks(colocated)
    place_ranks(RunConfig())
    with pytest.raises(PlacementRefused, match=why):
        take_devices(replace(colocated, engine=replace(sglang(), colocated=True)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # restored after the test
    take_devices(replace(colocated, engine=EngineConfig(colocated=True)))
    monkeypatch.delenv(name)
    server = SglangConfig(environment={name: value})
    with refusal(PlacementRefused, where=f"engine.sglang.environment.{name}"):
        take_devices(replace(colocated, engine=EngineConfig(kind="sglang", colocated=True, sglang=server)))
    take_devices(RunConfig(engine=EngineConfig(kind="sglang", sglang=server)))


def test_without_nvidia_smi_a_colocated_learner_on_cuda_is_refused_them_too(
    none: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    learner = LearnerConfig(colocated=True, device="cuda")
    with refusal(PlacementRefused, where="PYTORCH_ALLOC_CONF"):
        place_ranks(RunConfig(learner=learner, weights=WeightsConfig(overlap=False)))
    place_ranks(RunConfig(learner=replace(learner, device="auto"), weights=WeightsConfig(overlap=False)))


def test_live_rows_have_the_version_of_nccl(four: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it all weights go over gloo. Of the learner's parent, of a node's agent, of engines with the interpreter
    that they have.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # restored after the test
    for module in (visible, demand, learner_process, learner_nodes):
        monkeypatch.setattr(
            module, "nccl_of", lambda program=sys.executable: "2.30.4" if program == "/sglang/python" else "2.29.7"
        )
    assert place_ranks(RunConfig())[1].nccl == "2.29.7"
    assert learner_process.capabilities_of(four.devices[:2]).nccl == "2.29.7"
    assert learner_nodes.library_versions(RunConfig(), four.devices[:2])["NCCL"] == "2.29.7"
    assert "NCCL" not in learner_nodes.library_versions(RunConfig(), ())
    _, held = take_devices(RunConfig())
    assert held.nccl == "2.29.7"
    config = EngineConfig(kind="sglang", sglang=SglangConfig(python="/sglang/python"))
    assert take_devices(RunConfig(engine=config))[1].nccl == "2.30.4"


def test_the_environment_of_engines(four: Node) -> None:
    placed = EnginePlace(number=0, node=0, uuids=("b",), visible=("b", "a"))
    assert engine_variables(four, placed) == {"CUDA_VISIBLE_DEVICES": "b,a", "TIDEMILL_ENGINE__DEVICES": '["b"]'}
    on_cpu = EnginePlace(number=0, node=0)
    assert engine_variables(four, on_cpu) == {"CUDA_VISIBLE_DEVICES": ""}
    assert engine_variables(replace(four, devices=()), on_cpu) == {}


def test_an_engine_hides_all_devices_but_its_own(four: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand, and started again with the environment that it was given: the same device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid_of(3)},{uuid_of(2)}")  # restored after the test
    _, held = take_devices(RunConfig(engine=EngineConfig(devices=("3",))))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], held.devices, held.visible_devices) == (
        uuid_of(3),
        (uuid_of(3),),
        (uuid_of(3),),
    )
    assert held.device_memory_bytes == four.devices[3].memory_bytes
    assert take_devices(RunConfig()) == (EngineConfig(), held)


def test_an_engine_without_the_memory_for_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand: with the model here, and when it has come from the learner."""
    model = write_model(tmp_path / "model", vocab_size=200_000)
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", script=f"echo '{row(0, memory='16 MiB')}'"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # restored after the test
    config = RunConfig(model=ModelConfig(path=str(model)))
    why = r"memory of device 0: want 0.0 GB \(0.0 GB for 1 engine\(s\); .* got 0.0 GB, 95% of it"
    with pytest.raises(PlacementRefused, match=why):
        take_devices(config)
    elsewhere = RunConfig(model=ModelConfig(path="/not/here"))
    take_devices(elsewhere)
    with pytest.raises(PlacementRefused, match=why):
        refuse_small_devices(elsewhere, model)
    (model / "model.safetensors").write_bytes(b"broken")
    take_devices(config)


def test_an_sglang_server_counts_from_its_first_device_where_it_sees_all(
    four: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(device.uuid for device in four.devices))
    given = replace(sglang(tp_size=2), devices=(uuid_of(2), uuid_of(3)))
    config = RunConfig(engine=given, weights=WeightsConfig(transport="handles", staging="cuda"))
    engine, held = take_devices(config)
    assert engine.sglang.arguments == {"tp_size": 2, "base_gpu_id": 2}
    assert (held.devices, len(held.visible_devices)) == (given.devices, 4)
    plain, held = take_devices(replace(config, weights=WeightsConfig()))
    assert (plain, held.visible_devices) == (given, given.devices)


def test_without_devices_an_engine_is_as_it_was(none: None) -> None:
    before = dict(os.environ)
    engine, held = take_devices(RunConfig())
    assert (engine, held.devices, held.nccl, dict(os.environ)) == (EngineConfig(), (), "", before)


def test_the_version_of_nccl_is_that_of_its_package(tmp_path: Path) -> None:
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.symlink_to("/bin/true")
    assert nccl_of(str(program)) == nccl_of("no-such-program") == ""
    packages = tmp_path / "lib/python3.12/site-packages"
    (packages / "nvidia_nccl_cu13-2.29.7.dist-info").mkdir(parents=True)
    assert nccl_of(str(program)) == "2.29.7"
    (packages / "nvidia_nccl_cu12-2.27.1.dist-info").mkdir()
    assert nccl_of(str(program)) == "", "two of them: which one is loaded is not known"


# ---- before a start


def checked(tmp_path: Path, *settings: str) -> Report:
    return check(load(write_run(tmp_path), settings), Purpose())


def test_the_check_shows_the_placement(four: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(tmp_path, "up.engines=2", "learner.data_parallel=2", "weights.backend=gloo")
    assert not report.errors
    assert report.on(PLACEMENT) == [
        "ranks 0 to 1 on devices 0, 1",
        "engine 0 on device 2",
        "engine 1 on device 3",
        "weights over gloo",
    ]
    assert cli.main(["config", str(tmp_path / "run.yaml"), "--set", "engine.devices=[1]"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 on device 0\nengine 0 on device 1\n" in shown


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ["up.engines=4"],
            "devices: want 5 devices (1 for ranks, 4 x 1 for engines), got 4 visible (0, 1, 2, 3); lower up.engines",
        ),
        (
            ["learner.devices=[7]"],
            "--set: learner.devices: want indices or UUIDs of visible devices, got '7': 4 visible",
        ),
        (["engine.devices=[1, 1]"], "--set: engine.devices: want every device once, got '1', which is named before"),
        (["learner.tensor_parallel=2", "learner.data_parallel=4"], "devices: want 9 devices"),
    ],
)
def test_the_check_refuses_what_cannot_work(four: Node, tmp_path: Path, settings: list[str], complaint: str) -> None:
    (error,) = [finding.text for finding in checked(tmp_path, *settings).errors]
    assert error.startswith(complaint)


def test_the_check_counts_what_ranks_keep_outside_their_devices(
    four: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model of the test fits; into a machine with one page of memory nothing does."""
    offloaded = "learner.offload_optimizer=true"
    (fits,) = checked(tmp_path, offloaded).on("host memory")
    assert "needed for what 1 rank(s) keep outside their devices" in fits
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    (error,) = [finding.text for finding in checked(tmp_path, offloaded).errors if finding.topic == "host memory"]
    assert error.startswith("--set: learner.offload_optimizer: want 0.0 GB of the machine's memory")
    assert "Adam: two moments" in error and "for checkpoints, at most" in error
    assert error.endswith(
        "use a larger machine or learner.offload_optimizer: false or learner.checkpoint.background: false"
    )


def test_the_check_names_devices_whose_memory_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", script=f"echo '{row(0, memory='[N/A]')}'"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "memory of device 0 not checked: nvidia-smi does not report it" in checked(tmp_path).on(PLACEMENT)


def write_deepseek(directory: Path) -> None:
    """Write a DeepSeek-V3 of some tensors in the place of another model."""
    values = {**VALUES, **EXPERTS["deepseek_v3"], "model_type": "deepseek_v3", "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(values))
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    shapes = {
        "model.embed_tokens.weight": (128, 16),
        "lm_head.weight": (128, 16),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (24, 16),
        "model.layers.0.self_attn.kv_b_proj.weight": (112, 16),
        **{expert.format(number): (4000, 16) for number in range(8)},
    }
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / "model.safetensors")


def test_a_family_of_sglang_alone_has_its_memory_checked_by_its_tensors(
    four: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3: on the devices, outside them, and in the table, which says what is missing there."""
    file = write_run(tmp_path)
    write_deepseek(tmp_path / "model")
    settings = ("engine.kind=sglang", "engine.sglang.arguments={tp_size: 2}", "learner.pipeline_parallel=1")
    report = check(load(file, settings), Purpose())
    assert not report.errors, report.errors
    (fits,) = report.on("host memory")
    assert "needed for what 1 rank(s) keep outside their devices" in fits
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    (error,) = [
        finding.text for finding in check(load(file, settings), Purpose()).errors if finding.topic == "host memory"
    ]
    assert "copy of weights and the optimizer's state, for checkpoints" in error
    words = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["config", str(file), *words, "--memory"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rank weights" in shown and "rank Adam: two moments and main" in shown and "activations kept" not in shown
    assert "Nor counted for this family: activations and logits." in shown
    size = size_here(load(file, settings).config)
    monkeypatch.setenv(
        "PATH",
        fake_nvidia_smi(tmp_path / "small", script='for i in 0 1 2 3; do echo "$i, GPU-$i, 1 MiB, Disabled"; done'),
    )
    errors = [finding.text for finding in check(load(file, settings), Purpose()).errors if finding.topic == "devices"]
    assert size.parameters * 18 > 1 << 20 and errors[0].startswith("memory of device 0: want 0.0 GB")


def test_a_copy_for_checkpoints_that_finds_no_memory_names_its_own_setting(
    four: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is offloaded here, so that the cure must not name a setting that is off already."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    (error,) = [finding.text for finding in checked(tmp_path).errors if finding.topic == "host memory"]
    assert "Adam: two moments" not in error and "for checkpoints, at most" in error
    assert error.endswith("use a larger machine or learner.checkpoint.background: false")
    without = checked(tmp_path, "learner.checkpoint.background=false")
    (error,) = [finding.text for finding in without.errors if finding.topic == "host memory"]
    assert "checkpoint" not in error and error.endswith("use a larger machine")


def test_a_broken_driver_is_an_error_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", script="echo Failed to initialize NVML; exit 255"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (error,) = checked(tmp_path).errors
    assert (
        "got 255: 'Failed to initialize NVML'; fix the driver, or hide the devices (CUDA_VISIBLE_DEVICES=)"
        in error.text
    )


def test_without_devices_there_is_no_placement_to_show(
    none: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = checked(tmp_path, "up.engines=9", "learner.data_parallel=3")
    assert not report.errors and report.on(PLACEMENT) == []
    assert report.on("devices") == ["none visible here (nvidia-smi): ranks and engines run on the CPU"]
    assert cli.main(["config", str(tmp_path / "run.yaml")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("weights.backend=nccl", {"place": "--set: weights.backend", "got": "'nccl'"}),
        ("weights={transport: handles, staging: cuda}", {"place": "--set: weights.staging", "got": "'cuda'"}),
    ],
)
def test_a_shared_accelerator_refuses_what_needs_two(tmp_path: Path, setting: str, complaint: dict[str, Any]) -> None:
    with refusal(SettingsError, **complaint):
        load(write_run(tmp_path), ["learner.colocated=true", setting])


def test_devices_decide_nothing_that_is_trained() -> None:
    """A run continues with the same recorded steps on other GPUs."""
    assert RunConfig(learner=LearnerConfig(devices=("1",))).digest() == RunConfig().digest()
    same = LearnerConfig(offload_optimizer=True, overlap_grad_reduce="always", overlap_param_gather="never")
    assert RunConfig(learner=same).digest() == RunConfig().digest()
    assert RunConfig(learner=LearnerConfig(distributed_optimizer=True)).digest() != RunConfig().digest(), (
        "a norm is summed in another order"
    )


def test_the_fake_is_found_through_the_environment_given(tmp_path: Path) -> None:
    assert len(this_node(environment(fake_nvidia_smi(tmp_path, 3))).devices) == 3


@pytest.mark.parametrize(("script", "setting"), [("engine", "engine.devices"), ("learner", "learner.devices")])
def test_the_launch_scripts_name_devices_by_hand(tmp_path: Path, script: str, setting: str) -> None:
    program = tmp_path / "tidemill"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    given = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "BUS": "nats://127.0.0.1:1"}
    file = Path(__file__).resolve().parents[2] / f"launch/scripts/{script}.sh"

    def words(**more: str) -> list[str]:
        command = ["bash", str(file)]
        return (
            subprocess.run(command, env=given | more, capture_output=True, text=True, check=True)
            .stdout.splitlines()[-1]
            .split()
        )

    assert words(DEVICES="2,3")[-2:] == ["--set", f"{setting}=[2,3]"]
    assert not any(setting in word for word in words())
