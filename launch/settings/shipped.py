"""Configurations inside the package, which commands find by name, and the data beside them."""

import difflib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS, DATA = PACKAGE / "configs", PACKAGE / "data"


def names() -> list[str]:
    """Return the names of the configurations."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def config_file(text: str) -> Path:
    """Return the file of a configuration: the one at this path, else the one of this name in the package.

    A text that is neither stays a path, which ``yaml_file.read`` refuses with the names.
    """
    path = Path(text)
    is_name = text in names() and (path.is_dir() or not path.exists())
    return CONFIGS / f"{text}.yaml" if is_name else path


def cure(text: str) -> str:
    """Return what to write in place of a file of settings that does not exist."""
    near = difflib.get_close_matches(Path(text).stem, names(), n=1)
    return f"want a YAML file or one of {', '.join(names())}, got no such file" + (
        f"; did you mean {near[0]}?" if near else ""
    )
