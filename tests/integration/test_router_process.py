"""``tidemill router`` as a process: it finds an engine on the bus, reports it in its live row, answers a chat, and
drains.
"""

from pathlib import Path

import aiohttp

from tests.actor_kit import engine_row, row_until
from tests.bus_fixtures import BusOpener
from tests.engine_serving import serving
from tests.launched import run_tidemill
from tests.tiny_models import write_tiny_model
from tidemill.bus.exit_codes import CONFIG
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.server.nats_server import EmbeddedServer
from tidemill.launch.run.process import launched


async def test_a_router_finds_engines_on_the_bus_and_drains(
    nats_server: EmbeddedServer, open_bus: BusOpener, run_id: str, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model")
    arguments = ["--bus", nats_server.url, "--run", run_id, "--id", "door", "--port", "0", "--exact", str(model)]
    child = launched("router", ["router", *arguments], tmp_path / "router.log")
    async with open_bus() as bus, aiohttp.ClientSession() as session:
        await child.start()
        try:
            row = await row_until(bus.rows("live"), "router.door", lambda row: bool(row["address"]))
            assert (row["phase"], row["waits_for"]) == ("waiting", "an engine that serves")
            async with serving(model) as served, HeartbeatPublisher(bus, engine_row(served.engine.url), every_s=0.2):
                row = await row_until(bus.rows("live"), "router.door", lambda row: row["phase"] == "serving")
                assert (row["load"]["workers"], row["load"]["serving"]) == (1, 1)
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
                async with session.post(row["address"] + "/v1/chat/completions", json=body) as response:
                    assert (await response.json())["usage"]["completion_tokens"] == 3
                child.ask_to_end()
                assert await child.wait() == 0, child.last_lines()
            assert await bus.rows("live").get("router.door") is None
        finally:
            await child.end(0)


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    for wrong, said, *expected in (
        ([], "want --bus URL, --worker URL, or both"),
        (["--worker", "http://h:1", "--host", "0.0.0.0"], "router.host: 0.0.0.0 can be reached by others"),
        (["--worker", "http://h:1", "--host", "auto"], "--host: auto needs --bus"),
        (["--worker", "nowhere"], "worker: want a URL like http://host:port, got 'nowhere'"),
        (["--worker", "http://h:1", "--exact", str(tmp_path)], "want a directory with a tokenizer.json"),
        (
            ["--worker", "http://h:1", "--middleware", "no.module:f"],
            "middleware: want package.module:factory, got 'no.module:f'",
            CONFIG,
        ),
    ):
        ended = run_tidemill("router", "--port", "0", *wrong)
        assert [ended.returncode] == (expected or [2]), wrong
        assert said in ended.output, wrong
