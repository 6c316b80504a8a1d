"""Rewards by a model behind an URL: a judge, asked over OpenAI's chat API, and a reward model of an SGLang server."""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus.errors import WireError
from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import JsonMapping, is_number
from tidemill.rewards.errors import RewardFailed
from tidemill.rewards.model_text import MessageTemplate
from tidemill.rewards.port import RewardRequest
from tidemill.rewards.remote import AskingReward

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
MAX_PART = 200_000  # Characters of a prompt, label or response that are put in front of the judge


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


Tokenize = Callable[[list[dict[str, object]]], list[int]]


@dataclass(eq=False)
class RewardModel(AskingReward):
    """Asks ``/classify`` for the score of a prompt (text = one message of the user) and its response."""

    model: str = ""
    """Directory of its tokenizer and chat template, to send token ids (a text gets a second BOS); "" = send one text.
    """
    index: int = 0
    offset: float = 0.0
    scale: float = 1.0
    """The reward is ``scale * (output - offset)``."""
    low: float = -1e6
    high: float = 1e6
    """Bounds of the reward."""
    token_env: str = ""
    """Environment variable with a bearer token."""

    def __post_init__(self) -> None:
        finite = math.isfinite(self.scale) and math.isfinite(self.offset)
        if not (isinstance(self.index, int) and self.index >= 0 and -1e6 <= self.low < self.high <= 1e6 and finite):
            got = f"{self.index}, {self.low}, {self.high}, {self.offset}, {self.scale}"
            raise ValueError(f"want index >= 0, -1e6 <= low < high <= 1e6, finite offset and scale; got {got}")
        self._calls = self.calls("reward_model", "/classify", self.token_env)
        self._tokenize = _tokenizer(Path(self.model)) if self.model else None

    async def __call__(self, request: RewardRequest) -> dict[str, float]:
        output: float = await self._calls.post(self._body(request), self._read)
        return {"score": min(max(self.scale * (output - self.offset), self.low), self.high), "output": output}

    def _body(self, request: RewardRequest) -> dict[str, object]:
        prompt = request.prompt
        if self._tokenize is not None:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else chat_messages(prompt, "prompt")
            return {"input_ids": self._tokenize([*chat, {"role": "assistant", "content": request.response}])}
        if not isinstance(prompt, str):
            want = "the directory of the reward model's tokenizer and chat template"
            raise ValueError(f"a prompt of messages needs the option model: {want}")
        return {"text": prompt + request.response}

    def _read(self, answer: Any) -> float:
        try:
            output = answer["embedding"][self.index]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"want 'embedding' with more than {self.index} numbers, got {answer!r}"[:300]) from None
        try:
            number = float(output) if is_number(output) else math.nan
        except OverflowError:  # a whole number beyond floats
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"want a finite number, got {output!r}"[:300])
        return number


def _tokenizer(model_dir: Path) -> Tokenize:
    """Return the tokenizer of conversations. Raises ValueError without ``tokenizer.json`` or a fit chat template."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("model: want the package tokenizers where the actor runs (pip install tokenizers)") from None
    template, file = MessageTemplate.read(model_dir), model_dir / "tokenizer.json"
    if template is None or not file.exists():
        raise ValueError(f"model: want a directory with tokenizer.json and a chat template, got {str(model_dir)!r}")
    tokenizer = Tokenizer.from_file(str(file))

    def tokenize(messages: list[dict[str, object]]) -> list[int]:
        text = template.render(messages, add_generation_prompt=False)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    tokenize([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    return tokenize
