"""A built-in engine served over loopback for one test, and reference values from transformers for the same tokens."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from tests.waits import LIMIT_S
from tidemill.actors.config import EngineConfig
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine
from tidemill.bus.http.access import Rule

DEFAULTS: dict[str, Any] = {}
"""Settings of all engines that a test serves, for tests that run on several runners."""
HELD_STEP_S = 0.02
"""Seconds between two looks for commands while decoding is held."""


class Gate:
    """Decoding steps that a test lets a built-in engine do. It obeys commands, and begins new responses, while there
    are none left.
    """

    def __init__(self, steps: int) -> None:
        self._left, self._changed = steps, threading.Condition()

    def let(self, steps: int) -> None:
        """Allow so many steps more."""
        with self._changed:
            self._left += steps
            self._changed.notify()

    def open(self) -> None:
        """Allow every further step."""
        self.let(sys.maxsize)

    def passed(self) -> bool:
        """Return whether a step is allowed, and count it; the decoding thread, which looks for commands in between,
        waits a little.
        """
        with self._changed:
            if not self._left:
                self._changed.wait(HELD_STEP_S)
            allowed = self._left > 0
            self._left -= allowed
            return allowed


@dataclass
class Served:
    """An engine, a client of the port, and a raw HTTP session."""

    engine: BuiltinEngine
    client: HttpEngine
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.engine.url + path, json=body) as response:
            return response.status, await _content(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.engine.url + path) as response:
            return response.status, await _content(response)

    async def generate(self, prompt: Sequence[int], **params: Any) -> Any:
        """Return one response with log-probs; a refusal fails the test."""
        body = {"input_ids": list(map(int, prompt)), "sampling_params": params, "return_logprob": True}
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def together(self, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[Any]:
        """Return responses decoded in one batch: decoding is paused until all requests are there."""
        await self.client.pause()
        tasks = [asyncio.ensure_future(self.generate(prompt, **params)) for prompt, params in requests]
        await self.until(lambda: len(self.engine.scheduler.waiting) == len(requests))
        await self.client.resume()
        return await asyncio.gather(*tasks)

    def hold(self, *, after: int) -> Gate:
        """Let the engine do ``after`` decoding steps, and more when the gate lets it: a late command still finds a
        response unfinished.
        """
        return hold(self.engine, after=after)

    async def until(self, reached: Any) -> None:
        """Wait for a state of the engine's thread, which does not wake the loop: check again after every step of it."""
        async with asyncio.timeout(LIMIT_S):
            while not reached():
                await asyncio.wrap_future(self.engine.scheduler.call(lambda: None))


def commands_of(engine: Any) -> list[str]:
    """Return the paths of an engine's commands."""
    rules = engine.server.listener.rules
    return sorted({route.partition(" ")[2] for route, rule in rules.items() if rule is Rule.COMMAND})


def hold(engine: BuiltinEngine, *, after: int) -> Gate:
    """Let an engine do ``after`` decoding steps, and more when the gate lets it."""
    batch, gate = engine.scheduler.batch, Gate(after)
    decode = batch.decode

    def decode_if_let() -> None:
        if gate.passed():
            decode()

    batch.decode = decode_if_let  # type: ignore[method-assign]
    return gate


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else await response.text()


@asynccontextmanager
async def serving(model_dir: Path, phase: str = "serving", version: int = 0, **config: Any) -> AsyncIterator[Served]:
    settings = EngineConfig(**DEFAULTS | config)
    engine = BuiltinEngine(model_dir, settings, version=version, authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start())
    engine.phase = phase
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
            yield Served(engine, client, session)
    finally:
        await client.close()
        await engine.close()


def prompts(count: int, *, seed: int = 0, low: int = 3, high: int = 40, vocab: int = 299) -> list[list[int]]:
    """Return random prompts of mixed lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab, random.integers(low, high)).tolist() for _ in range(count)]


async def scores(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the scores of every response token from one full forward pass, [R, V]."""
    return await asyncio.to_thread(_scores, model, prompt, tokens)


async def greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Return the result of transformers' greedy generate."""
    return await asyncio.to_thread(_greedy, model, prompt, max_new_tokens)


async def log_probs_across(models: Sequence[Any], answer: Any, prompt: Sequence[int], *, kept: bool) -> Any:
    """Return log-probs of an answer's tokens, each by the version its span names: with keys and values ``kept``, or
    recomputed.
    """
    tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
    if kept:
        stretches = [(models[int(span["version"])], span["end"] - span["start"]) for span in spans]
        return log_probs_of(await scores_across(stretches, prompt, tokens), tokens)
    by_version = [log_probs_of(await scores(model, prompt, tokens), tokens) for model in models]
    return np.concatenate([by_version[int(span["version"])][span["start"] : span["end"]] for span in spans])


async def scores_across(
    models: Sequence[tuple[Any, int]], prompt: Sequence[int], tokens: Sequence[int]
) -> torch.Tensor:
    """Return scores with weights that changed on the way and kept keys and values: ``models`` = (model, its number of
    tokens).
    """
    return await asyncio.to_thread(_scores_across, models, prompt, tokens)


@torch.inference_mode()
def _scores(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()


@torch.inference_mode()
def _scores_across(models: Sequence[tuple[Any, int]], prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    from transformers import DynamicCache

    cache, found, fed, position = DynamicCache(config=models[0][0].config), [], [*prompt, *tokens], 0
    made = 0
    for model, count in models:
        made += count
        until = len(prompt) + made - 1
        out = model(torch.tensor([fed[position:until]]), past_key_values=cache, use_cache=True).logits[0]
        found.append(out[-count:].float())
        position = until
    return torch.cat(found)


def log_probs_of(scores_RV: torch.Tensor, tokens: Sequence[int]) -> np.ndarray:
    return scores_RV.log_softmax(-1).gather(1, torch.tensor(list(tokens))[:, None])[:, 0].numpy()


def told_log_probs(answer: Any) -> np.ndarray:
    """Return the log-probs [R] of an answer; its token column must equal its output_ids."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return np.array([entry[0] for entry in entries])


@torch.inference_mode()
def _greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    given = torch.tensor([list(prompt)])
    out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=max_new_tokens)
    return out[0, len(prompt) :].tolist()
