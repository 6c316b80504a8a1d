"""Which files of a repository are fetched: of a model, or of one split of a data set.

Never pickles, and no code: a repository that has nothing else is refused.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from tidemill.launch.hub.errors import HubRefused
from tidemill.launch.settings.hub_names import HubName
from tidemill.learner.prompts.formats import NUMBERED, SUFFIXES

CARD = "README.md"
WEIGHTS = ".safetensors"
# Ends of a model's other files: sizes, tokenizer (`tokenizer.model`, `merges.txt`), chat template.
_TEXTS = (".json", ".jinja", ".model", ".txt")
# Names of the weights as transformers saves them; a repository may have other copies beside them.
_COMPLETE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_GLOBBED = re.compile(r"[*?[]")
_GLOB = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")
_REGEX = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
MOST_SHOWN = 20
_HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}  # Names of splits that are not for training


def model_files(where: str, name: HubName, files: Collection[str], *, weights: bool, tokenizer: bool) -> list[str]:
    """Return the files of a model, or of adapters, at the top of a repository. Raises HubRefused where some lack."""
    top = [file for file in files if "/" not in file]
    tensors = [file for file in top if file.endswith(WEIGHTS)]
    tensors = [file for file in tensors if _COMPLETE.fullmatch(file)] or tensors
    chosen = [file for file in top if file.endswith(_TEXTS)]
    if weights and not tensors:
        others = ", ".join(sorted(file for file in top if file.endswith((".bin", ".pt", ".pth", ".gguf"))))
        cure = "name a revision that has some (the hub converts models on a branch refs/pr/N), or convert them yourself"
        raise HubRefused(where, f"{name} with *.safetensors", others or "none", f"pickles are never read; {cure}")
    if tokenizer and "tokenizer.json" not in chosen:
        cure = "save the fast tokenizer beside the model in a directory, and give that"
        raise HubRefused(where, f"{name} with tokenizer.json", "none", cure)
    refuse_missing_shards(where, name, tensors)
    return [*chosen, *(tensors if weights else [])]


def data_files(where: str, name: HubName, files: Collection[str], card: Mapping[str, object]) -> tuple[list[str], str]:
    """Return the files of a split, and the file, directory or pattern in the repository that stands for them alone.

    ``card``: the metadata at the head of the data set's card. Raises HubRefused with the splits there are.
    """
    rows = sorted(file for file in files if file.endswith(SUFFIXES))
    if not rows:
        kinds = ", ".join(sorted({PurePosixPath(file).suffix for file in files} - {""})[:MOST_SHOWN])
        cure = f"try the hub's own conversion, {name.repo}@refs/convert/parquet/CONFIG/SPLIT"
        raise HubRefused(where, f"{name} with .jsonl or .parquet files", f"files of {kinds or 'no kind'}", cure)
    patterns: dict[str, tuple[str, ...]] = {}
    splits = _declared_splits(card, rows, patterns) or _splits_by_name(rows)
    inside = name.inside or (next(iter(splits)) if len(splits) == 1 else "")
    if len({label.partition("/")[0] for label in patterns}) == 1 and "/" not in inside:  # its name may be left out
        inside = next((label for label in patterns if label.partition("/")[2] == inside), inside)
    chosen = splits.get(inside) or [file for file in rows if inside and _is_inside(file, inside)]
    is_directory = inside not in splits and inside not in rows and not _GLOBBED.search(inside)
    if not chosen or (is_directory and _mixes(splits, chosen, is_declared=bool(patterns))):
        shown = ", ".join(f"{name.repo}/{label}" for label in list(splits)[:MOST_SHOWN])
        got = f"{name.inside!r}" + (f" with {len(chosen)} files of several" if chosen else "")
        got = got if name.inside else f"{len(splits)} splits"
        raise HubRefused(where, f"one split of {name.repo}", got, f"name one of: {shown}")
    if inside not in rows:  # a shard may be named alone
        refuse_missing_shards(where, name, chosen)
    return chosen, _pattern_of(where, name, chosen, rows, patterns.get(inside, (inside,)))


def _mixes(splits: Mapping[str, list[str]], chosen: Collection[str], *, is_declared: bool) -> bool:
    """Return whether files are of several splits, so that a held-out one may be among them.

    Splits that no card declares are any names of files.
    """
    names = {label.rpartition("/")[2] for label, files in splits.items() if not set(files).isdisjoint(chosen)}
    return len(names) > 1 and (is_declared or not names.isdisjoint(_HELD_OUT))


def refuse_missing_shards(where: str, name: HubName, files: Iterable[str]) -> None:
    """Raise HubRefused where a file of ``-of-N`` is missing, as in the cache of a download that was cut."""
    counts: Counter[tuple[str, int]] = Counter()
    for file in map(PurePosixPath, files):
        shard = NUMBERED.fullmatch(file.stem)
        if shard is not None and shard["count"]:
            counts[f"{file.parent / shard['name']}", int(shard["count"])] += 1
    for (shards, number), count in counts.items():
        if count != number:
            cure = "fetch it with the hub in reach, or give a directory"
            raise HubRefused(where, f"all {number} files {shards}-* of {name}", f"{count} of them", cure)


def _declared_splits(
    card: Mapping[str, object], rows: Sequence[str], patterns: dict[str, tuple[str, ...]]
) -> dict[str, list[str]]:
    """Return the files of each CONFIG/SPLIT in a card; fill ``patterns`` with theirs."""
    splits: dict[str, list[str]] = {}
    for config, split, globs in _declarations(card):
        chosen = [file for file in rows if any(_matches(file, glob) for glob in globs)]
        if chosen:
            splits[f"{config}/{split}"], patterns[f"{config}/{split}"] = chosen, globs
    return splits


def _declarations(card: Mapping[str, object]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (configuration, split, patterns) of a card, whose form is not trusted."""
    configs = card.get("configs")
    for config in configs if isinstance(configs, list) else ():
        data = config.get("data_files") if isinstance(config, dict) else None
        parts = data if isinstance(data, list) and all(isinstance(part, dict) for part in data) else [{"path": data}]
        for part in parts:
            paths = part.get("path")
            globs = tuple(glob for glob in (paths if isinstance(paths, list) else [paths]) if isinstance(glob, str))
            if globs:
                yield str(config.get("config_name", "default")), str(part.get("split", "train")), globs


