"""``tidemill push``: the model of a finished run into a repository of the Hugging Face Hub, with a card that is made
from the run's summary.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.launch.cli.inputs import read_secrets
from tidemill.launch.hub.errors import TOKEN, HubRefused, endpoint, explained
from tidemill.launch.hub.repository import show_progress
from tidemill.launch.hub.selection import CARD, model_files
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.hub_names import COMMIT, MODEL, HubName, names_in, parse
from tidemill.launch.settings.run_config import CONFIG_FILE

FINAL, SUMMARY = "final", "summary.json"
PACKAGES = ("tidemill", "torch", "transformers", "megatron-core")
OPTION = "--to-hub"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a finished run: runs/digits")
    parser.add_argument("--to-hub", required=True, metavar="NAME", help="org/name; made if there is none")
    parser.add_argument("--public", action="store_true", help="make it public; default: private")


def run(args: argparse.Namespace) -> int:
    """Upload the model in ``final/`` with its card. Returns 0. Raises HubRefused."""
    require("hub")
    read_secrets(args, [Path()])

    print(push(args.run, args.to_hub, public=args.public))
    return 0


def push(root: Path, repo: str, *, public: bool) -> str:
    """Upload ``final/`` of a run with its card, into a repository that is made if need be. Return the commit's URL.

    Blocks. A repository that exists stays public or private. Raises HubRefused.
    """
    name = parse(MODEL, repo)
    if name is None or name.revision:
        raise HubRefused(OPTION, "org/name, and no directory here of that name", repr(repo), "give another name")
    final, files = root / FINAL, sorted(os.listdir(root / FINAL)) if (root / FINAL).is_dir() else []
    if "config.json" not in files or not (root / SUMMARY).is_file():
        cure = "finish it: tidemill up CONFIG --resume"
        raise HubRefused(str(root), f"a finished run ({SUMMARY}, and a model in {FINAL}/)", "none", cure)
    chosen = model_files(str(final), name, files, weights=True, tokenizer=False)
    text = card(yaml_file.read(root / CONFIG_FILE)[0], json.loads((root / SUMMARY).read_text()))
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    from tidemill.weightstore.store.snapshot_files import MANIFEST

    token = get_token()
    if not token:
        raise HubRefused(OPTION, f"a token that may write to {repo}", "none", TOKEN)
    api = HfApi(endpoint=endpoint(), token=token, library_name="tidemill")
    operations = [CommitOperationAdd(CARD, text.encode())]
    operations += [CommitOperationAdd(file, str(final / file)) for file in chosen if file != MANIFEST]
    show_progress()
    with explained(OPTION, repo, MODEL, uploads=True):
        api.create_repo(repo, private=not public, exist_ok=True)
        done = api.create_commit(repo, operations, commit_message=f"Model of the run {root.name}")
    return str(done.commit_url)


def card(config: JsonMapping, summary: JsonMapping) -> str:
    """Return the card of a model, in Markdown behind metadata. Paths of this machine are left out but for their end."""
    names = names_in(dict(config))
    model, prompts = config["model"]["path"], dict(_prompts(config))
    of_data = [name.repo for setting, name in names.items() if setting.startswith("data.")]
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head |= {"base_model": names["model.path"].repo} if "model.path" in names else {}
    head |= {"datasets": sorted(set(of_data))} if of_data else {}
    head["tags"] = ["tidemill", "reinforcement-learning"]
    learner = config["learner"]
    rows = {
        "base model": _shown(names.get("model.path"), model),
        **prompts,
        "algorithm": _algorithm(learner["algorithm"]),
        "steps": f"{summary['steps']}, of {learner['groups_per_step']} prompts x {learner['group_size']} responses",
        "learning rate": learner["optimizer"]["lr"],
        "samples trained": summary["samples_trained"],
        "mean reward of the first step": _number(summary["reward_first"]),
        "mean reward of the last ten": _number(summary["reward_last"]),
        "largest lag": summary["max_lag_trained"],
        "versions": ", ".join(_versions()),
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    parts = [f"# {config['run']}", "Trained with Tidemill, by asynchronous reinforcement learning."]
    parts.append(f"| | |\n|---|---|\n{table}")
    if scores := [line for line in summary.get("evaluations", ()) if "mean" in line]:
        lines = (f"| {line['set']} | {line['step']} | {_number(line['mean'])} | {_interval(line)} |" for line in scores)
        parts += ["## Held-out scores", "| set | step | mean | interval |\n|---|---|---|---|\n" + "\n".join(lines)]
    return f"---\n{yaml_file.dump(head)}---\n\n" + "\n\n".join(parts) + "\n"


def _prompts(config: JsonMapping) -> Iterator[tuple[str, str]]:
    data = config["data"]
    sources = data["sources"] or {"": {"path": data["path"]}}
    for source, entry in sources.items():
        yield f"prompts {source}".strip(), _shown(parse("dataset", entry["path"]), entry["path"])
    reward = config["actor"]["reward"]
    yield "reward", ", ".join(config["actor"]["reward_parts"]) or str(reward)


def _shown(name: HubName | None, path: str) -> str:
    """Return a name with its commit; of a path of this machine, which is nobody else's business, the end alone."""
    if name is not None:
        return f"`{name.repo}` at `{name.revision[:12] if COMMIT.fullmatch(name.revision) else name.revision}`"
    return f"`{Path(path).name}`, of no hub"


def _algorithm(settings: Mapping[str, Any]) -> str:
    parts = (settings.get(name) for name in ("loss", "correction", "advantage"))
    return ", ".join(str(part) for part in parts if part)


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except ModuleNotFoundError:
            continue


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _interval(line: JsonMapping) -> str:
    return f"{line['mean_low']:.3f} to {line['mean_high']:.3f}" if "mean_low" in line else ""
