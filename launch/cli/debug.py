"""``tidemill debug``: comparisons of dumps, scores of prompts, and requests for a profile."""

import argparse
import itertools
import json
import logging
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.system.processes import direct_opener
from tidemill.launch.cli.arguments import refuse_no_model
from tidemill.launch.settings.extras import require
from tidemill.launch.settings.run_paths import config_file
from tidemill.learner.debug.config import read_prompts
from tidemill.rewards.remote import bearer

if TYPE_CHECKING:
    from tidemill.learner.debug.comparison import Comparison
    from tidemill.learner.debug.train_file import Array


SHOWN = 5  # Maximum number of differences that are printed, after the first one
DEFAULT_ENGINE_DTYPE = "bfloat16"  # Dtype of an engine that reports none: engines on accelerators have it


def add(parser: argparse.ArgumentParser) -> None:
    """Add its words and their arguments."""
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")

    compare = words.add_parser("compare", help="the first thing that differs between two dumps, and by how much")
    compare.add_argument("ours", type=Path, metavar="A", help="a file of debug.save_train, its record, or a dump")
    compare.add_argument("theirs", type=Path, metavar="B", nargs="?", help="another one; default: the record of A")
    compare.add_argument("--tolerance", type=float, metavar="X", help="relative (modules) or absolute error")
    compare.add_argument("--json", action="store_true", help="print one JSON object")

    score = words.add_parser("score", help="log-probs of the tokens of fixed prompts, and the outputs of modules")
    where = score.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="directory of a Hugging Face model, loaded here")
    where.add_argument("--engine", default="", metavar="URL", help="a running engine: log-probs only")
    score.add_argument("--key-env", default="", metavar="VARIABLE", help="with --engine: variable with the api key")
    score.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="a JSON list of token ids per line")
    score.add_argument("--out", type=Path, default=None, metavar="FILE", help="write a dump for tidemill debug compare")
    implementation = (
        "with --model: which implementation computes; engine: the built-in one; sglang: a server started for it"
    )
    score.add_argument("--by", choices=("engine", "learner", "sglang"), default="engine", help=implementation)
    config = (
        "with --by sglang: a configuration; its engine.sglang has the interpreter, arguments and environment of "
        "the server"
    )
    score.add_argument("--config", type=config_file, action="append", default=[], metavar="FILE", help=config)
    names = "with --model: outputs to write, such as 'layers.0.*' or '*' for all modules (default: log_probs alone)"
    score.add_argument("--names", default="log_probs", metavar="PATTERN", help=names)
    dtype = "with --model: dtype to compute in (default float32; --by sglang: that of the configuration); "
    dtype += "with --engine: that of an engine that reports none (default bfloat16)"
    score.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help=dtype)
    score.add_argument("--json", action="store_true", help="print one JSON object per prompt")

    weights = words.add_parser(
        "weights", help="compare weights: directories, checkpoints, engines, or a run's engines with its files"
    )
    sides = "two of: model directories, checkpoints of a run or of Megatron, URLs of engines"
    weights.add_argument("sides", nargs="*", metavar="DIR|CHECKPOINT|URL", help=sides)
    weights.add_argument("--run-dir", default="", help="a run's directory: its engines against their files")
    model = "with --run-dir: compare with this directory; with a checkpoint: its model (default: the run's)"
    weights.add_argument("--model", type=Path, default=None, metavar="DIR", help=model)
    weights.add_argument("--json", action="store_true", help="print one JSON object per comparison")

    profile = words.add_parser("profile", help="profile the next steps of one rank of a running learner")
    profile.add_argument("--run-dir", required=True, help="the run's directory on the machine of rank 0")
    profile.add_argument("--steps", type=int, default=2, metavar="N", help="steps to profile (default 2)")
    profile.add_argument("--rank", type=int, default=0, metavar="R", help="rank that profiles (default 0)")
    profile.add_argument("--memory", action="store_true", help="record allocations as well")


def run(args: argparse.Namespace) -> int:
    """Run one word. Returns 0, or 1 when something differs. Raises ValueError for wrong files and arguments."""
    if args.word == "weights":
        from tidemill.launch.cli.weights import compare_weights

        return compare_weights(args)
    return {"compare": _compare, "score": _score, "profile": _profile}[args.word](args)


