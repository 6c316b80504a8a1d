"""The score of a reward model that an SGLang server holds (``--is-embedding``)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bus.wire.chat_messages import chat_messages
from tidemill.bus.wire.json_object import is_number
from tidemill.rewards.http.remote import AskingReward
from tidemill.rewards.model_text.message_template import MessageTemplate
from tidemill.rewards.port import RewardRequest

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
