"""The model types that the installed transformers has a language model for. Imports neither it nor torch."""

import ast
import functools
import importlib.util
from pathlib import Path

_FILE, _NAMES = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@functools.cache
def language_models() -> frozenset[str]:
    """Return the values of ``model_type``, read from transformers' source; empty where it is not installed."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return frozenset()
    source = Path(found.submodule_search_locations[0], _FILE).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == _NAMES for target in node.targets):
            assert isinstance(node.value, ast.Call)
            return frozenset(name for name, _ in ast.literal_eval(node.value.args[0]))
    raise ImportError(f"transformers has no {_NAMES} in {_FILE}")
