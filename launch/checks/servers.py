"""Checks of the nats-servers that a run is to use: reached, new enough, with JetStream of their own or passed on to."""

import json
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from tidemill.bus.config import LEAF_CURE, OLDEST_SERVER
from tidemill.launch.checks.findings import Report

ANSWER_S = 0.5  # Seconds for a server to accept the connection and send its INFO line, or an answer


def check_servers(report: Report, where: str, servers: Sequence[str]) -> int:
    """Ask all servers at once for their INFO lines, and check the first answer. Returns its ``max_payload`` or 0."""
    reasons = []
    with ThreadPoolExecutor(len(servers)) as asking:
        answers = {server: asking.submit(_info, server) for server in servers}
    for server, answer in answers.items():
        try:
            info = answer.result()
        except (OSError, ValueError) as error:
            reasons.append(f"{server}: {error}")
            continue
        _check_server(report, where, server, info)
        largest = info.get("max_payload")
        return largest if isinstance(largest, int) else 0
    want = "a nats-server that can be reached"
    cure = "start it, or remove bus.url: one is started then"
    report.error("bus", where, want=want, got="; ".join(reasons), cure=cure)
    return 0


def _info(server: str) -> dict[str, object]:
    """Return a server's INFO, its first line. Raises OSError, ValueError. Source: docs.nats.io, "NATS Protocol"."""
    parts = urlsplit(server)
    with socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=ANSWER_S) as opened:
        line = opened.makefile("rb").readline(1 << 16)
    if not line.startswith(b"INFO "):
        raise ValueError("no nats-server answers there")
    info = json.loads(line[5:])
    if not isinstance(info, dict):
        raise ValueError("no nats-server answers there")
    return info


def _check_server(report: Report, where: str, server: str, info: dict[str, object]) -> None:
    version, oldest = str(info.get("version", "0.0")), ".".join(map(str, OLDEST_SERVER))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_SERVER:
        report.error("bus", where, want=f"nats-server >= {oldest}", got=f"{version} at {server}", cure="update it")
    elif not info.get("jetstream") and not _passes_on(server, info):
        want = "a nats-server with JetStream"
        cure = f"start it with -js; if it is a leaf node, {LEAF_CURE}"
        report.error("bus", where, want=want, got=f"one without at {server}", cure=cure)
    else:
        report.good("bus", f"{server}: nats-server {version} with JetStream")


def _passes_on(server: str, info: Mapping[str, object]) -> bool:
    """Return whether a server without JetStream passes requests on to one that has it, as a leaf node may.

    True where only a login would show it.
    """
    if info.get("auth_required") or info.get("tls_required"):
        return True
    options, request = b'{"verbose":false,"headers":true,"no_responders":true}', b"$JS.API.INFO"
    parts = urlsplit(server)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4222), timeout=ANSWER_S) as opened:
            opened.sendall(b"CONNECT %b\r\nSUB _INBOX.check 1\r\nPUB %b _INBOX.check 0\r\n\r\n" % (options, request))
            lines = opened.makefile("rb")
            answer = next((line for line in lines if line.startswith((b"MSG ", b"HMSG "))), b"HMSG")
    except OSError:
        return False
    return not answer.startswith(b"HMSG")  # Without responders the answer is a status, in headers
