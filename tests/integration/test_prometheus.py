"""`tidemill metrics prometheus` on a real nats-server, scraped by a real Prometheus and checked by promtool."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.bus_fixtures import BusOpener
from tests.bus_kit import make_sample
from tests.prometheus_kit import get, query, real_prometheus, scrape, wants_prometheus
from tests.refusals import refusal
from tests.waits import LIMIT_S, until
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.http.listener import Listener
from tidemill.bus.liveness import HeartbeatPublisher
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire import subjects
from tidemill.bus.wire.messages import Done, Evaluated
from tidemill.bus.wire.rows import LiveRow
from tidemill.launch.cli import main as cli
from tidemill.launch.metrics import monitoring
from tidemill.launch.metrics.prometheus import RunState, listener_of, read_rows

pytestmark = wants_prometheus
VALUES = {
    "train/loss": -0.25,
    "train/tokens": 1000.0,
    "offpolicy/k3": 0.2,
    "offpolicy/lag_mean": 1.0,
    "offpolicy/lag_share/0": 0.75,
    "offpolicy/lag_share/over": 0.25,
    "data/reward/format": 0.5,
}
ENGINE = LiveRow(
    role="engine", id="e.0", host="h", pid=1, phase="serving", version=3, load={"stall_s": 1.5, "steps": 7}
)


def promtool(*words: str, text: str = "") -> None:
    """Check rules or metrics; a remark of its linter is a failure, too."""
    checked = subprocess.run(["promtool", "check", *words], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout + checked.stderr


async def written(bus: Bus) -> None:
    """Write a run with a step, a score and a sample."""
    await bus.plans.fence(1)
    await bus.rows("run").put(
        "config", {"learner": {"steps": 4}, "staleness": {"max_lag": 2}, "bus": {"samples_max_bytes": 1000}}
    )
    await bus.plans.append(Done(epoch=1, step=3, metrics=VALUES))
    await bus.plans.append(Evaluated(epoch=1, version=3, step=3, dataset="held out", metrics={"mean": 0.75}))
    await bus.samples.publish(make_sample(bus.run))


@pytest.fixture
def exporter(tmp_path: Path) -> Any:
    """Return a function that starts the command, and ends it with the test."""
    children: list[subprocess.Popen[bytes]] = []

    def start(bus: Bus, port: int) -> None:
        words = ["metrics", "prometheus", "--bus", bus.connected_url, "--run", bus.run, "--option", f"port={port}"]
        children.append(subprocess.Popen([sys.executable, "-m", "tidemill", *words], cwd=tmp_path))

    yield start
    for child in children:
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT_S) == 0


@pytest.mark.slow
async def test_a_real_prometheus_scrapes_a_run_and_its_rules_fire(
    open_bus: BusOpener, tmp_path: Path, exporter: Any
) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(monitoring.rules())
    promtool("rules", str(rules))
    with KeptPort() as ours, KeptPort() as theirs:
        settings = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(rules)]}
        settings |= {"scrape_configs": [scrape("tidemill", ours.number)]}
        async with open_bus() as bus:
            await written(bus)
            async with HeartbeatPublisher(bus, ENGINE):
                exporter(bus, ours.number)
                with real_prometheus(settings, theirs.number, tmp_path):
                    await _check_scraped(theirs.number, bus.run)
                    promtool("metrics", text=(await get(f"http://127.0.0.1:{ours.number}/metrics"))[1])


async def _check_scraped(port: int, run: str) -> None:
    value = partial(query, port)

    async def answered() -> Any:
        return await value("tidemill_engine_stall_seconds_total") and await value('ALERTS{alertname="TidemillK3Warn"}')

    ((labels, _),) = await until(answered, timeout_s=300)
    assert (labels["run"], labels["severity"]) == (run, "warning")
    assert labels["alertstate"] in ("pending", "firing"), "it fires after a minute, which a busy machine may need"
    assert [number for _, number in await value("tidemill_train_loss")] == ["-0.25"]
    shares = {labels["lag"]: number for labels, number in await value("tidemill_offpolicy_lag_share")}
    assert shares == {"0": "0.75", "over": "0.25"}
    assert [(labels["id"], number) for labels, number in await value("tidemill_engine_steps_total")] == [("e.0", "7")]
    assert [(labels["set"], number) for labels, number in await value("tidemill_eval_mean")] == [("held out", "0.75")]
    assert not await value('ALERTS{alertname="TidemillK3Error"}'), "0.2 is within 0.15 x (1 + lag 1)"


async def test_a_scrape_has_streams_rows_and_the_silence_of_the_bus(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await written(bus)
        state = RunState(run=bus.run)
        listener = listener_of(state)
        url = await listener.start("127.0.0.1", 0)
        async with HeartbeatPublisher(bus, ENGINE):
            reading = asyncio.create_task(read_rows(bus, state))
            await until(lambda: state.up and state.rows)
            status, text = await get(f"{url}/metrics")
            assert status == 200 and f'tidemill_bus_up{{run="{bus.run}"}} 1.0' in text
            assert f'tidemill_bus_stream_messages{{run="{bus.run}",stream="SAMPLES"}} 1.0' in text
            assert f'tidemill_bus_stream_bytes_limit{{run="{bus.run}",stream="SAMPLES"}} 1000.0' in text
            assert f'tidemill_process_up{{host="h",id="e.0",role="engine",run="{bus.run}"}} 1.0' in text
            assert f'tidemill_process_version{{host="h",id="e.0",role="engine",run="{bus.run}"}} 3.0' in text
            assert state.store is not None and state.store[0] > 0
            reading.cancel()
        await _close(listener)


async def test_a_run_that_ends_early_has_ended(open_bus: BusOpener) -> None:
    async with open_bus() as bus:
        await written(bus)
        state = RunState(run=bus.run)
        reading = asyncio.create_task(read_rows(bus, state))
        await until(lambda: state.up)
        assert state.series().samples["run/ended"][0][1] == 0.0
        row = {"outcome": "done", "code": 0, "reason": "all prompts are used", "step": 3, "time_s": 0.0}
        await bus.rows("run").put(subjects.END_KEY, row)
        await until(lambda: state.series().samples["run/ended"][0][1] == 1.0)
        await bus.rows("run").delete(subjects.END_KEY)  # a start with other settings goes on
        await until(lambda: state.series().samples["run/ended"][0][1] == 0.0)
        reading.cancel()


async def test_a_scrape_without_a_token_is_under_no_other_name() -> None:
    listener = listener_of(RunState(run="r"))
    url = await listener.start("127.0.0.1", 0)
    for host, status in (("evil.example", 421), ("localhost:9464", 200), ("127.0.0.1", 200), ("[::1]:1", 200)):
        assert (await get(f"{url}/metrics", Host=host))[0] == status, host
    await _close(listener)


ALARMED = {
    "tidemill_offpolicy_k3": "0.2x90",
    "tidemill_offpolicy_lag_mean": "1x90",
    "tidemill_train_tokens": "1000x90",
    'tidemill_run_alarm_threshold{alarm="k3",level="warning"}': "0.05x90",
    'tidemill_run_alarm_threshold{alarm="k3",level="critical"}': "0.15x90",
}
STEADY = {"tidemill_bus_up": "1x90", "tidemill_run_ended": "0x90", "tidemill_run_step": "0+1x90"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "firing"),
    [
        (STEADY, {}),
        (STEADY | {"tidemill_run_step": "0x29"}, {}),  # a start: its first step takes a while
        (STEADY | {"tidemill_run_step": "5x90"}, {"TidemillNoStep": 36}),
        (STEADY | ALARMED, {"TidemillK3Warn": 4}),
        (STEADY | dict(list(ALARMED.items())[:3]), {}),  # the run ignores this alarm
        (STEADY | ALARMED | {"tidemill_offpolicy_lag_mean": "0x90"}, {"TidemillK3Warn": 4, "TidemillK3Error": 4}),
        (STEADY | {"tidemill_run_step": "5x90", "tidemill_run_ended": "1x90"}, {}),
        (STEADY | {"tidemill_run_step": "0+1x20 20x15"}, {}),  # the exporter ended
        (STEADY | {"tidemill_bus_up": "1x40 0x50"}, {"TidemillBusAway": 43}),
        (STEADY | {"tidemill_bus_up": "1x40 0x50", "tidemill_run_ended": "0x39 1x51"}, {}),
        (STEADY | {'tidemill_process_up{id="e"}': "1x40 0x50"}, {"TidemillProcessSilent": 43}),
        (STEADY | {'tidemill_process_up{id="e"}': "1x40 0x50", "tidemill_run_ended": "0x39 1x51"}, {}),
    ],
)
def test_conditions_of_a_run_fire_for_what_is_wrong_alone(
    values: dict[str, str], firing: dict[str, int], tmp_path: Path
) -> None:
    """``firing``: minute by which each alert fires; no other one fires at any minute."""
    rules, tests = tmp_path / "rules.yml", tmp_path / "tests.yml"
    rules.write_text(monitoring.rules())
    series = [{"series": _of_run(name), "values": row} for name, row in values.items()]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    checks = [
        {
            "expr": query,
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'{{alertname="{name}"}}', "value": 1} for name, from_m in firing.items() if minute >= from_m
            ],
        }
        for minute in range(1, 90)
        if not any(from_m - 3 <= minute < from_m for from_m in firing.values())
    ]
    group = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    tests.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [group]}))
    checked = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _of_run(name: str) -> str:
    return f'{name[:-1]},run="r"}}' if name.endswith("}") else f'{name}{{run="r"}}'


async def test_other_machines_need_the_token(open_bus: BusOpener) -> None:
    with refusal(ValueError, place="host"):
        await listener_of(RunState(run="r")).start("0.0.0.0", 0)
    listener = listener_of(RunState(run="r"), "s3cret")
    url = (await listener.start("0.0.0.0", 0)).replace("0.0.0.0", "127.0.0.1")
    assert (await get(f"{url}/metrics"))[0] == 401
    assert (await get(f"{url}/metrics", Authorization="Bearer s3cret"))[0] == 200
    await _close(listener)


async def _close(listener: Listener) -> None:
    await listener.close()


@pytest.mark.parametrize(
    ("options", "want"),
    [(["prot=1"], "want host or port"), (["port=70000"], "want 0 .any free one. to 65535"), (["port=x"], "want 0")],
)
def test_a_wrong_option_is_refused(options: list[str], want: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for option in options for word in ("--option", option)]
    assert cli.main(["metrics", "prometheus", "--bus", "nats://127.0.0.1:1", *words]) == 2
    assert want.replace(".any free one.", "(any free one)") in capsys.readouterr().err
    assert "TIDEMILL_METRICS_TOKEN" not in os.environ
