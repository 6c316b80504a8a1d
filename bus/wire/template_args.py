"""The variables of a chat template that a task gives to the chats of its episode."""

import json

from tidemill.bus.errors import WireError
from tidemill.bus.wire.json_object import JsonMapping

OF_TEMPLATE = frozenset(
    ("self", "messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict", "return_tensors")
)
"""Arguments of a chat template that the program sets: none of them is a variable in ``chat_template_args``."""


def check_template_args(given: JsonMapping) -> None:
    """Raises WireError for an argument that the program sets, and for a value that is none of JSON."""
    if set_by_program := OF_TEMPLATE & given.keys():
        raise WireError("chat_template_args", f"none of {', '.join(sorted(OF_TEMPLATE))}", sorted(set_by_program))
    try:
        json.dumps(given)
    except (TypeError, ValueError) as error:
        raise WireError("chat_template_args", "values of JSON", error) from None
