"""The mistakes of a first hour (docs/configuring.md): each is reported at once, with place, wanted and given value, and
remedy.
"""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.check_kit import processes_started, write_model, write_prompts, write_run
from tests.waits import LIMIT_S
from tidemill.launch.cli import main as cli

ANSWER_S = 2.0
"""CPU seconds."""
TRIES = 3
"""Most measurements, of which the smallest counts: on shared processors a process is charged for time that others took.
"""
DOCS = Path(__file__).parents[2] / "docs/configuring.md"
Prepare = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the parts that its message must contain."""

    where: str
    want: str
    got: str
    cure: str
    settings: tuple[str, ...] = ()
    makes: Prepare | None = None
    """Change to the directory of a good run."""
    options: tuple[str, ...] = ()


def prompts(*rows: object) -> Prepare:
    return lambda root, _: write_prompts(root / "prompts.jsonl", *rows)


def empty(root: Path, _: pytest.MonkeyPatch) -> None:
    (root / "prompts.jsonl").write_text("")


def without(name: str) -> Prepare:
    return lambda root, _: (root / name).unlink()


def yaml_text(text: str) -> Prepare:
    return lambda root, _: (root / "run.yaml").write_text((root / "run.yaml").read_text() + text)


def module(name: str, text: str) -> Prepare:
    def make(root: Path, patch: pytest.MonkeyPatch) -> None:
        (root / f"{name}.py").write_text(text)
        patch.syspath_prepend(root)

    return make


def other_run(root: Path, _: pytest.MonkeyPatch) -> None:
    """Create a run of the good configuration and a second model, which the settings name."""
    (root / "run").mkdir()
    (root / "run/config.yaml").write_text((root / "run.yaml").read_text() + "run: run\n")
    write_model(root / "llama", model_type="llama")


LONG = {"prompt": "one " * 300, "label": "3"}
GOOD = {"prompt": "what is one plus two", "label": "3"}

MISTAKES: dict[str, Mistake] = {
    "a model directory that is not there": Mistake(
        "--set: model.path",
        "a directory with a Hugging Face model",
        "'/nope': no such directory",
        "give the directory",
        ("model.path=/nope",),
    ),
    "a model without weights": Mistake(
        "model",
        "its weights in *.safetensors",
        "no such file",
        "save the model again",
        (),
        without("model/model.safetensors"),
    ),
    "a model without a tokenizer": Mistake(
        "model/tokenizer.json",
        "a tokenizer",
        "no such file",
        "save_pretrained",
        (),
        without("model/tokenizer.json"),
    ),
    "a family of models that is not known": Mistake(
        "model/config.json: model_type",
        "that the installed transformers has a language model for",
        "got pond",
        "use another model",
        (),
        lambda root, _: write_config(root, "pond"),
    ),
    "tensor parallelism that does not divide the heads": Mistake(
        "config.json: num_attention_heads",
        "a multiple of learner.tensor_parallel = 3",
        "got 4",
        "lower learner.tensor_parallel",
        ("learner.tensor_parallel=3",),
    ),
    "responses longer than the context": Mistake(
        "--set: sampling.max_new_tokens",
        "< 256",
        "got 5000",
        "set sampling.max_new_tokens to",
        ("sampling.max_new_tokens=5000",),
    ),
    "a data file that is not there": Mistake(
        "no.jsonl", "a file of prompts", "no such file", "--set: data.path", ("data.path=no.jsonl",)
    ),
    "an empty data file": Mistake("prompts.jsonl", "at least one prompt", "got none", "fix the file", (), empty),
    "broken JSON": Mistake(
        "prompts.jsonl:2",
        "a JSON map",
        "Expecting value",
        "fix the file",
        ("data.bad_rows=refuse",),
        prompts(GOOD, '{"prompt": '),
    ),
    "a key of prompts that is not there": Mistake(
        "prompts.jsonl:1",
        "key 'nope' (data.prompt_key)",
        "['label', 'prompt']",
        "fix the file, or data.prompt_key",
        ("data.prompt_key=nope",),
    ),
    "a nested key that is not there": Mistake(
        "prompts.jsonl:1",
        "reward_model.gold",
        "['label', 'prompt']",
        "data.label_key",
        ("data.label_key=reward_model.gold",),
    ),
    "a row without a label": Mistake(
        "prompts.jsonl:2",
        "key 'label' (data.label_key)",
        "['prompt']",
        "fix the file",
        ("data.bad_rows=refuse",),
        prompts(GOOD, {"prompt": "what"}),
    ),
    "prompts that are all too long": Mistake(
        "prompts.jsonl:1", "<= 240 tokens", "2 of 2 rows read are such", "a larger context", (), prompts(LONG, LONG)
    ),
    "a chat template that is not there": Mistake(
        "--set: data.apply_chat_template",
        "a chat template",
        "got none",
        "chat_template.jinja",
        ("data.apply_chat_template=true",),
        lambda root, _: write_model(root / "model", chat_template=False),
    ),
    "a label that the reward cannot compare with": Mistake(
        "row 1 of data.path",
        "a text or a number",
        "a map",
        "name the key that holds the answer",
        (),
        prompts({"prompt": "what", "label": {"answer": "3"}}),
    ),
    "no reward": Mistake(
        "actor.reward",
        "a reward: one of by_rollout, code, dapo, deepscaler, digits",
        "got none",
        "actor: {reward: exact}",
        ("actor.reward=''",),
    ),
    "a reward that is not known": Mistake(
        "--set: actor.reward",
        "one of ['by_rollout', 'code', 'dapo', 'deepscaler', 'digits', 'exact'",
        "'nosuch'",
        "fix the name",
        ("actor.reward=nosuch",),
    ),
    "a reward in a module that is not there": Mistake(
        "--set: actor.reward",
        "a reward that can be loaded",
        "cannot import nomod",
        "PYTHONPATH",
        ("actor.reward=nomod:fn",),
    ),
    "a reward that its module does not have": Mistake(
        "--set: actor.reward",
        "a reward that can be loaded",
        "mistake_name has no 'nofn'",
        "fix the name",
        ("actor.reward=mistake_name:nofn",),
        module("mistake_name", "def word(request):\n    return 1.0\n"),
    ),
    "an option that the reward does not take": Mistake(
        "--set: actor.reward_options.bonos",
        "an option of",
        "there are ['bonus', 'in_thread']",
        "fix it",
        ("actor.reward=mistake_option:word", "actor.reward_options.bonos=1"),
        module("mistake_option", "def word(request, bonus=0):\n    return 1.0\n"),
    ),
    "a reward that fails when it is called": Mistake(
        "--set: actor.reward",
        "a number for row 1",
        "RuntimeError('no judge') (",
        "fix mistake_call:word",
        ("actor.reward=mistake_call:word",),
        module("mistake_call", "def word(request):\n    raise RuntimeError('no judge')\n"),
        ("check", "--check-reward"),
    ),
    "a reward that ends its process when it is called": Mistake(
        "--set: actor.reward",
        "a number for row 1",
        "its process exited with code 7",
        "fix mistake_exit:word",
        ("actor.reward=mistake_exit:word",),
        module("mistake_exit", "import os\ndef word(request):\n    os._exit(7)\n"),
        ("check", "--check-reward"),
    ),
    "a loss with another signature": Mistake(
        "--set: learner.algorithm.loss",
        "a function (log_probs_T, anchor_T, tokens, config)",
        "too many positional arguments: it takes (log_probs_T)",
        "docs/algorithms.md",
        ("learner.algorithm.loss=mistake_loss:loss",),
        module("mistake_loss", "import torch\ndef loss(log_probs_T):\n    return log_probs_T\n"),
    ),
    "an engine that is not known": Mistake(
        "--set: engine.kind", "want builtin or sglang", "got 'vllm'", "builtin or sglang", ("engine.kind=vllm",)
    ),
    "an address of the bus that is none": Mistake(
        "--set: bus.url", "nats://host:port", "'foo'", "remove it", ("bus.url=foo",)
    ),
    "a model and prompts beside `prepare`": Mistake(
        "run.yaml:3: model.path",
        "or prepare, which makes both",
        "all of them",
        "--set prepare=null",
        ("prepare.kind=digits",),
    ),
    "groups of one": Mistake("group_size", "want >= 2", "got 1", "raise it", ("learner.group_size=1",)),
    "another model at a resume": Mistake(
        "--set: model.path",
        "qwen2 of 1 layers of 16",
        "llama of 1 layers of 16",
        "start another run",
        ("model.path=llama",),
        other_run,
        ("up", "--resume"),
    ),
    "a misspelled setting": Mistake(
        "--set", "did you mean learner.steps?", "learner.stepz", "did you mean", ("learner.stepz=3",)
    ),
    "a single value in place of a list": Mistake(
        "--set: sampling.stop", "want a list", "got 'word'", "such as [a, b]", ("sampling.stop=word",)
    ),
    "a text that is not YAML": Mistake(
        "run.yaml:", "not YAML", "expected", "look at 'learner: {steps: 3'", (), yaml_text("learner: {steps: 3\n")
    ),
    "a variable with one underscore": Mistake(
        "environment TIDEMILL_LEARNER_STEPS",
        "two underscores",
        "got one",
        "did you mean TIDEMILL_LEARNER__STEPS?",
        (),
        lambda _, patch: patch.setenv("TIDEMILL_LEARNER_STEPS", "3"),
    ),
}


def write_config(root: Path, family: str) -> None:
    config = root / "model/config.json"
    config.write_text(config.read_text().replace("qwen2", family))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, file = MISTAKES[name], write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    if mistake.makes is not None:
        mistake.makes(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    command, *options = mistake.options or ("up",)
    settings = [word for setting in mistake.settings for word in ("--set", setting)]
    used_s = math.inf
    for _ in range(TRIES):
        since = time.process_time()
        with processes_started() as started:
            code = cli.main([command, str(file), *options, *settings])
        used_s = min(used_s, time.process_time() - since)
        shown = "".join(capsys.readouterr())
        if used_s < ANSWER_S:
            break
    for part in (mistake.where, mistake.want, mistake.got, mistake.cure):
        assert part in shown, shown
    assert code == 78
    runs_code = "--check-reward" in options or "mistake_loss:loss" in "".join(mistake.settings)
    assert bool(started) == runs_code, "code of the user is called in a child, as by an actor"
    assert [
        path for path in sorted(tmp_path.rglob("*")) if path.suffix != ".pyc" and path.name != "__pycache__"
    ] == before
    assert used_s < ANSWER_S
    assert "Traceback" not in shown


@pytest.mark.parametrize("settings", [("data.prompt_key=nope",), ("model.path=/nope", "actor.reward=nosuch")])
def test_a_shell_gets_the_answer_too(tmp_path: Path, settings: tuple[str, ...]) -> None:
    file = write_run(tmp_path)
    command = [
        sys.executable,
        "-m",
        "tidemill",
        "up",
        str(file),
        *[word for setting in settings for word in ("--set", setting)],
    ]
    used_s = math.inf
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, cwd=DOCS.parents[1], capture_output=True, text=True, timeout=LIMIT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = min(used_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if used_s < ANSWER_S:
            break
    assert result.returncode == 78, result.stderr
    assert len(result.stderr.splitlines()) == len(settings), "one line for each mistake"
    assert not result.stdout
    assert used_s < ANSWER_S
    assert not (tmp_path / "run").exists()


def test_nothing_is_wrong_with_what_the_mistakes_are_made_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", str(write_run(tmp_path))]) == 0
    out, err = capsys.readouterr()
    assert "valid" in out and not err


def test_every_mistake_is_in_the_docs() -> None:
    text = " ".join(DOCS.read_text().split())
    assert [name for name in MISTAKES if name not in text] == []