def _compare(args: argparse.Namespace) -> int:
    from tidemill.learner.debug.comparison import compare_modules, compare_train
    from tidemill.learner.debug.train_file import MODULES, read, read_modules, read_train, record_path

    theirs = args.theirs or record_path(args.ours)
    kinds = [read(path)[0].get("kind") for path in (args.ours, theirs)]
    if (kinds[0] == MODULES) != (kinds[1] == MODULES):
        raise ValueError(f"want two dumps of modules, or two of training data, got kinds {kinds[0]} and {kinds[1]}")
    if kinds[0] == MODULES:
        comparison = compare_modules(read_modules(args.ours), read_modules(theirs), args.tolerance)
    else:
        comparison = compare_train(read_train(args.ours), read_train(theirs), args.tolerance)
    _print(comparison, as_json=args.json)
    return int(comparison.first is not None)


def _print(comparison: "Comparison", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(comparison)))
        return
    for note in comparison.notes:
        print(note)
    if comparison.first is None:
        print(f"equal: {', '.join(comparison.compared)}")
        return
    first = comparison.first.name
    before = list(itertools.takewhile(lambda name: name != first, comparison.compared))
    if before:
        print(f"equal: {', '.join(before)}")
    print(f"DIFFERS first in {comparison.first}")
    for difference in comparison.differences[1 : 1 + SHOWN]:
        sizes = f"largest difference {difference.largest:.3g}, relative {difference.relative:.3g}"
        print(f"  then {difference.name}: {sizes}")
    if (num_hidden := len(comparison.differences) - 1 - SHOWN) > 0:
        print(f"  and {num_hidden} more")


def _score(args: argparse.Namespace) -> int:
    prompts = read_prompts(args.prompts)
    if args.config and (args.engine or args.by != "sglang"):
        raise ValueError(f"--config: want it with --by sglang, got {'--engine' if args.engine else '--by ' + args.by}")
    if args.engine:
        engine = RunningEngine(args.engine, args.key_env)
        outputs, source = engine.log_probs(prompts), args.engine
        dtype = _dtype_of_engine(engine, args.dtype) if args.out is not None else ""
    else:
        refuse_no_model("--model", args.model)
        require("learner" if args.by == "learner" else "engine")
        source = f"{args.by} {args.model}"
        score = _score_by_sglang if args.by == "sglang" else _score_here
        outputs, dtype = score(args, prompts)
    if args.out is not None:
        from tidemill.learner.debug.train_file import write_modules

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
            print(
                f"prompt {number}: {len(tokens)} tokens, mean log-prob {sum(values) / len(values):.4f}, least "
                f"{min(values):.4f}"
            )


