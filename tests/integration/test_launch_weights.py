"""``tidemill weights`` with real engines and bus: one with a flipped bit is named by majority; of two that differ, both
are named.
"""

import argparse
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from tests.engine_serving import serving
from tests.tiny_models import write_tiny_model
from tests.waits import until
from tidemill.bus.config import BusConfig
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.bus.streams.bus import connect
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli.weights import show_weights

LOST = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("count", [2, 3])
async def test_engines_that_differ_are_named(
    nats_server: EmbeddedServer, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    directory = write_tiny_model(tmp_path / "model")
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(nats_server.url, run_id, BusConfig(), name="look", wait_s=60))
        await bus.create_layout()
        engines = [await stack.enter_async_context(serving(directory, version=4)) for _ in range(count)]
        other = await stack.enter_async_context(serving(write_tiny_model(tmp_path / "other", seed=1), version=5))
        addresses = {f"e{number}": served.engine.url for number, served in enumerate(engines)}
        addresses |= {"gone": "http://127.0.0.1:9", "newer": other.engine.url}
        for id, address in addresses.items():
            row = LiveRow(role="engine", id=id, host="test", pid=1, phase="serving", version=4, address=address)
            heartbeat = await stack.enter_async_context(HeartbeatPublisher(bus, row, every_s=0.2))
            await until(lambda heartbeat=heartbeat: heartbeat.written_s >= 0)

        async def asked() -> tuple[int, dict[str, list[str]], dict[str, str]]:
            code = await show_weights(bus, argparse.Namespace(json=True, ended=False))
            rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            return code, {row["engine"]: row["differs"] for row in rows}, {row["engine"]: row["silent"] for row in rows}

        code, differs, silent = await asked()
        assert (code, set(map(tuple, differs.values()))) == (0, {()})
        assert [id for id, why in silent.items() if why] == ["gone"]
        engines[0].engine.updates.weights.named[LOST].view(-1).view(torch.uint8)[7] ^= 16
        code, differs, _ = await asked()
        assert code == 1
        assert differs["e0"] == [LOST] and differs["e1"] == ([LOST] if count == 2 else [])
        await show_weights(bus, argparse.Namespace(json=False, ended=False))
        shown = " ".join(capsys.readouterr().out.split())
        assert f"engine e0 version 4 DIFFERS in 1 of 25 tensors: {LOST}" in shown
        assert "engine newer version 5 25 tensors; no other engine serves this version" in shown
        if count == 3:
            assert "engine e1 version 4 25 tensors; the same as 1 other of this version" in shown
