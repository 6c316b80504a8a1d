"""The smallest engine: it samples every token uniformly. It serves any version, and catches up by snapshots instead of
pushes.
"""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from tidemill.actors import NONCE_HEADER, EngineConfig
from tidemill.bus import Capabilities, nonce


class UniformEngine:
    """Implements ``ServedEngine`` (``actors/serving/port.py``) and answers ``POST /generate`` as ``docs/wire.md``
    describes.
    """

    handles = ""
    capabilities = Capabilities()

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        *,
        version: int = -1,
        on_update: Callable[[int, int], object] = lambda version, epoch: None,
        authority: object = None,
    ) -> None:
        self.phase, self.url, self.version, self.epoch, self.whole = "loading", "", version, -1, True
        self._model_dir, self._config, self._on_update = model_dir, config, on_update
        self._vocabulary, self._running, self._answered = 0, 0, 0
        self._failed = asyncio.Event()
        self.nonce = nonce()

    def load(self) -> None:
        self._vocabulary = json.loads((self._model_dir / "config.json").read_text())["vocab_size"]

    async def start(self) -> str:
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate), web.post("/abort_request", self._nothing)])
        app.add_routes(
            [web.get("/health", self._health), web.get("/model_info", self._info), web.get("/server_info", self._info)]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        host = "127.0.0.1" if self._config.host == "auto" else self._config.host
        await web.TCPSite(self._runner, host, self._config.port).start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self.url

    async def load_snapshot(self, directory: Path, version: int, epoch: int) -> None:
        self.version, self.epoch = version, epoch
        self._on_update(version, epoch)

    async def probe(self) -> None:
        self.sample(1, seed=0)

    async def drain(self, timeout_s: float) -> bool:
        self.phase = "draining"
        return self._running == 0

    async def close(self) -> None:
        await self._runner.cleanup()

    async def failed(self) -> None:
        await self._failed.wait()

    def stats(self) -> dict[str, float]:
        return {"running": float(self._running), "answered": float(self._answered)}

    def sample(self, count: int, seed: int | None) -> list[int]:
        """Token ids, the same ones for the same seed."""
        return np.random.default_rng(seed).integers(self._vocabulary, size=count).tolist()  # type: ignore[no-any-return]

    async def _generate(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        parameters = body["sampling_params"]
        ids = self.sample(parameters["max_new_tokens"], parameters.get("sampling_seed"))
        log_prob = -math.log(self._vocabulary)
        self._answered += 1
        meta = {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": [[log_prob, id, None] for id in ids],
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(ids)}],
            "finish_reason": {"type": "length"},
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def _info(self, request: web.Request) -> web.Response:
        about = {
            "model_path": str(self._model_dir),
            "weight_version": str(self.version),
            "vocab_size": self._vocabulary,
        }
        return web.json_response(about)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({}, headers={NONCE_HEADER: self.nonce})

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})
