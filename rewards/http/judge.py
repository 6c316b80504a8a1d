"""A language model as a judge, over OpenAI's chat API: its last number, in bounds, is the reward."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.http.remote import AskingReward
from tidemill.rewards.port import RewardRequest

TEMPLATE = """Grade a response to a task.

Task:
{prompt}

Reference answer:
{label}

Response:
{response}

Explain in one or two sentences how good the response is. Then end with a line "Score: N", where N is a number from \
{low} to {high}."""
PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
MAX_PART = 200_000
"""Characters of a prompt, label or response that are put in front of the judge."""


@dataclass(eq=False, kw_only=True)
class Judge(AskingReward):
    """Asks a chat model to grade a response; ``score`` is its number, scaled to 0..1, ``grade`` the number itself.

    ``url``: address of an API (``.../v1``). An answer without a number in bounds is asked for again.
    """

    model: str
    template: str = TEMPLATE
    """Question, with ``{prompt}``, ``{label}``, ``{response}``, ``{low}``, ``{high}``."""
    pattern: str = PATTERN
    """Regular expression: group 1 of its last match is the number."""
    low: float = 0.0
    high: float = 10.0
    key_env: str = ""
    """Environment variable with the API's key."""
    max_tokens: int = 1024
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"want low < high, got {self.low} and {self.high}")
        if "{response}" not in self.template:
            raise ValueError("template: want {response} in it")
        try:
            self._pattern = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: {error}") from None
        if not self._pattern.groups:
            raise ValueError("pattern: want a group for the number")
        self._calls = self.calls("judge", "/chat/completions", self.key_env)

    async def __call__(self, request: RewardRequest) -> dict[str, float]:
        text = fill(self.template, request, low=self.low, high=self.high)
        body = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "messages": [{"role": "user", "content": text}],
        }
        grade: float = await self._calls.post(body, self._read)
        return {"score": (grade - self.low) / (self.high - self.low), "grade": grade}

    def _read(self, answer: Any) -> float:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"want choices[0].message.content, got {answer!r}"[:300]) from None
        numbers = self._pattern.findall(text) if isinstance(text, str) else []
        last = numbers[-1] if numbers else None
        number = last[0] if isinstance(last, tuple) else last
        try:
            grade = float(number)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            want = f"{self._pattern.pattern!r} in the judge's answer"
            raise ValueError(f"want {want}, got {str(text)[-200:]!r}") from None
        if not self.low <= grade <= self.high:
            raise ValueError(f"want a grade from {self.low:g} to {self.high:g}, got {grade:g}")
        return grade


def fill(template: str, request: RewardRequest, **numbers: float) -> str:
    """Return the template with the request's texts in it, as they are. Other braces stay."""
    values = {"prompt": _text(request.prompt), "label": _text(request.label), "response": request.response}
    values = {name: text[:MAX_PART] for name, text in values.items()}
    values |= {name: f"{number:g}" for name, number in numbers.items()}
    return re.sub(r"\{(prompt|label|response|low|high)\}", lambda match: values.get(match[1], match[0]), template)


def _message_text(message: JsonMapping) -> str:
    """Return a message as text: role, content, and the functions of its calls as JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls]))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    with suppress(WireError):  # a label may be a list of anything
        return "\n\n".join(map(_message_text, chat_messages(value)))
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise RewardFailed("judge", f"want a label that JSON has, got {type(value).__name__}") from None
