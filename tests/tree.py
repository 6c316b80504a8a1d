"""Print the tree of the six packages: each folder and file with the first sentence of its docstring (``make tree``)."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bus", "weightstore", "rewards", "actors", "learner", "launch", "tests/bench")


def role_of(file: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    docstring = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    first, stop, _ = docstring.partition(". ")
    return first + stop.strip() if stop else docstring


def tree(names: tuple[str, ...] = PACKAGES) -> list[str]:
    """Return the printed lines of the folders ``names``, files in alphabetical order below their folder."""
    lines = []
    for folder in (
        folder for name in names for folder in sorted({file.parent for file in (ROOT / name).rglob("*.py")})
    ):
        files = sorted(file for file in folder.glob("*.py") if file.stem not in ("__init__", "__main__"))
        package = folder / "__init__.py"
        lines += ["", f"{folder.relative_to(ROOT)}/  {role_of(package) if package.exists() else ''}".rstrip()]
        lines += [f"  {file.name:28} {role_of(file)}" for file in files]
    return lines[1:]


if __name__ == "__main__":
    print("\n".join(tree(tuple(sys.argv[1:]) or PACKAGES)))
