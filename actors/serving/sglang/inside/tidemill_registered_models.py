"""Program for SGLang's interpreter: prints its release, the architectures that its registry has, and which of those
given as arguments limit attention to a window, as JSON.

The registry imports the modules of all models, which takes half a minute of a core. So their source is read: names from
the lines by which a module registers its classes, windows from the calls that make a class's layers of attention.
Modules that cannot be imported there are read, too.
"""

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "sglang.srt.models."
WINDOWS = ("sliding_window_size", "use_irope")
"""Names by which RadixAttention, SGLang's layer of attention, gets its window; the second one is Llama 4's."""
_REGISTERED = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\w+|[\[(][^\])]*[\])])", re.MULTILINE)
_COMMENT = re.compile(r"#.*")


class Module:
    """What a module of models defines, and which names it has from other such modules."""

    def __init__(self, source: str) -> None:
        self.defined: dict[str, ast.AST] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in (tree := ast.parse(source)).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self.defined[node.name] = node
            elif isinstance(node, ast.Assign):
                self.defined |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        for part in ast.walk(tree):
            if isinstance(part, ast.ImportFrom) and (part.module or "").startswith(PACKAGE):
                origin = str(part.module).removeprefix(PACKAGE)
                self.imported |= {alias.asname or alias.name: (origin, alias.name) for alias in part.names}


def sets_window(node: ast.AST) -> bool:
    """Return whether a definition gives a layer of attention a window, in its call or afterwards."""
    for part in ast.walk(node):
        if isinstance(part, ast.keyword) and part.arg in WINDOWS and not isinstance(part.value, ast.Constant):
            return True
        if isinstance(part, ast.Attribute) and part.attr in WINDOWS and isinstance(part.ctx, ast.Store):
            return True
    return False


def reachable(files: dict[str, Path], module: str, name: str) -> Iterator[ast.AST]:
    """Yield the definition of a name, and of all names in it, through imports from other modules of models."""
    read = cache(lambda module: Module(files[module].read_text(encoding="utf-8")))
    waiting: list[tuple[str, str]] = [(module, name)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        place = module, name = waiting.pop()
        if place in seen or module not in files:
            continue
        seen.add(place)
        if (node := read(module).defined.get(name)) is not None:
            yield node
            waiting += [(module, part.id) for part in ast.walk(node) if isinstance(part, ast.Name)]
        elif name in read(module).imported:
            waiting.append(read(module).imported[name])


def main() -> None:
    """Print release, architectures and those with windows, without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("there is no package sglang")
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    files = {file.stem: file for file in folder.glob("*.py")}
    module_of: dict[str, str] = {}
    for module, file in files.items():
        listed = "\n".join(_REGISTERED.findall(file.read_text(encoding="utf-8")))
        module_of |= dict.fromkeys(re.findall(r"\w+", _COMMENT.sub("", listed)), module)
    asked = [name for name in sys.argv[1:] if name in module_of]
    windowed = [name for name in asked if any(map(sets_window, reachable(files, module_of[name], name)))]
    release = importlib.metadata.version("sglang")
    print(json.dumps({"release": release, "architectures": sorted(module_of), "windowed": windowed}))


if __name__ == "__main__":
    main()
