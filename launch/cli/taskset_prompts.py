"""``tidemill data verifiers``: the tasks of a taskset of verifiers as a prompt file, printed by the interpreter that has verifiers."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tidemill.actors.rollout_settings import OF_VERIFIERS, VERIFIERS, parse_rollouts
from tidemill.learner.errors import PromptError
from tidemill.rewards.children.keeper_process import environment

PROGRAM = VERIFIERS.rpartition(":")[0]


def write_prompts(args: argparse.Namespace) -> int:
    """Write the file whole, or not at all. Returns 0. Raises ValueError for bad arguments, PromptError for an unreadable taskset."""
    python, out = args.python or sys.executable, Path(args.out)
    if args.count < 0:
        raise ValueError(f"--count: want a whole number >= 0 (0 = all), got {args.count}")
    try:
        options = json.loads(args.options)
    except ValueError as error:
        raise ValueError(f"--options: want JSON, as in rollouts.NAME.options: {error}") from None
    parse_rollouts({"taskset": {"use": f"{OF_VERIFIERS}{args.taskset}", "options": options}}, "the arguments' rollouts")
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            command = [python, PROGRAM, args.taskset, json.dumps(options), str(args.count)]
            done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=environment(os.environ))
        if done.returncode:
            why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise PromptError(args.taskset, f"a taskset that {python} can read", f"{why}{_cure(why)}")
        with part.open(encoding="utf-8") as file:
            count = sum(1 for _ in file)
        if not count:
            raise PromptError(args.taskset, "a taskset with tasks", "none")
        part.replace(out)
    except OSError as error:
        raise PromptError(str(error.filename or out), "a file or program that can be opened", error.strerror or error) from None
    finally:
        part.unlink(missing_ok=True)
    settings = f"data.path={out}, data.metadata_key=metadata"
    print(f"{out}: {count} prompts of {args.taskset}; train on them with {settings} and a rollout with use: {OF_VERIFIERS}{args.taskset}")
    return 0


def _cure(why: str) -> str:
    return "; name the interpreter that has verifiers with --python" if "No module named 'verifiers'" in why else ""
