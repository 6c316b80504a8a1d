"""The experts that a real SGLang server returns are those of transformers' routers, by way of the proxy and the
client.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.contract.test_engine_routing import chosen
from tests.sglang.server import CONTEXT, config
from tests.tiny_models import tiny_model, write_tiny_model
from tidemill.actors.engines.engine_client import HttpEngine
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.sglang.engine import SglangEngine
from tidemill.bus.wire.messages import Sampling
from tidemill.bus.wire.routed_experts import unknown_rows

PROMPTS = [(5, 70, 9, 31), (8, 9), tuple(range(40, 90))]
SIZES: dict[str, Any] = {"max_position_embeddings": CONTEXT}


async def test_the_experts_of_prompt_and_response_are_those_of_transformers(python: str, tmp_path: Path) -> None:
    """A server that is started with the flag; the second request finds its prompt in the cache of keys and values."""
    directory, model = write_tiny_model(tmp_path / "model", "qwen3_moe", **SIZES), tiny_model("qwen3_moe", **SIZES)
    settings = replace(config(python, log=str(tmp_path / "sglang.log")), dtype="float32", routed_experts=True)
    engine = SglangEngine(directory, settings, version=0, authority=Authority(unguarded=True))
    await asyncio.to_thread(engine.load)
    client = HttpEngine(await engine.start(), routed_experts=True)
    engine.phase = "serving"
    try:
        made = [await client.generate(prompt, Sampling(max_new_tokens=24)) for prompt in (*PROMPTS, PROMPTS[2])]
        *_, streamed = [state async for state in client.stream(PROMPTS[0], Sampling(max_new_tokens=24))]
    finally:
        await client.close()
        await engine.close()
    assert made[3].cached_tokens > 0
    for prompt, one in zip((*PROMPTS, PROMPTS[2], PROMPTS[0]), (*made, streamed), strict=True):
        assert one.routed_experts is not None and one.routed_experts.shape[1:] == (2, 2)
        assert unknown_rows(one.routed_experts).tolist() == [False] * (len(one.routed_experts) - 1) + [True]
        wanted = chosen(model, [*prompt, *one.tokens.tolist()[:-1]])
        assert (np.sort(one.routed_experts[:-1], axis=-1) == wanted).all()
