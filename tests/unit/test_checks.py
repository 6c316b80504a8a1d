"""Findings of the checks besides mistakes: warnings, prompt lengths, settings that a resumed run may not change, and
their import cost.
"""

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.check_kit import VALUES, write_model, write_prompts, write_run
from tests.examples import examples
from tests.refusals import refusal
from tidemill.bus.wire.messages import Sampling, Task
from tidemill.launch.checks import servers as server_checks
from tidemill.launch.checks import teachers
from tidemill.launch.checks.data import SURE_ROWS
from tidemill.launch.checks.findings import CheckFailed, Finding, Report
from tidemill.launch.checks.resume import model_identity
from tidemill.launch.checks.run import Purpose, check
from tidemill.launch.cli import main as cli
from tidemill.launch.settings.config_loader import load, to_map
from tidemill.launch.settings.prepare import prepare
from tidemill.launch.settings.run_config import CONFIG_FILE
from tidemill.learner.buffer.datasource import DataSource
from tidemill.learner.buffer.rules import DataRules
from tidemill.learner.buffer.step_plan import plan_bytes
from tidemill.learner.checkpoints import disk
from tidemill.learner.prompts.prompt_file import PlannedRows, PromptFile

ROOT = Path(__file__).resolve().parents[2]
KEYS = (
    *("rope_scaling", "rope_theta", "head_dim", "eos_token_id", "architectures", "layer_types"),
    *("chat_template", "eos_token", "weight_map", "model"),
)
TIMES = 3.0
"""CPU time of a process that checks a file of 7,000 prompts, of that of a process that checks one prompt."""


def checked(tmp_path: Path, *settings: str, **purpose: bool) -> Report:
    return check(load(write_run(tmp_path), settings), Purpose(**purpose))


def texts(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings]


def test_every_error_is_named_at_once(tmp_path: Path) -> None:
    report = checked(tmp_path, "model.path=/nope", "actor.reward=nosuch", "data.prompt_key=nope")
    assert [error.topic for error in report.errors] == ["model", "data", "reward"]
    with pytest.raises(CheckFailed) as failed:
        report.refuse()
    assert failed.value.exit_code == 78
    assert len(str(failed.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("free", "stored", "finding"),
    [
        (10_000_000, 5_000_000, ("good", "the bus's samples up to 0.0 GB")),
        (10_000_000, 8_000_000, ("error", "bus.samples_max_bytes: want <= three quarters of what is free")),
        (1_000_000, 740_000, ("warning", "directory: want room for 0.0 GB of checkpoints beside 0.0 GB of samples")),
        (100_000, 5_000, ("error", "directory: want 0.0 GB for 2 checkpoints")),
    ],
)
def test_the_disk_has_room_for_checkpoints_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, stored: int, finding: tuple[str, str]
) -> None:
    """The nats-server takes three quarters of a free disk, and reserves room for a stream when it makes it."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2 * free, used=free, free=free))
    report = checked(tmp_path, f"bus.samples_max_bytes={stored}", "bus.history_samples=0", "learner.steps=1")
    severity, text = finding
    found = {"good": report.findings, "error": report.errors, "warning": report.warnings}[severity]
    assert [text in one.text for one in found if one.topic == "disk"] == [True], report.findings


def test_the_memory_has_room_for_keys_and_values(tmp_path: Path) -> None:
    settings = ("learner.device=cpu", "engine.dtype=float32")
    assert "tokens, engine.kv_tokens)" in checked(tmp_path, *settings).on("memory")[0]
    (refusal,) = texts(checked(tmp_path, *settings, "engine.kv_tokens=100000000000").errors)
    assert "engine.kv_tokens: want" in refusal and "lower engine.kv_tokens" in refusal


def test_the_room_for_keys_and_values_is_compared_with_the_longest_sequence_and_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself each engine takes a quarter of the memory: 31,250 tokens of 64 bytes here."""
    monkeypatch.setattr("tidemill.launch.checks.machine.host_memory", lambda: 8_000_000)
    path = write_model(tmp_path / "long", max_position_embeddings=65536)

    def findings(*settings: str) -> list[tuple[str, str]]:
        always = (f"model.path={path}", "learner.device=cpu", "engine.dtype=float32", "sampling.max_new_tokens=250")
        report = checked(tmp_path, *always, *settings)
        return [(one.level, one.text) for one in report.findings if one.topic == "memory"]

    assert [level for level, _ in findings("data.max_prompt_tokens=30998", "up.engines=2")] == ["ok"]
    (level, text), _ = findings("data.max_prompt_tokens=30999", "up.engines=2")
    assert level == "error" and "engine.kv_tokens: want room for keys and values of 31,249 tokens" in text
    assert "got 31,248 tokens in a quarter" in text
    [(level, text)] = findings("data.max_prompt_tokens=9", "up.engines=4")
    assert level == "warning" and "engine.kv_tokens: want 0.0 GB for weights, and for keys and values" in text
    assert [level for level, _ in findings("up.engines=4", "engine.kv_tokens=2000")] == ["ok"]


def test_a_directory_of_megatron_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    report = checked(tmp_path, f"learner.megatron={{config_logger_dir: {tmp_path}/prompts.jsonl/log}}")
    (error,) = report.errors
    assert error.topic == "disk" and "learner.megatron.config_logger_dir: " in error.text
    assert not checked(tmp_path, f"learner.megatron={{config_logger_dir: {tmp_path}/log}}").errors


