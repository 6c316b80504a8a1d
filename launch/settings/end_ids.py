"""The tokens that end a response, by the files of a model directory. Loads no torch."""

import json
from pathlib import Path


def end_ids(model: Path) -> tuple[int, ...]:
    """Return the ids, those of the model's configuration before others of its generation settings; empty if the files name none."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(found))
