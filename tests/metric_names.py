"""Names in docs/metrics.md."""

import re
from collections.abc import Iterable
from pathlib import Path

METRICS = Path(__file__).resolve().parents[1] / "docs/metrics.md"


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the names that no table has in its first column; ``<lag>`` and the like stand for any text."""
    cells = re.findall(r"^\| (`[^|]+`) \|", METRICS.read_text(), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    forms = [re.compile(re.sub(r"<\w+>", r"[\\w.-]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))) for name in listed]
    return {name for name in names if not any(form.fullmatch(name) for form in forms)}
