"""Names in docs/metrics.md."""

import re
from collections.abc import Iterable
from pathlib import Path

METRICS = Path(__file__).resolve().parents[1] / "docs/metrics.md"


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the names that no table has in its first column; ``<lag>`` and the like stand for any text."""
    forms = [_form(name) for name in _listed()]
    return {name for name in names if not any(form.fullmatch(name) for form in forms)}


def missing(names: Iterable[str], sections: tuple[str, ...]) -> set[str]:
    """Return the documented names of these sections (``train/``, ...) that none of ``names`` is."""
    names = list(names)
    return {
        name for name in _listed() if name.startswith(sections) and not any(_form(name).fullmatch(one) for one in names)
    }


def _listed() -> list[str]:
    cells = re.findall(r"^\| (`[^|]+`) \|", METRICS.read_text(), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def _form(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"[\\w.-]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")))