def test_the_best_checkpoint_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2, used=1, free=1))
    held = f"eval.sets={{held: {{path: {tmp_path}/prompts.jsonl}}}}"
    (error,) = [
        one.text for one in checked(tmp_path, "eval.every=5", held, "eval.best=held/mean").errors if one.topic == "disk"
    ]
    assert "for 5 checkpoints" in error


def test_all_that_is_kept_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State of policy and critic, a reference that moves, in two checkpoints and the one being written; models of
    earlier steps.
    """
    monkeypatch.setattr("tidemill.launch.checks.machine._gb", str)

    def need(*settings: str) -> int:
        """Return the bytes of checkpoints and models."""
        report = checked(tmp_path, "learner.keep_checkpoints=2", "learner.steps=10", *settings)
        (text,) = [one.text for one in report.findings if one.topic == "disk"]
        return int(text.partition("checkpoints need ")[2].partition(",")[0])

    plain = need()
    parameters, rest = divmod(plain, 3 * 16 + 4)
    assert parameters > 1000 and not rest
    assert 0.5 * parameters < (need("learner.algorithm.advantage=gae") - plain) / (3 * 16) < parameters, (
        "it has no output layer"
    )
    assert need("learner.algorithm.kl.coef=0.1", "learner.algorithm.kl.reference_ema=0.9") - plain == 3 * 4 * parameters
    assert need("learner.save_hf_every=2", "learner.keep_hf=3") - plain == 3 * 4 * parameters
    assert need("learner.save_hf_every=2", "learner.keep_hf=0") - plain == 5 * 4 * parameters


def test_a_stream_that_exists_has_its_room(tmp_path: Path) -> None:
    (tmp_path / "run" / "bus").mkdir(parents=True)
    assert "disk" not in [error.topic for error in checked(tmp_path, f"bus.samples_max_bytes={10**18}").errors]


class _Teacher(BaseHTTPRequestHandler):
    """Answers as a server of the model with 128 ids."""

    engine = ""

    def do_GET(self) -> None:
        body = json.dumps({"vocab_size": 128, "model_path": "big", "engine": self.engine}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Write nothing."""


@pytest.mark.parametrize(
    ("engine", "run", "row", "want"),
    [
        ("builtin", 0.5, 0.7, ""),
        ("sglang", 1, 1, ""),
        ("sglang", 1, None, ""),
        ("sglang", 0.5, None, "want a teacher that scores at sampling.temperature 0.5, got big: http://"),
        ("sglang", 1, 0.7, "want a teacher that scores at the temperature 0.7 of "),
    ],
)
def test_a_server_that_scores_at_one_temperature_is_refused_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, run: float, row: float | None, want: str
) -> None:
    monkeypatch.setattr(teachers, "ANSWER_S", 60.0)
    file = write_run(tmp_path)
    rows = [
        {"prompt": "what is one", "label": "3", "s": own}
        for own in (None, {"temperature": row} if row else {"max_new_tokens": 4})
    ]
    write_prompts(tmp_path / "prompts.jsonl", *rows)
    with HTTPServer(("127.0.0.1", 0), type("Server", (_Teacher,), {"engine": engine})) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        try:
            ours = f"actor.teachers={json.dumps({'big': {'urls': [f'http://127.0.0.1:{server.server_port}']}})}"
            settings = (ours, "learner.algorithm.distill.coef=1", "learner.algorithm.distill.teacher=engine")
            report = check(load(file, (*settings, "data.sampling_key=s", f"sampling.temperature={run}")), Purpose())
        finally:
            server.shutdown()
            answering.join()
    errors = [str(error) for error in report.errors if error.topic == "teachers"]
    assert len(errors) == bool(want) and all(want in error for error in errors), report.findings


