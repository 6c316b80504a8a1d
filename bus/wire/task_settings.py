"""Names, limits and template arguments that settings and tasks share. Without numpy and pydantic: commands and keepers
of rewards start fast.
"""

import json
import re
from dataclasses import dataclass

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping

RUN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # A run's name can be part of a subject and of a stream's name
BY_ROLLOUT = "by_rollout"  # ``actor.reward`` of a run in which every episode gets its reward from its rollout
# Arguments of a chat template that the program sets: none is a variable in ``chat_template_args``
OF_TEMPLATE = frozenset(
    (
        "self",
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "tokenize",
        "return_dict",
        "return_tensors",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of an episode; 0 = none."""

    turns: int = 0
    tokens: int = 0
    """Sampled tokens."""
    context: int = 0
    """Tokens of one sequence."""
    total_tokens: int = 0
    """Tokens of all sequences, L."""
    seconds: float = 0.0


def check_template_args(template_args: JsonMapping) -> None:
    """Raises WireError for an argument that the program sets, and for a value that is none of JSON."""
    if set_by_program := OF_TEMPLATE & template_args.keys():
        raise WireError("chat_template_args", f"none of {', '.join(sorted(OF_TEMPLATE))}", sorted(set_by_program))
    try:
        json.dumps(template_args)
    except (TypeError, ValueError) as error:
        raise WireError("chat_template_args", "values of JSON", error) from None
