"""SGLang as an engine: a server that is started (or found), and a proxy in front of it with the built-in engine's HTTP
API.

    clients, learner --HTTP--> proxy (this process) --HTTP--> SGLang server (a child with its own interpreter, or a URL)

The proxy refuses requests that would kill the server or mix two learners, keeps versions and phases, and passes all
others on. This module ties them together.
"""

import asyncio
import json
import logging
import secrets
from pathlib import Path
from typing import Any

from tidemill.actors.errors import EngineFailed, EngineUnavailable, UnsupportedModel
from tidemill.actors.serving.host import PROBE, EngineHost
from tidemill.actors.serving.sglang.arguments import CPU_CHECKSUMS, NEWEST, Release, release_of, written
from tidemill.actors.serving.sglang.proxy import Proxy
from tidemill.actors.serving.sglang.registry import ServerCheck
from tidemill.actors.serving.sglang.server_process import INFO_S, Api, ServerProcess
from tidemill.actors.serving.sglang.tensors import layout_of
from tidemill.actors.serving.sglang.weight_updates import SglangUpdates
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.bus.wire.model_values import language_values
from tidemill.bus.wire.routed_experts import RoutedShape
from tidemill.bus.wire.rows import Capabilities

log = logging.getLogger(__name__)

COUNTERS = ("requests", "refused", "asked_again", "requests_aborted", "requests_aborted_by_pushes")
PROBE_S = 60.0
"""Time limit in seconds of a probe."""


class SglangEngine(EngineHost[SglangUpdates]):
    """An engine that generates in a SGLang server."""

    api: Api
    """The server's own API."""
    routed: RoutedShape | None
    """Sizes of the model's routing; None = it has none, or of a family that is not known here."""

    def __init__(self, *args: Any, release: Release | None = None, **settings: Any) -> None:
        """``release``: release of the server; None = the one in its /server_info."""
        super().__init__(*args, **settings)
        self._given_release, self.ranks = release, 1
        self._process: ServerProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self.counters = dict.fromkeys(COUNTERS, 0.0)

    def load(self) -> None:
        """Read the model's sizes, tokenizer and tensor names, which the proxy needs. Raises UnsupportedModel, also for
        a model that SGLang does not serve.
        """
        file = self.model_dir / "config.json"
        try:
            config = json.loads(file.read_text())
            values = language_values(config)
            vocab_size, context = int(values["vocab_size"]), int(values["max_position_embeddings"])
            self._hidden_size = int(values["hidden_size"])
            self.routed = RoutedShape.of(values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            want = "want vocab_size, hidden_size and max_position_embeddings"
            raise UnsupportedModel(str(file), f"{want}: {error!r}") from error
        self._read_limits(vocab_size, context, experts=self.routed is not None)
        self._check = ServerCheck.before(file, config, self.config.sglang, self.limits.max_context)
        self._names = frozenset(tensor_names(self.model_dir))

    async def _open(self) -> Proxy:
        """Start the server, or find it, and wait until it answers. Raises EngineFailed with the server's last lines."""
        process = self._process = await ServerProcess.open(self.model_dir, self.config)
        self.api = process.api
        info = await process.api.call("GET", "/server_info", timeout_s=INFO_S)
        self._updates = updates = self._updates_of(process.api, info)
        model = await process.api.call("GET", "/model_info", timeout_s=INFO_S) if self.config.sglang.url else None
        self._check.of_server(process.api.url, info, model)
        # Version 0 was not written since the server's start; any other may be another run's.
        if model is not None and str(model.get("weight_version")) == "0":
            updates.version = max(0, self._first_version)
            await updates.run_shielded(updates.generate_as_is())
        watching = process.watch(lambda: updates.operation, updates.resume_if_abandoned)
        self._watching = asyncio.create_task(watching, name="sglang health")
        return Proxy(self, process.api, self.counters, f"{secrets.token_hex(4)} version", self.routed)

    def _updates_of(self, api: Api, info: JsonMapping) -> SglangUpdates:
        """Return the updates of a server by its release and its settings, its /server_info. Raises EngineFailed."""
        self.release = release = self._given_release or release_of(api.url, info.get("version"))
        if release > NEWEST:
            log.warning("SGLang %s is newer than the newest tested release, %s", info.get("version"), written(NEWEST))
        self.ranks = int(info.get("tp_size") or 1)
        sizes = {"vocab_size": self.limits.vocab_size, "hidden_size": self._hidden_size}
        updates = SglangUpdates(
            api,
            self._names,
            layout_of(info, **sizes, on_cpu=release >= CPU_CHECKSUMS),
            pause="retract" if self.config.colocated else self.config.sglang.pause,
            ranks=self.ranks,
            unfinished=lambda: self.unfinished,
            on_update=self._updated,
        )
        updates.version = self._first_version
        return updates

    async def failed(self) -> None:
        """Wait until the server has ended or is silent, then raise EngineFailed with its last lines."""
        assert self._process is not None, "the engine is not started"
        await self._process.failed()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().close()
        if self._process is not None:
            await self._process.close()

    @property
    def capabilities(self) -> Capabilities:
        """Pushes to ``ranks`` processes of the server; no pushes in one request, and no snapshots for peers."""
        return Capabilities(colocated=self.config.colocated, ranks=self.ranks)

    @property
    def _alive(self) -> bool:
        return self._process is not None and not self._process.lost.is_set()

    def stats(self) -> dict[str, float]:
        return {**self.counters, **super().stats()}

    async def probe(self, timeout_s: float = PROBE_S) -> None:
        """Generate one token, in any phase, between updates. Raises EngineFailed, also for log-probs NaN or > 0."""
        await self.updates.between_updates(timeout_s)
        if self.updates.released:
            raise EngineFailed(self.url, "its memory is released")
        try:
            answer = await self.api.call("POST", "/generate", PROBE, timeout_s=timeout_s)
            log_prob = float(answer["meta_info"]["output_token_logprobs"][0][0])
        except (EngineUnavailable, KeyError, IndexError, TypeError) as error:
            raise EngineFailed(self.api.url, f"the probe got no token: {error!r}") from error
        if not log_prob <= 1e-5:
            raise EngineFailed(self.api.url, f"the probe's log-prob is {log_prob}")


def tensor_names(model_dir: Path) -> list[str]:
    """Return the names in the safetensors files of a directory. Raises UnsupportedModel when there are none."""
    names: list[str] = []
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            names += [name for name in json.loads(opened.read(size)) if name != "__metadata__"]
    if not names:
        raise UnsupportedModel(str(model_dir), "want *.safetensors, there are none")
    return names
