"""Functions by import path, compared with their call; and every setting that names a place."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tidemill.launch.checks.own_objects import defect
from tidemill.launch.cli.main import main
from tidemill.launch.settings import reference

MINE = """
import functools
import json
from other import fits as renamed, short as too_short
from other import Policy

def fits(log_probs, anchor, tokens, config): return log_probs
def more(a, b, c, d, *, lengths_N, scale=1.0): return a
def needs(a, b, c, d, *, scale): return a
def any_number(*all): return all
async def later(a, b, c, d): return a
class Loss:
    def __call__(self, a, b, c, d): return a
number = 3
text = f"{number}"
table = {"a": 1}
small = lambda a: a
right = lambda a, b, c, d: a
made = functools.partial(fits, 1)
if number:
    def inside(a, b, c, d): return a
else:
    inside = None
"""
OTHER = "def fits(a, b, c, d): return a\ndef short(a): return a\nclass Policy: pass\n"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


ARGUMENTS = ("a", "b", "c", "d")


@pytest.mark.parametrize("name", ["fits", "renamed", "more", "any_number", "right", "inside"])
def test_a_function_that_can_be_called(name: str) -> None:
    assert defect(f"mine:{name}", ARGUMENTS, ("lengths_N",)) == ""
    assert "mine" not in sys.modules, "its module may load torch, and is imported by another process"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("mine:nothing", "mine has no 'nothing'"),
        ("nowhere:fits", "cannot import nowhere: No module named 'nowhere'"),
        ("broken:fits", "importing broken: ZeroDivisionError: division by zero"),
        ("mine:number", "want a callable, number is int"),
        ("mine:json", "want a callable, json is module"),
        ("mine:later", "an async function"),
        ("mine:Loss", "a class"),
        ("mine:Policy", "a class"),
        ("mine:made", "too many positional arguments"),
        ("mine:small", "too many positional arguments"),
        ("mine:too_short", "too many positional arguments"),
        ("mine:needs", "missing a required argument: 'scale'"),
        ("math:sin", "too many positional arguments"),
    ],
)
def test_what_cannot_be_called(path: str, reason: str) -> None:
    assert defect(path, ARGUMENTS, ("lengths_N",)).startswith(reason)


def test_a_module_that_ends_its_process_ends_no_check(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("import os, sys\nprint('the end', file=sys.stderr, flush=True)\nos._exit(3)\n")
    assert defect("ending:f") == "its import ends the process: the end"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Loss", ""), ("Policy", ""), ("made", "no class"), ("fits", "no class"), ("number", "no class")],
)
def test_a_class(name: str, reason: str) -> None:
    assert defect(f"mine:{name}", kind="class") == reason


NOWHERE: Mapping[str, tuple[str, ...]] = {
    "model.path": ("prepare=null", "model.path=/no/such", "data.path=/no/such"),
    "model.megatron_checkpoint": ("model.megatron_checkpoint=/no/such",),
    "data.path": ("prepare=null", "data.path=/no/such"),
    "data.filters": ("data.filters={a: {use: 'nothere:f'}}",),
    "eval.sets": ("eval.sets={a: {path: /no/such}}", "eval.every=1"),
    "rollouts": ("rollouts={a: {use: 'agent:nothere:f'}}",),
    "learner.bridge": ("learner.bridge=nothere:C",),
    "learner.family": ("learner.family=nothere:F",),
    "learner.from_checkpoint": ("learner.from_checkpoint=/no/such",),
    "learner.critic.path": ("learner.critic.path=/no/such", "learner.algorithm.advantage=gae"),
    "learner.lora.adapter": ("learner.lora.adapter=/no/such", "learner.lora.rank=4"),
    **{
        f"learner.algorithm.{name}": (f"learner.algorithm.{name}=nothere:f",)
        for name in ("advantage", "loss", "weight.level", "aggregation")
    },
    "learner.algorithm.reject.rules": ("learner.algorithm.reject.rules=['nothere:f']",),
    "learner.algorithm.kl.reference": ("learner.algorithm.kl.reference=/no/such", "learner.algorithm.kl.coef=0.1"),
    "learner.hooks.before_step": ("learner.hooks.before_step=nothere:f",),
    "learner.hooks.before_log_probs": ("learner.hooks.before_log_probs=nothere:f", "learner.algorithm.kl.coef=0.1"),
    "bus.tls_cert": ("bus.tls_cert=/no/such.pem", "bus.tls_key=/no/such.pem"),
    "bus.tls_key": ("bus.tls_cert=/no/such.pem", "bus.tls_key=/no/such.pem"),
    "bus.tls_ca": ("bus.tls_ca=/no/such.pem",),
    "engine.sglang.python": ("engine.kind=sglang", "engine.sglang.python=/no/such"),
    "actor.reward": ("actor.reward=nothere:f",),
    "actor.group_reward": ("actor.group_reward=nothere:f",),
    "actor.reward_parts": ("actor.reward=''", "actor.reward_parts={a: {reward: 'nothere:f'}}"),
    "debug.load_rollout": ("debug.load_rollout=/no/such/{step}",),
    "debug.dump_modules.prompts": ("debug.dump_modules.step=1", "debug.dump_modules.prompts=/no/such"),
}
"""Every setting that names a file, a directory or code, with settings by which it leads nowhere."""
WRITTEN = {
    "directory",
    "bus.auth_dir",
    "engine.sglang.log",
    "debug.save_rollout",
    "debug.save_train",
    "debug.dump_modules.path",
}
"""Places where a run writes."""


def test_every_setting_that_names_a_place_is_in_the_table() -> None:
    names = re.compile(r"import path|module:|director|PEM file|^File|^Files|^Interpreter|^Programs|file\'s path", re.I)
    by_sentence = {
        one.path
        for one in reference.entries()
        if not one.is_section and ".NAME." not in one.path and names.search(one.sentence)
    }
    assert by_sentence - {*NOWHERE} - WRITTEN == {
        "learner.checkpoint.store",  # test_checks_store
        "debug.dump_modules.step",
        "actor.reward_workers",
        "weights.load_deadline_s",
    }


@pytest.mark.parametrize("path", NOWHERE)
def test_a_place_that_is_not_there_is_refused_before_a_run_starts(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for setting in NOWHERE[path] for word in ("--set", setting)]
    assert main(["config", "launch/configs/digits.yaml", *words]) == 78
    message = capsys.readouterr().err
    assert (path in message or "/no/such" in message) and ("nothere" in message or "/no/such" in message), message


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ("{tools: ['nothere:f']}", "options.tools[0]"),
        ("{tools: [python, {use: 'json:nothere'}]}", "options.tools[1]"),
        ("{environment: 'nothere:E'}", "options.environment"),
    ],
)
def test_code_in_the_options_of_a_rollout_is_looked_for(
    options: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use = f"rollouts={{a: {{use: multi_turn, options: {options}}}}}"
    assert main(["config", "launch/configs/digits.yaml", "--set", use]) == 78
    assert f"rollouts.a.{setting}: want a program that can be imported, got " in capsys.readouterr().err
