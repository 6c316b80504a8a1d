"""Program for SGLang's interpreter: prints its release and the architectures that its registry has, as JSON.

The registry imports the modules of all models, which takes half a minute of a core. So the names are read from the
lines by which a module registers its classes. Modules that cannot be imported there are
listed, too.
"""

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

_REGISTERED = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\w+|[\[(][^\])]*[\])])", re.MULTILINE)
_COMMENT = re.compile(r"#.*")


def main() -> None:
    """Print release and architectures, without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("there is no package sglang")
    files = Path(spec.submodule_search_locations[0], "srt", "models").glob("*.py")
    listed = [names for file in files for names in _REGISTERED.findall(file.read_text(encoding="utf-8"))]
    names = {name for text in listed for name in re.findall(r"\w+", _COMMENT.sub("", text))}
    print(json.dumps({"release": importlib.metadata.version("sglang"), "architectures": sorted(names)}))


if __name__ == "__main__":
    main()
