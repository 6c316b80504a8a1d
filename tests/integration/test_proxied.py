"""Under the proxy variables of a company's machine: traffic inside a run goes past the proxy, downloads go through
it.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from tidemill.actors.episodes.children import Children
from tidemill.actors.rollout_settings import RolloutConfig
from tidemill.bus.system.limits import environment
from tidemill.bus.system.processes import Child, direct_opener, without_proxy

ROOT = Path(__file__).parents[2]
ROOMS = ("bus", "weightstore", "rewards", "actors", "learner", "launch")
VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
CLIENTS = {
    "httpx": "import httpx\ndef ask(url): return httpx.get(url, timeout=60).text",
    "requests": "import requests\ndef ask(url): return requests.get(url, timeout=60).text",
    "urllib": "import urllib.request\ndef ask(url): return urllib.request.urlopen(url, timeout=60).read().decode()",
    "httpx_async": """
import asyncio, httpx
async def get(url):
    async with httpx.AsyncClient(timeout=60) as client:
        return (await client.get(url)).text
def ask(url): return asyncio.run(get(url))
""",
    "aiohttp": """
import asyncio, aiohttp
async def get(url):
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        return await answer.text()
def ask(url): return asyncio.run(get(url))
""",
}
PRINT = "\nimport sys\nprint(*map(ask, sys.argv[1:]), sep='\\n')"


@contextmanager
def answering(text: str, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve one text at every path, as a server or as a proxy; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with Server((host, 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A proxy that answers everything itself, in all variables; no exception is set."""
    with answering("by proxy") as url:
        for name in VARIABLES:
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield url


def asked(client: str, urls: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the answers of a program with this client."""
    command = [sys.executable, "-c", CLIENTS[client] + PRINT, *urls]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reaches_this_machine_directly_and_others_by_the_proxy(proxy: str, client: str) -> None:
    with ExitStack() as stack:
        hosts = ("127.0.0.1", "::1")[: 1 if client == "urllib" else 2]
        urls = [stack.enter_context(answering("directly", host)) for host in hosts]
        urls += [urls[0].replace("127.0.0.1", "localhost"), "http://hub.invalid/file"]
        assert asked(client, urls, os.environ) == ["by proxy"] * len(urls), "else this test shows nothing"
        assert asked(client, urls, environment(os.environ)) == ["directly"] * (len(urls) - 1) + ["by proxy"]


def test_exceptions_that_were_set_stay_in_both_variables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"no_proxy": "a.example, 127.0.0.1", "NO_PROXY": "b.example", "OTHER": "x"}
    with_hosts = without_proxy(there, ["10.0.0.5", ""])
    assert with_hosts["no_proxy"] == with_hosts["NO_PROXY"] == "a.example,127.0.0.1,b.example,localhost,::1,10.0.0.5"
    assert with_hosts["OTHER"] == "x" and without_proxy(with_hosts) == with_hosts


def test_requests_of_commands_and_ranks_go_past_the_proxy(proxy: str) -> None:
    """All requests by urllib in this project go by ``direct_opener``."""
    with answering("directly") as url:
        assert direct_opener().open(url, timeout=60).read() == b"directly"
    others = [
        file
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if re.search(r"urlopen\(|build_opener\(", file.read_text())
    ]
    assert others == [ROOT / "bus/system/processes.py"]


async def test_a_supervised_child_has_this_machine_among_the_exceptions(proxy: str, tmp_path: Path) -> None:
    with answering("directly") as url:
        child = Child("asks", (sys.executable, "-c", CLIENTS["httpx"] + PRINT, url), tmp_path / "log")
        await child.start()
        assert await child.wait() == 0
    assert (tmp_path / "log").read_text().strip() == "directly"


async def test_an_agent_reaches_a_gateway_on_another_address_without_a_proxy(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``http_client`` and a client of the agent's own, made when its module is imported."""
    (tmp_path / "agent_under_proxy.py").write_text(
        "import httpx\nown = httpx.AsyncClient(timeout=60)\n"
        "async def run(data, base_url, api_key, http_client, **options):\n"
        "    texts = [(await client.get(base_url)).text for client in (own, http_client)]\n"
        "    return {'score': float(texts == ['directly'] * 2)}\n"
    )
    with answering("directly", "127.0.0.2") as url:
        host = urlsplit(url).hostname or ""
        monkeypatch.syspath_prepend(tmp_path)
        async with Children(RolloutConfig(use="agent:agent_under_proxy:run"), gateway_host=host) as children:
            result = await children.run(
                "1.0.a", base_url=url, api_key="k", task={"prompt": "", "label": "", "metadata": {}}
            )
    assert result.value == {"score": 1.0}
