"""``tidemill teacher``: serves a fixed model that scores samples (``tidemill.launch.run.teacher``)."""

import argparse
from pathlib import Path

from tidemill.launch.settings.extras import require

DRAIN_S = 30.0
"""Seconds that a teacher has to finish its requests."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="model with the vocabulary of the trained one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=30000, help="0 = any free port")
    parser.add_argument("--insecure", action="store_true", help="let other machines ask, without a key")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where it computes")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on GPUs"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads")
    parser.add_argument("--max-context", type=int, default=0, metavar="N", help="tokens of a sequence; 0 = the model's")


def run(args: argparse.Namespace) -> int:
    """Serve a fixed model until drained. Returns the exit code of ``process.run``. Raises ValueError."""
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"MODEL_DIR: want a directory with a Hugging Face model (config.json in it), got {str(args.model)!r}"
        )
    if not 0 <= args.port < 65536 or args.max_context < 0:
        raise ValueError(f"want --port 0 to 65535 and --max-context >= 0, got {args.port}, {args.max_context}")
    require("engine")
    from tidemill.actors.config import EngineConfig
    from tidemill.actors.errors import UnsupportedModel
    from tidemill.launch.run import process
    from tidemill.launch.run.teacher import run_teacher

    names = ("host", "port", "insecure", "device", "dtype", "threads", "max_context")
    config = EngineConfig(**{name: getattr(args, name) for name in names})
    process.set_up_logging("teacher", args.model.name)
    try:
        return process.run_refusing(
            lambda draining: run_teacher(args.model, config, draining, drain_s=DRAIN_S),
            drain_s=DRAIN_S + 5,
            refusals=(ValueError, UnsupportedModel),
        )
    except UnsupportedModel as error:
        raise ValueError(str(error)) from None