def _splits_by_name(rows: Sequence[str]) -> dict[str, list[str]]:
    """Return files by the part of their path before a shard's number: data/train-00000-of-00002.parquet is train."""
    splits = defaultdict(list)
    for file in map(PurePosixPath, rows):
        shard = NUMBERED.fullmatch(file.stem)
        parts = file.parent.parts[file.parts[0] == "data" :]
        label = "/".join([*parts, *filter(None, [file.stem if shard is None else shard["name"]])])
        splits[label or file.stem].append(str(file))
    return dict(splits)


def _pattern_of(where: str, name: HubName, chosen: Sequence[str], rows: Sequence[str], patterns: Sequence[str]) -> str:
    """Return a path that, read as a source of prompts, stands for the chosen files and no other file of the rows."""
    if len(chosen) == 1:
        return chosen[0]
    first = PurePosixPath(chosen[0])
    shard = NUMBERED.fullmatch(first.stem)
    stem = "" if shard is None else f"{shard['name']}{shard['between']}[0-9]"
    globs = [str(first.with_name(f"{start}*{first.suffix}")) for start in (stem, "")]
    for pattern in (*patterns, *globs):
        if "**" not in pattern and [file for file in rows if _matches(file, pattern)] == list(chosen):
            return pattern
    cure = "name them one by one in data.sources"
    raise HubRefused(where, f"files of {name} that one pattern names", ", ".join(chosen[:MOST_SHOWN]), cure)


def _is_inside(file: str, inside: str) -> bool:
    return file == inside or file.startswith(f"{inside}/") or _matches(file, inside)


def _matches(file: str, pattern: str) -> bool:
    """Return whether a file fits a pattern, where ``*`` ends at a slash and ``**`` does not; ``[0-9]`` is a digit."""
    parts = [_REGEX.get(part) or re.escape(part).replace(r"\[0\-9\]", "[0-9]") for part in _GLOB.findall(pattern)]
    return re.fullmatch("".join(parts), file) is not None
