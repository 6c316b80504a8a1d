"""Settings of the debugging modes: file names with unknown placeholders, contradictions and missing files are refused
before a start.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.debug_kit import rollout
from tests.refusals import refusal
from tidemill.launch.checks.data import check_debug
from tidemill.launch.checks.findings import Report
from tidemill.launch.settings.config_loader import SettingsError, from_map
from tidemill.learner.debug.config import DebugConfig, DumpModulesConfig, read_prompts
from tidemill.learner.debug.rollout_file import DumpedRollout, save_rollout
from tidemill.learner.errors import DebugFileRefused


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        (
            {"save_rollout": "a/{rollout_id}.msgpack"},
            "save_rollout: want a file name with {step}, got 'a/{rollout_id}.msgpack'",
        ),
        ({"save_rollout": "a/{}.msgpack"}, "save_rollout: want a file name with {step}"),
        ({"save_rollout": "a/{step.real}.msgpack"}, "{step} is missing"),
        ({"save_rollout": "a/{step"}, "write other braces twice"),
        ({"save_rollout": "a/b.msgpack"}, "{step} is missing"),
        ({"save_train": "a/{step}.safetensors"}, "save_train: want {step} and {rank} in the file name"),
        ({"load_rollout": "a/{step}_{rank}"}, "load_rollout: want a file name with {step}"),
        ({"rollout_only": True, "load_rollout": "a"}, "rollout_only: want either this or load_rollout, got both"),
        ({"rollout_only": True, "save_train": "{step}_{rank}"}, "save_train: want none with rollout_only"),
        (
            {"rollout_only": True, "dump_modules": DumpModulesConfig(step=1, prompts="p")},
            "dump_modules: want none with rollout_only",
        ),
        ({"save_rollout": "{step}", "load_rollout": "{step}"}, "save_rollout: want other files than load_rollout"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], want: str) -> None:
    with pytest.raises(ValueError) as bad:
        DebugConfig(**settings)
    assert want in str(bad.value)


def test_right_settings_are_accepted() -> None:
    assert DebugConfig(load_rollout="a/{step:04d}.msgpack").trains_only
    assert DebugConfig(load_rollout="one.msgpack", save_train="{step}/{rank}").trains_only
    assert not DebugConfig(rollout_only=True, save_rollout="{{x}}/{step}").trains_only
    with refusal(ValueError, place="prompts"):
        DumpModulesConfig(step=1)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (
            {"debug": {"rollout_only": True}, "learner": {"from_checkpoint": "c"}},
            "learner.from_checkpoint: want none with debug",
        ),
        (
            {"debug": {"rollout_only": True}, "learner": {"lora": {"rank": 2, "adapter": "a"}}},
            "learner.lora.adapter: want none with debug.rollout_only, whose engines load model.path, got 'a'",
        ),
        (
            {"debug": {"rollout_only": True}, "model": {"megatron_checkpoint": "c"}},
            (
                "model.megatron_checkpoint: want none with debug.rollout_only, whose engines load model.path, "
                "got 'c'; convert it"
            ),
        ),
        (
            {"learner": {"lora": {"rank": 2}}, "model": {"megatron_checkpoint": "c"}},
            (
                "model.megatron_checkpoint: want none with learner.lora, whose adapters belong to model.path, "
                "got 'c'; convert it"
            ),
        ),
        (
            {"debug": {"rollout_only": True}, "learner": {"nodes": 2, "data_parallel": 2}},
            "learner.nodes: want 1 with debug.rollout_only",
        ),
        (
            {"debug": {"load_rollout": "a"}, "learner": {"colocated": True}},
            "learner.colocated: want false with debug.load_rollout",
        ),
        (
            {"debug": {"load_rollout": "a"}, "learner": {"num_epochs": 2}},
            "learner.num_epochs: want 0 with debug.load_rollout",
        ),
        (
            {"debug": {"load_rollout": "a", "save_rollout": "{step}"}},
            "debug.save_rollout: want none with debug.load_rollout",
        ),
    ],
)
def test_contradictions_with_other_sections_are_refused(values: dict[str, Any], want: str) -> None:
    with pytest.raises(SettingsError) as bad:
        from_map({"weights": {"overlap": False}} | values, "test")
    assert want in str(bad.value)


def checked(steps: int, **debug: Any) -> list[str]:
    report = Report()
    check_debug(report, from_map({"learner": {"steps": steps}, "debug": debug}, "test"))
    return [finding.text for finding in report.errors]


def test_every_step_must_have_a_file(tmp_path: Path) -> None:
    files = f"{tmp_path}/{{step}}.msgpack"
    saved: DumpedRollout = rollout()
    for step in (1, 2):
        save_rollout(tmp_path / f"{step}.msgpack", saved)
    assert checked(2, load_rollout=files) == []
    (missing,) = checked(3, load_rollout=files)
    assert f"got none for step 3: {tmp_path}/3.msgpack; set learner.steps: 2" in missing
    assert checked(9, load_rollout=f"{tmp_path}/2.msgpack") == []
    (tmp_path / "2.msgpack").write_bytes(b"other")
    (other,) = checked(2, load_rollout=files)
    assert "2.msgpack" in other and "save it again" in other


@pytest.mark.parametrize("line", ["", "[1]", "[1, -2]", '["a", "b"]', "[1, 2", '{"text": "a"}', "[1, true]"])
def test_bad_prompts_are_refused_with_their_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"[3, 4, 5]\n{line}\n" if line else "\n")
    with refusal(DebugFileRefused, where=re.compile(r"prompts\.jsonl:2$" if line else r"prompts\.jsonl$")):
        read_prompts(file)
    file.write_text('[3, 4, 5]\n\n{"tokens": [7, 8]}\n')
    assert read_prompts(file) == [[3, 4, 5], [7, 8]]
    (wrong,) = checked(1, dump_modules={"step": 1, "prompts": str(tmp_path / "none")})
    assert "debug.dump_modules.prompts" in wrong
    assert "want <= learner.steps = 1" in checked(1, dump_modules={"step": 2, "prompts": str(file)})[0]
