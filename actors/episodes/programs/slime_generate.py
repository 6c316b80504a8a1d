"""Generate functions of slime as rollouts: ``use: slime:MODULE:NAME``, ``async def NAME(args, sample,
sampling_params)``.

Such a function asks ``http://{args.sglang_router_ip}:{args.sglang_router_port}/generate``, here the gateway of its
episode, so tokens, masks and log-probs are recorded there; what it puts into its sample is not read. Where slime is not
installed, the few names of it that generate functions use are provided: ``slime.utils.types.Sample``,
``slime.utils.http_utils.post`` and ``slime.rollout.sglang_rollout.GenerateState`` (names and signatures by slime
0a79899 and its example ``search-r1`` at 624b824a8).
"""

import asyncio
import enum
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

TRIES, PAUSE_S = 5, 0.5
"""Tries of a request with a failing connection, and the pause between them."""


class SlimeStatus(enum.Enum):
    """End of a response."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SlimeSample:
    """The fields of slime's sample that generate functions read and set."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    remove_sample: bool = False
    session_id: str | None = None
    rollout_id: int | None = None

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens to the response: sampled ones with log-probs, others without. Raises ValueError."""
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            got = None if log_probs is None else len(log_probs)
            raise ValueError(f"log_probs: want {len(tokens)} for trainable tokens, got {got}")
        self.tokens += tokens
        self.response_length += len(tokens)
        self.response += text
        self.loss_mask = [*(self.loss_mask or []), *[int(trainable)] * len(tokens)]
        self.rollout_log_probs = [*(self.rollout_log_probs or []), *(log_probs or [0.0] * len(tokens))]
        kind = ((meta_info or {}).get("finish_reason") or {}).get("type")
        if update_terminal_info and kind is not None:
            self.status = {"length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED}.get(
                kind, SlimeStatus.COMPLETED
            )


SlimeSample.Status = SlimeStatus  # type: ignore[attr-defined]  # as slime has it


async def post(
    url: str, payload: object, max_retries: int = TRIES, headers: Mapping[str, str] | None = None, **options: object
) -> Any:
    """Return the JSON that a POST is answered with. Raises RuntimeError for another status than 200."""
    for attempt in range(1, max_retries + 1):
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                async with session.post(url, json=payload, headers=headers) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{answer.status}: {(await answer.text())[:1000]}")
                    return await answer.json()
        except aiohttp.ClientConnectionError:
            if attempt == max_retries:
                raise
            await asyncio.sleep(PAUSE_S)
    raise ValueError(f"max_retries: want >= 1, got {max_retries}")


class GenerateState:
    """State that generate functions share: the tokenizer of ``args.hf_checkpoint``, and a semaphore."""

    _states: ClassVar[dict[str, "GenerateState"]] = {}
    """States by the directory of the model."""

    def __new__(cls, args: Any) -> "GenerateState":
        """Return the state of this model, made at the first call. Raises ValueError without ``args.hf_checkpoint``."""
        path = str(getattr(args, "hf_checkpoint", "") or "")
        if not path:
            raise ValueError("GenerateState: want the model's directory in rollouts.NAME.options.args.hf_checkpoint")
        if path not in cls._states:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            state = super().__new__(cls)
            # As the learner does (``learner/prompts/tokenizer.py``), so that both have the same ids.
            reader = PreTrainedTokenizerFast if (Path(path) / "tokenizer.json").is_file() else AutoTokenizer
            state.tokenizer = reader.from_pretrained(path)
            state.args = args
            state.semaphore = asyncio.Semaphore(int(getattr(args, "sglang_server_concurrency", 512)))
            state.aborted = False
            cls._states[path] = state
        return cls._states[path]

    args: Any
    tokenizer: Any
    semaphore: asyncio.Semaphore
    aborted: bool


class Slime:
    """The program of ``use: slime:MODULE:NAME``."""

    def __init__(self, generate: str, args: Mapping[str, Any] | None = None) -> None:
        """``generate``: MODULE:NAME. ``args``: of the function, by slime's names. Raises the errors of its import."""
        provide_names()
        module, _, name = generate.partition(":")
        self._generate: Callable[..., Awaitable[Any]] = getattr(importlib.import_module(module), name)
        if not inspect.iscoroutinefunction(self._generate):
            raise TypeError(f"{generate}: want an async function (args, sample, sampling_params)")
        signature = inspect.signature(self._generate)
        if len(signature.parameters) < 3:
            raise TypeError(f"{generate}: want a function of (args, sample, sampling_params), got {signature}")
        self._evaluates = "evaluation" in signature.parameters
        self._args = dict(args or {})
        self._sample = importlib.import_module("slime.utils.types").Sample

    async def run(self, data: Mapping[str, Any], base_url: str, api_key: str) -> float | dict[str, float] | None:
        """Return the reward that the function gives its samples, their sum for several; None = it gives none."""
        url = urlsplit(base_url)
        # slime's functions put the address together from host and port alone; the key goes with it as the user of the
        # URL.
        router = {"sglang_router_ip": f"{api_key}@{url.hostname}", "sglang_router_port": url.port}
        args = SimpleNamespace(**{"partial_rollout": False, **self._args, **router})
        sample = self._sample(
            prompt=data["prompt"],
            label=data["label"],
            metadata=dict(data["metadata"]),
            index=data["task"] * data["group_size"] + data["index"],
            group_index=data["task"],
        )
        sampling = dict(data["sampling"])
        options = {"evaluation": data["kind"] == "eval"} if self._evaluates else {}
        result = await self._generate(args, sample, sampling, **options)
        samples = result if isinstance(result, list) else [result]
        if not samples:
            raise RuntimeError("the generate function returned no sample")
        for sample in samples:
            status = getattr(sample.status, "value", sample.status)
            if status in ("aborted", "failed"):
                raise RuntimeError(f"the generate function returned a sample with status {status}")
            if status == SlimeStatus.TRUNCATED.value:
                headers = {"Authorization": f"Bearer {api_key}"}
                await post(base_url.removesuffix("/v1") + "/truncated", {"limit": "generate_function"}, headers=headers)
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if not rewards:
            return None
        if len(rewards) == 1:
            return rewards[0]  # type: ignore[no-any-return]
        return float(sum(rewards))


def provide_names() -> None:
    """Make the names of slime that generate functions import, where slime is not installed."""
    if importlib.util.find_spec("slime") is not None:
        return
    names: dict[str, dict[str, object]] = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": SlimeSample},
        "slime.utils.http_utils": {"post": post},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    }
    for name, values in names.items():
        module = sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
        module.__dict__.update(values)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