def test_prompts_that_are_too_long_are_counted(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    long, short = {"prompt": "one " * 300, "label": "3"}, {"prompt": "what is one", "label": "3"}
    write_prompts(tmp_path / "prompts.jsonl", short, *[long, short] * 25)
    (warning,) = check(load(file), Purpose()).warnings
    assert (
        f"{tmp_path}/prompts.jsonl:2: want <= 240 tokens (data.max_prompt_tokens), got 300; 25 of 51 rows "
        "read are such; they are skipped"
    ) in warning.text
    (error,) = check(load(file, ["data.bad_rows=refuse"]), Purpose()).errors
    assert "25 of 51 rows read are such; a larger context" in error.text


def test_the_steps_of_the_passes_are_shown(tmp_path: Path) -> None:
    passes = ("learner.num_epochs=3", "learner.groups_per_step=8")
    assert checked(tmp_path, *passes).on("data")[1:] == ["3 passes of 20 prompts: the run ends after at most 8 steps"]
    weighted = "data.sources={a: {path: %s, weight: 0.5}}" % (tmp_path / "prompts.jsonl")
    assert "passes of 10 prompts" in checked(tmp_path, *passes, "data.path=''", weighted).on("data")[1]
    assert "after at most 4 steps" in checked(tmp_path, *passes, "data.path=''", weighted).on("data")[1]
    assert "learner.steps ends the run before" in checked(tmp_path, *passes, "learner.steps=8").on("data")[1]
    (warning,) = checked(tmp_path, *passes, "learner.optimizer.lr_decay=cosine").warnings
    assert "want learner.steps: 8 with learner.optimizer.lr_decay: cosine" in warning.text


@pytest.mark.parametrize("here", [True, False])
def test_a_renderer_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """An actor on another machine may have them."""
    monkeypatch.setitem(sys.modules, "renderers", None)
    report = checked(tmp_path, "actor.gateway.renderer=qwen3", f"up.actors={int(here)}")
    (finding,) = [one for one in report.findings if one.topic == "rollouts"]
    want = "actor.gateway.renderer: want the packages of tidemill[renderers], got none of the name renderers"
    assert (
        finding.level == ("error" if here else "warning")
        and want in finding.text
        and "pip install 'tidemill[renderers]'" in finding.text
    )
    assert not checked(tmp_path).on("rollouts")


@pytest.mark.parametrize("setting", ["learner.device", "engine.device"])
def test_cuda_is_refused_where_there_is_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tidemill.launch.checks.devices.GPU", tmp_path / "nvidiactl")
    (error,) = texts(checked(tmp_path, f"{setting}=cuda").errors)
    assert f"{setting}: want auto or cpu: this machine has no GPU, got cuda" in error
    (tmp_path / "nvidiactl").touch()  # nvidia-smi is missing, and torch may find a GPU
    assert not checked(tmp_path, f"{setting}=cuda").errors


@pytest.mark.parametrize(("length", "fits"), [(240, True), (241, False)])
def test_the_longest_prompt_that_fits(tmp_path: Path, length: int, fits: bool) -> None:
    file = write_run(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", {"prompt": "one " * length, "label": "3"})
    assert bool(check(load(file), Purpose()).errors) is not fits


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["data.max_prompt_tokens=241"], "data.max_prompt_tokens: want <= 240"),
        (["engine.max_context=300"], "engine.max_context: want <= 256"),
        (["engine.max_context=100", "sampling.max_new_tokens=100"], "sampling.max_new_tokens: want < 100"),
        (["engine.kv_tokens=101", "sampling.max_new_tokens=100"], "sampling.max_new_tokens: want < 96"),
        (["engine.kind=sglang", "engine.kv_tokens=100", "sampling.max_new_tokens=100"], "max_new_tokens: want < 100"),
        (
            ["engine.kind=sglang", "engine.sglang.arguments={max-total-tokens: 90}", "sampling.max_new_tokens=100"],
            "max_new_tokens: want < 90",
        ),
        (
            ["engine.kind=sglang", "engine.sglang.arguments={context_length: 80}", "sampling.max_new_tokens=100"],
            "max_new_tokens: want < 80",
        ),
        (["bus.tls_ca=no.pem"], "bus.tls_ca: want a PEM file, got 'no.pem'"),
        (["bus.url=http://a:1"], "bus.url: want nats://host:port"),
        (["bus.url=nats://a:x"], "bus.url: want nats://host:port"),
        (
            ["engine.kind=sglang", "engine.sglang.python=/no/python"],
            "engine.sglang.python: want the Python interpreter",
        ),
        (
            ["learner.algorithm.kl.reference=/no/such", "learner.algorithm.kl.coef=0.1"],
            "kl.reference: want the directory of a model",
        ),
        (
            ["learner.critic.path=/no/such", "learner.algorithm.advantage=gae"],
            "learner.critic.path: want the directory of a Hugging Face",
        ),
        (
            ["learner.algorithm.advantage=nothere:f"],
            "advantage: want a function (rewards_N, groups_N, *, lengths_N, truncated_N, parts",
        ),
        (["learner.algorithm.advantage=json:nothing"], "json has no 'nothing'"),
        (
            ["learner.hooks.before_step=shutil:copytree_"],
            "learner.hooks.before_step: want a function (moment), got 'shutil:copytree_'",
        ),
        (
            ["learner.algorithm.reject.rules=[textwrap:dedent]"],
            "learner.algorithm.reject.rules: want a function (delta_T, mask_T, sequence_T",
        ),
        (
            ["learner.hooks.before_step=textwrap:indent"],
            "missing a required argument: 'prefix'",
        ),
        (["directory=/proc/1/run"], "directory: want a directory that can be made"),
        (["data.template=no place"], "data.template: want text with {prompt} in it"),
    ],
)
def test_what_cannot_work_is_an_error(tmp_path: Path, settings: list[str], complaint: str) -> None:
    (error,) = texts(checked(tmp_path, *settings).errors)
    assert complaint in error


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, ""),
        ({"num_hidden_layers": 1, "vocab_size": 2 * VALUES["vocab_size"]}, ""),
        ({"vocab_size": VALUES["vocab_size"] // 2}, "learner.critic.path: want a vocabulary of at least"),
        ({"max_position_embeddings": 8}, "and a context of at least"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_a_critic_reads_the_tokens_of_the_policy(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "critic"
    write_model(path)
    (path / "config.json").write_text(json.dumps(VALUES | changes))
    found = texts(checked(tmp_path, f"learner.critic.path={path}", "learner.algorithm.advantage=gae").errors)
    assert [complaint in error for error in found] == [True] * bool(complaint)


@pytest.mark.parametrize(
    ("policys", "changes", "complaint"),
    [
        ({}, {}, ""),
        ({"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, ""),
        (
            {"rope_theta": 500.0},
            {"rope_theta": 600.0},
            "kl.reference: want a model with the policy's rope_theta = 500.0, got 600.0 in",
        ),
        ({"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 600.0}}, "rope_theta = 500.0"),
        (
            {"rope_scaling": None},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "the policy's rope_scaling = None",
        ),
        ({}, {"num_hidden_layers": 2}, "want the directory of a model with the sizes of the trained one"),
    ],
)
def test_a_reference_is_computed_as_the_policy(
    tmp_path: Path, policys: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "reference"
    write_model(path)
    (path / "config.json").write_text(json.dumps(VALUES | ({} if "rope_parameters" in changes else policys) | changes))
    file = write_run(tmp_path)
    (tmp_path / "model" / "config.json").write_text(json.dumps(VALUES | policys))
    settings = (f"learner.algorithm.kl.reference={path}", "learner.algorithm.kl.coef=0.1")
    found = texts(check(load(file, settings), Purpose()).errors)
    assert [complaint in error for error in found] == [True] * bool(complaint), found


def test_a_critic_with_experts_has_its_optimizer_on_the_device(tmp_path: Path) -> None:
    path = tmp_path / "critic"
    write_model(path)
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    (path / "config.json").write_text(json.dumps(VALUES | experts))
    settings = (f"learner.critic.path={path}", "learner.algorithm.advantage=gae")
    assert texts(checked(tmp_path, *settings).errors) == []
    (found,) = texts(checked(tmp_path, *settings, "learner.offload_optimizer=true").errors)
    assert "learner.offload_optimizer: want false with a critic that has experts (qwen3_moe" in found


@pytest.mark.parametrize(
    ("where", "user"),
    [
        (
            ("engine.kind=sglang", "engine.sglang.url=http://127.0.0.1:1"),
            "a server that is running (engine.sglang.url)",
        ),
        ((), "engine.kind: builtin"),
    ],
)
def test_settings_of_a_server_that_is_not_started_are_named(tmp_path: Path, where: tuple[str, ...], user: str) -> None:
    settings = ("engine.sglang.arguments.tp_size=2", "engine.sglang.environment.A=b")
    warnings = [text for text in texts(checked(tmp_path, *where, *settings).warnings) if "engine.sglang." in text]
    assert [f"want none with {user}, got " in text for text in warnings] == [True, True]
    assert not [text for text in texts(checked(tmp_path, *where).warnings) if "engine.sglang.arguments" in text]


@pytest.mark.parametrize(
    ("release", "supported"), [("0.5.20", False), ("0.5.21", True), ("0.6.0.post1", True), ("", True)]
)
def test_an_old_sglang_is_found_without_starting_it(tmp_path: Path, release: str, supported: bool) -> None:
    """In the environment of the interpreter; where no release is found there, the engine checks it when it starts."""
    program = tmp_path / "sglang/bin/python"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/true")
    if release:
        (tmp_path / f"sglang/lib/python3.12/site-packages/sglang-{release}.dist-info").mkdir(parents=True)
    found = texts(checked(tmp_path, "engine.kind=sglang", f"engine.sglang.python={program}").errors)
    told = f"want an environment with SGLang 0.5.21 or newer, got '{program}': SGLang {release}"
    assert len(found) == (not supported)
    assert supported or told in found[0]


def test_an_environment_without_sglang_is_found_without_starting_it(tmp_path: Path) -> None:
    program = tmp_path / "other/bin/python"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/true")
    (tmp_path / "other/lib/python3.12/site-packages/numpy-2.dist-info").mkdir(parents=True)
    warnings = texts(checked(tmp_path, "engine.kind=sglang", f"engine.sglang.python={program}").warnings)
    (found,) = [text for text in warnings if "sglang" in text]
    assert f"got '{program}', whose packages have no sglang" in found


def clip_range(low: float, high: float) -> tuple[str, str]:
    return f"learner.algorithm.clip.low={low}", f"learner.algorithm.clip.high={high}"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            ["learner.algorithm.loss=gspo", *clip_range(0.2, 0.28)],
            ["learner.algorithm.clip.high: want about 3e-4", "learner.algorithm.aggregation: want seq_mean"],
        ),
        (
            [
                *(
                    "learner.algorithm.correction=gspo",
                    "learner.algorithm.anchor=rollout",
                    "learner.algorithm.weight.level=none",
                ),
                *clip_range(3e-4, 4e-4),
            ],
            ["anchored at the proximal"],
        ),
        (["learner.algorithm.correction=gspo"], []),
        (["prepare.kind=digits", "data.path="], ["model.path to be what it makes"]),
    ],
)
def test_what_is_doubtful_is_a_warning(tmp_path: Path, settings: list[str], complaint: list[str]) -> None:
    report = checked(tmp_path, *settings)
    assert not report.errors
    assert len(report.warnings) == len(complaint)
    for warning, part in zip(texts(report.warnings), complaint, strict=True):
        assert part in warning


def test_the_stream_is_measured_by_the_longest_prompt(tmp_path: Path) -> None:
    """The longest prompt is that of the file, or the limit; if neither is known, the context, which may be far too
    long: a warning.
    """
    small = "bus.samples_max_bytes=1000"
    (measured,) = texts(checked(tmp_path, small).errors)
    (limited,) = texts(checked(tmp_path, small, "data.max_prompt_tokens=10").errors)
    (doubted,) = texts(checked(tmp_path, small, "prepare.kind=gsm8k", "data.path=").warnings)[1:]
    config = load(tmp_path / "run.yaml").config
    for text, tokens in ((measured, 5), (limited, 10), (doubted, 240)):
        assert f"want >= {config.stream_bytes(tokens)} for what lies" in text
        assert f"in samples of {tokens} prompt tokens, got 1000; raise it, or lower data.max_prompt_tokens" in text
    assert config.stream_bytes(240, 384) > 10 * config.stream_bytes(240), "with experts of 48 layers, 8 in each"
    assert config.stream_bytes(240) > config.stream_bytes(10) > config.stream_bytes(5) > config.stream_bytes(0)


def test_the_plan_of_a_step_fits_in_a_message(tmp_path: Path) -> None:
    def found(*settings: str) -> list[str]:
        """Return the findings on the plan, with their level."""
        step = ("learner.groups_per_step=400", "learner.group_size=16", "bus.samples_max_bytes=1000000000000")
        return [str(one) for one in checked(tmp_path, *step, *settings).findings if "the plan of a step" in one.text]

    least = plan_bytes(
        groups=400, samples=6400, sequences=6400, versions=load(write_run(tmp_path)).config.staleness.max_lag + 1
    )
    assert 16 * 6400 < least < 18 * 6400 + 1024
    (error,) = found(f"bus.max_payload_bytes={least + 1023}")
    assert (
        error.startswith("error")
        and "--set: bus.max_payload_bytes: want room for the plan of a step, of 400 groups and 6400" in error
    )
    assert f"for a plan of {least} bytes; raise it to {least + 1024}, or lower learner.groups_per_step" in error
    assert not found(f"bus.max_payload_bytes={least + 1024}")
    for budget in ("turns: 9", "turns: 0, tokens: 9", "turns: 99, total_tokens: 19"):
        rollout = (
            f"rollouts={{a: {{use: 'agent:tests.rollout_programs:Agent', budget: {{{budget}}}}}}}",
            "data.rollout=a",
        )
        (warning,) = found(*rollout, f"bus.max_payload_bytes={least + 1024}")
        assert (
            warning.startswith("warning") and "with the 9 sequences that rollouts.a.budget allows an episode" in warning
        )
        assert "such a step runs with fewer groups; raise it to" in warning
        assert not found(*rollout, "bus.max_payload_bytes=1000000")


def test_a_model_whose_weights_are_not_its_own_is_refused(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    (error,) = texts(check(load(file), Purpose()).errors)
    assert "want a tensor model.embed_tokens.weight of (128, 32), as config.json has it, got one of (128, 16)" in error


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:3], lambda data: b"\xff" * 50, lambda data: b""]
)
def test_weights_that_are_cut_off_are_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    file = write_run(tmp_path)
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    (error,) = texts(check(load(file), Purpose()).errors)
    assert "want its weights in *.safetensors" in error


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"model_type": "qwen2"}', '{"model_type": "qwen2", "hidden_size": "x"}', "\x00"]
)
def test_a_configuration_of_a_model_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = write_run(tmp_path)
    (tmp_path / "model/config.json").write_text(text)
    assert [error.topic for error in check(load(file), Purpose()).errors] == ["model"]


def test_the_module_and_the_interpreter_of_a_rollout_are_looked_for(tmp_path: Path) -> None:
    good = (
        "rollouts.a.use=agent:tests.rollout_programs:Agent",
        f"rollouts.b.python={sys.executable}",
        "rollouts.b.use=agent:elsewhere:f",
        "rollouts.c.use=slime:tests.env.slime_letters:generate",  # imports names of slime, which is not installed here
    )
    assert not checked(tmp_path, *good).errors, "another interpreter may find other modules"
    bad = (
        "rollouts.a.use=agent:nosuch.module:f",
        "rollouts.b.python=/nowhere/python",
        "rollouts.b.use=agent:elsewhere:f",
    )
    found = texts(checked(tmp_path, *bad).errors)
    assert len(found) == 2 and "rollouts.a.use" in found[0] and "'/nowhere/python'" in found[1]
    report = checked(tmp_path, *bad, starts_workers=False)
    assert not report.errors and len([text for text in texts(report.warnings) if "rollouts." in text]) == 2
    unnamed = (
        "rollouts.a.use=slime:tests.rollout_programs:generat",
        "rollouts.b.use=agent:tests.rollout_programs:Agent",
    )
    (found,) = texts(checked(tmp_path, *unnamed).errors)
    assert "'tests.rollout_programs:generat': tests.rollout_programs has no 'generat'" in found


def test_filters_are_loaded_with_their_options(tmp_path: Path) -> None:
    good = (
        "data.filters.a=equal_rewards",
        "data.filters.b.use=tests.child_filters:by_label",
        "data.filters.b.options.dropped=[1]",
    )
    assert not checked(tmp_path, *good).errors
    found = texts(checked(tmp_path, "data.filters.a.use=mean_reward", "data.filters.a.options.atleast=0.5").errors)
    assert len(found) == 1 and "data.filters.a.options.atleast" in found[0] and "nearest: 'at_least'" in found[0]
    for use, words in (
        ("nosuch.module:f", "cannot import nosuch.module"),
        ("tests.child_filters:nothing", "has no 'nothing'"),
    ):
        found = texts(checked(tmp_path, f"data.filters.a={use}").errors)
        assert len(found) == 1 and "data.filters.a.use" in found[0] and words in found[0]


def test_a_reward_elsewhere_is_doubted_where_no_actor_starts(tmp_path: Path) -> None:
    for report in (
        checked(tmp_path, "actor.reward=nomod:fn", "up.actors=0"),
        checked(tmp_path, "actor.reward=nomod:fn", starts_workers=False),
    ):
        assert not report.errors
        assert ["cannot import nomod" in text for text in texts(report.warnings)] == [True]


OF_KIND = {
    "math": {"reward": "gsm8k", "when": {"kind": "math"}},
    "form": {"reward": "format", "when": {"kind": "form"}},
    "mine": {"reward": "tests.child_rewards:of_label", "when": {"kind": "mine"}},
    "none": {"reward": "gsm8k", "when": {"kind": "none"}},
    "held": {"reward": "gsm8k", "when": {"kind": "held"}},
}
"""Parts of a reward, of which each wants labels that the others refuse."""


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        (7, ""),
        (
            "a word",
            (
                "actor.reward_parts.mine: want a number for row 3 of data.path with its label as the response, "
                "got want a number"
            ),
        ),
    ],
)
def test_a_part_of_a_reward_is_tried_on_a_row_that_it_is_for(tmp_path: Path, label: object, complaint: str) -> None:
    file = write_run(tmp_path)
    kinds = {"form": None, "math": "5", "mine": label}
    write_prompts(
        tmp_path / "prompts.jsonl",
        *({"prompt": "what", "label": label, "meta": {"kind": kind}} for kind, label in kinds.items()),
    )
    held = write_prompts(tmp_path / "held.jsonl", {"prompt": "what", "label": "6", "meta": {"kind": "held"}})
    words = [f"actor.reward_parts={json.dumps(OF_KIND)}", "actor.reward=''", "data.metadata_key=meta", "eval.every=1"]
    report = check(
        load(file, [*words, f"eval.sets={json.dumps({'held': {'path': str(held)}})}"]), Purpose(call_reward=True)
    )
    assert [complaint in text for text in texts(report.errors)] == ([True] if complaint else []), texts(report.errors)
    tried = [text for text in report.on("reward") if "as the response is worth" in text]
    assert len(tried) == 4 - bool(
        complaint
    ) and "gsm8k loaded, not called (none of the rows read is for it)" in report.on("reward")


