"""``tidemill convert``: a learner's checkpoint as a Hugging Face directory, or a Hugging Face directory as a
checkpoint; ``tidemill push``: the model of a finished run into a repository of the Hugging Face Hub, with a card that
is made from the run's summary.
"""

import argparse
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.json_object import JsonMapping, JsonObject
from tidemill.launch.checks.resume import began_with
from tidemill.launch.cli.inputs import read_secrets
from tidemill.launch.hub.repository import show_progress
from tidemill.launch.hub.selection import CARD, TOKEN, HubRefused, endpoint, explained, model_files
from tidemill.launch.settings import yaml_file
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.hub_names import COMMIT, MODEL, HubName, names_in, parse
from tidemill.launch.settings.run_config import CONFIG_FILE, RunConfig
from tidemill.learner.backends.choice import choose_backend
from tidemill.learner.checkpoints.disk import TORCH_DIST, has_weights
from tidemill.learner.checkpoints.torch_dist import TRACKER, find
from tidemill.learner.errors import LearnerError
from tidemill.learner.settings.backends import BACKENDS, FSDP
from tidemill.learner.settings.config import LearnerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.learner.ranks.conversion import Conversion


AUTO = BACKENDS[0]
GGUF = ".gguf"  # end of the name of a file in llama.cpp's format
FINAL, SUMMARY = "final", "summary.json"
PACKAGES = ("tidemill", "torch", "transformers", "megatron-core")
OPTION = "--to-hub"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FROM", help="a checkpoint, a model directory or a GGUF file")
    parser.add_argument("out", type=Path, metavar="TO", help="a directory that does not exist yet")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint's model (default: of the run)")
    parser.add_argument("--backend", choices=BACKENDS, default=AUTO, help="of a checkpoint to make (learner.backend)")
    parser.add_argument("--bridge", default="", metavar="MODULE:CLASS", help="bridge of the family, as learner.bridge")
    parser.add_argument("--family", default="", metavar="MODULE:NAME", help="rules of the family, as learner.family")


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint to a model directory, or the reverse. Returns 0. Raises ValueError."""
    require("learner")
    return run_convert(args.source, args.out, args.model, Codes(args.bridge, args.family), args.backend)


class Codes(NamedTuple):
    """Import paths of the user's code for a family; empty = none."""

    bridge: str = ""
    family: str = ""

    def of(self, kind: str) -> str:
        """Return the path for a backend. Raises ValueError for a bridge that it does not have."""
        if kind == FSDP and self.bridge:
            raise ValueError(
                f"--bridge: want none with learner.backend: fsdp: it leads to Megatron's layers, got {self.bridge}"
            )
        return self.family if kind == FSDP else self.bridge


NO_CODES = Codes()


def run_convert(source: Path, out: Path, model: Path | None, codes: Codes = NO_CODES, backend: str = AUTO) -> int:
    """Convert by the kind of ``source``, in this process, on the CPU. Returns 0. Raises ValueError.

    ``backend``: ``learner.backend`` of the runs that begin with a checkpoint made here.
    """
    if out.exists():
        raise ValueError(f"{out}: want a directory that does not exist yet, got one that does")
    if backend != AUTO and not is_model(source):
        raise ValueError(f"--backend: want none without a model directory, got {backend}: a checkpoint names its own")
    if source.suffix == GGUF:
        return _from_gguf(source, out, model)
    if (source / TRACKER).is_file():
        source = find(source)
    if has_weights(source):
        model_dir, codes_of_run = _of_run(source, model)
        with _conversion(source, codes if any(codes) else codes_of_run) as conversion:
            step = conversion.to_model(source, out, model_dir)
        print(f"{out}: the model of step {step}")
    elif is_model(source):
        if model is not None:
            raise ValueError(f"--model: want none with a model directory, got {model}")
        kind = choose_backend(LearnerConfig(backend=backend, **codes._asdict()), _config_of(source)).kind
        with _conversion(source, codes, kind) as conversion:
            conversion.to_checkpoint(source, out)
        print(f"{out}: a checkpoint with its weights, for learner.from_checkpoint with learner.backend: {kind}")
    else:
        files = ", ".join(TORCH_DIST)
        raise ValueError(f"{source}: want a checkpoint ({files}) or a model directory (config.json), got neither")
    return 0


def is_model(source: Path) -> bool:
    """Return whether a path looks like a model directory, and like no checkpoint."""
    return (source / "config.json").is_file() and not has_weights(source)


def _config_of(model_dir: Path) -> JsonObject:
    file = model_dir / "config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=JsonObject)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}: want a JSON map, got {error}") from None


def _from_gguf(file: Path, out: Path, model: Path | None) -> int:
    from tidemill.learner.checkpoints import gguf

    require("gguf")
    if model is not None:
        raise ValueError(f"--model: want none with a GGUF file, got {model}")
    parameters = gguf.to_directory(file, out)
    print(f"{out}: a model directory of {parameters:,} parameters, in float32")
    return 0


def weights_of(checkpoint: Path, model: Path | None) -> "dict[str, Tensor]":
    """Return the weights of a checkpoint under Hugging Face names, read in this process, on the CPU.

    ``model``: its model directory; None = the model of the run that has written it. Raises ValueError with the reason
    in one line.
    """
    model_dir, codes = _of_run(checkpoint, model)
    with _conversion(checkpoint, codes) as conversion:
        return conversion.weights_of(checkpoint, model_dir)


@contextmanager
def _conversion(source: Path, codes: Codes, kind: str = "") -> "Iterator[Conversion]":
    """Open the conversion of files of a backend, in this process, on the CPU. ``kind``: empty = of the checkpoint.

    Raises ValueError for the learner's errors inside.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with KeptPort() as port:
        # Before torch looks for devices: this needs none.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from tidemill.learner.ranks import conversion

        try:
            kind = kind or conversion.kind_of(source)
            with conversion.one_process(kind, code_path=codes.of(kind)) as opened:
                yield opened
        except (LearnerError, OSError) as error:
            raise ValueError(" ".join(str(error).split())) from error


def _of_run(checkpoint: Path, model: Path | None) -> tuple[Path, Codes]:
    """Return model directory (``model``, if given) and the user's code of a checkpoint's run. Raises ValueError."""
    file = checkpoint.absolute().parent.parent / CONFIG_FILE
    run: RunConfig | None = began_with(file) if file.is_file() else None
    path = "" if run is None else run.model.path
    if model is None and not path:
        why = f"which lies in no run's directory (no {file})"
        raise ValueError(f"--model: want the model directory of {checkpoint}, {why}; give --model DIR")
    if model is None and not Path(path).is_dir():
        got = f"none at {path!r} (model.path of {file})"
        raise ValueError(f"--model: want the model directory of {checkpoint}, got {got}; give --model DIR")
    return model or Path(path), NO_CODES if run is None else Codes(run.learner.bridge, run.learner.family)


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a finished run: runs/digits")
    parser.add_argument("--to-hub", required=True, metavar="NAME", help="org/name; made if there is none")
    parser.add_argument("--public", action="store_true", help="make it public; default: private")


def run_push(args: argparse.Namespace) -> int:
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
    with explained(OPTION, repo, MODEL):
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
