"""``tidemill init``: write the files of a new run into the current directory, with a comment at each setting that
matters.
"""

import argparse
from pathlib import Path

from tidemill.launch.settings import env_file, yaml_file

TEMPLATES = Path(__file__).parents[1] / "data/init"
CONFIG = "run.yaml"
KINDS: dict[str, tuple[str, ...]] = {
    "own": ("my_reward.py", "prompts.jsonl"),
    "gsm8k": (),
    "tools": (),
    "sft": ("responses.jsonl",),
}
"""Kinds of runs, and the files of each beside its configuration."""
OF_MODELS = ("own", "sft")
"""Kinds that begin with a model of the user's; the others make a tiny one first."""
_MODEL = "@MODEL@"
IGNORES = ".gitignore"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    about = (
        "own (your prompts and your reward), gsm8k (school mathematics), tools (episodes with a tool), sft (your "
        "responses)"
    )
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=about)
    parser.add_argument("--model", default="", metavar="MODEL", help="for own and sft: a directory, or org/name")


def run(args: argparse.Namespace) -> int:
    """Write the files of a kind of run, all or none, and print their names. Returns 0. Raises ValueError."""
    if bool(args.model) != (args.kind in OF_MODELS):
        want = (
            "MODEL, a directory in Hugging Face format or org/name"
            if args.kind in OF_MODELS
            else f"none with {args.kind}, which makes a tiny model"
        )
        raise ValueError(f"--model: want {want}, got {args.model or 'nothing'}")
    config = (TEMPLATES / f"{args.kind}.yaml").read_text(encoding="utf-8")
    model = yaml_file.dump(args.model, flow=True)
    texts = {CONFIG: config.replace(_MODEL, model)}
    texts |= {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in KINDS[args.kind]}
    if present := [name for name in texts if Path(name).exists()]:
        raise ValueError(
            f"{present[0]}: want no such file, which is never overwritten; begin in another directory, or remove it"
        )
    if not Path(IGNORES).exists():
        texts[IGNORES] = f"{env_file.NAME}\nruns/\n"  # no secret and no checkpoint into a repository
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
        print(f"{name}: written")
    print(f"next: tidemill check {CONFIG}")
    return 0
