"""``tidemill debug``: comparisons of dumps, scores of prompts, and requests for a profile."""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.launch.settings.extras import require
from tidemill.learner.debug.prompts import read_prompts

if TYPE_CHECKING:
    from tidemill.launch.cli.debug_engine import Engine
    from tidemill.learner.debug.comparison import Comparison
    from tidemill.learner.debug.train_file import Array

SHOWN = 5
"""Most differences that are printed, after the first one."""
DEFAULT_ENGINE_DTYPE = "bfloat16"
"""Dtype of an engine that reports none: that of engines on accelerators."""


def run_debug(args: argparse.Namespace) -> int:
    """Run one word. Returns 0, or 1 when something differs. Raises ValueError for wrong files and arguments."""
    if args.word == "weights":
        from tidemill.launch.cli.debug_weights import compare_weights

        return compare_weights(args)
    return {"compare": _compare, "score": _score, "profile": _profile}[args.word](args)


def _compare(args: argparse.Namespace) -> int:
    from tidemill.learner.debug.comparison import compare_modules, compare_train
    from tidemill.learner.debug.module_file import read_modules
    from tidemill.learner.debug.train_file import MODULES, read, read_train, record_path

    theirs = args.theirs or record_path(args.ours)
    kinds = [read(path)[0].get("kind") for path in (args.ours, theirs)]
    if (kinds[0] == MODULES) != (kinds[1] == MODULES):
        raise ValueError(f"want two dumps of modules, or two of training data, got kinds {kinds[0]} and {kinds[1]}")
    if kinds[0] == MODULES:
        found = compare_modules(read_modules(args.ours), read_modules(theirs), args.tolerance)
    else:
        found = compare_train(read_train(args.ours), read_train(theirs), args.tolerance)
    _print(found, as_json=args.json)
    return int(found.first is not None)


def _print(found: "Comparison", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found)))
        return
    for note in found.notes:
        print(note)
    if found.first is None:
        print(f"equal: {', '.join(found.compared)}")
        return
    before = found.compared[: found.compared.index(found.first.name)] if found.first.name in found.compared else found.compared
    if before:
        print(f"equal: {', '.join(before)}")
    print(f"DIFFERS first in {found.first}")
    for one in found.differences[1 : 1 + SHOWN]:
        print(f"  then {one.name}: largest difference {one.largest:.3g}, relative {one.relative:.3g}")
    if (more := len(found.differences) - 1 - SHOWN) > 0:
        print(f"  and {more} more")


def _score(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts)
    if args.config and (args.engine or args.by != "sglang"):
        raise ValueError(f"--config: want it with --by sglang, got {'--engine' if args.engine else '--by ' + args.by}")
    if args.engine:
        from tidemill.launch.cli.debug_engine import Engine

        engine = Engine(args.engine, args.key_env)
        outputs, source = engine.log_probs(prompts), args.engine
        dtype = _dtype_of_engine(engine, args.dtype) if args.out is not None else ""
    else:
        if not (args.model / "config.json").exists():
            raise ValueError(f"--model: want a directory with a Hugging Face model (config.json in it), got {str(args.model)!r}")
        require("learner" if args.by == "learner" else "engine")
        source = f"{args.by} {args.model}"
        outputs, dtype = _of_sglang(args, prompts) if args.by == "sglang" else _of_this_process(args, prompts, args.dtype or "float32")
    if args.out is not None:
        from tidemill.learner.debug.module_file import write_modules

        write_modules(args.out, outputs, prompts=prompts, dtype=dtype, source=source)
        megabytes = args.out.stat().st_size / 1e6
        print(f"{len(outputs)} outputs of {len(prompts)} prompts into {args.out} ({megabytes:.1f} MB)", file=sys.stderr)
    _print_scores(outputs, prompts, as_json=args.json)
    return 0


def _print_scores(outputs: "Mapping[str, Array]", prompts: Sequence[Sequence[int]], *, as_json: bool) -> None:
    for number, tokens in enumerate(prompts):
        log_probs = outputs.get(f"{number}.log_probs")
        if log_probs is None:
            continue
        values = [float(value) for value in log_probs[:, 0]]
        if as_json:
            print(json.dumps({"prompt": number, "tokens": list(tokens), "log_probs": values}))
        else:
            print(f"prompt {number}: {len(tokens)} tokens, mean log-prob {sum(values) / len(values):.4f}, least {min(values):.4f}")


def _of_this_process(args: argparse.Namespace, prompts: Sequence[Sequence[int]], dtype: str) -> "tuple[dict[str, Array], str]":
    """Return the outputs, computed in this process, and their dtype."""
    if args.by == "engine":
        from tidemill.actors.serving.builtin.scoring import score_directory

        return score_directory(args.model, prompts, args.names, dtype=dtype), dtype
    from tidemill.launch.run.learner_score import score_by_learner

    logging.getLogger("megatron").setLevel(logging.WARNING)
    return score_by_learner(args.model, prompts, args.names, dtype=dtype), dtype


def _of_sglang(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> "tuple[dict[str, Array], str]":
    """Return the outputs of a server that is started for them, and their dtype. Raises ValueError."""
    from tidemill.actors.errors import EngineError
    from tidemill.actors.serving.sglang.scoring import score_directory
    from tidemill.launch.settings.config_loader import load

    engine = load(args.config, environment=os.environ).config.engine
    settings = engine.sglang
    settings = replace(settings, log=settings.log or str(Path(tempfile.gettempdir()) / f"tidemill-score-{os.getpid()}.log"))
    if args.dtype:
        settings = replace(settings, arguments={name: value for name, value in settings.arguments.items() if name != "dtype"})
        engine = replace(engine, dtype=args.dtype)
    print(f"starting SGLang with {settings.python}; its output: {settings.log}", file=sys.stderr)
    try:
        return score_directory(args.model, prompts, args.names, replace(engine, sglang=settings))
    except EngineError as failed:
        if isinstance(failed, ValueError):
            raise
        raise ValueError(str(failed)) from None


def _dtype_of_engine(engine: "Engine", wanted: str | None) -> str:
    """Return the dtype that an engine reports, else ``wanted``, else the default, which is printed. Raises ValueError if the two differ."""
    found = engine.dtype()
    if found and wanted not in (None, found):
        raise ValueError(f"--dtype: want {found}, which the engine reports, got {wanted}; leave it out")
    if not found and wanted is None:
        cure = "--dtype float32 compares at 1e-4 instead of 0.03"
        print(f"the engine reports no dtype: {DEFAULT_ENGINE_DTYPE} is written into the dump; {cure}", file=sys.stderr)
    return found or wanted or DEFAULT_ENGINE_DTYPE


def _profile(args: argparse.Namespace) -> int:
    from tidemill.launch.settings.config_loader import load
    from tidemill.launch.settings.run_config import CONFIG_FILE
    from tidemill.learner.debug.profile_request import DIRECTORY, ProfileRequest, trace_name, write_request

    root = Path(args.run_dir)
    if not (root / CONFIG_FILE).exists():
        raise ValueError(f"--run-dir: want the directory of a run ({CONFIG_FILE} in it), got {args.run_dir}")
    try:
        request = ProfileRequest(steps=args.steps, memory=args.memory, rank=args.rank)
        request.refuse_unknown_rank(load(root / CONFIG_FILE).config.learner.num_ranks)
    except ValueError as bad:
        raise ValueError(f"--{bad}") from None
    write_request(root, request)
    trace = root / DIRECTORY / trace_name(args.rank, "<first>", "<last>")
    print(f"requested: rank {args.rank} profiles its next {args.steps} steps, and writes {trace}")
    return 0
