"""Program for SGLang's interpreter: prints its release, the architectures that its registry has, and for those given
as arguments that limit attention to a window the attention backends in which it holds, as JSON.

The registry imports the modules of all models, which takes half a minute of a core. So their source is read: names from
the lines by which a module registers its classes, windows from the calls that make a class's layers of attention, and
from the modules of the backends. Modules that cannot be imported there are read, too.
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
CHUNKED = "is_local_attention_model"
"""SGLang's function with the architectures whose chunks FlashAttention computes: not all that have some."""
WINDOWS = {"sliding_window_size": {"sliding_window_size"}, "use_irope": {"use_irope", CHUNKED}}
"""Names by which RadixAttention, SGLang's layer of attention, gets its window (the second one is Llama 4's), and
attributes or parameters of which each backend that computes it reads one.
"""
BACKENDS, OTHER_DEVICES = "sglang.srt.layers.attention.", "sglang.srt.hardware_backend."
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


def windows_in(node: ast.AST) -> set[str]:
    """Return the names by which a definition gives a layer of attention a window, in its call or afterwards."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.keyword) and part.arg in WINDOWS and not isinstance(part.value, ast.Constant):
            names.add(part.arg)
        if isinstance(part, ast.Attribute) and part.attr in WINDOWS and isinstance(part.ctx, ast.Store):
            names.add(part.attr)
    return names


@cache
def names_read(source: str) -> set[str]:
    """Return the attributes that a module reads, and the parameters of its functions."""
    parts = list(ast.walk(ast.parse(source)))
    attributes = {part.attr for part in parts if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)}
    return attributes | {part.arg for part in parts if isinstance(part, ast.arg)}


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


class Backends:
    """The attention backends of a release, by the names under which it registers them."""

    def __init__(self, package: Path) -> None:
        """``package``: the directory ``sglang``."""
        self._package = package
        registry = package / "srt/layers/attention/attention_registry.py"
        self._modules = dict(self._registered(registry)) if registry.is_file() else {}

    def with_window(self, architecture: str, names: set[str]) -> list[str] | None:
        """Return those in which an architecture has its window, which its layers get by one of the names; None if the
        release has no list of backends.
        """
        if not self._modules:
            return None
        return sorted(
            backend
            for backend, modules in self._modules.items()
            if any(self._reads(module, name, architecture) for module in modules for name in names)
        )

    def _registered(self, registry: Path) -> Iterator[tuple[str, list[str]]]:
        for node in ast.parse(registry.read_text(encoding="utf-8")).body:
            calls = [call for call in getattr(node, "decorator_list", ()) if isinstance(call, ast.Call)]
            names = [str(call.args[0].value) for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
            imported = [str(part.module) for part in ast.walk(node) if isinstance(part, ast.ImportFrom)]
            own = [module for module in imported if module.startswith(BACKENDS)]
            modules = own or [module for module in imported if module.startswith(OTHER_DEVICES)]
            yield from ((name, modules) for name in names)

    def _reads(self, module: str, name: str, architecture: str) -> bool:
        read = names_read(self._source(module))
        is_gated = name == "use_irope" and CHUNKED in read
        return bool(WINDOWS[name] & read) and (not is_gated or architecture in self._chunked())

    def _chunked(self) -> list[str]:
        for node in ast.walk(ast.parse(self._source("sglang.srt.configs.model_config"))):
            if isinstance(node, ast.FunctionDef) and node.name == CHUNKED:
                return [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
        return []

    def _source(self, module: str) -> str:
        path = self._package.parent.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return file.read_text(encoding="utf-8") if file.is_file() else ""


def main() -> None:
    """Print release, architectures and those with windows, without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("there is no package sglang")
    package = Path(spec.submodule_search_locations[0])
    files = {file.stem: file for file in (package / "srt/models").glob("*.py")}
    module_of: dict[str, str] = {}
    for module, file in files.items():
        listed = "\n".join(_REGISTERED.findall(file.read_text(encoding="utf-8")))
        module_of |= dict.fromkeys(re.findall(r"\w+", _COMMENT.sub("", listed)), module)
    asked = [name for name in sys.argv[1:] if name in module_of]
    windows = {name: set().union(*map(windows_in, reachable(files, module_of[name], name))) for name in asked}
    backends = Backends(package)
    windowed = {name: backends.with_window(name, names) for name, names in windows.items() if names}
    release = importlib.metadata.version("sglang")
    print(json.dumps({"release": release, "architectures": sorted(module_of), "windowed": windowed}))


if __name__ == "__main__":
    main()
