"""Messages of an episode for viewers, bounded. The learner never reads them."""

import json

from tidemill.actors.http_api import json_map
from tidemill.actors.router.dialects import DIALECTS
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping, JsonObject

MAX_BYTES = 256_000
"""Most bytes of a transcript as JSON. A longer one is cut in the middle."""


def messages_of(body: bytes, path: str, answer: str) -> tuple[JsonObject, ...]:
    """Return the messages of a request that has been answered, and the answer; without messages the prompt, if it is text."""
    given: JsonMapping = json_map(body) if body else {}
    if path in DIALECTS:
        given = DIALECTS[path].chat_of(given)
    messages = given.get("messages") if path in DIALECTS or path.endswith("/chat/completions") else None
    if not isinstance(messages, list):
        prompt = next((given[name] for name in ("prompt", "text", "input") if isinstance(given.get(name), str)), None)
        messages = [] if prompt is None else [{"role": "user", "content": prompt}]
    return bounded([*(chat_messages(messages) if messages else []), {"role": "assistant", "content": answer}])


def bounded(messages: list[JsonObject], max_bytes: int = MAX_BYTES) -> tuple[JsonObject, ...]:
    """Return the messages; those in the middle give way to a remark where all are longer than ``max_bytes``."""
    sizes = [len(json.dumps(message)) for message in messages]
    if sum(sizes) <= max_bytes:
        return tuple(messages)
    head, tail = 0, len(messages)
    left = max_bytes
    while head < tail:
        take_head = head <= len(messages) - tail
        place = head if take_head else tail - 1
        if sizes[place] > left:
            break
        left -= sizes[place]
        head, tail = (head + 1, tail) if take_head else (head, tail - 1)
    remark: JsonObject = {"role": "note", "content": f"{tail - head} messages left out: longer than {max_bytes} bytes"}
    return (*messages[:head], remark, *messages[tail:])
