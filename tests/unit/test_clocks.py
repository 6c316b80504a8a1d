"""No decision depends on the wall clock: it may jump, and those of two machines differ. Every use is listed here with
its purpose.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "weightstore", "rewards", "actors", "learner", "launch")

WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today", "fromtimestamp", "utcfromtimestamp"},
    "date": {"today", "fromtimestamp"},
}
"""Functions, by the module or class on which they are called."""
READ_FOR = {
    "launch/run/web_hook.py": "the time in a notice, for a person",
    "launch/run/run_end.py": "the time in the row of a run's end, for a person",
    "learner/feed/outcomes.py": "the same, of a run that is done",
    "actors/actor/loop.py": "created_s of a sample: shown by `tidemill tail`, compared with nothing",
    "actors/actor/sample_scoring.py": "created_s of a sample, when its reward is there",
    "learner/feed/recorded_responses.py": "created_s of a sample that a row has recorded, as above",
    "launch/samples/text.py": (
        "times of samples as a person reads them, and `--since 10:00`: where an onlooker begins, nothing else"
    ),
    "launch/metrics/sinks.py": "the time of a step as MLflow shows it",
    "launch/page/reader.py": "ages of a run's data as a page shows them, beside the server's stamps",
    "launch/run/backup.py": "time of a backup, for the person that restores it",
    "actors/serving/server.py": "created of an answer in OpenAI's shape, as OpenAI gives it",
    "rewards/model_text.py": "strftime_now of chat templates, as transformers has it",
    "actors/router/token_history.py": "created of an answer in OpenAI's shape, as OpenAI gives it",
    "actors/serving/builtin/backend.py": "timestamp in the answer to SGLang's /v1/loads, as SGLang gives it",
}
ONLOOKERS = ("bus/streams/readers.py", "launch/samples/", "launch/cli/", "launch/metrics/", "launch/page/")
"""Modules that show, search and count the server's stamps (its clock alone), for a person; the run does not depend on
them.
"""
STAMPS = {
    "created_s": {"actors/actor/loop.py", "bus/wire/invariants.py"},
    "stored_s": {
        "bus/client/jetstream.py",
        "bus/client/pull.py",
        "bus/client/rows.py",
        *("bus/streams/shard_reading.py", "bus/streams/fenced.py"),
    },
}
"""Wall-clock stamps that travel (the writer's, the server's), and the only files that may touch them: to set, bound,
carry or show them.
"""


def test_the_wall_clock_is_read_only_to_be_shown() -> None:
    found: dict[str, list[str]] = {}
    for file, tree in _modules():
        if read := [
            f"line {node.lineno}: {_name(node.func)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _reads(node.func)
        ]:
            found[file] = read
        from_time = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "time"]
        assert not from_time, (
            f"{file}: want `import time`, so that what it reads can be seen, got line {from_time[0].lineno}"
        )
    assert found.keys() == READ_FOR.keys(), f"want the wall clock read in {sorted(READ_FOR)}, got {found}"


def test_stamps_of_the_wall_clock_are_not_calculated_with() -> None:
    """Files that touch a stamp are known; and none of them compares one, or adds or subtracts it."""
    for file, tree in _modules():
        for node in ast.walk(tree):
            if file.startswith(ONLOOKERS):
                continue
            if isinstance(node, ast.Attribute) and node.attr in STAMPS:
                assert file in STAMPS[node.attr], f"{file}:{node.lineno}: touches {node.attr}"
            if isinstance(node, ast.BinOp | ast.Compare):
                inside = [one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr in STAMPS]
                assert not inside, f"{file}:{node.lineno}: calculates with {inside[0]}"


def test_files_are_not_compared_by_their_times() -> None:
    times = {"st_mtime", "st_ctime", "st_atime", "st_mtime_ns", "st_ctime_ns", "getmtime", "getctime", "getatime"}
    for file, tree in _modules():
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in times]
        assert not names, f"{file}:{names[0].lineno}: {names[0].attr}"


@functools.cache
def _modules() -> list[tuple[str, ast.Module]]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 100
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in files]


def _reads(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value.attr if isinstance(called.value, ast.Attribute) else getattr(called.value, "id", "")
    return called.attr in WALL.get(owner, ())


def _name(called: ast.expr) -> str:
    return ast.unparse(called)
