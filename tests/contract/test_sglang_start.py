"""An SGLang engine starts on a server of a supported release only."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.refusals import refusal
from tests.router_kit import faulty
from tests.tiny_models import write_tiny_model
from tidemill.actors.config import EngineConfig, SglangConfig
from tidemill.actors.errors import EngineFailed
from tidemill.actors.serving.sglang.engine import SglangEngine


@pytest.mark.parametrize(
    ("version", "refused"), [("0.5.20", True), ("0.5.15.post1", True), (None, True), ("0.5.21", False)]
)
async def test_the_release_is_checked_before_it_serves(version: str | None, refused: bool, tmp_path: Path) -> None:
    async with faulty() as server:
        server.version = version
        settings = EngineConfig(kind="sglang", sglang=SglangConfig(url=server.url))
        engine = SglangEngine(write_tiny_model(tmp_path / "model", max_position_embeddings=64), settings)
        await asyncio.to_thread(engine.load)
        try:
            if refused:
                got = "None" if version is None else version
                with refusal(EngineFailed, engine=server.url, got=re.compile(rf"^{got}")):
                    await engine.start()
                assert server.paths == ["/server_info"], "the server gets no command"
            else:
                await engine.start()
                assert engine.release == (0, 5, 21)
        finally:
            await engine.close()
