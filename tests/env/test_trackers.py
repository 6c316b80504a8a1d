"""`tidemill metrics` into the stores of MLflow and Trackio, by the libraries themselves, read back as databases; and
traces into MLflow's server, a collector of OpenTelemetry.

Their packages are beside ours on the path of the command alone (``--trackers``), as those of a user would be.
"""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.bus_fixtures import BusOpener
from tests.integration.test_metrics_export import LIMIT_S, scores, steps
from tests.integration.test_traces import one, written
from tests.waits import poll
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.streams.bus import Bus
from tidemill.bus.wire.messages import Done
from tidemill.launch.metrics.sinks import mlflow_name


@pytest.fixture
def packages(request: pytest.FixtureRequest) -> Path:
    directory = request.config.getoption("--trackers")
    if not directory:
        pytest.skip("want --trackers DIRECTORY, with the packages mlflow-skinny and trackio (make test-env)")
    return Path(directory).resolve()


def export(bus: Bus, packages: Path, *words: str, **variables: str) -> str:
    """Run `tidemill metrics` to the end of the log, and return its last line."""
    command = [sys.executable, "-m", "tidemill", "metrics", "--bus", bus.connected_url, "--run", bus.run, *words]
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", **variables}
    ended = subprocess.run(
        [*command, "--until-end"], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


async def test_mlflow_has_each_step_once_and_its_run_is_found_again(
    open_bus: BusOpener, tmp_path: Path, packages: Path
) -> None:
    database = tmp_path / "mlflow.db"
    words = ("mlflow", "--option", f"tracking_uri=sqlite:///{database}", "--option", "experiment=tide")
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 3)
        await scores(bus, 2)
        ended = await asyncio.to_thread(export, bus, packages, *words)
        assert ended.startswith("3 steps and 1 evaluations given to mlflow, 0 calls failed")
        await bus.plans.append(Done(epoch=1, step=4, metrics={"data/reward/<b>: '\u202e": 2.0}))
        ended = await asyncio.to_thread(export, bus, packages, *words)
        assert ended.startswith("1 steps and 0 evaluations given to mlflow, which had 4")
        run = bus.run
    logged = rows(database, "SELECT key, step, value FROM metrics WHERE key NOT LIKE 'last/%' ORDER BY key, step")
    assert logged == [
        ("data/reward/_b__ __", 4, 2.0),
        *[("data/reward_mean", step, 1.0) for step in (1, 2, 3)],
        ("eval/held_out/mean", 2, 0.5),
        *[("train/loss", step, step / 4) for step in (1, 2, 3)],
    ]
    assert rows(database, "SELECT name, status FROM runs") == [(run, "FINISHED")]


async def test_trackio_has_the_steps(open_bus: BusOpener, tmp_path: Path, packages: Path) -> None:
    words = ("trackio", "--option", "project=tide")
    async with open_bus() as bus:
        await bus.plans.fence(1)
        await steps(bus, 1, 2)
        await scores(bus, 1)
        await asyncio.to_thread(export, bus, packages, *words, TRACKIO_DIR=str(tmp_path))
        await steps(bus, 3, 3)
        await asyncio.to_thread(export, bus, packages, *words, "--from-step", "3", TRACKIO_DIR=str(tmp_path))
        run = bus.run
    logged = rows(tmp_path / "tide.db", "SELECT run_name, step, metrics FROM metrics ORDER BY id")
    values: list[tuple[int, Mapping[str, float]]] = [(step, json.loads(text)) for _, step, text in logged]  # type: ignore[call-overload, misc]
    assert len({name for name, _, _ in logged}) == 1 and str(logged[0][0]).startswith(f"{run}-")
    trained = [(step, metrics["train/loss"]) for step, metrics in values if "train/loss" in metrics]
    assert sorted(trained) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [(step, metrics) for step, metrics in values if "eval/held_out/mean" in metrics] == [
        (1, {"eval/held_out/mean": 0.5})
    ]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("train/loss", "train/loss"), ("a//b", "a/_/b"), ("../b", ".._/b"), ("é:%", "___"), ("x" * 300, "x" * 250)],
)
def test_names_are_fit_for_mlflow(name: str, accepted: str) -> None:
    assert mlflow_name(name) == accepted


@pytest.fixture
def collector(tmp_path: Path, packages: Path) -> Iterator[tuple[str, Path]]:
    """Start MLflow's server, which takes spans of OpenTelemetry into its database; yield its address and the latter."""
    database = tmp_path / "mlflow.db"
    with KeptPort() as kept:
        words = ["--backend-store-uri", f"sqlite:///{database}", "--port", str(kept.number), "--workers", "1"]
        variables = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words],
            env={**os.environ, "PYTHONPATH": str(packages), **variables},
            cwd=tmp_path,
            process_group=0,
        )
        try:
            poll(lambda: server.poll() is not None or _answers(kept.number))
            assert server.poll() is None, "the server has ended"
            yield f"http://127.0.0.1:{kept.number}", database
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def test_traces_arrive_at_a_collector(open_bus: BusOpener, collector: tuple[str, Path], packages: Path) -> None:
    endpoint, database = collector
    async with open_bus() as bus:
        await written(bus, one(bus, 0), one(bus, 1))
        words = ("traces", "--option", f"endpoint={endpoint}", "--option", "every=1")
        header = "x-mlflow-experiment-id=0"
        done = await asyncio.to_thread(export, bus, packages, *words, OTEL_EXPORTER_OTLP_HEADERS=header)
    assert done == "2 samples traced in 13 spans", "the second was dropped, not trained"
    spans = rows(database, "SELECT name, count(*), count(DISTINCT trace_id) FROM spans GROUP BY name ORDER BY name")
    twice = ("buffered", "generating", "queued", "reward", "sample", "tools")
    assert spans == [*((name, 2, 2) for name in twice), ("trained", 1, 1)]
    assert rows(database, "SELECT count(*) FROM spans WHERE parent_span_id IS NULL") == [(2,)]
