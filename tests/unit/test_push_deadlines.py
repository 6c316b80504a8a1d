"""Deadlines of the phases of a push: by size at first, then by measured times, and the same for an engine's adapter."""

import asyncio
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.refusals import refusal
from tidemill.bus.wire.rows import LiveRow
from tidemill.weightstore.errors import ReceiverFailed
from tidemill.weightstore.format.checksums import ChecksumReport
from tidemill.weightstore.push.member import Member
from tidemill.weightstore.transport.http_receiver import HttpReceiver
from tidemill.weightstore.transport.port import FIRST_BYTES_PER_S, SLOWER, Deadlines, WeightReceiver

SMOLLM_BYTES = 538_000_000


@pytest.mark.parametrize("phase", ["begin", "bucket 3 of 9", "verify", "end", "resume weights"])
def test_at_first_a_phase_has_the_time_of_a_slow_machine_for_all_weights(phase: str) -> None:
    deadlines = Deadlines(30.0)
    assert deadlines.of(phase) == 30.0
    deadlines.num_bytes = SMOLLM_BYTES
    assert deadlines.of(phase) == pytest.approx(30.0 + SMOLLM_BYTES / FIRST_BYTES_PER_S)
    deadlines.num_bytes = 10**15
    assert deadlines.of(phase) == 600.0, "no phase has more than a load"


@pytest.mark.parametrize("phase", ["join", "leave", "release", ""])
def test_a_phase_without_work_on_the_weights_has_the_set_time(phase: str) -> None:
    deadlines = Deadlines(30.0)
    deadlines.num_bytes = SMOLLM_BYTES
    assert deadlines.of(phase) == 30.0


def test_a_set_deadline_above_that_of_a_load_is_kept() -> None:
    deadlines = Deadlines(1200.0)
    deadlines.num_bytes = 10**15
    assert deadlines.of("verify") == 1200.0


def test_measured_times_decide_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("tidemill.weightstore.transport.port.time.perf_counter", lambda: now_s)
    deadlines = Deadlines(30.0)
    deadlines.num_bytes = 10**10
    for phase, took_s in (("verify", 7.0), ("verify", 2.0), ("bucket 1 of 8", 0.5)):
        with deadlines.measure(phase):
            now_s += took_s
    with pytest.raises(ReceiverFailed), deadlines.measure("end"):
        now_s += 100.0
        raise ReceiverFailed("engine", "end", "frozen")
    assert deadlines.of("verify") == 30.0 + SLOWER * 7.0, "the longest of any engine"
    assert deadlines.of("bucket 8 of 8") == 30.0 + SLOWER * 0.5
    assert deadlines.of("end") == 30.0 + 10**10 / FIRST_BYTES_PER_S, "a phase that failed has no measured time"


async def test_an_engine_that_needs_longer_than_the_set_time_for_large_weights_is_not_evicted() -> None:
    """Member and adapter go by the same deadlines: the engine answers only when the set time has passed."""
    limits_s: dict[str, float] = {}

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        limits_s[request.path] = body["timeout_s"]
        await asyncio.sleep(4 * deadlines.phase_s)  # the work of the engine
        return web.json_response({"success": True, "scheme": "sum64", "parts": [], "stall_s": 0.0})

    async def check(report: ChecksumReport) -> list[str]:
        return []

    app = web.Application()
    app.router.add_post("/{path}", handle)
    deadlines = Deadlines(0.05)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        row = LiveRow(role="engine", id="slow", host="test", pid=1, phase="serving", address=url)
        member = Member(
            row, cast(WeightReceiver, HttpReceiver(session, url, epoch=1, deadlines=deadlines)), deadlines=deadlines
        )
        with refusal(ReceiverFailed, phase="verify"):
            await member.finish(1, check)
        deadlines.num_bytes = SMOLLM_BYTES
        await member.begin(1)
        updated: Any = await member.finish(1, check)
    assert updated.verify_s > 4 * deadlines.phase_s
    assert all(limit_s > 20 for limit_s in limits_s.values()), limits_s
