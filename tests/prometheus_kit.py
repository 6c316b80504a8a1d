"""A real Prometheus for tests, and requests over HTTP to it and to what it scrapes."""

import json
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.programs import missing
from tests.waits import LIMIT_S

wants_prometheus = pytest.mark.skipif(bool(missing(("prometheus", "promtool"))), reason="want Debian's prometheus")


async def get(url: str, **headers: str) -> tuple[int, str]:
    """Return status and text of an answer."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


def scrape(job: str, port: int) -> dict[str, Any]:
    """Return the configuration of a job that reads ``/metrics`` at a port each second."""
    return {"job_name": job, "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}


@contextmanager
def real_prometheus(settings: Mapping[str, Any], port: int, directory: Path) -> Iterator[None]:
    """Run a Prometheus at ``port`` with these settings, and its files in ``directory``, while entered."""
    config = directory / "prometheus.yml"
    config.write_text(json.dumps(settings))
    words = [f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    child = subprocess.Popen(["prometheus", *words])
    try:
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(LIMIT_S)


async def query(port: int, text: str) -> list[tuple[dict[str, str], str]]:
    """Return labels and value of each series that a query finds; none while Prometheus does not answer."""
    api = f"http://127.0.0.1:{port}/api/v1/query"
    try:
        async with aiohttp.ClientSession() as session, session.get(api, params={"query": text}) as answer:
            found = (await answer.json())["data"]["result"]
            return [(series["metric"], series["value"][1]) for series in found]
    except (aiohttp.ClientError, KeyError):
        return []