def test_a_reward_is_not_tried_on_recorded_responses(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    said = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "is"}]
    rows = [{"prompt": said, "label": None, "way": "shown"}, {"prompt": "what", "label": "5", "way": "single_turn"}]
    write_prompts(tmp_path / "prompts.jsonl", *rows)
    words = ["data.rollout_key=way", "learner.algorithm.sft_coef=0.1", "actor.reward=gsm8k"]
    report = check(load(file, [*words, 'rollouts={"shown": {"use": "dataset"}}']), Purpose())
    assert not texts(report.errors)
    assert "gsm8k: the label of row 2 as the response is worth 1.0" in report.on("reward")


def test_what_prepare_will_make_is_checked_before_it_is_made(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(
        f"directory: {tmp_path}/run\nprepare: {{kind: digits}}\nactor: {{reward: digits}}\nsampling: "
        f"{{max_new_tokens: 4}}\n"
    )
    assert not check(load(file), Purpose()).errors
    for setting, complaint in (
        ("learner.tensor_parallel=3", "prepare: vocab_size: want a multiple of learner.tensor_parallel = 3, got 16"),
        ("prepare.model.max_position_embeddings=8", "prepare.max_digits: want <= 4 for the longest prompt"),
        ("sampling.max_new_tokens=600", "sampling.max_new_tokens: want < 512"),
        ("data.label_key=answer", "key 'answer' (data.label_key), got keys ['label', 'prompt']"),
    ):
        assert any(complaint in text for text in texts(check(load(file, [setting]), Purpose()).errors)), setting
    assert not (tmp_path / "run").exists()


def began(root: Path, rules: DataRules) -> None:
    """Write a checkpoint of a run with these rules."""
    staging = disk.staging(root / "checkpoints", step=3, epoch=1)
    disk.commit(staging, DataSource(rules, epoch=1).snapshot())


def test_a_run_that_goes_on_is_compared_with_its_checkpoint(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    rules = {"run": "run", "steps": 5, "groups_per_step": 1, "temperature": 0.5}
    began(
        tmp_path / "run", DataRules(**rules, model=model_identity(write_model(tmp_path / "llama", model_type="llama")))
    )
    errors = texts(check(load(file), Purpose(resumes=True)).errors)
    assert [re.split(": want", text)[0].rpartition(" ")[2] for text in errors] == [
        "data.path",
        "model.path",
        "sampling.temperature",
    ]
    assert "llama of 1 layers" in errors[1] and f"got {tmp_path}/model: qwen2 of 1 layers" in errors[1]
    assert "want 0.5, with which the run in" in errors[2] and "got 1.0" in errors[2]
    assert not check(load(file), Purpose()).errors, "a run that begins"


def test_a_run_that_goes_on_may_have_other_rows_that_it_has_not_planned(tmp_path: Path) -> None:
    file, rows = write_run(tmp_path), [{"prompt": f"what is {number}", "label": "1"} for number in range(20)]
    path = write_prompts(tmp_path / "prompts.jsonl", *rows)
    prompts = PromptFile(path, tokenize=lambda _: [1], max_tokens=9)
    planned, order = PlannedRows(prompts), prompts.order(0).tolist()
    values: dict[str, Any] = {
        "run": "run",
        "epoch": 1,
        "group_size": 1,
        "sampling": Sampling(),
        "prompt_tokens": np.array([1], np.int32),
    }
    planned.note(Task(prompt="", prompt_epoch=0, offset=0, **values))
    identity = {"prompts_digest": prompts.digest, "model": model_identity(tmp_path / "model")}
    rules = DataRules(run="run", steps=5, groups_per_step=1, **identity)
    staging = disk.staging(tmp_path / "run" / "checkpoints", step=3, epoch=1)
    disk.commit(staging, DataSource(rules, epoch=1).snapshot(rows=planned.dump()))

    def found() -> Report:
        return check(load(file), Purpose(resumes=True))

    assert not found().warnings and not found().errors
    write_prompts(path, *rows[: order[1]], {"prompt": "what is mended", "label": "1"}, *rows[order[1] + 1 :])
    assert not found().errors
    (warning,) = texts(found().warnings)
    assert (
        f"data.path: want the files with which the run in {tmp_path}/run began, got others: 1 of 20 rows differ"
        in warning
    )
    assert f"{path}:{order[1] + 1}" in warning and "the run goes on with these" in warning
    write_prompts(path, *rows[: order[0]], {"prompt": "what is other", "label": "1"}, *rows[order[0] + 1 :])
    (error,) = texts(found().errors)
    assert (
        f"data.path: want the row {path}:{order[0] + 1} as it was when the run planned it" in error
        and "what is other" in error
    )


def test_a_run_that_goes_on_keeps_its_adapters(tmp_path: Path) -> None:
    file, rank = write_run(tmp_path), "learner.lora.rank=4"
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / CONFIG_FILE).write_text(yaml.safe_dump(to_map(load(file, [rank]).config)))
    assert not check(load(file, [rank]), Purpose(resumes=True)).errors
    for chosen, got in (([], "got 'none'"), ([rank, "learner.lora.alpha=4"], "'alpha': 4")):
        [error] = texts(check(load(file, chosen), Purpose(resumes=True)).errors)
        assert "learner.lora: want {'rank': 4, 'alpha': 32.0" in error and got in error


def test_a_checkpoint_without_a_model_identity_is_accepted(tmp_path: Path) -> None:
    """Checkpoints from before models were recorded, and checkpoints with a tokenizer or model that cannot be read."""
    known = DataRules(run="r", steps=5, groups_per_step=1, model="qwen2")
    state = DataSource(known, epoch=1).snapshot()
    assert DataSource.restore(known, state).step == 0
    with refusal(ValueError, field="model"):
        DataSource.restore(DataRules(run="r", steps=5, groups_per_step=1, model="llama"), state)
    import msgpack

    fields = msgpack.unpackb(state)
    del fields["identity"]["model"]
    assert DataSource.restore(known, msgpack.packb(fields)).step == 0


def test_an_identity_is_that_of_the_sizes_and_the_tokenizer(tmp_path: Path) -> None:
    one = model_identity(write_model(tmp_path / "one"))
    assert one == model_identity(write_model(tmp_path / "two", use_cache=False, architectures=None))
    assert one != model_identity(write_model(tmp_path / "three", hidden_size=32))
    tokenizer = tmp_path / "two/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("five", "six"))
    assert one != model_identity(tmp_path / "two")


def test_an_identity_names_the_iteration_of_a_checkpoint_of_megatron(tmp_path: Path) -> None:
    """And its files: the reference of a resumed run is read from it again."""
    model, root = write_model(tmp_path / "model"), tmp_path / "megatron"
    for number in (10, 20):
        (root / f"iter_{number:07d}").mkdir(parents=True)
        (root / f"iter_{number:07d}" / "common.pt").touch()
        (root / f"iter_{number:07d}" / "__0_0.distcp").write_text("weights")

    def identity(number: str) -> str:
        (root / "latest_checkpointed_iteration.txt").write_text(number)
        return model_identity(model, str(root))

    one = identity("10")
    assert one.startswith(f"{model_identity(model)}, weights of iter_0000010 (files ")
    assert one == model_identity(model, str(root / "iter_0000010")) != identity("20")
    (root / "iter_0000010" / "__0_0.distcp").write_text("others!")
    assert identity("10") not in (one, model_identity(model))


def test_an_identity_is_that_which_older_runs_have_recorded(tmp_path: Path) -> None:
    for family, sizes in (("qwen3", "67c50cdd"), ("glm4", "485be5cb")):
        found = model_identity(write_model(tmp_path / family, model_type=family))
        assert found == f"{family} of 1 layers of 16 (sizes {sizes}, tokenizer 2e35a9e8)"


def test_the_command_prints_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_run(tmp_path))
    assert cli.main(["check", file, "--set", "learner.device=cpu"]) == 0
    topics = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert topics == [
        ["ok", topic] for topic in ("model", "tokenizer", "ends", "data", "reward", "disk", "memory", "devices")
    ]
    assert cli.main(["check", file, "--set", "actor.reward=nosuch"]) == 78
    assert "error   reward    --set: actor.reward: want" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["config", "check", "up"])
