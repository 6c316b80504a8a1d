"""The files of the page, read once, for the server and for exports.

``app.js`` is all modules as one, each behind its imports: a browser that reads imports asks for them level by
level, and each level is a round trip before the first chart.
"""

import hashlib
import re
import zlib
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)
_DECLARED = re.compile(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file with its type, its tag for a browser that has it already, and its compressed form."""

    body: bytes
    content_type: str
    tag: str
    deflated: bytes

    @classmethod
    def of(cls, body: bytes, suffix: str) -> "StaticFile":
        """Return a file by its content. Raises KeyError for a suffix that no file of a page has."""
        return cls(body, TYPES[suffix], hashlib.sha256(body).hexdigest()[:16], zlib.compress(body, 9))


def read_files() -> dict[str, StaticFile]:
    """Return the page's files by name. Raises ValueError for modules that cannot be joined."""
    bodies = {file.name: file.read_bytes() for file in STATIC.iterdir() if file.suffix in TYPES}
    bodies["app.js"] = joined(STATIC).encode()
    return {name: StaticFile.of(body, Path(name).suffix) for name, body in bodies.items()}


def joined(folder: Path) -> str:
    """Return all modules that ``app.js`` imports as one, each behind its imports.

    Raises ValueError for an import in another form, a cycle, or a name that two modules declare.
    """
    texts: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    waiting = ["app"]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        text = (folder / f"{name}.js").read_text()
        needs[name] = _IMPORT.findall(text)
        texts[name] = _EXPORT.sub("", _IMPORT.sub("", text))
        if re.search(r"^(import|export)\b", texts[name], re.MULTILINE) or "</script" in texts[name]:
            raise ValueError(f"{name}.js: want imports and exports of one line with names, and no end of a script")
        waiting += needs[name]
    owners: dict[str, str] = {}
    for name, text in texts.items():
        for declared in _DECLARED.findall(text):
            if owners.setdefault(declared, name) != name:
                raise ValueError(f"{declared}: want one module that declares it, got {owners[declared]} and {name}")
    try:
        return "\n".join(texts[name] for name in TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ValueError(f"modules: want no cycle of imports, got {error.args[1]}") from None
