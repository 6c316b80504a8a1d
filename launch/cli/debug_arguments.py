"""Arguments of ``tidemill debug``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: "Commands") -> None:
    """Add the command and its words."""
    debug = commands.add_parser("debug", help="find where numbers go wrong: compare dumps and weights, score prompts (docs/debugging.md)")
    words = debug.add_subparsers(dest="word", required=True, metavar="WORD")

    compare = words.add_parser("compare", help="the first thing that differs between two dumps, and by how much")
    compare.add_argument("ours", type=Path, metavar="A", help="a file of debug.save_train, its record, or a dump of modules")
    compare.add_argument("theirs", type=Path, metavar="B", nargs="?", help="another one; without it, the record that belongs to A")
    compare.add_argument("--tolerance", type=float, default=None, metavar="X", help="modules: relative error; else: absolute difference")
    compare.add_argument("--json", action="store_true", help="print one JSON object")

    score = words.add_parser("score", help="log-probs of the tokens of fixed prompts, and the outputs of modules")
    where = score.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", type=Path, metavar="DIR", help="directory of a Hugging Face model, loaded here")
    where.add_argument("--engine", default="", metavar="URL", help="a running engine, SGLang or built-in: log-probs only")
    score.add_argument("--key-env", default="", metavar="VARIABLE", help="with --engine: variable with the run's api key, if it wants one")
    score.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="a JSON list of token ids per line")
    score.add_argument("--out", type=Path, default=None, metavar="FILE", help="write a dump for tidemill debug compare")
    implementation = "with --model: which implementation computes; engine: the built-in one; sglang: a server started for it"
    score.add_argument("--by", choices=("engine", "learner", "sglang"), default="engine", help=implementation)
    config = "with --by sglang: a configuration; its engine.sglang has the interpreter, arguments and environment of the server"
    score.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=config)
    names = "with --model: outputs to write, such as 'layers.0.*' or '*' for all modules (default: log_probs alone)"
    score.add_argument("--names", default="log_probs", metavar="PATTERN", help=names)
    dtype = "with --model: dtype to compute in (default float32; --by sglang: that of the configuration); "
    dtype += "with --engine: that of an engine that reports none (default bfloat16)"
    score.add_argument("--dtype", choices=("float32", "bfloat16"), default=None, help=dtype)
    score.add_argument("--json", action="store_true", help="print one JSON object per prompt")

    weights = words.add_parser("weights", help="compare weights: directories, checkpoints, engines, or a run's engines with its files")
    sides = "two of: model directories, checkpoints of a run or of Megatron, URLs of engines"
    weights.add_argument("sides", nargs="*", metavar="DIR|CHECKPOINT|URL", help=sides)
    weights.add_argument("--run-dir", default="", help="a run's directory: each engine against the files of the version it serves")
    model = "with --run-dir: compare with this directory; with a checkpoint: its model (default: the run's)"
    weights.add_argument("--model", type=Path, default=None, metavar="DIR", help=model)
    weights.add_argument("--json", action="store_true", help="print one JSON object per comparison")

    profile = words.add_parser("profile", help="profile the next steps of one rank of a running learner")
    profile.add_argument("--run-dir", required=True, help="the run's directory on the machine of rank 0")
    profile.add_argument("--steps", type=int, default=2, metavar="N", help="steps to profile (default 2)")
    profile.add_argument("--rank", type=int, default=0, metavar="R", help="rank that profiles (default 0)")
    profile.add_argument("--memory", action="store_true", help="record allocations as well")