def _score_here(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> "tuple[dict[str, Array], str]":
    dtype = args.dtype or "float32"
    if args.by == "engine":
        from tidemill.actors.serving.builtin.scoring import score_directory

        return score_directory(args.model, prompts, args.names, dtype=dtype), dtype

    logging.getLogger("megatron").setLevel(logging.WARNING)
    return score_by_learner(args.model, prompts, args.names, dtype=dtype), dtype


def _score_by_sglang(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> "tuple[dict[str, Array], str]":
    from tidemill.actors.errors import EngineError
    from tidemill.actors.serving.sglang.scoring import score_directory
    from tidemill.launch.settings.config_loader import load

    engine = load(args.config, environment=os.environ).config.engine
    log_file = engine.sglang.log or str(Path(tempfile.gettempdir()) / f"tidemill-score-{os.getpid()}.log")
    settings = replace(engine.sglang, log=log_file)
    if args.dtype:  # an argument of the server would win over engine.dtype
        arguments = {name: value for name, value in settings.arguments.items() if name != "dtype"}
        settings, engine = replace(settings, arguments=arguments), replace(engine, dtype=args.dtype)
    print(f"starting SGLang with {settings.python}; its output: {settings.log}", file=sys.stderr)
    try:
        return score_directory(args.model, prompts, args.names, replace(engine, sglang=settings))
    except EngineError as failed:
        if isinstance(failed, ValueError):
            raise
        raise ValueError(str(failed)) from None


def _dtype_of_engine(engine: "RunningEngine", dtype: str | None) -> str:
    """Return the dtype that an engine reports, else ``dtype``, else the default. Raises ValueError if they differ."""
    reported = engine.dtype()
    if reported and dtype not in (None, reported):
        raise ValueError(f"--dtype: want {reported}, which the engine reports, got {dtype}; leave it out")
    if not reported and dtype is None:
        cure = "--dtype float32 compares at 1e-4 instead of 0.03"
        print(f"the engine reports no dtype: {DEFAULT_ENGINE_DTYPE} is written into the dump; {cure}", file=sys.stderr)
    return reported or dtype or DEFAULT_ENGINE_DTYPE


def _profile(args: argparse.Namespace) -> int:
    from tidemill.launch.settings.config_loader import load
    from tidemill.launch.settings.run_config import CONFIG_FILE
    from tidemill.learner.debug.config import DIRECTORY, ProfileRequest, trace_name, write_request

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


def score_by_learner(
    directory: Path, prompts: Sequence[Sequence[int]], names: str, *, dtype: str
) -> dict[str, NDArray[np.float32]]:
    """Return the outputs of the modules, as ``megatron.activations.module_outputs``. Raises ConfigRefused."""
    import torch

    from tidemill.learner.backends.megatron import groups
    from tidemill.learner.backends.megatron.backend import module_outputs
    from tidemill.learner.backends.megatron.model import build_policy
    from tidemill.learner.layout.parallel import choose_device

    with KeptPort() as port:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        torch.use_deterministic_algorithms(True)
        world = groups.join(tensor_parallel_size=1, device=choose_device("auto"), seed=0)
    try:
        return module_outputs(build_policy(directory, dtype=dtype, parallel=world), prompts, names)
    finally:
        groups.leave()


ANSWER_S = 120.0  # seconds for an engine to score a prompt
MAX_ANSWER_BYTES = 256 << 20
# Dtypes by their names in an engine's answer. SGLang's `auto` depends on the model and the device.
DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


class RunningEngine:
    """The address of an engine, and the key for it."""

    def __init__(self, url: str, key_env: str) -> None:
        """``key_env``: variable with the key; empty = none. Raises ValueError for a variable that is not set."""
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **bearer(key_env, "--key-env")}
        self._opener = direct_opener(_NotFollowed())

    def log_probs(self, prompts: Sequence[Sequence[int]]) -> "dict[str, Array]":
        """Return the log-probs of the prompts' own tokens but the first: ``<prompt>.log_probs`` -> [T - 1, 1], float32.

        Raises ValueError for an engine that does not return them.
        """
        outputs: dict[str, Array] = {}
        for number, tokens in enumerate(prompts):
            body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
            try:
                answer = self._json("/generate", body | {"return_logprob": True, "logprob_start_len": 0})
                values = [float(pair[0]) for pair in answer["meta_info"]["input_token_logprobs"][1:]]
            except (HTTPException, OSError, ValueError, LookupError, TypeError) as error:
                got = repr(error)
                if isinstance(error, urllib.error.HTTPError):
                    got = f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
                raise ValueError(f"--engine: want an engine that scores prompts at {self._url}, got {got}") from None
            if len(values) != len(tokens) - 1:
                got = f"{len(values)}; score its weights with --model DIR"
                raise ValueError(f"--engine: want {len(tokens) - 1} log-probs of prompt {number}, got {got}")
            outputs[f"{number}.log_probs"] = np.array(values, np.float32)[:, None]
        return outputs

    def dtype(self) -> str:
        """Return the dtype in the engine's answer to GET /server_info; empty if there is none."""
        try:
            answer = self._json("/server_info")
        except (HTTPException, OSError, ValueError):
            return ""
        return DTYPES.get(str(answer.get("dtype")).removeprefix("torch."), "") if isinstance(answer, Mapping) else ""

    def _json(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        with self._opener.open(request, timeout=ANSWER_S) as response:
            return json.loads(response.read(MAX_ANSWER_BYTES))  # a longer one is cut off, and no JSON


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would take the key to another server."""

    def redirect_request(self, *_: object) -> None:
        """Return no request; the answer is an error then."""