def test_settings_that_cannot_work_are_printed_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [command, str(write_run(tmp_path)), "--set", "learner.device=cpu", "--print-config"]
    assert cli.main(words) == 0
    assert cli.main([*words, "--set", "learner.algorithm.advantage=nothere:f"]) == 78
    printed = capsys.readouterr()
    assert printed.out.count("advantage: ") == 2
    assert "--set: learner.algorithm.advantage: want a function" in printed.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["engine", "--set", "engine.prot=3"], "--set: engine.prot: no such setting"),
        (["actor", "--set", "actor.retries"], "--set actor.retries: want path.to.key=value"),
        (["engine", "--print-config"], "--print-config: want --config FILE"),
    ],
)
def test_a_process_without_a_file_ignores_nothing(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--bus", "nats://127.0.0.1:1"]) != 0
    assert complaint in capsys.readouterr().err


def test_seven_thousand_prompts_are_checked_at_once_and_without_torch(tmp_path: Path) -> None:
    one, _ = _checked(tmp_path / "one", 1)
    all_of_them, said = _checked(tmp_path / "all", 7000)
    read = re.search(
        r"(the first )?(\d+) prompts read", said
    )  # on a busy machine not all are read in the time there is
    assert read is not None and (int(read[2]) >= SURE_ROWS if read[1] else int(read[2]) == 7000), said
    assert all_of_them < TIMES * one
    assert json.loads((tmp_path / "all/model/config.json").read_text())["model_type"] == "qwen2"


def _checked(directory: Path, prompts: int) -> tuple[float, str]:
    """Return the CPU seconds and the output of a process that checks a file of so many prompts, and imports no large
    module.
    """
    directory.mkdir()
    file = write_run(directory)
    write_prompts(directory / "prompts.jsonl", *[{"prompt": f"what is one plus {'two ' * 40}", "label": "3"}] * prompts)
    code = (
        "import sys\nfrom tidemill.launch.cli.main import main\n"
        f"assert main(['check', {str(file)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'megatron', 'nats', 'aiohttp', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result.stdout


STRANGE = st.sampled_from(
    [None, True, 0, -1, 1.5, 1e400, 10**30, "", "x", [], [1], {}, {"a": 1}, {"rope_type": "linear"}, {"type": "llama3"}]
)
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(file=st.sampled_from(FILES), key=st.sampled_from([*VALUES, *KEYS]), value=STRANGE)
def test_whatever_stands_in_a_model_directory_a_check_ends(
    file: str, key: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("strange")
    run, there = write_run(directory), directory / "model" / file
    values = json.loads(there.read_text()) if there.exists() else {}
    there.write_text(json.dumps(values | {key: value}))
    check(load(run), Purpose(resumes=True))
    there.write_text(json.dumps(value))
    check(load(run), Purpose(resumes=True))
    there.write_bytes(b"\xff\xfe" + repr(value).encode())
    check(load(run), Purpose(resumes=True))


def test_the_configuration_of_a_prepared_run_begins_a_new_one(tmp_path: Path) -> None:
    """The configuration that a run keeps names the files that it has made: ``--from-checkpoint`` with another directory
    uses them again.
    """
    sizes = "count: 20, model: {num_hidden_layers: 1, hidden_size: 16, intermediate_size: 16}"
    file = tmp_path / "run.yaml"
    file.write_text(
        f"directory: {tmp_path}/old\nprepare: {{kind: digits, {sizes}}}\nactor: {{reward: digits}}\nsampling: "
        f"{{max_new_tokens: 4}}\n"
    )
    first = load(file)
    assert first.config.prepare is not None
    prepare(first.config.prepare, tmp_path / "old/prepared")
    kept = tmp_path / "kept.yaml"
    kept.write_text(yaml.safe_dump(to_map(first.config)))
    again = check(load(kept, [f"directory={tmp_path}/new"]), Purpose())
    assert not again.errors
    assert again.on("prepare") == [f"{tmp_path}/old/prepared: made by an earlier run, with the same settings"]
    other = check(load(kept, [f"directory={tmp_path}/new", "prepare.count=21"]), Purpose())
    assert "or prepare, which makes both" in texts(other.errors)[0]


def test_the_servers_of_the_bus_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is silent until all have been asked: one after the other, the first would time out."""
    monkeypatch.setattr(server_checks, "ANSWER_S", 20.0)
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]

        def close_all() -> None:
            for asked in [each.accept()[0] for each in listening]:
                asked.close()

        closing = threading.Thread(target=close_all, daemon=True)
        closing.start()
        servers = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in listening)
        report = check(load(write_run(tmp_path), [f"bus.url=nats://{servers}"]), Purpose(uses_bus=True))
        closing.join()
    (error,) = [each.text for each in report.errors if each.topic == "bus"]
    assert error.count("no nats-server answers there") == 3, error
