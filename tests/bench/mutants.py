"""Do the tests of ``learner/algorithms`` detect a wrong formula? Each mutant is one change of the source; the tests
must fail.

A mutant replaces an operator, a comparison, a constant, a function (min by max, sum by mean, ...), drops a ``detach``
or a ``not``, or negates a condition. It replaces the module in a forked child, which runs the tests that import the
module, with ``-x``. Survivors are printed with their line: each is a missing test, or a change without effect.
"""

import argparse
import ast
import functools
import importlib.util
import os
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "learner" / "algorithms"
READ_BY = {"contradictions": "config"}
"""Modules that one other imports alone: its tests are theirs."""
MODULES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")
CPU_S = 120
"""Processor seconds after which a child counts as one whose tests failed: an endless loop."""

BINARY: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARE: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
FLIPPED: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "sequence_sums": "sequence_means",
    "sequence_means": "sequence_sums",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "exp": "expm1",
}
DROPPED = ("detach", "clamp", "abs", "square", "sqrt", "log", "neg")


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    number: int
    line: int
    what: str


class _Mutator(ast.NodeTransformer):
    """Transformer that makes the ``wanted``-th possible change; counts all of them and describes each."""

    def __init__(self, wanted: int = -1, *, everywhere: bool = False) -> None:
        """``everywhere``: outside of functions, too, as in a module of constants alone."""
        self.wanted, self.found, self._inside = wanted, [], everywhere  # type: ignore[var-annotated]

    def _take(self, node: ast.AST, what: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), what))
        return len(self.found) - 1 == self.wanted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self._inside = self._inside, True
        node.body = [self.visit(one) for one in node.body]
        self._inside = before
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = BINARY.get(type(node.op)) if self._inside else None
        if other is not None and self._take(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for table in (COMPARE, FLIPPED) if self._inside and len(node.ops) == 1 else ():
            other = table.get(type(node.ops[0]))
            if other is not None and self._take(node, f"{type(node.ops[0]).__name__} -> {other.__name__}"):
                node.ops = [other()]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if (
            self._inside
            and isinstance(node.op, ast.USub | ast.Not | ast.Invert)
            and self._take(node, f"drop {type(node.op).__name__}")
        ):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self._inside and type(node.value) in (int, float) and self._take(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._inside and self._take(node, "negate the condition"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self._inside:
            return node
        if isinstance(node.func, ast.Attribute):
            method = not isinstance(node.func.value, ast.Name | ast.Constant)
            can = (node.func.attr in DROPPED and method) or node.func.attr == "detach"
            if can and self._take(node, f"drop .{node.func.attr}"):
                return node.func.value
            if node.func.attr in NAMES and self._take(node, f"{node.func.attr} -> {NAMES[node.func.attr]}"):
                node.func.attr = NAMES[node.func.attr]
        elif isinstance(node.func, ast.Name) and node.func.id in NAMES:
            other = NAMES[node.func.id]
            if other in ("sequence_sums", "sequence_means", "min", "max", "any", "all") and self._take(
                node, f"{node.func.id} -> {other}"
            ):
                node.func.id = other
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node


def files_for(module: str) -> list[str]:
    """Return the files of tests that import a module or are named after it, the latter first."""
    module = READ_BY.get(module, module)
    files = [*ROOT.glob("tests/unit/test_*.py"), *ROOT.glob("tests/contract/test_custom_algorithms.py")]
    found = [
        file
        for file in files
        if f"tidemill.learner.algorithms.{module}" in _imports(file) or file.stem.endswith(f"_{module}")
    ]
    return [
        str(file.relative_to(ROOT))
        for file in sorted(found, key=lambda file: (module not in file.stem, "algorithms" not in file.stem, file))
    ]


@functools.cache
def _imports(file: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {str(node.module) for node in nodes} | {
        f"{node.module}.{alias.name}" for node in nodes for alias in node.names
    }


def _parsed(module: str, number: int = -1) -> tuple[_Mutator, ast.Module]:
    """Return the mutator that has visited a module, and the module with mutant ``number``."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    mutator = _Mutator(number, everywhere=not any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)))
    return mutator, ast.fix_missing_locations(mutator.visit(tree))


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    for number, (line, what) in enumerate(_parsed(module)[0].found):
        yield Mutant(module, number, line, what)


def child(mutant: Mutant | None, files: list[str]) -> None:
    """Run in a forked process: replace the module by the mutant and run the tests; exit code 0 = they passed."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    if mutant is not None:
        name = f"tidemill.learner.algorithms.{mutant.module}"
        spec = importlib.util.find_spec(name)
        assert spec is not None
        made = ModuleType(name)
        made.__spec__, made.__file__ = spec, spec.origin
        sys.modules[name] = made
        try:
            exec(compile(_parsed(mutant.module, mutant.number)[1], str(spec.origin), "exec"), made.__dict__)
        except Exception:
            os._exit(1)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os._exit(int(pytest.main([*quiet, *files])))


def run(work: list[Mutant], jobs: int) -> list[Mutant]:
    """Return the survivors."""
    running: dict[int, Mutant] = {}
    waiting, survivors, done = list(work), [], 0
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            pid = os.fork()
            if pid == 0:
                child(mutant, files_for(mutant.module))
            running[pid] = mutant
        pid, status = os.wait()
        mutant, done = running.pop(pid), done + 1
        if status == 0:
            survivors.append(mutant)
        verdict = "survives" if status == 0 else "killed"
        print(f"{verdict}: {mutant.module}.py:{mutant.line} {mutant.what} ({done} of {len(work)} done)", flush=True)
    return survivors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", nargs="*", default=MODULES, choices=MODULES)
    parser.add_argument("--sample", type=int, default=0, help="so many of each module, drawn at random; 0 = all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    os.chdir(ROOT)
    warnings.simplefilter("ignore")
    import hypothesis
    import megatron.core.models.gpt.gpt_model  # noqa: F401  # once, and not in each child; nothing of learner, which would keep the module
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", deadline=None, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    pid = os.fork()
    if pid == 0:
        child(None, sorted({file for module in args.modules for file in files_for(module)}))
    assert os.waitpid(pid, 0)[1] == 0, "the tests fail without any mutation"
    made = {module: list(mutants(module)) for module in args.modules}
    work = {
        module: random.Random(args.seed).sample(all_, min(args.sample or len(all_), len(all_)))
        for module, all_ in made.items()
    }
    survivors = Counter(
        mutant.module for mutant in run([mutant for chosen in work.values() for mutant in chosen], args.jobs)
    )
    for module, chosen in work.items():
        killed = len(chosen) - survivors[module]
        print(f"RATIO {module}: {killed} of {len(chosen)} mutants killed ({len(made[module])} there are)", flush=True)
    of = sum(map(len, work.values()))
    print(f"RATIO of all: {of - survivors.total()} of {of} mutants killed, {survivors.total()} survived", flush=True)


if __name__ == "__main__":
    main()
