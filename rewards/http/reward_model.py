"""The score of a reward model that an SGLang server holds (``--is-embedding``)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewards.http.calls import Calls
from rewards.http.remote import bearer
from rewards.message_template import MessageTemplate
from rewards.port import RewardRequest

Tokenize = Callable[[list[dict[str, object]]], list[int]]


class RewardModel:
    """Asks ``/classify`` for a reward model's score of a conversation: the prompt (text = one message of the user), the response.

    Options: ``url`` of the server; ``model``: directory with the reward model's ``tokenizer.json`` and chat template, which make the token
    ids that are sent (as a text they would get a second BOS there); "" = prompt and response are sent as one text; ``index`` of the
    model's output that is the score; ``offset``, ``scale``: the reward is ``scale * (output - offset)``; ``low``, ``high``: its bounds;
    ``token_env``: variable with a bearer token; ``timeout_s``, ``retries``, ``connections``.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        index: int = 0,
        offset: float = 0.0,
        scale: float = 1.0,
        low: float = -1e6,
        high: float = 1e6,
        token_env: str = "",
        timeout_s: float = 60.0,
        retries: int = 3,
        connections: int = 64,
    ) -> None:
        if not (isinstance(index, int) and index >= 0 and -1e6 <= low < high <= 1e6 and math.isfinite(scale) and math.isfinite(offset)):
            raise ValueError(
                f"want index >= 0, -1e6 <= low < high <= 1e6, finite offset and scale; got {index}, {low}, {high}, {offset}, {scale}"
            )
        address = url.rstrip("/") + "/classify"
        self._calls = Calls(
            "reward_model", address, headers=bearer(token_env), timeout_s=timeout_s, retries=retries, connections=connections
        )
        self._tokenize = _tokenizer(Path(model)) if model else None
        self._index, self._offset, self._scale, self._low, self._high = index, offset, scale, low, high

    async def __call__(self, request: RewardRequest) -> dict[str, float]:
        output: float = await self._calls.post(self._body(request), self._read)
        return {"score": min(max(self._scale * (output - self._offset), self._low), self._high), "output": output}

    def _body(self, request: RewardRequest) -> dict[str, object]:
        prompt = request.prompt
        if self._tokenize is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return {"input_ids": self._tokenize([*messages, {"role": "assistant", "content": request.response}])}
        if not isinstance(prompt, str):
            raise ValueError("a prompt of messages needs the option model: the directory of the reward model's tokenizer and chat template")
        return {"text": prompt + request.response}

    def _read(self, answer: Any) -> float:
        try:
            output = answer["embedding"][self._index]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"want 'embedding' with more than {self._index} numbers, got {answer!r}"[:300]) from None
        if isinstance(output, bool) or not isinstance(output, int | float) or not math.isfinite(output):
            raise ValueError(f"want a finite number, got {output!r}"[:300])
        return float(output)


def _tokenizer(model_dir: Path) -> Tokenize:
    """Return the tokenizer of conversations. Raises ValueError without ``tokenizer.json`` or a chat template that renders one."""
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
